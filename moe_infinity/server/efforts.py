"""Fields of several APIs for how much a model reasons."""

from __future__ import annotations

from typing import Any, Literal

from moe_infinity.server.fields import Body

# Of reasoning; the first two leave it to the model.
Effort = Literal["auto", "default", "none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS = {True: "medium", False: "none", None: None}  # for who says only whether to reason
# Variables of chat templates for how much a model reasons: gpt-oss has the first, Qwen and GLM the
# second, DeepSeek the third.
HINTS = ("reasoning_effort", "enable_thinking", "thinking")


class StatedEffort(Body):
    """How much to reason, as OpenRouter and the Responses API say it."""

    effort: Effort | None = None
    enabled: bool | None = None


class Thinking(Body):
    """The choice to reason or not, as Anthropic, DeepSeek and Z.ai say it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    # Without effect: no model here knows budgets, and reasoning is always shown.
    budget_tokens: Any = None
    display: Any = None

    def effort(self) -> str | None:
        return {"enabled": "medium", "disabled": "none"}.get(self.type)
