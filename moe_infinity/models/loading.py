"""Load a model without its experts: transformers loads the dense part, the experts stay where they
are on disk.

transformers calls `_load_pretrained_model` with the model on the meta device and the resolved list
of weight conversions. There we find the experts modules, plan where each expert's bytes lie, take
the parameters out of the modules, and hand the stock method the remaining tensors, each read on
demand.

Private names of transformers used here: `_load_pretrained_model`, `_from_config`,
`LoadStateDictConfig.weight_mapping`. Others are in planning.py and recipes.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from moe_infinity.errors import CheckpointError, UnsupportedModelError
from moe_infinity.memory.checkpoint import checkpoint_files, read_headers
from moe_infinity.memory.extents import StoredTensor
from moe_infinity.memory.reader import Reader
from moe_infinity.models.adapters import ExpertsModule
from moe_infinity.models.planning import Plan, plan_experts


@dataclass(slots=True)
class LoadedModel:
    """A model whose experts are still on disk."""

    model: transformers.PreTrainedModel
    plan: Plan
    reader: Reader
    startup_bytes_read: int  # headers and dense weights


class StoredSlice:
    """A tensor of the checkpoint, read when transformers indexes it; the interface of a safetensors
    slice.
    """

    def __init__(self, tensor: StoredTensor, reader: Reader) -> None:
        self._tensor = tensor
        self._reader = reader

    def __getitem__(self, index: Any) -> Tensor:
        raw = bytearray(self._tensor.extent.num_bytes)
        self._reader.read_into(self._tensor.extent, memoryview(raw))
        dtype = getattr(torch, self._tensor.dtype)
        whole = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return whole.view(self._tensor.shape)[index]

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return self._tensor.stored_dtype


def load_without_experts(
    checkpoint: str, *, dtype: str, experts_implementation: str, trust_remote_code: bool
) -> LoadedModel:
    """The model of a folder or hub id with dense weights in memory and experts on disk.

    Raises UnsupportedModelError, CheckpointError.
    """
    stock_class = model_class(checkpoint, trust_remote_code=trust_remote_code)
    if Path(checkpoint).is_dir():
        checkpoint_files(Path(checkpoint))  # names a missing shard better than transformers does
    reader = Reader()
    plans: list[Plan] = []
    try:
        model, info = _offloading_class(stock_class, reader, plans).from_pretrained(
            checkpoint,
            dtype=dtype,
            experts_implementation=experts_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with names
            trust_remote_code=trust_remote_code,
        )
        _refuse_made_up_weights(checkpoint, info)
    except (SafetensorError, UnpicklingError) as error:  # it opened a broken file before we could
        reader.close()
        raise CheckpointError(f"{checkpoint}: transformers cannot load it: {error}") from error
    except BaseException:
        reader.close()
        raise
    model.__class__ = stock_class
    (plan,) = plans
    return LoadedModel(model, plan, reader, plan.headers.num_bytes + reader.bytes_read)


def _offloading_class(stock_class: Any, reader: Reader, plans: list[Plan]) -> Any:
    """`stock_class` with a load hook that leaves the experts on disk and appends its plan."""

    def _load_pretrained_model(
        model: Any,
        state_dict: Any,
        files: list[str] | None,
        load_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        headers = read_headers(Path(file) for file in files or [])
        plan = plan_experts(model, headers, load_config.weight_mapping or [])
        plans.append(plan)
        for row in plan.rows:
            _take_out(row)
        dense = {
            key: StoredSlice(tensor, reader)
            for key, tensor in headers.tensors.items()
            if key not in plan.owned
        }
        return stock_class._load_pretrained_model(model, dense, files, load_config, *args, **kwargs)

    attributes = {
        "__module__": stock_class.__module__,
        "__qualname__": stock_class.__qualname__,
        "_load_pretrained_model": staticmethod(_load_pretrained_model),
    }
    return type(stock_class.__name__, (stock_class,), attributes)


def _refuse_made_up_weights(checkpoint: str, info: dict[str, Any]) -> None:
    """transformers initialises what it does not find or what has another shape; we refuse."""
    for name, found_shape, wanted_shape in sorted(info["mismatched_keys"]):
        raise CheckpointError(
            f"{checkpoint}: {name} has shape {list(found_shape)}, "
            f"the model wants {list(wanted_shape)}"
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise CheckpointError(
            f"{checkpoint}: no tensor for {missing[0]} ({len(missing)} weights are missing)"
        )


def plan_from_headers(checkpoint: str, *, dtype: str, trust_remote_code: bool = False) -> Plan:
    """What `load_without_experts` would find, reading nothing but headers. `checkpoint` is a
    folder.
    """
    stock_class = model_class(checkpoint, trust_remote_code=trust_remote_code)
    headers = read_headers(checkpoint_files(Path(checkpoint)))
    config = transformers.AutoConfig.from_pretrained(
        checkpoint, trust_remote_code=trust_remote_code
    )
    if dtype != "auto":
        torch_dtype = getattr(torch, dtype)
    elif (torch_dtype := config.dtype) is None:  # then transformers takes the first floating one
        stored = (getattr(torch, tensor.dtype) for tensor in headers.tensors.values())
        torch_dtype = next((found for found in stored if found.is_floating_point), torch.float32)
    with torch.device("meta"):
        model = stock_class._from_config(config, dtype=torch_dtype)
    return plan_experts(model, headers, get_model_conversion_mapping(model))


def model_class(checkpoint: str, *, trust_remote_code: bool = False) -> Any:
    """transformers' class for this checkpoint, or the checkpoint's own if it is to be trusted.
    Raises UnsupportedModelError, CheckpointError.
    """
    if not Path(checkpoint).is_dir() and (
        Path(checkpoint).exists() or checkpoint.startswith((".", "/", "~"))
    ):
        raise CheckpointError(f"{checkpoint}: not a folder; give a checkpoint folder or a hub id")
    try:
        config = transformers.AutoConfig.from_pretrained(
            checkpoint, trust_remote_code=trust_remote_code
        )
        own_code = getattr(config, "auto_map", None) or {}
        if trust_remote_code:
            for name in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM"):
                if name in own_code:
                    return get_class_from_dynamic_module(own_code[name], checkpoint)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{checkpoint}: transformers {transformers.__version__} does not understand "
            f"its config.json: {error}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{checkpoint}: no usable config.json: {error}") from error
    if hasattr(config, "quantization_config"):
        method = dict(config.quantization_config).get("quant_method", "of an unnamed kind")
        raise UnsupportedModelError(
            f"{checkpoint}: quantized checkpoints ({method}) are not supported yet, "
            "expected weights in bfloat16, float16 or float32"
        )
    for name in config.architectures or []:
        found = getattr(transformers, name, None)
        if found is not None and found.can_generate():
            return found
    for mapping in (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    ):
        if type(config) in mapping:
            return mapping[type(config)]
    hint = "\nhint: it brings its own code, run by `trust_remote_code`" if own_code else ""
    raise UnsupportedModelError(
        f"{checkpoint}: transformers {transformers.__version__} has no generating class for "
        f"architectures {config.architectures}{hint}"
    )


def _take_out(row: ExpertsModule) -> None:
    """Remove the expert parameters; a meta tensor of the same name stays, which transformers' init
    may touch.
    """
    for path in (path for home in row.homes.values() for path in home.paths):
        owner_name, _, name = path.rpartition(".")
        owner = row.module.get_submodule(owner_name)
        param = owner._parameters.pop(name)
        assert param is not None, path
        meta = torch.empty_like(param, device="meta", requires_grad=False)
        object.__setattr__(owner, name, meta)
