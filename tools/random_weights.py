"""How large the weights of a random model are, and how its tokens are routed.

Every part of a layer keeps the size of what passes through it, and what a layer adds to the
residual is smaller the more layers there are. So hidden states keep their token's embedding at any
depth, and routers see in it what the embedding has:

    row of the embedding   | the same in all rows | the same for a topic | of this token alone |

The first part makes some experts more popular than others, the second lets neighbouring tokens
share experts: `topical_ids` are texts that stay with a topic for a while. The shares are such that
routing is like recorded traces (docs/performance.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ROUTER_SIZE = 3.0  # standard deviation of a router's logits
NORM_SPREAD = 0.1
COMMON_SHARE, TOPIC_SHARE = 0.125, 0.5  # of the columns of the embedding
TOPIC_TOKENS = 64  # neighbouring ids
TEXT_TOPICS = 4  # of one text
MEAN_STAY = 40  # tokens about a topic before another one
ADDS = ("attn_output.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight",
        "ssm_out.weight")  # fmt: skip


def weight_size(name: str, num_columns: int, config: Mapping[str, Any]) -> float:
    """Return the standard deviation of a matrix of the GGUF file, by its name in it."""
    is_multiplied = config["model_type"] == "gemma4_text"  # by the root of the width
    if name == "token_embd.weight" and not is_multiplied:
        return 1.0
    is_added = name.endswith(ADDS)
    return 1 / math.sqrt(num_columns * (config["num_hidden_layers"] if is_added else 1))


def small_tensor(name: str, shape: torch.Size, config: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor of the checkpoint that stays float32, by its name in the checkpoint."""
    is_gemma = config["model_type"] == "gemma4_text"
    normal = torch.randn(shape)
    if name.endswith("A_log"):
        return torch.empty(shape).uniform_(1, 16).log()
    if name.endswith("router.scale"):  # divided by the root of the width in the model's code
        return (1 + NORM_SPREAD * normal) * math.sqrt(config["hidden_size"])
    if "norm" in name:
        is_shifted = config["model_type"].startswith(("qwen3_5", "qwen3_next"))
        center = 0.0 if is_shifted and not name.endswith("linear_attn.norm.weight") else 1.0
        is_added = is_gemma and "post_" in name
        return (center + NORM_SPREAD * normal) * (
            (2 * config["num_hidden_layers"]) ** -0.5 if is_added else 1.0
        )
    if name.endswith(("layer_scalar", "per_expert_scale")):
        return 1 + NORM_SPREAD * normal
    if name.endswith("conv1d.weight"):
        return normal / math.sqrt(shape[-1])
    if name.endswith(("gate.weight", "router.weight", "router.proj.weight")):
        size = 1.0 if "shared_expert_gate" in name else ROUTER_SIZE
        return normal * size / math.sqrt(shape[-1])
    return NORM_SPREAD * normal


def embedding_blocks(first: int, last: int, num_blocks: int, pool: int) -> NDArray[np.int64]:
    """Return the blocks of the pool that make the rows `first` to `last` of an embedding, of
    `num_blocks` each.
    """
    common = round(COMMON_SHARE * num_blocks)
    topical = round(TOPIC_SHARE * num_blocks)
    rows = np.arange(first, last)[:, None]
    column = np.arange(num_blocks)[None]
    number = np.where(column < common, 0, np.where(column < common + topical, 1, 2))
    owner = np.select([number == 0, number == 1], [0 * rows, 1 + rows // TOPIC_TOKENS], rows + 1)
    found: NDArray[np.int64] = ((owner * 3 + number) * num_blocks + column) * 7919 % pool
    return found


def topical_ids(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Return the ids of a text that stays with one of its topics for a while."""
    random = np.random.default_rng(seed)
    topics = random.integers(1, vocab_size // TOPIC_TOKENS, TEXT_TOPICS)
    found: list[int] = []
    while len(found) < count:
        first = int(random.choice(topics)) * TOPIC_TOKENS
        stay = int(random.geometric(1 / MEAN_STAY))
        found += (first + random.integers(0, TOPIC_TOKENS, stay)).tolist()
    return found[:count]
