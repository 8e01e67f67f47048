"""Keys and tensors of files in circulation that today's converter of llama.cpp does not write: of
older converters, of other people's, and of checkpoints that were quantized before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from gguf import GGUFValueType as T

from moe_infinity import CheckpointError, MoE, UnsupportedModelError
from moe_infinity.experts import ParamSpec
from moe_infinity.gguf.config import config_of
from moe_infinity.gguf.file import read_gguf
from moe_infinity.gguf.generation import generation_of
from moe_infinity.kernels.unpack import blocks_layout
from tests.closeness import distance
from tests.gguf_files import build, rewrite, stock_model
from tests.gguf_models import WIDE
from tests.kernels.stored_weights import ggml_blocks
from tests.test_gguf_families import ids_of
from tests.test_gguf_in_circulation import fused
from tools.convert_to_gguf import ARCHITECTURES, convert

pytestmark = pytest.mark.arithmetic

TOLERANCE = 1e-5
NVFP4 = GGMLQuantizationType.NVFP4


def made(name: str, folder: Path, **changes: Any) -> tuple[Path, Path]:
    """A checkpoint and its file."""
    build(name, folder, **changes)
    convert(folder, folder / "model.gguf", "f32")
    return folder, folder / "model.gguf"


def with_keys(name: str, file: Path, **tensors: Any) -> Any:
    """A function that rewrites the file with keys of its architecture."""

    def written(keys: dict[str, Any]) -> Path:
        full = {f"{ARCHITECTURES[name]}.{key}": value for key, value in keys.items()}
        return rewrite(file, file.with_name("other.gguf"), full, **tensors)

    return written


def logits_of(file: Path) -> torch.Tensor:
    with torch.no_grad(), MoE(file, dtype="float32", host_memory="50%", device="cpu") as moe:
        found: torch.Tensor = moe.model(ids_of(40)).logits
    return found


def text_config(file: Path) -> Any:
    return config_of(read_gguf(file)).get_text_config()


def test_a_layer_that_a_file_of_deepseek_4_counts_as_ahead_is_computed(tmp_path):
    """As in those of antirez: 43 layers, one of them said to predict ahead, none that does."""
    folder, file = made("deepseek_v4", tmp_path / "model")
    counted = with_keys("deepseek_v4", file)({"nextn_predict_layers": (T.UINT32, 1)})
    with torch.no_grad():
        expected = stock_model(folder)(ids_of(40)).logits
    assert distance(logits_of(counted), expected) < TOLERANCE


def test_a_layer_of_deepseek_4_that_is_ahead_is_not(tmp_path):
    _, file = made("deepseek_v4", tmp_path / "model")
    ahead = {"blk.3.nextn.eh_proj.weight": np.zeros((64, 128), np.float32)}
    said = with_keys("deepseek_v4", file, **ahead)({"nextn_predict_layers": (T.UINT32, 1)})
    assert text_config(said).num_hidden_layers == 3


def test_which_layers_of_glm_5_2_choose_tokens_is_known_without_a_key(tmp_path):
    """Unsloth's files have no key, and a copy of the index in each layer."""
    layers = {"num_hidden_layers": 7, "mlp_layer_types": ["dense"] + ["sparse"] * 6}
    folder, file = made("glm_moe_dsa", tmp_path / "model", **layers)
    keys = {"attention.indexer.types": None, "context_length": (T.UINT32, 1 << 20)}
    config = transformers.AutoConfig.from_pretrained(folder)
    config.indexer_types = ["full"] * 3 + ["shared"] * 3 + ["full"]
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32
    )
    with torch.no_grad():
        expected = stock(ids_of(40)).logits
    unsaid = with_keys("glm_moe_dsa", file)(keys)
    assert distance(logits_of(unsaid), expected) < TOLERANCE
    assert distance(logits_of(file), expected) > TOLERANCE, "no layer chose for another"
    shorter = with_keys("glm_moe_dsa", file)({"attention.indexer.types": None})
    assert {*text_config(shorter).indexer_types} == {"full"}, "GLM-5 and 5.1"


def test_windows_have_the_base_of_llama_cpp_where_a_file_has_none(tmp_path):
    for name in ("step3p7", "mimo_v2_flash", "gemma4_text"):
        _, file = made(name, tmp_path / name)
        rope = text_config(with_keys(name, file)({"rope.freq_base_swa": None})).rope_parameters
        assert rope["sliding_attention"]["rope_theta"] == 10_000, name
        assert rope["full_attention"]["rope_theta"] == 5000, name


def test_limits_of_step_have_older_names_too(tmp_path):
    folder, file = made("step3p7", tmp_path / "model")
    said = read_gguf(file)
    keys: dict[str, Any] = dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp"))
    keys["swiglu_limits"] = said.value("swiglu_clamp_exp")
    keys["swiglu_limits_shared"] = said.value("swiglu_clamp_shexp")
    with torch.no_grad():
        expected = stock_model(folder)(ids_of(40)).logits
    assert distance(logits_of(with_keys("step3p7", file)(keys)), expected) < TOLERANCE


