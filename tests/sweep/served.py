"""One architecture: what the server gives for requests in chunks, in a batch and behind kept
prefixes, against what generate() gives for each of them alone.

The config's lengths are made so small that prompts and answers cross each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_infinity import MoE, MoEInfinityError
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.engine import Engine
from moe_infinity.server.sampling import ChosenToken
from moe_infinity.server.sequences import Request, Running
from tests.conftest import save_tokenizer
from tests.sweep import tiny
from tests.sweep.discover import Architecture, with_sub_configs

WINDOW = 24  # above the prefix cache's blocks of 16 tokens
ORIGINAL = 32  # tokens from which a rotary embedding changes
LENGTHS: dict[str, Any] = {
    **dict.fromkeys(("sliding_window", "sliding_window_size", "keep_window_size"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "rel_extent", "index_block_size"), WINDOW),
    "use_sliding_window": True,
    "max_window_layers": 2,
    "floor_scale": 8,
    "original_max_position_embeddings": ORIGINAL,
}
TOLERANCE = 1e-3  # of the largest logit, float32: sums in another order


def dynamic(num_pairs: int) -> dict[str, Any]:
    """The embedding of each length beyond the original is another."""
    return {"rope_type": "dynamic", "factor": 2.0}


def longrope(num_pairs: int) -> dict[str, Any]:
    """There are two, for lengths up to the original and beyond."""
    return {
        "rope_type": "longrope",
        "short_factor": [1.0] * num_pairs,
        "long_factor": [4.0] * num_pairs,
        "short_mscale": 1.1,
        "long_mscale": 1.3,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    }


ROPES: dict[str, Callable[[int], dict[str, Any]] | None] = {
    "own": None,
    "dynamic": dynamic,
    "longrope": longrope,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {"max_batch": 1, "prefix_cache": "off"},
    "chunks": {"max_batch": 2, "prefill_chunk": 7, "prefix_cache": "off"},
    "batch": {"max_batch": 4, "prefix_cache": "off"},
    "prefixes": {"max_batch": 3, "prefill_chunk": 20, "prefix_cache": "16MiB"},
    "prefixes, one by one": {"max_batch": 1, "prefix_cache": "16MiB"},
}
PROMPTS = [
    [int(i) for i in torch.arange(n) * 7 % 101 + 3] for n in (9, 22, 30, 34, 70)
]  # each begins with those before it
NUM_NEW = 8


@dataclass
class Forced:
    """Stands for the sampler: takes the given tokens, and keeps the logits."""

    token_ids: list[int]
    logits: list[Tensor] = field(default_factory=list)

    def choose(self, logits_V: Tensor) -> ChosenToken:
        """Choose what is next of the given ones."""
        self.logits.append(logits_V.clone())
        return ChosenToken(self.token_ids[len(self.logits) - 1])


# Their attention ignores the window of their config, which is null in every real one.
WITHOUT_WINDOW = (
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
)


def with_lengths(architecture: Architecture, rope: str) -> Any:
    """A tiny config whose lengths are short. None if it has no such rotary embedding."""
    config = tiny.tiny_config(architecture)
    text = config.get_text_config(decoder=True)
    if architecture.name in WITHOUT_WINDOW:
        text.sliding_window = None
    for part in with_sub_configs(config):
        for name, value in LENGTHS.items():
            if getattr(part, name, None) is not None:
                setattr(part, name, value)
    parameters = getattr(text, "rope_parameters", None)
    make = ROPES[rope]
    kinds = rope_kinds(parameters)
    if make is None:
        for kind in kinds:
            if "original_max_position_embeddings" in kind:
                kind["original_max_position_embeddings"] = ORIGINAL
        return config
    if not kinds:
        return None
    width = getattr(text, "qk_rope_head_dim", None) or getattr(text, "head_dim", None) or 16
    for kind in kinds:
        share = kind.get("partial_rotary_factor", 1.0)
        kind.update(make(int(width * share) // 2))
    text.max_position_embeddings = ORIGINAL if rope == "dynamic" else 4 * ORIGINAL
    return config


def rope_kinds(parameters: Any) -> list[dict[str, Any]]:
    """The parameters of each kind of layer."""
    if not parameters:
        return []
    if "rope_type" in parameters:
        return [parameters]
    return [kind for kind in parameters.values() if isinstance(kind, dict)]


def save(architecture: Architecture, config: Any, folder: Path) -> None:
    """A checkpoint with random float32 weights."""
    torch.manual_seed(0)
    model = tiny.random_model(architecture, config).float()  # complex numbers stay
    model.save_pretrained(folder)
    save_tokenizer(folder)


Answer = tuple[list[int], Tensor]  # tokens, and the logits [N, V] they were chosen from


def generated(moe: MoE, prompt: list[int]) -> Answer:
    """What generate() gives for this request alone."""
    out = moe.generate(
        torch.tensor([prompt]),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


def answers(folder: Path, *, is_history_free: bool) -> list[Answer]:
    """What generate() gives for each prompt, of a model that has seen no other."""
    if not is_history_free:
        return [_of_a_fresh_model(folder, prompt) for prompt in PROMPTS]
    with opened(folder) as moe:
        return [generated(moe, prompt) for prompt in PROMPTS]


def _of_a_fresh_model(folder: Path, prompt: list[int]) -> Answer:
    with opened(folder) as moe:
        return generated(moe, prompt)


def opened(folder: Path) -> MoE:
    moe = MoE(folder, host_memory="100%", dtype="float32", preload="off")
    moe.model.generation_config.eos_token_id = None  # nothing ends an answer early
    return moe


def differences(folder: Path, rope: str, names: Iterable[str] = OPTIONS) -> Iterator[str]:
    """In words, where the server gives other logits, or why it does not serve."""
    wanted = answers(folder, is_history_free=rope != "dynamic")
    for name in names:
        with opened(folder) as moe:
            try:
                engine = Engine(moe, ServeConfig(max_context=200, **OPTIONS[name]))
            except MoEInfinityError as error:
                yield f"{name}: not served: {error}"
                continue
            yield from (f"{name}: {found}" for found in _compared(engine, wanted))


def _compared(engine: Engine, wanted: list[Answer]) -> Iterator[str]:
    cases = list(zip(PROMPTS, wanted, strict=True))
    for turn, order in (("first", cases), ("again", cases[::-1])):
        running: list[tuple[int, Running, Forced, Tensor]] = []
        for prompt, (tokens, logits) in order:
            request = Request(prompt_ids=prompt, max_new_tokens=NUM_NEW)
            sequence = engine.running(request, lambda output: None)
            engine.submit([sequence])
            forced: Any = Forced(tokens)
            sequence._sampler = forced
            running.append((len(prompt), sequence, forced, logits))
            engine.step()
        for _ in range(400):
            if not (engine._waiting or engine._prefilling or engine._decoding):
                break
            engine.step()
        for length, _, forced, logits in running:
            if len(forced.logits) < NUM_NEW:
                yield f"{turn}, prompt of {length}: ended after {len(forced.logits)} tokens"
                continue
            found = torch.stack(forced.logits)
            off = (found - logits).abs().amax(dim=1) / logits.abs().max()
            if not bool((off <= TOLERANCE).all()):
                at = int((~(off <= TOLERANCE)).nonzero()[0])
                yield f"{turn}, prompt of {length}: token {at} by {float(off.max()):.1e}"
