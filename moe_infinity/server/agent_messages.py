"""Messages between the agents of Codex, of which one writes a task to another."""

from __future__ import annotations

from typing import Literal

from moe_infinity.server.chat import Message
from moe_infinity.server.fields import Body, Items

ENCRYPTED = "gAAAAA"  # how OpenAI's own ciphertexts begin; to other servers Codex writes text


class AgentText(Body):
    """A part of such a message."""

    text: str | None = None
    encrypted_content: str | None = None


class AgentMessage(Body):
    """A text of another agent, which this one has to do or to read."""

    type: Literal["agent_message"]
    content: Items[AgentText] | None = None

    def for_chat(self) -> Message | None:
        texts = [each.text or each.encrypted_content or "" for each in self.content or ()]
        text = "".join(each for each in texts if not each.startswith(ENCRYPTED))
        return Message(role="user", content=text) if text else None
