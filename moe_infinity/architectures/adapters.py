"""The experts of one MoE layer, whatever class holds them: where their parameters are, how one
expert computes, and how the model's own code is made to call the engine.

    Adapter          classes behind transformers' experts interface, which call our backend
    its subclasses   the classes outside it (docs/models.md), each called in its own way
    module_list.py         nn.ModuleList and nn.ModuleDict of expert MLPs, as in remote code

T tokens, K experts per token, E experts, D model width, R rows of one expert.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moe_infinity.errors import UnsupportedModelError
from moe_infinity.experts import COMPUTE_DTYPES, ExpertLayout
from moe_infinity.kernels.reference import expert_mlp
from moe_infinity.routing import NO_EXPERT, Routing

# Set by transformers' `use_experts_implementation` on every experts module of the interface.
INTERFACE_ATTRIBUTES = {"has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts"}
CALL_ATTRIBUTE = "_moe_infinity_call"  # set on each module of the interface: its MoeLayer


class ExpertCalls(Protocol):
    """The calls that a block of a model makes of its experts by itself, and what they answer."""

    def answer(self, expert_idx: int, mlp: Callable[..., Tensor], weights: Any) -> None:
        """Compute all calls of this expert. `mlp` takes its weights and what a call passes."""


class MoeLayer(Protocol):
    """One MoE layer of the engine, as an adapter calls it."""

    def __call__(self, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
        """[T, D]: the weighted sum over each token's experts."""

    def answer_calls(self, calls: ExpertCalls, routing: Routing) -> None:
        """Answer the calls that a block makes of its experts by itself."""


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
    is_transposed: bool | None  # expert_mlp finds weights as [in, out]; None: it does not compute
    adapter: Adapter

    def connect(self, model: nn.Module, layer: MoeLayer) -> None:
        self.adapter.connect(self, model, layer)


class Adapter:
    """For the classes of the interface. Adapters of other classes override what differs."""

    # In which order a token's experts are summed, see engine/exact.py; None: as configured.
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
        return int(module.num_experts)

    def locations(self, module: Any, num_experts: int) -> dict[str, ParameterLocation]:
        return {
            key: ParameterLocation((key,), True, num_experts)
            for key, param in module.named_parameters(recurse=False)
            if param.ndim >= 2 and param.shape[0] == num_experts
        }

    def computation(self, module: Any) -> Callable[..., Tensor]:
        return partial(expert_mlp, module)

    def hidden(self, module: Any) -> Callable[[Tensor], Tensor] | None:
        """What an expert computes between two products. None: it is not of that form."""
        if vars(module).get("has_post_expert_norm"):
            return None
        found: Callable[[Tensor], Tensor] = module._apply_gate if module.has_gate else module.act_fn
        return found

    def orientation(self, module: Any) -> bool | None:
        return bool(module.is_transposed)

    def connect(self, experts: ExpertsModule, model: nn.Module, layer: MoeLayer) -> None:
        """From now on the model's code calls `layer`."""
        object.__setattr__(experts.module, CALL_ATTRIBUTE, layer)


def _shape_of_one(param: Tensor, location: ParameterLocation) -> tuple[int, ...]:
    if not location.is_stacked:
        return tuple(param.shape)
    return tuple(param.shape[1:]) if location.rows == 1 else (location.rows, *param.shape[1:])


