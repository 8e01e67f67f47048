"""Print one line that stays the same as long as no bit of any result changes.

    python -m scripts.same_bits [--details FILE] [--data FOLDER]

The line holds a hash over everything and one hash for each group of cases:

    logits     tiny random models, one for each way in which experts are called and stored, computed
               in every mode, with room for one, half and all of the experts, preloaded or not
    counters   hits, misses, evictions and resident experts of those runs that preload nothing
    tokens     what the bundled model generates
    replays    counters of a trace of the bundled model, replayed by the simulator
    recorded   the same of traces of real models, or "absent" without the folder they lie in

Run it before and after a refactor. `--details` writes a line for each case, so that `diff` names
the first that differs. The bits are those of one machine: other processors round differently.
Every process computes with one thread, so that the number of cores changes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from moe_infinity import MoE
from moe_infinity.cluster.model import ClusterMoE
from tests import gguf_files, gguf_models, quantized_checkpoints
from tests.remote_code.checkpoints import MODELS as REMOTE_CODE
from tests.remote_code.checkpoints import save_remote_code_model
from tests.sweep.discover import architectures_in
from tests.sweep.tiny import VOCAB_SIZE, tiny_model
from tools.convert_to_gguf import convert

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "models" / "demo"
PROMPTS = ("The old house stood at the edge of the moor, and", "def f(x):", "Once upon a time")
RECORDED = ("gpt-oss-20b_decode", "deepseek-v2-lite_esft")
GROUPS = ("logits", "counters", "tokens", "replays", "recorded")
NUM_PROCESSES = 2

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "exact": {"exact": True},
    "eager": {"experts_implementation": "eager"},
}
# The first loads only what layers ask for, so that what it loads, and when, can be counted.
PRELOADS: dict[str, dict[str, Any]] = {
    "off": {"preload": "off", "stream_layers": False, "prefetch": False},
    "idle": {"preload": "idle"},
}
POLICIES = ("activation-aware", "lru", "lfu", "request-lfu")

# By folder of transformers: the classes that have adapters of their own, then those behind the
# experts interface, one for each form of experts, router and attention.
CLASSES = {
    "aria": "AriaTextForCausalLM",
    "dbrx": "DbrxForCausalLM",
    "jetmoe": "JetMoeForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "longcat_flash": "LongcatFlashForCausalLM",
    "nllb_moe": "NllbMoeForConditionalGeneration",
    "step3p7": "Step3p7ForConditionalGeneration",
    "switch_transformers": "SwitchTransformersForConditionalGeneration",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "jamba": "JambaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "zaya": "ZayaForCausalLM",
}
GGUF_FILES = (
    ("qwen3_moe", "q8_0"),
    ("qwen3_moe", "q4_k_m"),
    ("mixtral", "bf16"),
    ("deepseek_v2", "q4_0"),
    ("gpt_oss", "mxfp4"),
)
PACKED_WHILE_LOADED = ("int4", "int8", "fp8")
# Our kernels for packed experts want so many columns.
WIDE = {"hidden_size": 256, "num_attention_heads": 4}

SHORT = torch.arange(3, 14)[None] * 5 % VOCAB_SIZE
LONG = torch.arange(3, 78)[None] * 11 % VOCAB_SIZE
WITH_LONG_PROMPT = ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")
PAIR = torch.arange(3, 25).view(2, 11) * 5 % VOCAB_SIZE
NUM_TOKENS = 5  # the prompt's own and those of 4 decode steps


class Case(NamedTuple):
    """One result, by name."""

    group: str
    name: str
    digest: str


class Checkpoint(NamedTuple):
    """A tiny model on disk, and what opening it takes."""

    path: Path
    options: dict[str, Any]


Build = Callable[[Path], Checkpoint]
Task = Callable[[], list[Case]]


def digest(*values: object) -> str:
    """The hash of tensors, by their bytes, and of anything else, by its text."""
    sha = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            sha.update(f"{value.dtype} {tuple(value.shape)} ".encode())
            sha.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            sha.update(f"{value!r} ".encode())
    return sha.hexdigest()


# Tiny models


def build_class(folder: str, path: Path) -> Checkpoint:
    """A class of transformers, in the layout that its architecture is published in."""
    (found,) = (a for a in architectures_in(folder) if a.name == CLASSES[folder])
    tiny_model(found).save_pretrained(path)
    return Checkpoint(path, {})


def build_remote_code(name: str, path: Path) -> Checkpoint:
    """Code that the checkpoint brings, with experts in a list or a dict of modules."""
    path.mkdir()
    return Checkpoint(save_remote_code_model(path, name), {"trust_remote_code": True})


def build_packed(name: str, path: Path) -> Checkpoint:
    """A checkpoint with quantized weights."""
    width = "intermediate_size" if name == "mxfp4" else "moe_intermediate_size"
    return Checkpoint(quantized_checkpoints.build(name, path, **WIDE, **{width: 128}), {})


def build_gguf(name: str, weights: str, path: Path) -> Checkpoint:
    """A GGUF file; the config that some need is beside it."""
    file = gguf_files.build(name, path, **gguf_models.WIDE) / f"{weights}.gguf"
    convert(path, file, weights)
    return Checkpoint(file, {} if name == "qwen3_moe" else {"config_from": str(path)})


def build_packed_while_loaded(dtype: str, path: Path) -> Checkpoint:
    """Plain weights, whose experts are packed by the reader."""
    folder = gguf_files.build("qwen3_moe", path, **gguf_models.WIDE)
    return Checkpoint(folder, {"expert_dtype": dtype, "dtype": "bfloat16"})


def builds() -> dict[str, Build]:
    """Every tiny model, by the name its cases have."""
    return (
        {folder: partial(build_class, folder) for folder in CLASSES}
        | {f"remote {name}": partial(build_remote_code, name) for name in REMOTE_CODE}
        | {
            f"stored {name}": partial(build_packed, name)
            for name in quantized_checkpoints.CHECKPOINTS
        }
        | {f"gguf {name} {w}": partial(build_gguf, name, w) for name, w in GGUF_FILES}
        | {f"packed {d}": partial(build_packed_while_loaded, d) for d in PACKED_WHILE_LOADED}
    )


def cases_of_model(name: str, build: Build) -> list[Case]:
    """One tiny model in every mode, with every memory, preloaded or not."""
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = build(Path(scratch, name.replace(" ", "_")))
        with MoE(checkpoint.path, host_memory="100%", device="cpu", **checkpoint.options) as moe:
            num_slots = moe.report().tiers[0].capacity
        memories = {"one": f"{100.1 / num_slots:.4f}%", "half": "50%", "all": "100%"}
        prompt = LONG if name in WITH_LONG_PROMPT else SHORT
        cases: list[Case] = []
        for mode, options in MODES.items():
            for memory, size in memories.items():
                for preload, preloading in PRELOADS.items():
                    run = f"{name}, {mode}, {memory}, {preload}"
                    every = checkpoint.options | options | preloading
                    with MoE(checkpoint.path, host_memory=size, device="cpu", **every) as moe:
                        cases += cases_of_run(run, moe, prompt, is_counted=preload == "off")
    return cases


@torch.no_grad()
def cases_of_run(run: str, moe: MoE, prompt: Tensor, *, is_counted: bool) -> Iterator[Case]:
    """A forward pass over a prompt, greedy tokens after it, and a batch of two with padding."""
    mask = torch.ones_like(PAIR)
    mask[1, :3] = 0
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    decoder = {"decoder_input_ids": prompt[:, :5]} if moe.model.config.is_encoder_decoder else {}
    yield Case("logits", f"{run}, prompt", digest(moe.model(**inputs, **decoder).logits))
    states = [moe.expert_states().tobytes()]
    for name, batch in (("tokens", inputs), ("pair", {"input_ids": PAIR, "attention_mask": mask})):
        out = moe.generate(
            **batch,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        yield Case("logits", f"{run}, {name}", digest(torch.stack(out.logits), out.sequences))
        states.append(moe.expert_states().tobytes())
    if is_counted:
        yield Case("counters", f"{run}, experts", digest(states))
        yield Case("counters", f"{run}, counters", counters(moe))


def counters(moe: MoE) -> str:
    """Every count of a run that loads only what layers ask for; not the seconds."""
    report = moe.report()
    phases = [
        (c.hits, c.late_hits, c.misses, c.steps, c.tokens, c.bytes_read)
        for c in (report.prefill, report.decode)
    ]
    return digest(phases, report.evictions, [tier.experts for tier in report.tiers])


# The bundled model


def cases_of_demo() -> list[Case]:
    """Greedy tokens with a quarter and all of the experts in memory, and counts by policy."""
    runs: dict[str, dict[str, Any]] = {
        f"demo, {mode}, {memory}": MODES[mode] | {"host_memory": memory}
        for mode in ("default", "exact")
        for memory in ("25%", "100%")
    }
    small = {"host_memory": "25%"}
    runs["demo, early router"] = small | {"prefetch": True, "early_router": True}
    runs["demo, prefetch"] = small | {"prefetch": True}
    runs["demo, two hosts"] = small | {"expert_hosts": 2}
    for policy in POLICIES:
        runs[f"demo, {policy}"] = small | PRELOADS["off"] | {"policy": policy, "exact": True}
    cases = []
    for name, options in runs.items():
        model_class = ClusterMoE if "expert_hosts" in options else MoE
        with model_class(DEMO, device="cpu", **options) as moe:
            for prompt in PROMPTS:
                inputs = moe.tokenizer(prompt, return_tensors="pt")
                tokens = moe.generate(**inputs, max_new_tokens=32, do_sample=False)
                cases.append(Case("tokens", f"{name}, {prompt}", digest(tokens)))
            if "policy" in options:
                cases.append(Case("counters", f"{name}, counters", counters(moe)))
    return cases


# Replays


def command(*arguments: str) -> str:
    """What `moe-infinity` prints."""
    called = [sys.executable, "-m", "moe_infinity", *arguments]
    finished = subprocess.run(called, cwd=ROOT, capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(called)}: {finished.stderr}")
    return finished.stdout


def cases_of_own_trace() -> list[Case]:
    """A trace of the bundled model, recorded here."""
    with tempfile.TemporaryDirectory() as scratch:
        prompts, trace = Path(scratch, "prompts.jsonl"), Path(scratch, "trace.npz")
        prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
        recorded = ("--prompts", str(prompts), "--output", str(trace), "--max-new-tokens", "48")
        command("trace", str(DEMO), *recorded, "--device", "cpu", "--exact")
        alone = replayed("replays", "demo", trace, capacities="5%,25%,60%")
        together = replayed("replays", "demo together", trace, "--users=3", capacities="25%")
        return [*alone, *together]


def cases_of_recorded(name: str, folder: Path) -> list[Case]:
    """Some requests of a trace of a real model."""
    options = ("--draw", "4", "--warmup", "1")
    return replayed("recorded", name, folder, *options, capacities="10%,30%")


def replayed(group: str, name: str, trace: Path, *options: str, capacities: str) -> list[Case]:
    """The counts of a trace with several policies and capacities, with and without prefetch; of
    late hits too, since the clock of the simulator is a model."""
    arguments = ("--json", "--policy", ",".join(POLICIES), "--capacity", capacities, *options)
    cases = []
    for prefetch in ([], ["--prefetch"]):
        rows = json.loads(command("simulate", str(trace), *arguments, *prefetch))["rows"]
        for row in rows:
            run = ", ".join((name, *prefetch, row["policy"], row["capacity"], row["phase"]))
            counts = {k: v for k, v in sorted(row.items()) if isinstance(v, int)}
            cases.append(Case(group, run, digest(counts)))
    return cases


# All together


def start_process() -> None:
    """Nothing but the line is to be printed."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def tasks(data: Path) -> list[Task]:
    """What processes take one after the other, the longest first."""
    recorded = [(name, data / "traces" / name) for name in RECORDED]
    return [
        cases_of_demo,
        cases_of_own_trace,
        *(partial(cases_of_recorded, name, path) for name, path in recorded if path.is_dir()),
        *(partial(cases_of_model, name, build) for name, build in builds().items()),
    ]


def line_of(cases: Sequence[Case]) -> str:
    """The hash over all, then those of the groups."""
    parts = []
    for group in GROUPS:
        digests = [case.digest for case in cases if case.group == group]
        parts.append(f"{group} {digest(digests)[:8] if digests else 'absent'}")
    return f"same bits: {digest(list(cases))[:16]}  {' '.join(parts)}"


def run_task(task: Task) -> list[Case]:
    return task()


def run_all(work: Iterable[Task]) -> list[Case]:
    """The cases of all tasks, in their order."""
    spawned = get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, spawned, initializer=start_process) as pool:
        return [case for cases in pool.map(run_task, work) for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--details", type=Path, metavar="FILE", help="write a line for each case")
    parser.add_argument("--data", type=Path, default=ROOT / "../shared/data", metavar="FOLDER")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as modules:
        # For all processes; transformers copies remote code into that folder.
        os.environ |= {"OMP_NUM_THREADS": "1", "HF_MODULES_CACHE": modules}
        cases = run_all(tasks(arguments.data))
    if arguments.details:
        lines = [f"{case.digest[:16]}  {case.group}  {case.name}\n" for case in cases]
        arguments.details.write_text("".join(lines))
    print(line_of(cases))


if __name__ == "__main__":
    main()
