"""Fields of the configs of models with latent attention: DeepSeek's, and those built alike."""

from __future__ import annotations

import logging
from typing import Any

from moe_infinity.errors import CheckpointError, UnsupportedModelError
from moe_infinity.gguf.derived import by_keys, dense_first, has_tensor, of_layers
from moe_infinity.gguf.file import WITH_CONFIG, GgufModel
from moe_infinity.gguf.rope import rope_parameters

GROUPED = (160, 256)  # experts of a layer of DeepSeek-V2 and V3, which choose among groups first
CONTEXT_OF_GLM_5_2 = 1 << 20  # and later ones, by which llama.cpp knows them

logger = logging.getLogger(__name__)


def latent_attention(gguf: GgufModel) -> dict[str, Any]:
    """Return the sizes of DeepSeek's attention. Older files have those of its heads themselves,
    newer ones those of heads of the latent vectors, and of themselves under other keys.
    """
    key = gguf.value("attention.key_length_mla", gguf.value("attention.key_length"))
    value = gguf.value("attention.value_length_mla", gguf.value("attention.value_length"))
    rotated = gguf.value("rope.dimension_count")
    if not all(type(size) is int for size in (key, value, rotated)) or not 0 <= rotated < key:
        raise CheckpointError(f"{gguf.files[0]}: no sizes of {gguf.architecture}'s attention")
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0}
    if scale := gguf.value("rope.scaling.yarn_log_multiplier"):
        yarn |= dict.fromkeys(("mscale", "mscale_all_dim"), round(scale * 10, 6))
    return {
        "qk_nope_head_dim": key - rotated, "qk_rope_head_dim": rotated, "v_head_dim": value,
        "head_dim": rotated,
        "rope_parameters": rope_parameters(gguf, gguf.value("rope.freq_base", 1e4), yarn),
    }  # fmt: skip


def deepseek2(gguf: GgufModel) -> dict[str, Any]:
    """Return the fields of DeepSeek-V2, or those of V3 if scores are corrected by a bias. GLM's
    files with this name compute as V3 does.
    """
    is_v3 = has_tensor(gguf, "exp_probs_b.bias") or gguf.value("expert_gating_func") == 2
    if is_v3 and gguf.value("expert_gating_func") == 1:
        raise UnsupportedModelError(
            f"{gguf.files[0]}: deepseek2.expert_gating_func is 1, a softmax, but its scores are "
            f"corrected by a bias: no class of transformers has that\n{WITH_CONFIG}"
        )
    has_groups = gguf.value("expert_group_count", 1) > 1
    if not is_v3 and gguf.value("expert_weights_norm"):
        raise UnsupportedModelError(
            f"{gguf.files[0]}: deepseek2.expert_weights_norm with a softmax over the experts: no "
            f"class of transformers has that\n{WITH_CONFIG}"
        )
    if gguf.value("expert_count") in GROUPED and gguf.value("expert_group_count") is None:
        logger.warning("%s: no deepseek2.expert_group_count, so experts of all groups are compared "
                       "for a token, as in llama.cpp\n%s", gguf.files[0], WITH_CONFIG)  # fmt: skip
    return latent_attention(gguf) | {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "topk_method": "group_limited_greedy" if has_groups else "greedy",
    }


def mistral4(gguf: GgufModel) -> dict[str, Any]:
    """Return the sizes of Mistral 4's attention. No key says by how much queries behind the context
    of training grow, so it is what the class in transformers has.
    """
    found = latent_attention(gguf)
    rotated = found["qk_rope_head_dim"]
    head = rotated + found["qk_nope_head_dim"]
    found["rope_parameters"] |= {
        "partial_rotary_factor": rotated / head, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    return found | {"head_dim": head}


def indexed_attention(gguf: GgufModel) -> dict[str, Any]:
    """Return the fields of latent attention to the tokens that an index chooses."""
    found = latent_attention(gguf) | dense_first(gguf)
    if gguf.value("attention.indexer.types") is not None:
        kinds = {True: "full", False: "shared"}
        types = of_layers(gguf, "attention.indexer.types")
        found["indexer_types"] = [kinds[bool(each)] for each in types]
    return found


def glm_dsa(gguf: GgufModel) -> dict[str, Any]:
    """Return the same for GLM-5. Files of GLM-5.2 that do not say which layers choose tokens of
    their own have the layers of llama.cpp's own list.
    """
    found = indexed_attention(gguf)
    if "indexer_types" not in found and gguf.value("context_length", 0) >= CONTEXT_OF_GLM_5_2:
        numbers = range(gguf.num_layers)
        found["indexer_types"] = ["full" if n < 2 or n % 4 == 2 else "shared" for n in numbers]
    return found


def kimi_linear(gguf: GgufModel) -> dict[str, Any]:
    """Return which layers of Kimi Linear have attention, and its sizes."""
    heads = gguf.value("attention.head_count")
    found = by_keys(gguf, "linear_attention") | latent_attention(gguf) | dense_first(gguf)
    return found | {"linear_num_heads": heads, "num_key_value_heads": heads}


def glm5_next(gguf: GgufModel) -> dict[str, Any]:
    """Return which layers of GLM-5-Next have attention, and its sizes. Nothing is rotated."""
    heads = gguf.value("attention.head_count")
    found = indexed_attention(gguf) | by_keys(gguf, "linear_attention")
    del found["rope_parameters"]
    return found | {
        "index_kpool_always_select_tail": gguf.value("attention.indexer.kpool_select_tail", True),
        "linear_lower_bound": gguf.value("kda.gate_lower_bound"),
        "linear_num_heads": heads, "num_key_value_heads": heads,
    }  # fmt: skip
