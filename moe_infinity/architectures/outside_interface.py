"""The classes of experts outside transformers' experts interface (docs/models.md): each has its own
names of parameters, and its own way to be called.

    Outside          one module with parameters stacked over experts
    OneModuleEach    one module per expert, in a list or dictionary

T tokens, K experts per token, E experts, D model width, R rows of one expert.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from moe_infinity.architectures.adapters import Adapter, ExpertsModule, MoeLayer, ParameterLocation
from moe_infinity.experts import NO_EXPERT
from moe_infinity.kernels.reference import PlainMlp


class Called(Adapter):
    """Modules whose forward method is replaced."""

    is_eager = True

    def connect(self, experts: ExpertsModule, model: nn.Module, layer: MoeLayer) -> None:
        experts.module.forward = partial(self.forward, experts.module, layer)

    def forward(self, module: Any, layer: MoeLayer, *args: Any) -> Any:
        """Run in place of the module's forward, with the same arguments."""
        return layer(*args)


class Outside(Called):
    """Classes that compute gate and up, an activation, and down. They have `num_experts`, `act_fn`,
    parameters stacked over experts, and are called with (x_TD, top_k_index_TK, top_k_weights_TK).
    """

    gate_up = "gate_up_proj"
    down = "down_proj"
    act = "act_fn"
    is_transposed: bool | None = False

    def orientation(self, module: Any) -> bool | None:
        return self.is_transposed

    def locations(self, module: Any, num_experts: int) -> dict[str, ParameterLocation]:
        paths = {"gate_up_proj": self.gate_up, "down_proj": self.down}
        return {
            key: ParameterLocation((path,), True, module.get_parameter(path).shape[0])
            for key, path in paths.items()
        }

    def computation(self, module: Any) -> Callable[..., Tensor]:
        return PlainMlp(
            SimpleNamespace(
                has_gate=True,
                has_bias=False,
                is_transposed=self.is_transposed,
                _apply_gate=self.hidden(module),
            ),
        )

    def hidden(self, module: Any) -> Callable[[Tensor], Tensor] | None:
        def gated(gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            product: Tensor = self.activation(module)(gate) * up  # which may be another one now
            return product

        return getattr(module, "_apply_gate", gated)

    def activation(self, module: Any) -> Callable[[Tensor], Tensor]:
        activation: Callable[[Tensor], Tensor] = attrgetter(self.act)(module)
        return activation


class LongcatFlash(Outside):
    """Layers of which some experts are the identity: they have no weights to load."""

    def count(self, module: Any) -> int:
        return int(module.num_routed_experts)

    def forward(self, module: Any, layer: MoeLayer, *args: Any) -> Tensor:
        x_TD, top_k_index_TK, top_k_weights_TK = args
        is_expert_TK = top_k_index_TK < module.num_routed_experts
        out_TD = layer(x_TD, top_k_index_TK.masked_fill(~is_expert_TK, NO_EXPERT), top_k_weights_TK)
        # One after the other by expert id, as the class adds them; adding zero changes no bit.
        order_TK = top_k_index_TK.argsort(dim=1)
        identity_TK = top_k_weights_TK.masked_fill(is_expert_TK, 0).gather(1, order_TK)
        for weight_T in identity_TK.unbind(dim=1):
            out_TD = out_TD + (x_TD * weight_T[:, None]).to(out_TD.dtype)
        return out_TD


class Aria(Outside):
    """Experts modules that route, too. They are in the interface since transformers 5.23."""

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
    sums in float32 as grouped_mm does. Its attention experts (JetMoeMoA) are dense weights here.
    """

    is_block = True
    is_eager = False
    gate_up = "input_linear.weight"
    down = "output_linear.weight"
    act = "activation"

    def count(self, module: Any) -> int:
        return int(module.router.num_experts)

    def forward(self, module: Any, layer: MoeLayer, *args: Any) -> Tensor:
        (x_BSD,) = args
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        logits_TE = module.router(x_TD)[-1]
        top_k = logits_TE.topk(module.router.top_k, dim=1)
        top_k_weights_TK = torch.softmax(top_k.values, dim=1).type_as(x_TD)
        out_TD = layer(x_TD, top_k.indices, top_k_weights_TK)
        out_BSD: Tensor = out_TD.view(x_BSD.shape) + module.bias
        return out_BSD


class Llama4(Outside):
    """The module is the whole block. The class computes every expert for every token; here an
    expert computes only the tokens routed to it.
    """

    is_block = True
    is_eager = False
    weighs_input = True
    gate_up = "experts.gate_up_proj"
    down = "experts.down_proj"
    act = "experts.act_fn"
    is_transposed = True

    def forward(self, module: Any, layer: MoeLayer, *args: Any) -> tuple[Tensor, Tensor]:
        x_TD = args[0].reshape(-1, module.hidden_dim)
        scores_TE, logits_TE = module.router(x_TD)
        top_k_index_TK = logits_TE.topk(module.top_k, dim=1).indices
        out_TD = module.shared_expert(x_TD)
        top_k_weights_TK = scores_TE.gather(1, top_k_index_TK)
        return out_TD.add_(layer(x_TD, top_k_index_TK, top_k_weights_TK)), logits_TE


class Dbrx(Outside):
    """Experts in three weights, each [E * F, D]: an expert is F neighbouring rows of each."""

    is_transposed = None

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
        x_BSD, top_k_index_TK, top_k_weights_TK = args
        out_TD = layer(x_BSD.reshape(-1, x_BSD.shape[-1]), top_k_index_TK, top_k_weights_TK)
        out_BSD: Tensor = out_TD.view(x_BSD.shape[0], -1, x_BSD.shape[-1])
        return out_BSD


class OneModuleEach(Called):
    """A ModuleList or ModuleDict with one module per expert. One copy of such a module, without
    weights of its own, computes every expert with the weights it is given.
    """

    def orientation(self, module: Any) -> bool | None:
        return None

    def count(self, module: Any) -> int:
        return len(self.names(module))

    def names(self, module: Any) -> list[str]:
        """Return the names of the experts: NLLB keeps a dropout among them."""
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
    """Experts that are called with the top-1 one-hot, [T, 1, E]: zeros beyond an expert's capacity
    (transformers 5.23).
    """

    def forward(self, module: Any, layer: MoeLayer, *args: Any) -> Tensor:
        x_TD, one_hot_T1E, top_k_weights_T1 = args
        has_none_T1 = ~one_hot_T1E.any(dim=-1)
        top_k_index_T1 = one_hot_T1E.argmax(dim=-1).masked_fill(has_none_T1, NO_EXPERT)
        return layer(x_TD, top_k_index_T1, top_k_weights_T1)


class NllbMoe(OneModuleEach):
    """NLLB as it was published, and as transformers 4 ran it: a token goes to every expert whose
    probability is not zero. transformers 5 (5.23 at least) takes a one-hot for ids: only experts 0
    and 1 run.
    """

    def computation(self, module: Any) -> Callable[..., Tensor]:
        run = super().computation(module)
        kept = 1 - module.moe_token_dropout

        def scaled(weights: dict[str, Tensor], x_RD: Tensor) -> Tensor:
            out_RD: Tensor = run(weights, x_RD) * kept
            return out_RD

        return scaled

    def forward(self, module: Any, layer: MoeLayer, *args: Any) -> Tensor:
        x_TD, _first_choice_TE, probabilities_TE = args
        top_k_weights_TK, top_k_index_TK = probabilities_TE.topk(2, dim=1)
        top_k_index_TK = top_k_index_TK.masked_fill(top_k_weights_TK == 0, NO_EXPERT)
        return layer(x_TD, top_k_index_TK, top_k_weights_TK)


# The classes outside the interface, by name.
ADAPTERS: dict[str, Adapter] = {
    "AriaExperts": Aria(),
    "DbrxExperts": Dbrx(),
    "JetMoeMoE": JetMoe(),
    "Llama4TextMoe": Llama4(),
    "LongcatFlashExperts": LongcatFlash(),
    "NllbMoeExperts": NllbMoe(),
    "Step3p7Experts": Outside(),  # the limit of their activation depends on the layer
    "SwitchTransformersExperts": SwitchTransformers(),
}
