"""Items of the Responses API that later requests only name.

Clients may send `previous_response_id` or an `item_reference` in place of what they have said and
been answered. The items of requests and answers are kept in memory as JSON, each under its id, and
leave it once they are the ones that nobody has used for longest. `kept_api` shows and deletes them.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

from pydantic import TypeAdapter

from moe_infinity.server.limits import KEPT, MESSAGES
from moe_infinity.server.refusals import BadRequest, Refused, require_within
from moe_infinity.server.responses_body import (
    InputItem,
    InputMessage,
    ItemReference,
    ResponsesBody,
)

ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)
SEND_ALL = "is not here, or not any more: send the whole conversation"


class KeptTexts:
    """Texts by the owner and id of what they are, up to a number of bytes.

    Safe to use from several threads.
    """

    def __init__(self, most_bytes: int = KEPT.most) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._texts: OrderedDict[tuple[str, str], str] = OrderedDict()  # newest last, all ASCII
        self._lock = Lock()

    @property
    def has_room(self) -> bool:
        """True if anything can be kept."""
        return self._most_bytes > 0

    def put(self, owner: str, id_: str, text: str) -> None:
        """Keep an ASCII text, and drop those that nobody has used for longest."""
        with self._lock:
            self._num_bytes += len(text) - len(self._texts.pop((owner, id_), ""))
            self._texts[owner, id_] = text
            while self._num_bytes > self._most_bytes:
                self._num_bytes -= len(self._texts.popitem(last=False)[1])

    def get(self, owner: str, id_: str) -> str | None:
        """Return a text, which counts as a use of it; None if it is not kept."""
        with self._lock:
            if (owner, id_) in self._texts:
                self._texts.move_to_end((owner, id_))
            return self._texts.get((owner, id_))

    def drop(self, owner: str, id_: str) -> None:
        """Keep a text no longer, if it is kept."""
        with self._lock:
            self._num_bytes -= len(self._texts.pop((owner, id_), ""))


# What a kept text is. Clients give ids of any kind where they may give one of a certain kind.
ITEM_OF = "item "
TURN_OF = "turn "
RESPONSE_OF = "response "


class ResponseTurn:
    """One request of a conversation, and its answer."""

    def __init__(self, kept: KeptTexts, owner: str, *, store: bool, max_bytes: int) -> None:
        self._kept = kept
        self._owner = owner
        self.keeps = store and kept.has_room
        self._previous: str | None = None
        self._said: list[dict[str, Any]] = []  # the request's own items
        self._bytes_left = max_bytes  # of all that is named

    def whole(self, body: ResponsesBody) -> ResponsesBody:
        """Return a body with all items that it names among its own. Raises Refused for those that
        are not kept.
        """
        text = body.input
        items = [InputMessage(role="user", content=text)] if isinstance(text, str) else text
        if self.keeps:
            self._previous = body.previous_response_id
            self._said = [item.model_dump(mode="json", by_alias=True) for item in items]
        whole = [*self._before(body.previous_response_id), *self._resolved(items)]
        require_within(MESSAGES, len(whole), "input")
        return body.model_copy(update={"input": whole})

    def end(self, response: dict[str, Any]) -> None:
        """Keep the items of the request and of its answer."""
        if not self.keeps:
            return
        output = response["output"]
        for item in output:
            self._kept.put(self._owner, ITEM_OF + item["id"], json.dumps(item))
        turn = {"previous": self._previous, "said": self._said, "output": output}
        self._kept.put(self._owner, TURN_OF + response["id"], json.dumps(turn))
        self._kept.put(self._owner, RESPONSE_OF + response["id"], json.dumps(response))

    def _before(self, id_: str | None) -> list[InputItem]:
        """Return all items up to the end of an earlier turn."""
        turns: list[list[InputItem]] = []
        while id_ is not None:
            turn = json.loads(self._text(TURN_OF, id_, "previous_response_id"))
            items = [ITEM.validate_python(item) for item in (*turn["said"], *turn["output"])]
            turns.append([*self._resolved(items)])
            id_ = turn["previous"]
        return [item for items in reversed(turns) for item in items]

    def _resolved(self, items: Sequence[InputItem]) -> Iterator[InputItem]:
        for item in items:
            if isinstance(item, ItemReference):
                yield ITEM.validate_json(self._text(ITEM_OF, item.id, "input"))
            else:
                yield item

    def _text(self, kind: str, id_: str, param: str) -> str:
        text = self._kept.get(self._owner, kind + id_)
        if text is None:
            code = "previous_response_not_found" if param == "previous_response_id" else None
            raise BadRequest(f"{id_[:80]!r} {SEND_ALL}", param=param, code=code)
        self._bytes_left -= len(text)
        if self._bytes_left < 0:
            message = f"{param}: it names more than --max-body allows"
            raise Refused(413, message, param=param, code="too_large")
        return text
