"""Load a model without its experts: transformers loads the dense part, the experts stay where they
are on disk.

transformers calls `_load_pretrained_model` with the model on the meta device and the resolved list
of weight conversions. There we find the experts modules, plan where each expert's bytes lie, take
the parameters out of the modules, and hand the stock method the remaining tensors, each read on
demand.

Private names of transformers used here: `_load_pretrained_model`, `_from_config`,
`LoadStateDictConfig.weight_mapping`, `_is_hf_initialized`. Others are in plan.py and recipe.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import logging

from moe_infinity.checkpoint.file_names import checkpoint_files
from moe_infinity.checkpoint.headers import read_headers
from moe_infinity.checkpoint.linear_experts import rules_of_linear_experts
from moe_infinity.checkpoint.packed_plan import PackedDense, find_packed_dense, source_of
from moe_infinity.checkpoint.plan import Contents, Plan, contents_of, plan_experts, stored_bytes
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.checkpoint.row_tables import Lookup, drop_half_tied, find_lookups, say_untied
from moe_infinity.errors import CheckpointError
from moe_infinity.gguf.names import weights_of
from moe_infinity.layout import WeightLayout
from moe_infinity.loading.kind import Kind, find_kind
from moe_infinity.loading.stored_slice import StoredSlice
from moe_infinity.untrusted.config_limits import as_meant, few_modules

CPU = torch.device("cpu")
# What a model's class raises for values in its config that it cannot use.
NO_MODEL = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


@dataclass(slots=True)
class LoadedModel:
    """A model whose experts are still on disk."""

    model: transformers.PreTrainedModel
    plan: Plan
    reader: Reader
    startup_bytes_read: int  # headers and dense weights


def load_without_experts(
    checkpoint: str,
    *,
    config_from: str | None,
    beside: Callable[[Kind], Kind],
    dtype: str,
    experts_implementation: str,
    trust_remote_code: bool,
    num_read_threads: int,
    device: torch.device,
    prepare: Callable[[Plan, int, int], Plan],
    reads_packed: Callable[[WeightLayout], bool],
    least_table_bytes: int | None,
    on_bytes: Callable[[int, int], None],
) -> LoadedModel:
    """The model of a folder, hub id or GGUF file with dense weights on `device` and experts on
    disk. `config_from`: a folder or hub id whose config is used instead; `beside` adds to the kind
    what a file beside the GGUF file has.

    Before dense weights are read, `prepare` is called with the plan, the bytes that they will take
    in memory, and how many of these the page cache may have; the plan that it returns is used.
    Packed dense weights that kernels read, as `reads_packed` says, stay packed. Embeddings of so
    many bytes as `least_table_bytes` (None: any) read their rows from the file. `on_bytes` gets
    bytes of dense weights that were read, and of all, from several threads. Raises
    UnsupportedModelError, CheckpointError.
    """
    kind = find_kind(checkpoint, config_from=config_from, trust_remote_code=trust_remote_code)
    kind = beside(kind)
    if kind.gguf is None and Path(checkpoint).is_dir():
        checkpoint_files(Path(checkpoint))  # names a missing shard better than transformers does
    reader = Reader(num_threads=num_read_threads)
    hook = _LoadHook(kind, reader, prepare, reads_packed, least_table_bytes, on_bytes)
    try:
        with few_modules(checkpoint), _no_progress_bar():
            model, info = hook.offloading_class().from_pretrained(
                checkpoint if kind.gguf is None else None,
                state_dict=None if kind.gguf is None else {},  # the hook finds the weights
                config=kind.config,
                dtype=kind.compute_dtype(dtype),
                experts_implementation=experts_implementation,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with names
                trust_remote_code=trust_remote_code,
            )
        _refuse_made_up_weights(checkpoint, info)
        hook.put_into(model)
        if device != CPU:
            model.to(device)
    except (SafetensorError, UnpicklingError) as error:  # it opened a broken file before we could
        reader.close()
        raise CheckpointError(f"{checkpoint}: transformers cannot load it: {error}") from error
    except BaseException as error:
        reader.close()
        if isinstance(error, NO_MODEL) and not hook.has_begun:
            raise _unbuildable(checkpoint, error) from error
        raise
    model.generation_config = _settled(kind.generation or model.generation_config)
    assert hook.plan is not None
    return LoadedModel(model, hook.plan, reader, hook.plan.header_bytes + reader.bytes_read)


def _settled(settings: transformers.GenerationConfig) -> transformers.GenerationConfig:
    """The same settings in transformers' words and types: empty lists are absent, a temperature of
    0 samples nothing, and a top_k below 1 is none.
    """
    for name, value in vars(settings).items():
        setattr(settings, name, None if value == [] else as_meant(name, value))
    if hasattr(settings, "do_sample"):  # else they are for a generate() of the model's own
        settings.do_sample = settings.do_sample and settings.temperature != 0
        settings.top_k = settings.top_k and max(settings.top_k, 0)
    return settings


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Inside, transformers shows none: it would count tensors of dense weights, and callers have
    `on_bytes`.
    """
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