class Outside(Adapter):
    """Outside the interface: gate and up, an activation, and down. The class has `num_experts`,
    `act_fn`, parameters stacked over experts, and is called with (x_TD, index_TK, weights_TK).
    """

    is_eager = True
    gate_up = "gate_up_proj"
    down = "down_proj"
    is_transposed = False

    def orientation(self, module: Any) -> bool | None:
        return self.is_transposed

    def locations(self, module: Any, num_experts: int) -> dict[str, ParameterLocation]:
        paths = {"gate_up_proj": self.gate_up, "down_proj": self.down}
        return {
            key: ParameterLocation((path,), True, module.get_parameter(path).shape[0])
            for key, path in paths.items()
        }

    def computation(self, module: Any) -> Callable[..., Tensor]:
        return partial(
            expert_mlp,
            SimpleNamespace(
                has_gate=True,
                has_bias=False,
                is_transposed=self.is_transposed,
                _apply_gate=self.hidden(module),
            ),
        )

    def hidden(self, module: Any) -> Callable[[Tensor], Tensor] | None:
        activation = self.activation(module)

        def gated(gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            product: Tensor = activation(gate) * up
            return product

        return getattr(module, "_apply_gate", gated)

    def activation(self, module: Any) -> Callable[[Tensor], Tensor]:
        found: Callable[[Tensor], Tensor] = module.act_fn
        return found

    def connect(self, experts: ExpertsModule, model: nn.Module, layer: MoeLayer) -> None:
        experts.module.forward = partial(self.forward, experts.module, layer)

    def forward(self, module: Any, layer: MoeLayer, *args: Any) -> Any:
        """What runs in place of the module's forward, called with the same arguments."""
        return layer(*args)


class Step3p7(Outside):
    """Called like the interface. Its activation clamps, with a limit that depends on the layer."""


class LongcatFlash(Outside):
    """Some experts of a layer are the identity: they have no weights to load."""

    def count(self, module: Any) -> int:
        return int(module.num_routed_experts)

    def forward(self, module: Any, layer: MoeLayer, *args: Any) -> Tensor:
        x_TD, index_TK, weights_TK = args
        is_expert_TK = index_TK < module.num_routed_experts
        out_TD = layer(x_TD, index_TK.masked_fill(~is_expert_TK, NO_EXPERT), weights_TK)
        # One after the other by expert id, as the class adds them; adding zero changes no bit.
        order_TK = index_TK.argsort(dim=1)
        identity_TK = weights_TK.masked_fill(is_expert_TK, 0).gather(1, order_TK)
        for weight_T in identity_TK.unbind(dim=1):
            out_TD = out_TD + (x_TD * weight_T[:, None]).to(out_TD.dtype)
        return out_TD


class Aria(Outside):
    """Routes inside the experts module. In the interface since transformers 5.23."""

    is_eager = False
    gate_up = "fc1.weight"
    down = "fc2.weight"
    is_transposed = True

    def count(self, module: Any) -> int:
        return int(module.config.moe_num_experts)

    def activation(self, module: Any) -> Callable[[Tensor], Tensor]:
        return nn.functional.silu

    def forward(self, module: Any, layer: MoeLayer, *args: Any) -> Tensor:
        x_TD, router_logits_TE = args
        return layer(x_TD, *module.route_tokens_to_experts(router_logits_TE))


class JetMoe(Outside):
    """The module is the whole block. Its router gives sorted pairs, so the top-k is taken again. It
    sums in float32 as grouped_mm does. Its attention experts (JetMoeMoA) are dense weights here."""

    is_block = True
    is_eager = False
    gate_up = "input_linear.weight"
    down = "output_linear.weight"

    def count(self, module: Any) -> int:
        return int(module.router.num_experts)

    def activation(self, module: Any) -> Callable[[Tensor], Tensor]:
        found: Callable[[Tensor], Tensor] = module.activation
        return found

    def forward(self, module: Any, layer: MoeLayer, *args: Any) -> Tensor:
        (x_BSD,) = args
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        logits_TE = module.router(x_TD)[-1]
        top_k = logits_TE.topk(module.router.top_k, dim=1)
        weights_TK = torch.softmax(top_k.values, dim=1).type_as(x_TD)
        out_BSD: Tensor = layer(x_TD, top_k.indices, weights_TK).view(x_BSD.shape) + module.bias
        return out_BSD


class Llama4(Outside):
    """The module is the whole block. The class computes every expert for every token; here an
    expert computes only the tokens routed to it."""

    is_block = True
    is_eager = False
    weighs_input = True
    gate_up = "experts.gate_up_proj"
    down = "experts.down_proj"
    is_transposed = True

    def activation(self, module: Any) -> Callable[[Tensor], Tensor]:
        found: Callable[[Tensor], Tensor] = module.experts.act_fn
        return found

    def forward(self, module: Any, layer: MoeLayer, *args: Any) -> tuple[Tensor, Tensor]:
        x_TD = args[0].reshape(-1, module.hidden_dim)
        scores_TE, logits_TE = module.router(x_TD)
        index_TK = logits_TE.topk(module.top_k, dim=1).indices
        out_TD = module.shared_expert(x_TD)
        return out_TD.add_(layer(x_TD, index_TK, scores_TE.gather(1, index_TK))), logits_TE


class Dbrx(Outside):
    """Three weights, each [E * F, D]: an expert is F neighbouring rows of each."""

    def orientation(self, module: Any) -> bool | None:
        return None

    def hidden(self, module: Any) -> None:
        return None

    def locations(self, module: Any, num_experts: int) -> dict[str, ParameterLocation]:
        rows = int(module.ffn_hidden_size)
        return {
            key: ParameterLocation((f"mlp.{key}",), True, num_experts, rows)
            for key in ("w1", "v1", "w2")
        }

    def computation(self, module: Any) -> Callable[..., Tensor]:
        def glu(weights: dict[str, Tensor], x_RD: Tensor) -> Tensor:
            gate = module.mlp.activation_fn(x_RD.matmul(weights["w1"].T))
            out_RD: Tensor = (gate * x_RD.matmul(weights["v1"].T)).matmul(weights["w2"])
            return out_RD

        return glu

    def forward(self, module: Any, layer: MoeLayer, *args: Any) -> Tensor:
        x_BSD, index_TK, weights_TK = args
        out_TD = layer(x_BSD.reshape(-1, x_BSD.shape[-1]), index_TK, weights_TK)
        out_BSD: Tensor = out_TD.view(x_BSD.shape[0], -1, x_BSD.shape[-1])
        return out_BSD


class OneModuleEach(Adapter):
    """A ModuleList or ModuleDict with one module per expert. One copy of such a module, without
    weights of its own, computes every expert with the weights it is given."""

    is_eager = True

    def orientation(self, module: Any) -> bool | None:
        return None

    def hidden(self, module: Any) -> None:
        return None

    def count(self, module: Any) -> int:
        return len(self.names(module))

    def names(self, module: Any) -> list[str]:
        """NLLB keeps a dropout among its experts."""
        return [name for name, child in module.named_children() if list(child.parameters())]

    def locations(self, module: Any, num_experts: int) -> dict[str, ParameterLocation]:
        names = self.names(module)
        keys = [key for key, _ in module.get_submodule(names[0]).named_parameters()]
        return {
            key: ParameterLocation(tuple(f"{name}.{key}" for name in names), False, num_experts)
            for key in keys
        }

    def computation(self, module: Any) -> Callable[..., Tensor]:
        template = copy.deepcopy(next(module.children())).eval()  # on meta; its forward stays

        def run(weights: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
            out: Tensor = torch.func.functional_call(template, weights, args, kwargs)
            return out

        return run


class SwitchTransformers(OneModuleEach):
    """Called with the top-1 one-hot, [T, 1, E]; zeros beyond an expert's capacity (5.23)."""

    def connect(self, experts: ExpertsModule, model: nn.Module, layer: MoeLayer) -> None:
        def forward(x_TD: Tensor, chosen_T1E: Tensor, weights_T1: Tensor) -> Tensor:
            index_T1 = chosen_T1E.argmax(dim=-1).masked_fill(~chosen_T1E.any(dim=-1), NO_EXPERT)
            return layer(x_TD, index_T1, weights_T1)

        experts.module.forward = forward


class NllbMoe(OneModuleEach):
    """As published, and as transformers 4 ran it: a token goes to every expert whose probability is
    not zero. transformers 5 (5.23 at least) takes a one-hot for ids: only experts 0 and 1 run."""

    def computation(self, module: Any) -> Callable[..., Tensor]:
        run = super().computation(module)
        kept = 1 - module.moe_token_dropout

        def scaled(weights: dict[str, Tensor], x_RD: Tensor) -> Tensor:
            out_RD: Tensor = run(weights, x_RD) * kept
            return out_RD

        return scaled

    def connect(self, experts: ExpertsModule, model: nn.Module, layer: MoeLayer) -> None:
        def forward(x_TD: Tensor, first_choice_TE: Tensor, probabilities_TE: Tensor) -> Tensor:
            weights_TK, index_TK = probabilities_TE.topk(2, dim=1)
            return layer(x_TD, index_TK.masked_fill(weights_TK == 0, NO_EXPERT), weights_TK)

        experts.module.forward = forward


# By class name: classes outside the interface.
ADAPTERS: dict[str, Adapter] = {
    "AriaExperts": Aria(),
    "DbrxExperts": Dbrx(),
    "JetMoeMoE": JetMoe(),
    "Llama4TextMoe": Llama4(),
    "LongcatFlashExperts": LongcatFlash(),
    "NllbMoeExperts": NllbMoe(),
    "Step3p7Experts": Step3p7(),
    "SwitchTransformersExperts": SwitchTransformers(),
}
INTERFACE = Adapter()
