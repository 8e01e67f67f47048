"""Notices modules that no longer compute what they did when kernels took their place.

Nothing announces that a user has changed a module: an adapter takes the place of a child, a hook is
installed, a method is patched, an attribute or weight is set. So whatever decides what a module
computes is noted when a kernel takes its place, and compared before each call of the kernel. If
anything differs, the module's own code runs.

    of each module       its class, attributes, children, parameters, buffers, hooks
    of a parameter       which tensor it is, where its memory is, and on a CPU the contents of
                         vectors, since kernels copy those; they read matrices where they are, and
                         those of a GPU everything
    of its class         the methods, and the functions of its file that `forward` calls
    of its config        the values that its methods read, such as which attention function is used
    of the process       hooks on all modules, modes of torch that see every function, autocast, and
                         what is registered as the attention function
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import itemgetter, methodcaller
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils._device import DeviceContext
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from moe_infinity.kernels.cpu.convolution import DepthwiseConvolutions
from moe_infinity.kernels.cpu.half_products import HalfProducts
from moe_infinity.kernels.cpu.same_bytes import KeptContents

HOOKS_ON_ALL = (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks)


_replaced = itemgetter(
    "linear", "conv1d", "scaled_dot_product_attention", "softmax", "silu", "gelu"
)


def _functions() -> tuple[Any, ...]:
    """Return the functions that run every module, and those that kernels replace."""
    return nn.Module.__call__, nn.Module._call_impl, torch.topk, *_replaced(vars(nn.functional))


STOCK = {"torch", "transformers", "moe_infinity"}


def is_stock(function: Any) -> bool:
    """Return True for a function of these packages: some are patched before they are noted here."""
    while isinstance(function, FunctionType):
        if function.__globals__.get("__name__", "").partition(".")[0] not in STOCK:
            return False
        if (wrapped := getattr(function, "__wrapped__", None)) is None:
            return True
        function = wrapped
    return isinstance(function, BuiltinFunctionType)


FUNCTIONS = _functions()
ARE_STOCK = all(map(is_stock, FUNCTIONS))
Names = tuple[Callable[[Any], Any], Any]  # reads the values of some names; whose they are


class ModuleState:
    """Everything that decides how some modules compute, as it is when this is made."""

    def __init__(
        self,
        called: Iterable[nn.Module],
        *,
        around: Iterable[nn.Module] = (),
        ours: object = None,
    ) -> None:
        """`called` are the modules whose calls a kernel replaces. `around` are those whose forward
        methods were replaced: their hooks still run. Hooks that are methods of `ours` change
        nothing.
        """
        modules = [*dict.fromkeys(called)]
        self._ours = ours
        self._hooks = [(h, m) for m in modules for h in (m._forward_hooks, m._forward_pre_hooks)]
        whole = [module for module in modules if isinstance(module, PreTrainedModel)]
        modules += around
        classes: dict[Any, None] = dict.fromkeys(map(type, modules))
        self._modules = modules
        self._types = [*map(type, modules)]
        self._mappings = [*_mappings_of_modules(modules), *_mappings_of_classes(classes)]
        self._noted = [*map(dict, self._mappings)]
        self._views = [mapping.values() for mapping in self._mappings]
        self._values = tuple(chain.from_iterable(self._views))
        self._names = [names for kind in classes if (names := _names_in(kind.forward))]
        self._names += _config_values_of(modules)
        self._names.append((methodcaller("get", "sdpa"), ALL_ATTENTION_FUNCTIONS))
        self._names += [(methodcaller("get", "forward"), vars(module)) for module in whole]
        self._named = [read(namespace) for read, namespace in self._names]
        tensors = [x for m in modules for x in (*m._parameters.values(), *m._buffers.values())]
        self._tensors = [x for x in tensors if x is not None]
        self._addresses = [*map(Tensor.data_ptr, self._tensors)]
        self._matrices = [x for x in self._tensors if x.dim() > 1]
        self._sizes = [*map(Tensor.size, self._tensors)]
        self._strides = [*map(Tensor.stride, self._matrices)]
        vectors = [x for x in self._tensors if x.dim() < 2]
        self._vectors = KeptContents([x for x in vectors if x.device.type == "cpu"])

    def change(self) -> str | None:
        """Return what is different now, in the words of a report; None if nothing is."""
        if is_watched():
            return "something watches or changes all modules"
        for hooks, module in self._hooks:
            if hooks and any(_counts(hook, self._ours) for hook in hooks.values()):
                return f"a hook on {type(module).__name__}"
        return None if self._is_same() else "it was changed after loading"

    def _is_same(self) -> bool:
        try:
            return (
                self._has_same_values()
                and [*map(type, self._modules)] == self._types
                and [*map(Tensor.data_ptr, self._tensors)] == self._addresses
                and [*map(Tensor.size, self._tensors)] == self._sizes
                and [*map(Tensor.stride, self._matrices)] == self._strides
                and self._vectors.are_same()
                and [read(namespace) for read, namespace in self._names] == self._named
            )
        except Exception:  # values whose comparison is no truth value, as tensors', or a name gone
            return False

    def _has_same_values(self) -> bool:
        """Return True if all values are the same, be it in another order: of something that was
        taken out and put back, say. Comparing tensors may raise.
        """
        with suppress(Exception):
            if tuple(chain.from_iterable(self._views)) == self._values:
                return True
        if [*map(dict, self._mappings)] != self._noted:
            return False
        self._values = tuple(chain.from_iterable(self._views))
        return True


def _mappings_of_modules(modules: Sequence[nn.Module]) -> list[Mapping[str, Any]]:
    """Return the attributes, children, parameters and buffers. Whole models keep notes in their
    attributes while they run: of those only a patched `forward` counts.
    """
    found: list[Mapping[str, Any]] = [
        vars(module) for module in modules if not isinstance(module, PreTrainedModel)
    ]
    return found + [d for m in modules for d in (m._modules, m._parameters, m._buffers)]


def _mappings_of_classes(classes: Iterable[type]) -> list[Mapping[str, Any]]:
    """Return all that the classes define."""
    bases = {base for kind in classes for base in _bases_of(kind)}
    for base in bases:
        inspect.get_annotations(base)  # kept in the class when they are asked for first
    return [vars(base) for base in bases]


def _bases_of(kind: type) -> tuple[type, ...]:
    """Return the class and those that it is derived from, up to torch's."""
    return kind.__mro__[: kind.__mro__.index(nn.Module)]


