"""The experts of one MoE layer, whatever class holds them: where their parameters are, how one
expert computes, and how the model's own code is made to call the engine.

    Adapter                classes behind transformers' experts interface, which call our backend
    outside_interface.py   the classes outside it (docs/models.md), each called in its own way
    module_list.py         nn.ModuleList and nn.ModuleDict of expert MLPs, as in remote code

T tokens, K experts per token, D model width, R rows of one expert, F expert width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moe_infinity.architectures.module_state import ModuleState
from moe_infinity.architectures.trial import Differs, Verdict, first_found, first_that, verdict
from moe_infinity.errors import UnsupportedModelError
from moe_infinity.experts import COMPUTE_DTYPES, ExpertLayout, Ints, Routing
from moe_infinity.kernels.reference import FUNCTIONS, Activation, PlainMlp
from moe_infinity.kernels.residents import Residents

# Set by transformers' `use_experts_implementation` on every experts module of the interface.
INTERFACE_ATTRIBUTES = {"has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts"}
BACKEND = "moe_infinity"  # the name of our experts implementation in transformers
CALL_ATTRIBUTE = "_moe_infinity_call"  # set on each module of the interface: its MoeLayer
LARGE = 1e4  # beyond every limit of an activation
TRIED = (0.0, 0.1, 0.6, 1.0, 1.5, 3.0, 5.0, 6.5, 8.0, 12.0, 30.0, LARGE)  # and their negatives
NUM_VALUES = 256  # of which the activations that are rounded in two ways round several so
WIDE = 256  # columns: whole vectors of any processor, gate and up
TOLERANCE = 1e-6  # relative, below 1 absolute: some architectures round to float32 on the way


class ExpertCalls(Protocol):
    """The calls that a block of a model makes of its experts by itself, and what they answer."""

    def answer(self, expert_idx: int, mlp: Callable[..., Tensor], weights: Any) -> None:
        """Compute all calls of this expert. `mlp` takes its weights and what a call passes."""


class MoeLayer(Protocol):
    """One MoE layer of the engine, as a model's modules call it."""

    def __call__(self, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
        """[T, D]: the weighted sum over each token's experts."""

    def answer_calls(self, calls: ExpertCalls, routing: Routing) -> None:
        """Answer the calls that a block makes of its experts by itself."""

    def residents(self) -> Residents | None:
        """Return the layer's experts if those of all layers are in memory and none has to leave."""

    def note(self, top_k_index_TK: Ints) -> None:
        """Enter the layer: the caller has computed its residents for these tokens."""


@dataclass(frozen=True, slots=True)
class ParameterLocation:
    """Where one parameter of the experts is in their module."""

    paths: tuple[str, ...]  # one parameter stacked over experts, or one parameter per expert
    is_stacked: bool
    num_stored: int  # experts in it; more than the layer has where some never compute
    rows: int = 1  # of the first dimension of a stacked one, for each expert


@dataclass(slots=True)
class ExpertsModule:
    """The experts of one MoE layer."""

    name: str  # full name in the model, e.g. "model.layers.3.mlp.experts"
    module: nn.Module
    block_name: str  # of the module that routes and then calls the experts
    num_experts: int
    locations: dict[str, ParameterLocation]  # by the parameter's name in a slot
    layout: ExpertLayout
    compute: Callable[..., Tensor]  # (one expert's weights by name, its rows [R, D]) -> [R, D]
    is_transposed: bool | None  # PlainMlp finds weights as [in, out]; None: it does not compute
    adapter: Adapter
    state: ModuleState | None = None  # of what kernels replace; None: there is no model around it

    @property
    def paths(self) -> list[str]:
        """The names of all parameters of the experts in their module."""
        return [path for location in self.locations.values() for path in location.paths]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that its experts compute in, as they were loaded."""
        dtype: torch.dtype = getattr(torch, self.layout.params[0].dtype)
        return dtype

    def note_state(self) -> None:
        """Note what the module is like, with all that we change of it."""
        inner = list(self.module.modules())[1:]
        self.state = ModuleState(inner, around=[self.module])

    def change(self) -> str | None:
        """Return what is different from when the state was noted; None if nothing is."""
        return None if self.state is None else self.state.change()


class Adapter:
    """The classes of the interface. Adapters of other classes override what differs."""

    # In which order a token's experts are summed, see engine/torch_backend.py; None: as configured.
    is_eager: bool | None = None
    weighs_input = False  # the routing weight scales what goes into an expert, not what comes out
    is_block = False  # the module routes, too

    def describe(self, name: str, module: Any) -> ExpertsModule:
        """Raises UnsupportedModelError for parameters of an unknown dtype."""
        num_experts = self.count(module)
        locations = self.locations(module, num_experts)
        shapes = {}
        for key, location in locations.items():
            param = module.get_parameter(location.paths[0])
            shapes[key] = _shape_of_one(param, location), str(param.dtype).removeprefix("torch.")
        dtypes = {key: dtype for key, (_, dtype) in shapes.items()}
        if set(dtypes.values()) - set(COMPUTE_DTYPES):
            raise UnsupportedModelError(
                f"{name}: experts of dtype {dtypes}, expected one of {', '.join(COMPUTE_DTYPES)}"
            )
        return ExpertsModule(
            name,
            module,
            block_name=name if self.is_block else name.rpartition(".")[0],
            num_experts=num_experts,
            locations=locations,
            layout=ExpertLayout.of(shapes),
            compute=self.computation(module),
            is_transposed=self.orientation(module),
            adapter=self,
        )

    def count(self, module: Any) -> int:
        """Return the number of experts that have weights."""
        return int(module.num_experts)

    def locations(self, module: Any, num_experts: int) -> dict[str, ParameterLocation]:
        """Return where each parameter of an expert is, by its name in a slot."""
        return {
            key: ParameterLocation((key,), True, num_experts)
            for key, param in module.named_parameters(recurse=False)
            if param.ndim >= 2 and param.shape[0] == num_experts
        }

    def computation(self, module: Any) -> Callable[..., Tensor]:
        """Return how one expert computes, see ExpertsModule.compute."""
        return PlainMlp(module)

    def hidden(self, module: Any) -> Callable[[Tensor], Tensor] | None:
        """Return what an expert that PlainMlp computes does between its two products; None if it
        does more.
        """
        if vars(module).get("has_post_expert_norm"):
            return None
        return module._apply_gate if module.has_gate else module.act_fn  # type: ignore[no-any-return]

    def orientation(self, module: Any) -> bool | None:
        """Return ExpertsModule.is_transposed."""
        return bool(module.is_transposed)

    def connect(self, experts: ExpertsModule, model: nn.Module, layer: MoeLayer) -> None:
        """Let the model's code call `layer` from now on."""
        object.__setattr__(experts.module, CALL_ATTRIBUTE, layer)


def _shape_of_one(param: Tensor, location: ParameterLocation) -> tuple[int, ...]:
    if not location.is_stacked:
        return tuple(param.shape)
    return tuple(param.shape[1:]) if location.rows == 1 else (location.rows, *param.shape[1:])


INTERFACE = Adapter()


# The activation of experts, found by trying


def find_activation(
    compute: Callable[[Tensor], Tensor], *, is_gated: bool
) -> Verdict[tuple[Activation, bool]]:
    """Find what `compute` does to the outputs of the first product, [R, 2F] or [R, F], and whether
    the columns of gate and up alternate there, instead of all of gate before all of up.
    """
    arrangements = (False, True) if is_gated else (False,)
    return first_found(
        verdict(partial(_search_activation, compute, is_gated, is_interleaved))
        for is_interleaved in arrangements
    )


def _search_activation(
    compute: Callable[[Tensor], Tensor], is_gated: bool, is_interleaved: bool
) -> tuple[Activation, bool]:
    def apply(gate: Tensor, up: Tensor) -> Tensor:
        if not is_gated:
            return compute(gate[None])[0]
        halves = [gate, up]
        columns = torch.stack(halves, -1).flatten() if is_interleaved else torch.cat(halves)
        return compute(columns[None])[0]

    values = torch.tensor([*TRIED, *(-x for x in TRIED)], dtype=torch.float64, device="cpu")
    gate, up = (axis.flatten() for axis in torch.meshgrid(values, values, indexing="ij"))
    outputs = apply(gate, up)
    if outputs.shape != gate.shape:
        raise Differs("its activation gives another shape")
    alpha, shift, limit = _measured(apply, is_gated=is_gated)
    candidates = [
        Activation(function, is_gated, alpha if function == "silu" else 1.0, shift, limit)
        for function in FUNCTIONS
    ]

    def agrees(activation: Activation) -> bool:
        expected = activation(gate, up if is_gated else None)
        return bool(((outputs - expected).abs() <= TOLERANCE * expected.abs().clamp(min=1)).all())

    return first_that(candidates, agrees, "kernels do not know its activation"), is_interleaved


def _measured(
    apply: Callable[[Tensor, Tensor], Tensor], *, is_gated: bool
) -> tuple[float, float, float]:
    """Return alpha, shift and limit, as they would be for silu."""
    up = torch.tensor([0.0, 1.0, LARGE], dtype=torch.float64, device="cpu")
    none, one, most = apply(torch.ones_like(up), up).tolist()
    slope = one - none if is_gated else one  # what the gate gives for 1
    alpha = math.log(slope / (1 - slope)) if 0 < slope < 1 else 1.0
    if not is_gated or slope == 0:
        return _rounded(alpha), 0.0, math.inf
    shift = none / slope
    limit = (most - none) / slope
    return _rounded(alpha), _rounded(shift), math.inf if limit > LARGE / 2 else _rounded(limit)


def _rounded(number: float) -> float:
    """Return 6 digits of a number, as many as it has in the model's code."""
    return float(f"{number:.6g}")


def rounds_by_place(compute: Callable[[Tensor], Tensor], *, dtype: torch.dtype) -> bool:
    """Return True if torch rounds the activation of experts differently at the end of a run of
    numbers, which it computes one by one, and within, where it computes vectors.
    """
    generator = torch.Generator().manual_seed(0)
    values_N1 = torch.randn(NUM_VALUES, 1, generator=generator, dtype=torch.float32, device="cpu")
    values_N1 = (3 * values_N1).to(dtype)
    within = compute(values_N1.expand(-1, WIDE).contiguous())[:, :1]
    alone = [compute(value.expand(1, 2).contiguous())[:, :1] for value in values_N1]
    return not torch.equal(within, torch.cat(alone))


# Gradients


def without_gradient(compute: Callable[[], Tensor], *inputs: Tensor) -> Tensor:
    """Return the result of `compute`, which depends on `inputs`. A backward pass through it raises
    UnsupportedModelError: experts have no gradients.

    Dense weights keep `requires_grad`, as in stock transformers. With it torch takes other kernels
    for some matrix products, which changes the last bit of float32.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return compute()
    out: Tensor = _Refusal.apply(compute, *inputs)  # type: ignore[no-untyped-call]
    return out


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Tensor], *inputs: Tensor) -> Tensor:
        return compute()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedModelError(
            "a model whose experts are not in memory cannot be trained: they have no gradient"
        )
