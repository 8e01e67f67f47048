"""How far logits are from those of the same weights computed in float64, given the same tokens.

Where a router's choice is nearly a tie, rounding decides it, and another expert changes logits far
more than any sum does. So the experts that float64 chooses, and their weights, can be imposed.

Legend: B sequences, N tokens of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from moe_infinity import MoE
from tests.closeness import logits_of_steps
from tests.sweep.compare import EXPERTS_CLASS
from tests.sweep.discover import architectures_in
from tests.sweep.tiny import VOCAB_SIZE, tiny_model

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
ARCHITECTURES = {
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "OlmoeForCausalLM": "olmoe",
    "GptOssForCausalLM": "gpt_oss",
    "Glm4MoeForCausalLM": "glm4_moe",
    "PhimoeForCausalLM": "phimoe",
}
NUM_PROMPT = 4  # tokens before the steps of one token

Routing = list[tuple[Tensor, Tensor]]  # of every call of an experts module: ids and weights


class Error(NamedTuple):
    """Of logits, in units of the root mean square of float64's."""

    rms: float
    largest: float


def save_tiny(name: str, folder: Path) -> Tensor:
    """A tiny random model in bfloat16, and tokens [B, N] for it."""
    (found,) = [each for each in architectures_in(ARCHITECTURES[name]) if each.name == name]
    tiny_model(found).save_pretrained(folder)
    return torch.randint(3, VOCAB_SIZE, (8, 64), generator=torch.Generator().manual_seed(1))


def text_for_demo() -> Tensor:
    """Tokens [B, N] of this project's license: English that does not change."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    text = (DEMO.parents[1] / "LICENSE").read_text("utf-8")
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids
    return ids[0, : 8 * 64].view(8, 64)


def errors(
    folder: Path, ids_BN: Tensor, ways: dict[str, dict[str, Any]], *, imposes_experts: bool
) -> dict[tuple[str, str], Error]:
    """By way of computing, its options for MoE(...), and by "prompt" and "steps"."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", experts_implementation="eager"
    ).double()
    found = {}
    routing: dict[str, Routing] = {"prompt": [], "steps": []}
    expected = {}
    for kind, chosen in routing.items():
        with _noting(reference, chosen):
            expected[kind] = _logits(reference, kind, ids_BN)
        assert chosen, "no experts were called"
    for way, options in ways.items():
        with MoE(folder, device="cpu", host_memory="100%", **options) as moe:
            for kind, chosen in routing.items():
                with _imposing(moe.model, chosen) if imposes_experts else nullcontext():
                    logits = _logits(moe.model, kind, ids_BN)
                found[way, kind] = _error(logits, expected[kind])
    return found


@torch.no_grad()
def _logits(model: Any, kind: str, ids_BN: Tensor) -> Tensor:
    if kind == "steps":
        return logits_of_steps(model, ids_BN, NUM_PROMPT)
    logits: Tensor = model(ids_BN, use_cache=False).logits
    return logits


def _error(found: Tensor, expected: Tensor) -> Error:
    scale = expected.square().mean().sqrt()
    difference = (found.double() - expected) / scale
    return Error(float(difference.square().mean().sqrt()), float(difference.abs().max()))


def _experts(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if EXPERTS_CLASS.search(type(m).__name__)]


@contextmanager
def _noting(model: nn.Module, chosen: Routing) -> Iterator[None]:
    def note(module: nn.Module, args: Any) -> None:
        chosen.append((args[1], args[2]))

    hooks = [module.register_forward_pre_hook(note) for module in _experts(model)]
    yield
    for hook in hooks:
        hook.remove()


@contextmanager
def _imposing(model: nn.Module, chosen: Routing) -> Iterator[None]:
    calls = iter(chosen)

    def impose(module: nn.Module, args: Any) -> Any:
        x_TD, _, weights_TK, *rest = args
        ids_TK, exact_weights_TK = next(calls)
        return x_TD, ids_TK, exact_weights_TK.to(weights_TK.dtype), *rest

    hooks = [module.register_forward_pre_hook(impose) for module in _experts(model)]
    yield
    for hook in hooks:
        hook.remove()
    assert next(calls, None) is None, "some experts were not called"
