"""Gives tensors of a GGUF file the names of a model's parameters, and undoes what llama.cpp's
converter changed.

    model.layers.0.self_attn.q_proj.weight   blk.0.attn_q.weight, by the gguf package's map
    model.layers.0.mlp.experts.gate_up_proj  blk.0.ffn_gate_exps.weight and blk.0.ffn_up_exps.weight

What comes out are the weights of a checkpoint under names of the model, and rules of transformers
for what is more than another name. So plan.py and transformers load it as any other checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
)

from moe_infinity.architectures.adapters import ExpertsModule
from moe_infinity.checkpoint.headers import STORED_DTYPES, Extent, StoredTensor
from moe_infinity.checkpoint.linear_experts import BIAS, LINEAR_LAYERS, stacking
from moe_infinity.checkpoint.packing import PackedTensor, PartFormat, WeightFormat
from moe_infinity.checkpoint.plan import Weights, find_experts
from moe_infinity.checkpoint.undo import JoinConvolutions, JoinHeads, JoinKeysAndValues, Undo
from moe_infinity.errors import CheckpointError, UnsupportedModelError
from moe_infinity.experts import ParamSpec
from moe_infinity.gguf.architectures import ALWAYS_CHANGED, KNOWN, Architecture
from moe_infinity.gguf.file import GgufModel
from moe_infinity.gguf.map import name_map
from moe_infinity.kernels.unpack import BLOCKS, blocks_layout, row_bytes
from moe_infinity.layout import Block, Parts, WeightLayout, without_ones

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry")
NUMBER = re.compile(r"\.(\d+)\.")
# By modules that have the same parameters, how their tensors' names begin; and by the ends of the
# parameters' names, how those of the tensors end.
GROUPS = (
    (
        {".attn_hyper_connection.": "hc_attn", ".mlp_hyper_connection.": "hc_ffn",
         ".hyper_connection_mixer.": "output_hc"},
        {"hc_norm.weight": "norm", "block_inject_weight.weight": "inject",
         "input_mix_weight_down.weight": "down", "input_mix_weight_up.weight": "up"},
    ),
    (
        {".attn_hc.": "hc_attn", ".ffn_hc.": "hc_ffn", ".hc_head.hc_": "output_hc"},
        {"fn": "fn", "base": "base", "scale": "scale"},
    ),
    (
        {".compressor.": "attn_compressor", ".indexer.": "indexer_compressor"},
        {"kv_proj.weight": "kv", "gate_proj.weight": "gate", "kv_norm.weight": "norm",
         "position_bias": "ape", "index_kpool_compress_gate": "gate",
         "index_kpool_compress_ape": "ape"},
    ),
)  # fmt: skip
# Tensors whose parameters have names that the gguf package's map does not know.
OTHER_NAMES = {
    ".e_score_correction_bias": "exp_probs_b.bias",
    ".block_sparse_moe.router.weight": "ffn_gate_inp.weight", ".dt_bias": "ssm_dt.bias",
    ".A_log": "ssm_a", ".forget_gate.f_a_proj.weight": "ssm_f_a.weight",
    ".forget_gate.f_b_proj.weight": "ssm_f_b.weight", ".expert_bias": "exp_probs_b.bias",
    ".router.scale": "ffn_gate_inp.scale", ".router.per_expert_scale": "ffn_down_exps.scale",
    ".ple_embedding.layer_multipliers": "ple.layer_multipliers",
    ".ple_embedding.ngram_heads_offsets": "ple.head_offsets",
    ".ple_embedding.ngram_heads_vocab_sizes": "ple.head_vocab_sizes",
    ".ple_embedding.ngram_embedding.weight": "per_layer_token_embd.weight",
    ".ple.conv1d.weight": "ple_conv1d.weight", ".ple.key_proj.weight": "ple_key.weight",
    ".ple.value_proj.weight": "ple_value.weight",
    ".indexer.q_layernorm.weight": "indexer.q_norm.weight",
    ".indexer.k_layernorm.weight": "indexer.k_norm.weight",
    ".ple.norm_key.weight": "ple_norm_key.weight", ".self_attn.kv_proj.weight": "attn_kv.weight",
    ".ple.norm_query.weight": "ple_norm_query.weight", ".gate.tid2eid": "ffn_gate_tid2eid.weight",
    ".ple.norm_conv.weight": "ple_norm_conv.weight", ".o_a_proj.weight": "attn_output_a.weight",
    ".q_a_norm.weight": "attn_q_a_norm.weight", ".o_b_proj.weight": "attn_output_b.weight",
    ".self_attn.kv_norm.weight": "attn_kv_a_norm.weight",
    ".indexer.q_b_proj.weight": "indexer.attn_q_b.weight",
    ".indexer.scorer.weights_proj.weight": "indexer.proj.weight",
} | {
    f".indexer.{leaf}.weight": f"indexer.{leaf}.weight" for leaf in ("q_proj", "k_proj", "q_norm")
} | {
    f"{module}{param}": f"{start}_{end}.weight"
    for modules, params in GROUPS
    for module, start in modules.items()
    for param, end in params.items()
}  # fmt: skip
# Parameters that the converter splits, if it does, and the parts.
SPLIT: dict[str, tuple[tuple[str, ...], ConversionOps]] = {
    ".self_attn.kv_b_proj.weight": (("attn_k_b", "attn_v_b"), JoinKeysAndValues()),
    ".shared_mlp.input_linear.weight": (("ffn_gate_shexp", "ffn_up_shexp"), Concatenate(0)),
    ".shared_experts.gate_up_proj.weight": (("ffn_gate_shexp", "ffn_up_shexp"), Concatenate(0)),
    ".mlp.gate_up_proj.weight": (("ffn_gate", "ffn_up"), Concatenate(0)),
    ".linear_attn.in_proj_qkvz.weight": (("attn_qkv", "attn_gate"), JoinHeads()),
    ".self_attn.conv1d.weight": (
        ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"), JoinConvolutions(),
    ),
    ".indexer.index_qk_proj.weight": (("indexer.q_proj", "indexer.k_proj"), Concatenate(0)),
}  # fmt: skip
OF_EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}  # by linear layer
FUSED_QKV = ("q_proj", "k_proj", "v_proj")
FUSED = "ffn_gate_up_exps"  # in the place of the two of gate_up_proj


class BlockFormat(WeightFormat):
    """One of GGML's block formats."""

    def layout_of(self, parts: dict[str, ParamSpec], *, is_transposed: bool) -> WeightLayout:
        rows, num_bytes = parts["values"].shape
        weights, block_bytes = BLOCKS[self.name]
        shape = rows, num_bytes // block_bytes * weights
        layout = blocks_layout(self.name, shape, parts["values"])
        return dataclasses.replace(layout, is_transposed=is_transposed)