@pytest.mark.parametrize("name", ["glm4_moe", "ernie4_5_moe"])
def test_biases_are_seen_in_one_tensor_of_queries_keys_and_values(name, tmp_path):
    bias = {"glm4_moe": {"attention_bias": True}, "ernie4_5_moe": {"use_bias": True}}[name]
    _, file = made(name, tmp_path / "model", **bias)
    assert torch.equal(logits_of(fused(file, tmp_path / "fused.gguf")), logits_of(file))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe_text"])
@pytest.mark.parametrize("ending", [".scale", ".weight.scale"])
def test_weights_in_nvfp4_have_a_scale_of_their_own(name, ending, tmp_path):
    """In files made of ModelOpt's checkpoints; experts have one each, and rows may be moved."""
    torch.manual_seed(0)
    _, file = made(name, tmp_path / "model", **WIDE)
    unpack = blocks_layout("nvfp4", (0, 0), ParamSpec("values", (0, 0), "uint8", 0)).unpack
    assert unpack is not None
    packed: dict[str, Any] = {}
    unpacked: dict[str, Any] = {}
    for tensor in gguf.GGUFReader(file).tensors:
        if not tensor.name.endswith(("_exps.weight", "attn_q.weight", "attn_gate.weight")):
            continue
        shape = tuple(tensor.data.shape)
        blocks = ggml_blocks("nvfp4", int(np.prod(shape[:-1])), shape[-1])
        blocks.view(-1, 36)[:, :4] = torch.randint(40, 60, (blocks.numel() // 36, 4)).byte()
        count = shape[0] if len(shape) == 3 else 1
        scale = torch.rand(count) + 0.1
        weight = unpack({"values": blocks}, None, torch.float32)
        by_scale = weight.view(count, -1) * scale[:, None]
        unpacked[tensor.name] = by_scale.view(shape).numpy()
        packed[tensor.name] = blocks.view(*shape[:-1], -1).numpy(), NVFP4
        start = tensor.name.removesuffix(".weight")
        packed[f"{start}{ending}"] = scale.numpy()
        packed[f"{start}.input_scale"] = np.full(count, 3, np.float32)
    expected = logits_of(rewrite(file, tmp_path / "f32.gguf", {}, **unpacked))
    found = logits_of(rewrite(file, tmp_path / "nvfp4.gguf", {}, **packed))
    assert distance(found, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("mimo_v2_flash", {"attention.head_count_kv": [2, 2, 2, 2]}, "head_count_kv"),
        ("nemotron_h", {"expert_used_count": [0, 3, 0, 2]}, "expert_used_count"),
        ("deepseek_v2", {"expert_weights_norm": True}, "expert_weights_norm"),
    ],
)
def test_what_no_class_of_transformers_computes_is_refused(name, keys, said, tmp_path):
    _, file = made(name, tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=said):
        MoE(with_keys(name, file)(keys))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("qwen3_moe", {"nextn_predict_layers": "one"}),
        ("qwen3_moe", {"block_count": [2, 2]}),
        ("qwen3_next", {"rope.dimension_count": "half"}),
        ("qwen3_moe", {"embedding_length": "wide"}),
    ],
)
def test_metadata_of_no_model_are_an_error_of_ours(name, keys, tmp_path):
    _, file = made(name, tmp_path / "model")
    with pytest.raises((CheckpointError, UnsupportedModelError)):
        config_of(read_gguf(with_keys(name, file)(keys)))


@pytest.mark.parametrize("theta", [0.0, -1.0, float("nan")])
def test_a_base_of_no_positions_is_an_error_of_ours(theta, tmp_path):
    _, file = made("qwen3_moe", tmp_path / "model")
    factors = np.array([1, 1, 1.5, 2, 4, 8, 8, 8], np.float32)
    written = with_keys("qwen3_moe", file, **{"rope_freqs.weight": factors})
    with pytest.raises((CheckpointError, UnsupportedModelError)):
        config_of(read_gguf(written({"rope.freq_base": (T.FLOAT32, theta)})))


def test_a_type_that_is_a_list_is_an_error_of_ours_or_nothing(tmp_path):
    _, file = made("qwen3_moe", tmp_path / "model")
    other = rewrite(file, tmp_path / "other.gguf", {"general.type": ["model"]})
    assert read_gguf(other).num_layers == 2


def test_a_setting_of_sampling_that_is_no_float32_is_left_out(tmp_path):
    _, file = made("qwen3_moe", tmp_path / "model")
    keys = {"general.sampling.top_k": (T.FLOAT64, 1e300), "general.sampling.temp": (T.FLOAT32, 0.5)}
    said = read_gguf(rewrite(file, tmp_path / "other.gguf", keys))
    found = generation_of(said, config_of(said), None)
    assert found.temperature == 0.5
    assert found.top_k != 1e300