class _LoadHook:
    """The load hook of one model: it runs inside `_load_pretrained_model`."""

    def __init__(
        self,
        kind: Kind,
        reader: Reader,
        prepare: Callable[[Plan, int, int], Plan],
        reads_packed: Callable[[WeightLayout], bool],
        least_table_bytes: int | None,
        on_bytes: Callable[[int, int], None],
    ) -> None:
        self.plan: Plan | None = None
        self.has_begun = False  # the model was built
        self.packed: list[PackedDense] = []  # to be loaded after the rest
        self.lookups: list[Lookup] = []  # embeddings that are not loaded
        self._kind = kind
        self._dense_bytes = 0  # of the checkpoint
        self._info: Any = None  # transformers' notes of what it loaded
        self._adapter: tuple[str, dict[str, Any]] | None = None  # of PEFT, beside the model
        self._unties = False  # weights that were tied are of several modules now
        self._reader = reader
        self._prepare = prepare
        self._reads_packed = reads_packed
        self._least_table_bytes = least_table_bytes
        self._on_bytes = on_bytes

    def note_read(self) -> None:
        """Report how many bytes of dense weights were read so far."""
        self._on_bytes(self._reader.bytes_read, self._dense_bytes)

    def put_into(self, model: Any) -> None:
        """Give a loaded model the weights that stay packed, those that stay on disk, and its own
        class; with PEFT also the adapter that lies beside it.
        """
        assert self.plan is not None
        may_be_mapped = self.plan.dense_in_page_cache > 0
        self.plan.dense_in_page_cache = 0
        for dense in self.packed:
            num_bytes = dense.put_into(model, self._reader, in_page_cache=may_be_mapped)
            self.plan.dense_in_page_cache += num_bytes
            self.note_read()
        for lookup in self.lookups:
            lookup.put_into(model, self._reader)
        if self._unties:
            say_untied(model)
        model.__class__ = self._kind.model_class
        if self._adapter is not None:
            _load_adapter(model, *self._adapter)

    def offloading_class(self) -> Any:
        """The stock class with a load hook that leaves experts and packed linear layers on disk. An
        adapter waits until the model has all of its modules.
        """
        stock_class = self._kind.model_class

        def _load_pretrained_model(
            model: Any, state_dict: Any, files: list[str] | None, load_config: Any, *args: Any,
            **kwargs: Any,
        ) -> Any:  # fmt: skip
            self.has_begun = True
            paths = list(map(Path, files or []))
            contents = _contents(self._kind, paths, model, load_config.weight_mapping or [])
            load_config = replace(load_config, weight_mapping=contents.rules)
            dense = self._dense(model, contents, load_config.dtype or torch.float32)
            loaded = stock_class._load_pretrained_model(
                model, dense, files, load_config, *args, **kwargs
            )
            self._info = loaded[0]
            return loaded

        def load_adapter(model: Any, path: str, *, load_config: Any = None, **settings: Any) -> Any:
            self._adapter = path, settings
            return self._info

        attributes = {
            "__module__": stock_class.__module__,
            "__qualname__": stock_class.__qualname__,
            "_load_pretrained_model": staticmethod(_load_pretrained_model),
            "load_adapter": load_adapter,
        }
        return type(stock_class.__name__, (stock_class,), attributes)

    def _dense(self, model: Any, contents: Contents, dtype: torch.dtype) -> dict[str, StoredSlice]:
        """The weights that the stock method is to load. All others are planned, and taken out of
        the model.
        """
        plan = plan_experts(model, contents)
        packed = find_packed_dense(model, plan, contents.rules, self._reads_packed)
        lookups = []
        if (least := self._least_table_bytes) is not None:
            lookups = find_lookups(model, plan, contents.rules, least_bytes=least)
        self.packed, self.lookups = drop_half_tied(model, packed, lookups)
        for layer in plan.layers:
            for path in layer.paths:
                _take_out(model, f"{layer.name}.{path}")
        read_by_layers = {source_of(f"{dense.name}.weight", model) for dense in self.packed}
        looked_up = {source_of(f"{lookup.name}.weight", model) for lookup in self.lookups}
        taken = [d.name for d in self.packed] + [table.name for table in self.lookups]
        self._unties = any(f"{name}.weight" in model.all_tied_weights_keys for name in taken)
        for name in taken:
            _take_out(model, f"{name}.weight")
        for name in looked_up - read_by_layers:
            del plan.dense[name]
        dense_bytes = sum(param.nbytes for param in model.parameters())
        dense_bytes += sum(one.num_bytes for one in self.packed)
        mappable = (one.num_bytes for one in self.packed if one.is_one_stretch)
        self.plan = self._prepare(plan, dense_bytes, sum(mappable))
        self._dense_bytes = plan.dense_bytes
        return {
            name: StoredSlice(weight, self._reader, dtype, self.note_read)
            for name, weight in self.plan.dense.items()
            if name not in read_by_layers
        }