def _format(name: str) -> BlockFormat:
    unpack = blocks_layout(name, (0, 0), ParamSpec("values", (0, 0), "uint8", 0)).unpack
    assert unpack is not None
    parts = (PartFormat("values", "", frozenset({"U8"})),)
    return BlockFormat(name, name, parts, lambda shapes: None, unpack, has_free_rows=True)


FORMATS = {name.upper(): _format(name) for name in BLOCKS}  # by name of the type


class ScaledBlockFormat(BlockFormat):
    """The same with a number that all values are multiplied by, in a tensor of its own. No kernel
    reads it, so it is unpacked for each use.
    """

    def layout_of(self, parts: dict[str, ParamSpec], *, is_transposed: bool) -> WeightLayout:
        plain = super().layout_of(parts, is_transposed=is_transposed)
        return dataclasses.replace(
            plain, kind=f"{plain.kind}_scaled", global_scale=parts["global_scale"],
            unpack=self.unpack,
        )  # fmt: skip


def _scaled(name: str) -> ScaledBlockFormat:
    plain = _format(name)

    def unpack(parts: Parts, block: Block | None, dtype: torch.dtype) -> Tensor:
        weight = plain.unpack({"values": parts["values"]}, block, torch.float32)
        scale = parts["global_scale"]
        return (weight * scale.reshape(-1, *[1] * (weight.ndim - 1))).to(dtype)

    parts = (*plain.parts, PartFormat("global_scale", "", frozenset({"F32"})))
    return ScaledBlockFormat(name, f"{name}_scaled", parts, lambda shapes: None, unpack)


