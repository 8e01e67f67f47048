"""Changes that a user may make to a module of a loaded model, each undone when its context ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

Undo = Iterator[None]
Change = Callable[[nn.Module], AbstractContextManager[None]]


def scaled(out: Any) -> Any:
    """What a module returned, but larger."""
    if isinstance(out, tuple):
        return tuple(scaled(x) if i == 0 else x for i, x in enumerate(out))
    return out * 1.5 if isinstance(out, Tensor) and out.is_floating_point() else out


class Wrapped(nn.Module):
    """Takes the place of a module, as adapters do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return scaled(self.inner(*args, **kwargs))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def the_float_parameter(module: nn.Module) -> str | None:
    names = [n for n, p in module.named_parameters(recurse=False) if p.is_floating_point()]
    return names[0] if names else None


@contextmanager
def forward_hook(module: nn.Module) -> Undo:
    with module.register_forward_hook(lambda module, args, out: scaled(out)):
        yield


@contextmanager
def pre_hook(module: nn.Module) -> Undo:
    with module.register_forward_pre_hook(lambda module, args: scaled(args)):
        yield


@contextmanager
def pre_hook_in_place(module: nn.Module) -> Undo:
    """Another weight in each call, which nothing but the hook can tell."""
    weight = module.get_parameter(the_float_parameter(module) or "")
    own = weight.detach().clone()
    calls: list[Any] = []

    def change(module: nn.Module, args: Any) -> None:
        calls.append(None)
        weight.data.copy_(own * (1.5 if len(calls) % 2 else 0.5))

    with module.register_forward_pre_hook(change):
        yield
    weight.data.copy_(own)


@contextmanager
def patched_forward(module: nn.Module) -> Undo:
    before = vars(module).get("forward")
    own = module.forward
    module.forward = lambda *args, **kwargs: scaled(own(*args, **kwargs))
    yield
    if before is None:
        del module.forward
    else:
        module.forward = before


@contextmanager
def patched_class(module: nn.Module) -> Undo:
    kind: Any = type(module)
    own = kind.forward
    if getattr(own, "is_patched", False):  # of both models
        yield
        return

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return scaled(own(self, *args, **kwargs))

    forward.is_patched = True  # type: ignore[attr-defined]
    kind.forward = forward
    yield
    kind.forward = own


@contextmanager
def in_place(module: nn.Module) -> Undo:
    weight = getattr(module, the_float_parameter(module) or "")
    with torch.no_grad():
        weight.mul_(2)
    yield
    with torch.no_grad():
        weight.mul_(0.5)


@contextmanager
def data_in_place(module: nn.Module) -> Undo:
    weight = getattr(module, the_float_parameter(module) or "")
    weight.data.mul_(2)
    yield
    weight.data.mul_(0.5)


@contextmanager
def new_data(module: nn.Module) -> Undo:
    weight = getattr(module, the_float_parameter(module) or "")
    before = weight.data
    weight.data = before.flip(0).clone()
    yield
    weight.data = before


@contextmanager
def new_parameter(module: nn.Module) -> Undo:
    name = the_float_parameter(module) or ""
    before = getattr(module, name)
    setattr(module, name, nn.Parameter(before.detach().flip(0).clone()))
    yield
    setattr(module, name, before)


class Multiplying(Tensor):
    """A weight that decides how it is multiplied with, as those of quantization libraries do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out.as_subclass(Tensor) * 1.5 if func is nn.functional.linear else out


@contextmanager
def weight_of_another_class(module: nn.Module) -> Undo:
    linear: Any = module
    before = linear.weight
    linear.weight = nn.Parameter(before.detach().as_subclass(Multiplying))
    yield
    linear.weight = before


@contextmanager
def parametrized(module: nn.Module) -> Undo:
    name = the_float_parameter(module) or ""
    weight = getattr(module, name)
    parametrize.register_parametrization(module, name, Doubled())
    yield
    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    assert getattr(module, name) is weight


@contextmanager
def pruned(module: nn.Module) -> Undo:
    name = the_float_parameter(module) or ""
    before = getattr(module, name)
    data = before.data
    prune.l1_unstructured(module, name, amount=0.5)
    yield
    prune.remove(module, name)
    before.data = data
    setattr(module, name, before)


@contextmanager
def new_number(module: nn.Module) -> Undo:
    """Another epsilon, scale, number of experts of a token, ..."""
    name, value = next(iter(numbers_of(module).items()))
    setattr(module, name, max(1, value - 1) if isinstance(value, int) else value * 3)
    yield
    setattr(module, name, value)


def numbers_of(module: nn.Module) -> dict[str, Any]:
    known = ("top_k", "scaling", "variance_epsilon", "eps", "routed_scaling_factor")
    return {name: vars(module)[name] for name in known if name in vars(module)}


@contextmanager
def wrapped_child(module: nn.Module) -> Undo:
    name, child = next(iter(inner_of(module).items()))
    setattr(module, name, Wrapped(child))
    yield
    setattr(module, name, child)


def inner_of(module: nn.Module) -> dict[str, nn.Module]:
    """The children that are neither experts nor a list."""
    return {
        name: child
        for name, child in module.named_children()
        if name != "experts" and not isinstance(child, nn.ModuleList)
    }


@contextmanager
def added_bias(module: nn.Module) -> Undo:
    linear: Any = module
    before = linear.bias
    linear.bias = nn.Parameter(torch.full((linear.out_features,), 0.3))
    yield
    linear.bias = before


@contextmanager
def hook_on_all(module: nn.Module) -> Undo:
    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        return scaled(out) if type(module).__name__.endswith("Norm") else out

    with nn.modules.module.register_module_forward_hook(hook):
        yield


@contextmanager
def training(module: nn.Module) -> Undo:
    module.training = True
    yield
    module.training = False


def has_weight(module: nn.Module) -> bool:
    """True for modules with a weight that is in memory."""
    return the_float_parameter(module) is not None and "Experts" not in type(module).__name__


CHANGES: dict[Change, Callable[[nn.Module], bool]] = {
    forward_hook: lambda module: True,
    pre_hook: lambda module: has_weight(module) or bool(inner_of(module)),
    pre_hook_in_place: has_weight,
    patched_forward: lambda module: True,
    patched_class: lambda module: not isinstance(module, nn.Linear),
    in_place: has_weight,
    data_in_place: has_weight,
    new_data: has_weight,
    new_parameter: has_weight,
    weight_of_another_class: lambda module: isinstance(module, nn.Linear),
    parametrized: has_weight,
    pruned: has_weight,
    new_number: lambda module: bool(numbers_of(module)),
    wrapped_child: lambda module: bool(inner_of(module)),
    added_bias: lambda module: isinstance(module, nn.Linear),
    hook_on_all: lambda module: True,
    training: lambda module: True,
}
