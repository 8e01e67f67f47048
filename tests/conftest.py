"""Tiny random checkpoints shared by all tests, made once per session by transformers itself.

Weights are drawn wide enough that routing and tokens depend on the prompt and on every expert: a
wrong or missing expert changes the output.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

gc.disable()  # until all is imported: it looks at millions of objects, and none of them goes

# Before torch: a thread of its that waits leaves the core to the other process of the suite.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

# Before our kernels, some of which are compiled as they are imported: all workers keep them for the
# next run, apart from the user's.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache" / "user-cache")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers: no test asks a hub
# Before triton, which transformers imports: without a GPU its kernels run in an interpreter.
os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))

import io
import logging
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe_infinity import MoE
from moe_infinity import __main__ as cli
from tests import other_machine, safetensors_file

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts jobs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(2)  # as on a user's machine more than one, here the same on every machine
if machine := os.environ.get("OTHER_ROUNDING"):  # `make test-rounding`
    other_machine.round_the_other_way(machine)
# The same examples in every run; a busy machine is no failure.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")

# What the tests of the server import, and a machine for tests of kernels may not have.
ABSENT = [name for name in ("fastapi", "openai", "uvicorn") if find_spec(name) is None]
collect_ignore = ["server"] if ABSENT else []

TESTS = Path(__file__).parent
VOCAB_SIZE = 128
SPECIAL_TOKENS = ("<unk>", "<eos>", "<pad>")
LONG_TESTS = set((TESTS / "long_tests.txt").read_text().split())  # see scripts/long_tests.py


def pytest_report_header() -> list[str]:
    return [f"tests/server left out: not installed: {', '.join(ABSENT)}"] if ABSENT else []


def pytest_configure() -> None:
    if os.environ["TRITON_INTERPRET"] == "0" and not torch.cuda.is_available():
        from tests.gpu.kernels.compiled import use_absent_gpu

        use_absent_gpu(int(os.environ.get("CAPABILITY", "80")))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are left out by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(TESTS).parts[0] == "gpu":
            item.add_marker("gpu_code")
        if item.nodeid.split("[")[0] in LONG_TESTS:
            item.add_marker("long")
    leave_diagonals_fast(marked("grid", items))
    leave_samples_fast(marked("sample", items))


def marked(name: str, items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Those with this marker that are not slow, by test function."""
    found: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker(name) and not item.get_closest_marker("slow"):
            found.setdefault(item.function, []).append(item)  # type: ignore[attr-defined]
    return list(found.values())


def leave_diagonals_fast(grids: list[list[pytest.Item]]) -> None:
    """The combinations on every second or third diagonal: each value of each parameter is among
    them.
    """
    for grid in grids:
        numbers: dict[str, dict[str, int]] = {}  # of each parameter's values
        diagonals = []
        for item in grid:
            diagonals.append(0)
            for name, value in item.callspec.params.items():  # type: ignore[attr-defined]
                known = numbers.setdefault(name, {})
                diagonals[-1] += known.setdefault(repr(value), len(known))
        step = min({len(known) for known in numbers.values()} - {1}, default=1)
        fast: set[tuple[str, str]] = set()
        for item, diagonal in zip(grid, diagonals, strict=True):
            if diagonal % step:
                item.add_marker(pytest.mark.slow)
            else:
                fast |= {(name, repr(value)) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]
        every = {(name, value) for name, known in numbers.items() for value in known}
        assert fast == every, (grid[0].nodeid, every - fast)


def leave_samples_fast(tests: list[list[pytest.Item]]) -> None:
    """Of sample(n) every n-th set of parameters. The tests of a file begin with different ones, so
    that together they see most values.
    """
    num_seen: Counter[Path] = Counter()  # tests by file
    for test in tests:
        marker = test[0].get_closest_marker("sample")
        assert marker is not None
        (n,) = marker.args
        first = num_seen[test[0].path] % min(n, len(test))
        num_seen[test[0].path] += 1
        for place, item in enumerate(test):
            if place % n != first:
                item.add_marker(pytest.mark.slow)


def save_tokenizer(folder: Path) -> None:
    """One token per word: w3 .. w127 and the three special ones; batches are padded on the left."""
    words = [*SPECIAL_TOKENS, *(f"▁w{number}" for number in range(3, VOCAB_SIZE))]
    vocab = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
    ).save_pretrained(folder)


def make_model(**changes: object) -> Qwen3MoeForCausalLM:
    """3 MoE layers of 8 experts, 2 per token, bf16."""
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "norm_topk_prob": True, "tie_word_embeddings": False, "initializer_range": 0.3,
        "max_position_embeddings": 512, "eos_token_id": 1, "pad_token_id": 2, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(settings | changes))).to(torch.bfloat16)