SCALED = {"NVFP4": _scaled("nvfp4")}


def weights_of(model: Any, file: GgufModel) -> tuple[Weights, list[WeightConverter]]:
    """The weights by name, and rules of transformers that make parameters of them. Raises
    CheckpointError for a tensor that is no parameter of the model.
    """
    names = Names(model, file)
    for layer in find_experts(model):
        names.add_experts(layer)
    names.add_dense()
    names.refuse_unused()
    return names.weights, list(names.rules.values())


class Names:
    """Gives tensors of a file the names of a model's parameters."""

    def __init__(self, model: Any, file: GgufModel) -> None:
        if file.architecture not in KNOWN:
            logger.warning(
                "%s: %s is tried, but nobody has compared it with the original model; only the "
                "names and shapes of its tensors are checked",
                file.files[0], file.architecture,
            )  # fmt: skip
        self.weights: Weights = {}
        self.rules: dict[str, WeightConverter] = {}  # by parameter, without the layer
        self._file = file
        self._architecture = KNOWN.get(file.architecture, Architecture())
        self._params = model.state_dict()
        self._scales_of_router = tuple(  # Gemma 4 has one for each expert
            leaf for end, leaf in OTHER_NAMES.items()
            if leaf.endswith(".scale") and any(param.endswith(end) for param in self._params)
        )  # fmt: skip
        self._config = model.config.get_text_config()
        self._num_layers = self._config.num_hidden_layers
        self._name_of = name_map(file, self._num_layers)
        self._unused = set(file.tensors)

    def add_experts(self, layer: ExpertsModule) -> None:
        for key, location in layer.locations.items():
            if not location.is_stacked or location.rows != 1:
                raise UnsupportedModelError(f"{layer.name}: GGUF for experts in separate modules")
            param = f"{layer.name}.{location.paths[0]}"
            suffix = "bias" if key.endswith(BIAS) else "weight"
            kind = key.removesuffix(BIAS)
            if kind not in LINEAR_LAYERS:
                raise UnsupportedModelError(f"{param}: GGUF has no tensor for it")
            leaves = [f"{OF_EXPERTS[linear]}.{suffix}" for linear in LINEAR_LAYERS[kind]]
            fused = f"{FUSED}.{suffix}"
            if kind == "gate_up_proj" and self._stored(param, fused) is not None:
                leaves = [fused]
            operations = stacking(layer, key, num_linears=len(leaves))
            del self._params[param]
            if self._stored(param, leaves[0]) is None:  # perhaps a file of before 2024-04
                self._add_one_by_one(param, leaves, operations, layer.num_experts)
            else:
                self._add(param, leaves, operations)

    def _add_one_by_one(
        self, param: str, leaves: list[str], operations: list[ConversionOps], num_experts: int
    ) -> None:
        """Experts of which each has tensors of its own."""
        for leaf in leaves:
            for expert in range(num_experts):
                of_expert = leaf.replace("_exps.", f".{expert}.")
                self._keep(f"{param}.{of_expert}", self._need(param, of_expert, leaf))
        names = [f"{param}.{leaf.replace('_exps.', '.*.')}" for leaf in leaves]
        self._add_rule(param, names, [MergeModulelist(dim=0), *operations])

    def add_dense(self) -> None:
        for param in self._params:
            leaves, operation = _by_end(SPLIT, param) or ((), None)
            if operation is not None and self._stored(param, f"{leaves[0]}.weight") is not None:
                self._add(param, [f"{leaf}.weight" for leaf in leaves], [operation])
                continue
            stored = self._stored_as(param) or self._rows_of_fused(param)
            if stored is not None:
                self._add_one(param, stored)

    def _stored_as(self, param: str) -> StoredTensor | None:
        """The one tensor that is this parameter, if there is one."""
        param = param.replace(".language_model.", ".", 1)  # of a model that sees
        leaf = _by_end(OTHER_NAMES, param)
        if leaf is not None:
            return self._stored(param, leaf) or self._stored(param, leaf.removesuffix(".bias"))
        older = param.replace("model.", "backbone.", 1)
        name = self._name_of(param) or self._name_of(older)
        if name is None:
            return None
        return self._file.tensors.get(name) or self._file.tensors.get(f"{name}.weight")

    def _rows_of_fused(self, param: str) -> StoredTensor | None:
        """The rows of queries, keys or values in the one tensor of all three, if there is one."""
        *_, name, suffix = "", *param.split(".")
        fused = self._stored(param, f"attn_qkv.{suffix}") if name in FUSED_QKV else None
        if fused is None:
            return None
        start = param.removesuffix(f"{name}.{suffix}")
        names = [f"{start}{each}.{suffix}" for each in FUSED_QKV]
        if not all(each in self._params for each in names):
            return None
        sizes = [len(self._params[each]) for each in names]
        if sum(sizes) != fused.shape[0]:
            raise CheckpointError(
                f"{self._file.files[0]}: {fused.name} has {fused.shape[0]} rows, not {sum(sizes)}"
            )
        place = FUSED_QKV.index(name)
        row_bytes = fused.extent.num_bytes // fused.shape[0]
        offset = fused.extent.offset + sum(sizes[:place]) * row_bytes
        extent = Extent(fused.extent.file, offset, sizes[place] * row_bytes)
        return dataclasses.replace(fused, shape=(sizes[place], *fused.shape[1:]), extent=extent)

    def _stored(self, param: str, leaf: str) -> StoredTensor | None:
        """A tensor of the layer that has the parameter, or of the model, or an array of the
        metadata.
        """
        number = NUMBER.search(param)
        of_layer = None if number is None else self._file.tensors.get(f"blk.{number[1]}.{leaf}")
        of_model = self._file.tensors.get(leaf)
        return of_layer or of_model or self._file.arrays.get(f"{self._file.architecture}.{leaf}")

    def _need(self, param: str, leaf: str, called: str = "") -> StoredTensor:
        """Return what `_stored` does. Raises CheckpointError if it is not there."""
        found = self._stored(param, leaf)
        if found is None:
            layer = NUMBER.search(param)
            raise CheckpointError(
                f"{self._file.files[0]}: no tensor blk.{layer and layer[1]}.{called or leaf}, "
                f"which {param} needs"
            )
        return found

    def _add_one(self, param: str, tensor: StoredTensor) -> None:
        """Under the name of the parameter, and in its shape, but for dimensions of 1."""
        wanted = tuple(self._params[param].shape)
        is_vector = len(wanted) == 1 and prod(tensor.shape) == prod(wanted)
        if is_vector or without_ones(tensor.shape) == without_ones(wanted):
            tensor = dataclasses.replace(tensor, shape=wanted)
        undo = _by_end({**ALWAYS_CHANGED, **self._architecture.changed}, param)
        # A tensor of another shape is left to transformers, which names it.
        moved = _by_end(self._architecture.moved, param) if tensor.shape == wanted else None
        if moved is not None and moved.dim == 0:  # rows are moved as they are stored
            undo = _both(undo, moved, self._config)
        self._keep(param, dataclasses.replace(tensor, undo=undo))
        if moved is not None and moved.dim != 0:
            self._add_rule(param, [param], [moved])

    def _add(self, param: str, leaves: list[str], operations: list[ConversionOps]) -> None:
        """A parameter that is made of these tensors of its layer, those that there are."""
        names = [f"{param}.{leaf}" for leaf in leaves] if operations else [param]
        for name, leaf in zip(names, leaves, strict=True):
            self._keep(name, self._need(param, leaf))
        if operations:
            self._add_rule(param, names, operations)

    def _add_rule(self, param: str, names: list[str], operations: list[ConversionOps]) -> None:
        """For this parameter of all layers. A star in a name stands for any number."""
        number = NUMBER.search(param)
        start = number.end() - 1 if number is not None else 0
        target = param[start:]
        if target not in self.rules:
            escaped = (re.escape(name[start:]).replace(r"\*", r"\d+") for name in names)
            patterns = [f"{name}$" for name in escaped]
            self.rules[target] = WeightConverter(patterns, [target], operations)

    def _keep(self, name: str, tensor: StoredTensor) -> None:
        self._unused.discard(tensor.name)
        self.weights[name] = weight_of(name, tensor, self._scale_of(tensor))

    def _scale_of(self, tensor: StoredTensor) -> StoredTensor | None:
        """Return what all of a weight is multiplied by, beside the scales in its blocks. Files
        in NVFP4 that were made of ModelOpt's or compressed-tensors' checkpoints have it.
        """
        names = (f"{tensor.name.removesuffix('.weight')}.scale", f"{tensor.name}.scale")
        found = [name for name in names if name in self._file.tensors]
        found = [name for name in found if not name.endswith(self._scales_of_router)]
        if tensor.stored_dtype not in SCALED or not found:
            return None
        self._unused.discard(found[0])
        return self._file.tensors[found[0]]

    def refuse_unused(self) -> None:
        """Layers after the file's last are those that predict more than one token ahead."""
        ahead = 0
        for name in sorted(self._unused):
            block = re.match(r"blk\.(\d+)\.", name)
            if block is not None and int(block[1]) >= self._file.num_layers:
                ahead += 1
                continue
            # The config says how positions are scaled.
            is_known = name.endswith(self._architecture.unused) or "rope_" in name
            # The last are of activations, which are not quantized here.
            if not (is_known or name.endswith(".input_scale")):
                raise CheckpointError(
                    f"{self._file.files[0]}: tensor {name} is no parameter of this model"
                )
        if ahead:
            logger.info("%d tensors of layers that predict further ahead are not used", ahead)