def _unbuildable(checkpoint: str, error: Exception) -> CheckpointError:
    what = f"{type(error).__name__}: {error}"
    return CheckpointError(
        f"{checkpoint}: its config.json has a value of which no model can be built: {what}"
    )


def _contents(kind: Kind, files: Iterable[Path], model: Any, rules: list[Any]) -> Contents:
    """The contents of the checkpoint. `rules` are those of transformers for the model's class,
    which a GGUF file replaces by its own.
    """
    if kind.gguf is None:
        found = contents_of(read_headers(files), kind.packing, rules)
        more = rules_of_linear_experts(model, found.weights, rules)
        return replace(found, rules=rules + more)
    weights, own_rules = weights_of(model, kind.gguf)
    others, other_rules = kind.weights_beside(model)
    return Contents(weights | others, own_rules + other_rules, "gguf", kind.gguf.header_bytes)


def _load_adapter(model: Any, path: str, settings: dict[str, Any]) -> None:
    """Raises CheckpointError for an adapter that PEFT does not take, or that is not whole."""
    try:
        info = model.load_adapter(path, **settings)
    except Exception as error:  # PEFT raises anything
        raise CheckpointError(f"{path}: its adapter cannot be loaded: {error}") from error
    _refuse_made_up_weights(path, info.to_dict())


def _refuse_made_up_weights(checkpoint: str, info: dict[str, Any]) -> None:
    """Raise CheckpointError for weights that transformers did not find, or found in another shape:
    it would initialise them instead.
    """
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


def plan_from_headers(
    checkpoint: str,
    *,
    dtype: str,
    config_from: str | None = None,
    beside: Callable[[Kind], Kind] = lambda kind: kind,
    trust_remote_code: bool = False,
) -> Plan:
    """The plan that `load_without_experts` would make, from nothing but headers. `checkpoint` is a
    folder or GGUF file.
    """
    kind = find_kind(checkpoint, config_from=config_from, trust_remote_code=trust_remote_code)
    kind = beside(kind)
    files = checkpoint_files(Path(checkpoint)) if kind.gguf is None else []
    compute_dtype = kind.compute_dtype(dtype)
    torch_dtype = kind.config.dtype if compute_dtype == "auto" else getattr(torch, compute_dtype)
    if torch_dtype is None:  # then transformers takes the first floating one
        tensors = read_headers(files).tensors.values()
        stored = (getattr(torch, tensor.dtype) for tensor in tensors)
        torch_dtype = next((found for found in stored if found.is_floating_point), torch.float32)
    try:
        with few_modules(checkpoint), torch.device("meta"):
            model = kind.model_class._from_config(kind.config, dtype=torch_dtype)
    except NO_MODEL as error:
        raise _unbuildable(checkpoint, error) from error
    contents = _contents(kind, files, model, get_model_conversion_mapping(model))
    plan = plan_experts(model, contents)
    found = find_lookups(model, plan, contents.rules, least_bytes=sys.maxsize)
    _, lookups = drop_half_tied(model, [], found)
    plan.row_bytes = stored_bytes(lookup.weight for lookup in lookups)
    return plan


def _take_out(model: Any, param_name: str) -> None:
    """Remove a parameter and its tie. A meta tensor stays, which transformers' init may touch; of
    a module without others it need not make random numbers.
    """
    model.all_tied_weights_keys.pop(param_name, None)
    owner_name, _, name = param_name.rpartition(".")
    owner = model.get_submodule(owner_name)
    param = owner._parameters.pop(name)
    assert param is not None, param_name
    meta = torch.empty_like(param, device="meta", requires_grad=False)
    object.__setattr__(owner, name, meta)
    if not [*owner.parameters(recurse=False), *owner.buffers(recurse=False)]:
        owner._is_hf_initialized = True