@pytest.fixture(autouse=True)
def only_gpu_tests_use_a_gpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of Triton's kernels, which are compiled then. Others compare with the bits of the
    CPU.
    """
    if not any(map(request.node.get_closest_marker, ("gpu", "triton"))):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE in one safetensors file, with tokenizer. Read-only: break a copy of it."""
    folder = tmp_path_factory.mktemp("tiny")
    make_model().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def sharded_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in several shards with an index. Read-only: copy it to break it."""
    folder = tmp_path_factory.mktemp("sharded")
    make_model().save_pretrained(folder, max_shard_size="50KB")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def hollow_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 experts of 12 MiB and 6 MiB of other weights, whose data are a hole in the file: a true
    header, all weights zero. For counting which bytes are read."""
    folder = tmp_path_factory.mktemp("hollow")
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 1024, "num_hidden_layers": 2}
    with torch.device("meta"):
        model = make_model(**sizes, num_experts=16)
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    shapes = {name: list(t.shape) for name, t in model.state_dict().items()}
    for at in [name.removesuffix(".gate_up_proj") for name in shapes if "gate_up_proj" in name]:
        del shapes[f"{at}.gate_up_proj"], shapes[f"{at}.down_proj"]
        for expert in (f"{at}.{expert_idx}" for expert_idx in range(16)):
            shapes |= {f"{expert}.{key}_proj.weight": [1024, 2048] for key in ("gate", "up")}
            shapes[f"{expert}.down_proj.weight"] = [2048, 1024]
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = safetensors_file.entry("BF16", shape, end, end := end + 2 * prod(shape))
    file = safetensors_file.write(folder / "model.safetensors", header)
    os.truncate(file, file.stat().st_size + end)
    return folder


@pytest.fixture
def bytes_read_by_kernel() -> Callable[[], int]:
    """How many bytes this process has read so far, by the kernel's count."""
    return lambda: int(Path("/proc/self/io").read_text().split()[1])


@pytest.fixture(scope="session")
def stock_model(tiny_checkpoint: Path) -> Any:
    """`tiny_checkpoint` as stock transformers runs it: what our results are compared with."""
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype="auto")


@pytest.fixture
def resident_model(tiny_checkpoint: Path) -> Iterator[MoE]:
    """`tiny_checkpoint` with all experts in memory: what runs with fewer, faults and interruptions
    are compared with.
    """
    with MoE(tiny_checkpoint, device="cpu", host_memory="100%") as moe:
        yield moe


Routing = list[list[np.ndarray]]


@pytest.fixture
def stock_routing(stock_model: Any) -> Iterator[Routing]:
    """What the stock routers choose while this is alive: for each step, for each MoE layer, the
    expert ids [tokens, k] of all sequences one after the other, padding included."""
    routing: Routing = []
    routers = [layer.mlp.gate for layer in stock_model.model.layers]

    def watch(router: Any, args: Any, output: Any) -> None:
        if router is routers[0]:
            routing.append([])
        routing[-1].append(output[2].numpy())

    handles = [router.register_forward_hook(watch) for router in routers]
    yield routing
    for handle in handles:
        handle.remove()


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """copy_of(folder) -> a copy of the checkpoint in tmp_path that the test may break."""

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / folder.name))

    return copy


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    def said(self, text: str) -> bool:
        """On stderr, wherever lines are broken."""
        return "".join(text.split()) in "".join(self.err.split())


@pytest.fixture(autouse=True)
def _leaves_ctrl_c() -> Iterator[None]:
    """A test that leaves Ctrl-C ignored would fail others, which wait for it, in some orders."""
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert after is before, after


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Outcome]]:
    """command("run", ...) -> what `moe-infinity run ...` does, in this process."""
    handlers = logging.root.handlers[:]
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # main() has its own
    on_ctrl_c = signal.getsignal(signal.SIGINT)

    def call(*args: object, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["moe-infinity", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        code = stopped.value.code
        assert code is None or isinstance(code, int)
        signal.signal(signal.SIGINT, on_ctrl_c)  # main() ignores it at its end
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Outcome(code or 0, captured.out, captured.err)

    yield call
    logging.root.handlers[:] = handlers  # main() logs to what was stderr during the test


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Captures are recordings (recorded_graph.py); those made, as they come."""
    from tests.gpu.recorded_graph import record_graphs

    return record_graphs(monkeypatch)


@pytest.fixture
def two_threads():
    """torch has two threads, however many cores the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
