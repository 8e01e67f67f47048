"""Attention with sinks on a CPU: numbers of each head that take part in the softmax and have no
value. torch's functions know none, so transformers attends step by step (`eager`), and keeps the
scores of all pairs several times.

    softmax with a sink = softmax without x sigmoid(log of the sum of exponentials - sink)

torch's kernel gives that logarithm beside its result. Our kernel for more than 64 queries
(prompt_attention.py) has the sinks in its softmax. Classes of which a trial shows that these give
what `eager` gives get an attention function of this name, as transformers lets anyone add.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from moe_infinity.architectures.attention_search import SINKS
from moe_infinity.architectures.module_state import eager_attention_of, is_watched
from moe_infinity.architectures.trial import Differs, Found, is_close, verdict
from moe_infinity.kernels.cpu.attention import attend_grouped
from moe_infinity.kernels.many_rows import MOST_TOKENS

NAME = "moe_infinity_sinks"
EAGER = "eager"
# An attribute of the modules whose class has passed a trial: the function it was compared with.
TRIED_WITH = "_moe_infinity_tried_with"
KNOWN = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"}


def attend_with_sinks(model: nn.Module) -> None:
    """Let the attention of a model that has sinks be computed by torch's kernel, if both give the
    same.
    """
    modules: list[Any] = [m for m in model.modules() if hasattr(m, SINKS) and hasattr(m, "config")]
    modules = [m for m in modules if m.config._attn_implementation == EAGER]
    tried = {type(m): m for m in modules if getattr(m, SINKS) is not None}
    passed = {kind for kind, m in tried.items() if isinstance(verdict(partial(_try, m)), Found)}
    for module in modules:
        if type(module) in passed:
            AttentionInterface.register(NAME, _attend)
            AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[EAGER])
            vars(module)[TRIED_WITH] = eager_attention_of(module)
            module.config._attn_implementation = NAME


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """[B, H, T, d], [B, G, N, d], [B, G, N, dv] -> [B, T, H, dv]."""
    eager = eager_attention_of(module)
    is_ours = vars(module).get(TRIED_WITH) is eager
    is_ours = is_ours and not torch.is_grad_enabled() and not is_watched()
    if is_ours and not dropout and not output_capturing._active_collector.get():
        out = attend_grouped(query, key, value, attention_mask, scaling, sinks_H=s_aux)
        if out is not None:
            return out, None
    options = {"scaling": scaling, "dropout": dropout, "s_aux": s_aux}
    out, weights = eager(module, query, key, value, attention_mask, **options, **kwargs)
    return out, weights


def _try(module: Any) -> None:
    """Compare both on random numbers. Raises Differs."""
    eager = eager_attention_of(module)
    if more := signature(eager).parameters.keys() - KNOWN:
        raise Differs(f"its attention takes {', '.join(sorted(more))}, too")
    generator = torch.Generator().manual_seed(0)
    sinks_H = module.sinks.detach()
    num_groups = len(sinks_H) // module.num_key_value_groups

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")

    for length in (5, MOST_TOKENS + 1):  # which are computed in two ways
        query = random(1, len(sinks_H), length, 16)
        key, value = random(2, 1, num_groups, length + 4, 16)
        mask = torch.zeros(1, 1, length, length + 4, dtype=torch.float32, device="cpu")
        mask[..., 3:].fill_(torch.finfo(torch.float32).min).triu_(2)
        wanted, _ = eager(module, query, key, value, mask, scaling=0.3, dropout=0.0, s_aux=sinks_H)
        found = attend_grouped(query, key, value, mask, 0.3, sinks_H=sinks_H)
        if found is None or not is_close(found, wanted):
            raise Differs("attention with sinks gives other numbers")
