"""What config.json says of the checkpoints of tests/quantized_checkpoints.py."""

from __future__ import annotations

from typing import Any

GROUP = 32  # columns


def compressed_tensors_config(stored_format: str, **weights: Any) -> dict[str, Any]:
    weights = {"block_structure": None, "dynamic": False, "symmetric": True} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    if weights["type"] == "float":
        activations: dict[str, Any] = {
            "num_bits": 8,
            "type": "float",
            "strategy": "token",
            "dynamic": True,
        }
        group["input_activations"] = activations | {"symmetric": True}
    return {
        "quant_method": "compressed-tensors", "format": stored_format,
        "quantization_status": "compressed", "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"], "kv_cache_scheme": None,
    }  # fmt: skip


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FP8 = {"num_bits": 8, "type": "float"}
FP4 = {"num_bits": 4, "type": "float"}
MX = {"strategy": "group", "group_size": GROUP, "scale_dtype": "torch.uint8"}
NV = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
MODELOPT = {
    "quant_method": "modelopt", "ignore": ["lm_head"], "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.47.0"},
}  # fmt: skip
DEEPSEEK_V4 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}  # fmt: skip
DEEPSEEK = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "mlp.gate"],
}  # fmt: skip
FBGEMM = {
    "quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0,
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
}  # fmt: skip
OF_QUARK = {
    "dtype": "fp4", "qscheme": "per_group", "group_size": GROUP, "ch_axis": -1,
    "scale_format": "e8m0", "scale_type": "float", "symmetric": None, "is_dynamic": False,
}  # fmt: skip
QUARK = {
    "quant_method": "quark", "algo_config": None, "exclude": ["lm_head", "*.mlp.gate"],
    "global_quant_config": {
        "weight": OF_QUARK, "input_tensors": OF_QUARK | {"is_dynamic": True}, "bias": None,
        "output_tensors": None,
    },
    "layer_quant_config": {"*self_attn*": {"weight": {
        "dtype": "fp8_e4m3", "qscheme": "per_tensor", "group_size": None, "ch_axis": None,
    }}},
    "layer_type_quant_config": {}, "quant_mode": "eager_mode",
    "export": {"pack_method": "reorder", "weight_format": "real_quantized", "kv_cache_group": []},
}  # fmt: skip
GPTQ = {
    "quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": GROUP,
    "sym": False, "desc_act": False,
}  # fmt: skip
AUTO_ROUND = {
    "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4,
    "group_size": GROUP, "sym": False, "data_type": "int", "autoround_version": "0.9.0",
    "block_name_to_quantize": "model.layers",
    "extra_config": {".*self_attn.*": {"bits": 8}, ".*mlp\\.gate.*": {"bits": 16}},
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "mlp.router", "lm_head"]}