def _config_values_of(modules: Sequence[nn.Module]) -> list[Names]:
    """Return how to read what the methods of modules read of their configs after they are made."""
    found: dict[int, tuple[dict[str, Any], set[str]]] = {}
    read_by = {kind: _read_later(kind) for kind in {*map(type, modules)}}
    for module in modules:
        for config in vars(module).values():
            if isinstance(config, PreTrainedConfig):
                values, keys = found.setdefault(id(config), (vars(config), set()))
                keys.update(read_by[type(module)] & values.keys())
    return [(itemgetter(*keys), values) for values, keys in found.values() if keys]


def _read_later(kind: type) -> set[str]:
    """Return the attributes that methods of a class name which read a config."""
    methods = {n: m for base in reversed(_bases_of(kind)) for n, m in vars(base).items()}
    found: set[str] = set()
    for name, method in methods.items():
        code = getattr(inspect.unwrap(method) if callable(method) else None, "__code__", None)
        if name != "__init__" and code is not None and "config" in code.co_names:
            found.update(code.co_names)
    # A property such as `_attn_implementation` is kept under a name like this one.
    return found | {f"{name}_internal" for name in found}


def _names_in(forward: Callable[..., Any]) -> Names | None:
    """Return how to read what the global names in a method stand for, and their namespace. Those
    in functions of the namespace that it calls count, too.
    """
    functions = [inspect.unwrap(forward)]
    namespace = functions[0].__globals__
    names: dict[str, Any] = {}
    for function in functions:
        new = {name for name in function.__code__.co_names if name in namespace} - names.keys()
        names |= {name: namespace[name] for name in new}
        called = [names[name] for name in new if isinstance(names[name], FunctionType)]
        functions += [callee for callee in called if callee.__globals__ is namespace]
    return (itemgetter(*names), namespace) if names else None


def is_watched() -> bool:
    """Return True if something in the process sees or changes what any module computes."""
    return (
        torch.compiler.is_compiling()
        or any(HOOKS_ON_ALL)
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or torch._C._len_torch_dispatch_stack() > 0
        or not ARE_STOCK
        or _functions() != FUNCTIONS
        or (torch._C._len_torch_function_stack() > 0 and _is_in_foreign_mode())
    )


def _is_in_foreign_mode() -> bool:
    modes = torch.overrides._get_current_function_mode_stack()
    ours = DeviceContext, DepthwiseConvolutions, HalfProducts
    return not all(isinstance(m, ours) or hasattr(m, CHANGES_NOTHING) for m in modes)


def eager_attention_of(module: nn.Module) -> Any:
    """Return the function, beside the class of an attention, that computes it step by step; None if
    there is none. Whoever replaces it replaces what the module computes.
    """
    return vars(sys.modules[type(module).__module__]).get("eager_attention_forward")


CHANGES_NOTHING = "_moe_infinity_changes_nothing"  # an attribute of our own modes


def has_hooks(module: nn.Module, *, ours: object = None) -> bool:
    """Return True if hooks of a module run before or after it, other than methods of `ours`."""
    hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
    return any(_counts(hook, ours) for hook in hooks)


def _counts(hook: Callable[..., Any], ours: object) -> bool:
    """Return True for a hook that may see or change what a module computes."""
    is_ours = ours is not None and getattr(hook, "__self__", None) is ours
    return not (is_ours or _is_idle(hook))


def _is_idle(hook: Callable[..., Any]) -> bool:
    """Return True for the hooks by which transformers captures outputs, while nobody wants any: it
    never removes them.
    """
    is_theirs = getattr(hook, "__module__", "") == output_capturing.__name__
    return is_theirs and not output_capturing._active_collector.get()


class Replacement(partial):  # type: ignore[type-arg]
    """A forward method in place of a module's own. A copy of the module has its own again: ours
    would compute with the weights of the original.
    """

    module: nn.Module
    former: Callable[..., Any] | None

    def __reduce__(self) -> tuple[Any, ...]:
        own = self.former or MethodType(type(self.module).forward, self.module)
        return _itself, (own,)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Give a module another forward method. Returns a function that gives it the former one back,
    unless somebody has given it a third meanwhile.
    """
    ours = Replacement(forward)
    ours.__wrapped__ = forward  # type: ignore[attr-defined]  # for who asks for its signature
    ours.module = module
    ours.former = former = vars(module).get("forward")
    vars(module)["forward"] = ours

    def undo() -> None:
        if vars(module).get("forward") is not ours:
            return
        del vars(module)["forward"]
        if former is not None:
            vars(module)["forward"] = former

    return undo


def stock_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward method that a module has before it gets one of ours: of its own, or else
    whatever its class has when it is called.
    """
    own: Callable[..., Any] | None = vars(module).get("forward")
    return own or (lambda *args, **kwargs: type(module).forward(module, *args, **kwargs))
