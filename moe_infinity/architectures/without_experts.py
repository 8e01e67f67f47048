"""A loaded model refuses what cannot be done without its experts among its weights.

Whoever asks for it gets UnsupportedModelError at once, instead of a file without experts, an
uninitialised weight or an error of Python: methods of transformers that need all weights, copies,
code that reads a weight of an expert, adapters around one, and a traced graph, in which the experts
that one input chose would stay chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from threading import RLock
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_infinity.architectures.adapters import BACKEND, ExpertsModule
from moe_infinity.architectures.module_state import stock_forward
from moe_infinity.errors import UnsupportedModelError

COPIED = "cannot be copied, pickled or sent to another process; load it there again"
INITIALISED = "cannot be initialised; it has the weights of {checkpoint}"
# Methods of transformers' models and of Python's copies, and what to say of them.
REFUSED = {
    "save_pretrained": "cannot be saved; copy {checkpoint} instead",
    "push_to_hub": "cannot be uploaded; upload {checkpoint} instead",
    "init_weights": INITIALISED,
    "initialize_weights": INITIALISED,
    "__deepcopy__": COPIED,
    "__reduce_ex__": COPIED,
}


def refuse(what: str, *_: Any, **__: Any) -> NoReturn:
    """Raise UnsupportedModelError: a model whose experts are not in memory `what`."""
    raise UnsupportedModelError(f"a model whose experts are not in memory {what}")


class OnDisk(Tensor):
    """The attribute of an experts module in place of a weight that was left on disk. Any use of it
    raises UnsupportedModelError.
    """

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        if function in (Tensor.__deepcopy__, Tensor.__reduce_ex__):
            refuse(COPIED)
        refuse("has no tensors of experts: only its forward pass computes them")


Held = tuple[Mapping[str, Any], str, Any]  # of a module, and what it has by a name


class AbsentWeights:
    """The weights of the experts in a module, which are not in memory. If a user gives the module
    others, or puts adapters around them or hooks on what has them, its experts would compute as if
    nothing had happened.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        """`name` is the module's in the model."""
        self._name = name
        items = [(m, key, x) for m in module.modules() for key, x in vars(m).items()]
        self._held: list[Held] = [(vars(m), key, x) for m, key, x in items if type(x) is OnDisk]
        owners = {m for m, _, x in items if type(x) is OnDisk}
        inner = {m for m in module.modules() if not owners.isdisjoint(m.modules())}
        # A list has no forward of its own: its experts are called.
        is_list = type(module).forward is nn.Module.forward
        uncalled = inner - {module, *(module.children() if is_list else ())}
        self._counted: list[Mapping[Any, Any]] = [m._parameters for m in owners]
        self._counted += [h for m in uncalled for h in (m._forward_hooks, m._forward_pre_hooks)]
        self._num_counted = sum(map(len, self._counted))
        self._held += [
            (m._modules, key, child)
            for m in inner
            for key, child in m._modules.items()
            if child in inner or m in uncalled
        ]

    def were_touched(self) -> bool:
        """Return True if a weight was replaced or a module that has some, or if one has hooks."""
        return sum(map(len, self._counted)) != self._num_counted or not all(
            mapping.get(key) is value for mapping, key, value in self._held
        )

    def require_untouched(self) -> None:
        """Raise UnsupportedModelError if they were touched."""
        if self.were_touched():
            refuse(
                f"cannot have changed experts, or hooks in them ({self._name})\nhint: adapters and "
                "hooks may be around all other modules; change experts in the checkpoint"
            )


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which torch.compile leaves alone: which experts run depends on data."""
    # A copy of `functools.wraps` from such a function; torch 2.8 would run that one in its place.
    vars(function).pop("_torchdynamo_orig_callable", None)
    left_alone: Callable[..., Any] = torch.compiler.disable(function)
    return left_alone


def refuse_graphs() -> None:
    """Raise UnsupportedModelError while torch records a graph: the experts that one input chose
    would stay chosen.
    """
    is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
    if is_tracing() or torch.compiler.is_exporting():
        refuse("cannot be traced or exported: which experts run depends on its input")


def refuse_what_needs_experts(
    model: PreTrainedModel, layers: Sequence[ExpertsModule], *, checkpoint: str, lock: RLock
) -> None:
    """Let `model`, the models inside it and its experts modules refuse what they cannot do. Each
    model runs with `lock`: kernels keep what they know of a step.
    """
    left_out = [f"{layer.name}.{path}" for layer in layers for path in layer.paths]
    on_disk = torch.empty(0, dtype=torch.bool, device="meta").as_subclass(OnDisk)
    for name in left_out:
        owner, _, attribute = name.rpartition(".")
        vars(model.get_submodule(owner))[attribute] = on_disk
    experts = {layer.name for layer in layers}
    for path, part in model.named_modules():
        if isinstance(part, PreTrainedModel) or path in experts:  # before anything is loaded
            part.register_load_state_dict_pre_hook(partial(_refuse_keys, left_out, path))
        if isinstance(part, PreTrainedModel):
            methods: dict[str, Any] = {
                method: partial(refuse, what.format(checkpoint=checkpoint))
                for method, what in REFUSED.items()
            }
            methods["set_experts_implementation"] = _keep_implementation
            methods["forward"] = _checked(part, left_out, lock)
            methods["_apply"] = partial(_apply_in_place, part)
            vars(part).update(methods)


def _apply_in_place(
    part: PreTrainedModel, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> Any:
    """Cast a model, as `float()` does, and refuse to move it: its experts stay where they are."""
    device = next((param.device for param in part.parameters()), None)
    if device not in (None, fn(torch.empty(1, dtype=torch.float32, device=device)).device):
        refuse("cannot be moved; choose the device when you load it, as MoE(..., device='cuda')")
    return type(part)._apply(part, fn, recurse)


def _refuse_keys(
    left_out: Sequence[str], path: str, _: Any, state: Mapping[str, Any], prefix: str, *__: Any
) -> None:
    for name in left_out:
        key = prefix + name.removeprefix(path).removeprefix(".")
        if key in state:
            refuse(f"cannot load other experts ({key}); change them in the checkpoint")


def _keep_implementation(experts_implementation: str | dict[str, str]) -> None:
    asked = experts_implementation
    others = (set(asked.values()) if isinstance(asked, dict) else {asked}) - {BACKEND}
    if others:
        refuse(
            f"cannot change to the experts implementation {' or '.join(sorted(map(str, others)))}\n"
            "hint: choose one when you load it, as MoE(..., experts_implementation='eager')"
        )


def _checked(part: PreTrainedModel, left_out: Iterable[str], lock: RLock) -> Callable[..., Any]:
    """The forward method of a model after a look at what was done to the model."""
    stock = stock_forward(part)

    @wraps(part.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        refuse_graphs()
        for adapter in vars(part).get("peft_config", {}).values():
            # PEFT does not find these, and leaves them out with a warning.
            for target in getattr(adapter, "target_parameters", None) or ():
                if any(f".{name}".endswith(f".{target}") for name in left_out):
                    refuse(f"cannot have adapters on its experts (target_parameters {target!r})")
        with lock:
            return stock(*args, **kwargs)

    return uncompiled(forward)
