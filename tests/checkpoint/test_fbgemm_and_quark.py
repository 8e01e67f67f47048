"""fbgemm_fp8 and quark: experts of Llama 4 as transformers stacks them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations import fbgemm_fp8
from transformers.models.llama4.modeling_llama4 import Llama4ForCausalLM

from moe_infinity import MoE
from moe_infinity.errors import CheckpointError, UnsupportedModelError
from moe_infinity.formats.methods import find_format
from tests.checkpoint.test_formats import stored
from tests.quantization_configs import FBGEMM, QUARK
from tests.quantized_checkpoints import COMMON, edit_config, pack_fp8_rows

pytestmark = pytest.mark.arithmetic

IDS = torch.arange(3, 23).view(1, 20) * 4 % 128
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def per_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    """In place of the kernel of fbgemm_gpu, which needs a GPU."""
    parts = pack_fp8_rows(weight)
    return parts[".weight"], parts[".weight_scale"].view(-1)


@pytest.fixture(params=[64, 96])  # with 64, a side is as long as the other
def llama(request, tmp_path, monkeypatch) -> tuple[Path, Path]:
    """A Llama 4 packed by transformers' conversion, and the same weights unpacked."""
    monkeypatch.setattr(fbgemm_fp8, "quantize_fp8_per_row", per_row, raising=False)
    config = transformers.Llama4TextConfig(
        **COMMON, intermediate_size=request.param, intermediate_size_mlp=96, num_local_experts=4,
        interleave_moe_layer_step=1, no_rope_layers=[1, 1], attn_temperature_tuning=False,
    )  # fmt: skip
    torch.manual_seed(0)
    Llama4ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "packed")
    model: Any = Llama4ForCausalLM(config)
    for layer in model.model.layers:
        layer.feed_forward.experts = fbgemm_fp8.FbgemmFp8Llama4TextExperts(config)
    convert = fbgemm_fp8.FbgemmFp8Quantize(None).convert
    packed: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, weight in load_file(tmp_path / "packed" / "model.safetensors").items():
        if not name.endswith((*EXPERTS, "_proj.weight")):
            plain[name] = packed[name] = weight
            continue
        made = convert({name: [weight]}, model=model)
        packed |= {key: value.detach().contiguous() for key, value in made.items()}
        scale = made[f"{name}_scale"]
        scale = scale.transpose(1, 2) if name.endswith("experts.down_proj") else scale
        plain[name] = (made[name].float() * scale).contiguous()
    for folder, tensors in (("packed", packed), ("plain", plain)):
        (tmp_path / folder).mkdir(exist_ok=True)
        save_file(tensors, tmp_path / folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(tmp_path / "plain")
    edit_config(tmp_path / "packed", lambda told: told | {"quantization_config": FBGEMM})
    return tmp_path / "packed", tmp_path / "plain"


@torch.no_grad()
def test_stacked_experts_of_llama_4_have_scales_per_output(llama):
    packed, plain = llama
    expected = Llama4ForCausalLM.from_pretrained(plain, dtype="float32")(IDS).logits
    for options in ({"exact": True, "host_memory": "50%"}, {"host_memory": "100%"}):
        with MoE(packed, dtype="float32", **options) as moe:
            torch.testing.assert_close(moe.model(IDS).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "scale"),
    [("a.weight", (1, 64)), ("a.weight", (32, 1)), ("a.gate_up_proj", (64, 1)),
     ("a.down_proj", (1, 64))],
)  # fmt: skip
def test_scales_of_anything_but_outputs_are_refused(name, scale):
    weight = torch.zeros(64, 64).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="do not fit"):
        find_format(FBGEMM).group(stored({name: weight, f"{name}_scale": torch.ones(scale)}))


def quark(weight: dict[str, Any] | list[Any], **changes: Any) -> dict[str, Any]:
    return QUARK | {"layer_quant_config": {"*experts*": {"weight": weight}}} | changes


OF_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (quark({"dtype": "int4", "qscheme": "per_group"}), r"\*experts\*, with dtype 'int4'"),
        (quark({"dtype": "fp4", "group_size": 16, "scale_format": "e4m3"}), "scale_format 'e4m3'"),
        (quark({"dtype": "fp4", "group_size": 16, "scale_format": "e8m0"}), "group_size 16"),
        (quark(OF_FP8 | {"qscheme": "per_group"}), "qscheme 'per_group'"),
        (quark(OF_FP8 | {"ch_axis": 1}), "ch_axis 1"),
        (quark([OF_FP8, {"dtype": "int4"}]), r"with dtypes \['fp8_e4m3', 'int4'\]"),
        (quark(OF_FP8, export={"weight_format": "fake_quantized"}), "fake_quantized"),
        (quark(OF_FP8, algo_config=[{"name": "rotation"}]), "rotation"),
        ({"quant_method": "quark"}, "global_quant_config"),
        ({"quant_method": "awq", "bits": 4, "pack_method": "order"}, "pack_method 'order'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config, named):
    with pytest.raises(UnsupportedModelError, match=named):
        find_format(config)
    assert find_format(quark(OF_FP8, algo_config=[{"name": "gptq"}])).method == "quark"
