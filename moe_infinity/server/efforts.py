"""Fields of several APIs for how much a model reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from moe_infinity.server.fields import Body, RequestBody
from moe_infinity.server.limits import STOP_CHARACTERS

# Of reasoning; the first two leave it to the model.
Effort = Literal["auto", "default", "none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS = {True: "medium", False: "none", None: None}  # for who says only whether to reason
# Variables of chat templates for how much a model reasons: gpt-oss has the first, Qwen and GLM the
# second, DeepSeek the third, Seed-OSS and Nemotron the last. Clients set them for any template.
SWITCHES = ("enable_thinking", "thinking")
BUDGET_HINTS = ("thinking_budget", "reasoning_budget")
HINTS = ("reasoning_effort", *SWITCHES, *BUDGET_HINTS)
# The most tokens of thoughts; -1: any number.
BudgetTokens = Annotated[int, Field(ge=-1)]
TemplateVariables = dict[str, str | int | float | bool | None]
LastWords = Annotated[str, Field(max_length=STOP_CHARACTERS.most)]


class StatedEffort(Body):
    """How much to reason, as OpenRouter and the Responses API say it."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: BudgetTokens | None = None
    summary: Any = None  # without effect


class Thinking(Body):
    """The choice to reason or not, as Anthropic, DeepSeek and Z.ai say it."""

    type: Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]
    budget_tokens: BudgetTokens | None = None
    display: Any = None  # without effect: reasoning is always shown

    @model_validator(mode="before")
    @classmethod
    def with_type(cls, given: Any) -> Any:
        """Return the choice with a type where it is true or false, or has only a budget."""
        if isinstance(given, bool):
            return {"type": "enabled" if given else "disabled"}
        is_budget = isinstance(given, dict) and given.get("budget_tokens") is not None
        return {"type": "enabled"} | given if is_budget else given

    def effort(self) -> str | None:
        return {"enabled": "medium", "disabled": "none"}.get(self.type)


class ReasoningFields(RequestBody):
    """The fields of a conversation for how much to reason."""

    reasoning_effort: Effort | None = None
    reasoning: StatedEffort | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None  # as Ollama says it
    reasoning_budget_tokens: BudgetTokens | None = None
    reasoning_budget_message: LastWords | None = None  # of a thought that its budget ends
    chat_template_kwargs: TemplateVariables | None = None

    def reasoning_fields(self) -> dict[str, Any]:
        """Those of them that are given, as a chat request has them."""
        names = ReasoningFields.model_fields.keys() - RequestBody.model_fields.keys()
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def thought_budget(self) -> int | None:
        """The most tokens of thoughts, 0 for none at all; None for any number."""
        switches = [each for each in map(self._variables.get, SWITCHES) if isinstance(each, bool)]
        thinks = all(switches) if switches else self._effort != "none"
        return self._budget if thinks else 0

    @property
    def template_hints(self) -> dict[str, Any]:
        """Variables of chat templates for how much a model reasons, by their HINTS."""
        effort = "none" if self._budget == 0 else self._effort
        budget = {} if self._budget is None else dict.fromkeys(BUDGET_HINTS, self._budget)
        if effort is None:
            return budget
        known = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
        switches = dict.fromkeys(SWITCHES, effort != "none")
        return {"reasoning_effort": known.get(effort, effort), **switches, **budget}

    @property
    def _variables(self) -> Mapping[str, Any]:
        return self.chat_template_kwargs or {}

    @property
    def _budget(self) -> int | None:
        """The lowest of those that were given."""
        in_template = map(self._variables.get, BUDGET_HINTS)
        given = (
            self.reasoning_budget_tokens,
            None if self.reasoning is None else self.reasoning.max_tokens,
            None if self.thinking is None else self.thinking.budget_tokens,
            *(each for each in in_template if type(each) is int),
        )
        return min((each for each in given if each is not None and each >= 0), default=None)

    @property
    def _effort(self) -> str | None:
        """None if it is left to the model."""
        reasoning = self.reasoning or StatedEffort()
        stated = (
            self.reasoning_effort,
            reasoning.effort,
            EFFORTS[reasoning.enabled],
            None if self.thinking is None else self.thinking.effort(),
            EFFORTS[self.enable_thinking],
            self.think if isinstance(self.think, str) else EFFORTS[self.think],
        )
        said = [effort for effort in stated if effort not in (None, "auto", "default")]
        return "none" if "none" in said else next(iter(said), None)