def _both(
    change: Callable[[Tensor], Tensor] | None, moved: Undo, config: Any
) -> Callable[[Tensor], Tensor]:
    """A function that undoes a change of values, if there is one, and then a change of rows."""

    def undo(stored: Tensor) -> Tensor:
        return moved.undone([stored if change is None else change(stored)], config)

    return undo


def _by_end(table: Mapping[str, Entry], param: str) -> Entry | None:
    """The entry of the first end that the parameter's name has."""
    return next((entry for end, entry in table.items() if param.endswith(end)), None)


def weight_of(
    name: str, tensor: StoredTensor, scale: StoredTensor | None = None
) -> StoredTensor | PackedTensor:
    """A tensor under this name, packed if its type is. `scale`: what is multiplied by."""
    if tensor.stored_dtype in STORED_DTYPES:
        return dataclasses.replace(tensor, name=name)
    weight_format = FORMATS[tensor.stored_dtype]
    width = row_bytes(weight_format.name, tensor.shape[-1])
    shape = (*tensor.shape[:-1], width)
    values = StoredTensor(name, "U8", shape, tensor.extent, tensor.undo)
    if scale is None:
        return PackedTensor(name, (("values", values),), tensor.shape, None, weight_format)
    parts = ("values", values), ("global_scale", scale)
    return PackedTensor(name, parts, tensor.shape, None, SCALED[tensor.stored_dtype])
