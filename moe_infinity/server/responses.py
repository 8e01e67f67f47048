"""Answers of OpenAI's Responses API for text.

An answer has other fields than a chat answer, and the events of its stream have names and sequence
numbers.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from moe_infinity.server.answers import ChatAnswer, sse
from moe_infinity.server.kept import ResponseTurn
from moe_infinity.server.refusals import Refused
from moe_infinity.server.responses_body import ResponsesBody
from moe_infinity.server.sequences import Output, Request, TokenText


class ResponseAnswer(ChatAnswer):
    """An answer of one message that has one part of text, and of calls of functions. Beside calls,
    a message without text is left out.

    The events of a stream: response.created, response.in_progress; for the message
    output_item.added, content_part.added, output_text.delta for each piece, output_text.done,
    content_part.done, output_item.done; four for each call; then response.completed or
    response.incomplete.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        asked: ResponsesBody,
        turn: ResponseTurn,
        **settings: Any,
    ) -> None:
        super().__init__(requests, **settings)
        self._turn = turn  # keeps the answer for later requests, once it is whole
        sampling = requests[0].sampling
        self._echoed_fields = asked.echoed_fields() | {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "store": turn.keeps,
        }
        self._names = asked.names_in_namespaces()
        self._id = f"resp_{uuid.uuid4().hex}"
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._num_events = 0
        self._in_progress = ""  # the answer before its end, as JSON, once it was wanted
        self._has_begun_message = False  # in the stream

    def body(self) -> dict[str, Any]:
        status = self._status
        usage = self.usage()
        is_cut = status == "incomplete"
        calls = self._calls()
        has_message = self._part()["text"] or self._choices[0].tokens or not calls
        response = self._response(
            status,
            output=[self._item(status), *calls] if has_message else calls,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage={
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
        )
        self._turn.end(response)
        return response

    def first_chunks(self) -> list[str]:
        begun = self._response("in_progress")
        return [
            self._named("response.created", response=begun),
            self._named("response.in_progress", response=begun),
        ]

    def life_chunk(self) -> str:
        """The only event that has no effect. It repeats the request, which may be long."""
        kind = "response.in_progress"
        self._in_progress = self._in_progress or json.dumps(self._response("in_progress"))
        head = sse({"type": kind, "sequence_number": self._num_events}, kind).removesuffix("}\n\n")
        self._num_events += 1
        return f'{head}, "response": {self._in_progress}}}\n\n'

    def chunk(self, index: int, output: Output) -> str:
        text = self._new[index].content
        if not text and not output.tokens:
            return ""
        begin = self._begin_message()
        logprobs = self._entries(output.tokens)
        return begin + self._of_part("output_text.delta", delta=text, logprobs=logprobs)

    def last_chunks(self) -> list[str]:
        body = self.body()
        chunks = []
        for at, item in enumerate(body["output"]):
            is_message = item["type"] == "message"
            chunks += self._end_message(item) if is_message else self._call_chunks(at, item)
        return [*chunks, self._named(f"response.{body['status']}", response=body)]

    def _begin_message(self) -> str:
        """The events that begin the message, once."""
        if self._has_begun_message:
            return ""
        self._has_begun_message = True
        item = self._item("in_progress") | {"content": []}
        part = self._part() | {"text": "", "logprobs": []}
        begin = self._named("response.output_item.added", output_index=0, item=item)
        return begin + self._of_part("content_part.added", part=part)

    def _end_message(self, item: dict[str, Any]) -> list[str]:
        begin = self._begin_message()
        (part,) = item["content"]
        text_done = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            begin + self._of_part("output_text.done", **text_done),
            self._of_part("content_part.done", part=part),
            self._named("response.output_item.done", output_index=0, item=item),
        ]

    def _call_chunks(self, output_index: int, call: dict[str, Any]) -> list[str]:
        begun = call | {"arguments": "", "status": "in_progress"}
        place = {"output_index": output_index, "item_id": call["id"]}
        kind = "response.function_call_arguments"
        done = {"name": call["name"], "arguments": call["arguments"]}
        return [
            self._named("response.output_item.added", output_index=output_index, item=begun),
            self._named(f"{kind}.delta", **place, delta=call["arguments"]),
            self._named(f"{kind}.done", **place, **done),
            self._named("response.output_item.done", output_index=output_index, item=call),
        ]

    def _calls(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "function_call",
                "id": f"{self._id.replace('resp_', 'fc_')}{at}",
                "call_id": call.id,
                **self._names.get(call.name, {"name": call.name}),
                "arguments": call.arguments,
                "status": "completed",
            }
            for at, call in enumerate(self._messages[0].message.calls)
        ]

    def error_chunk(self, refused: Refused) -> str:
        """The events that end a stream with an error: some clients know only the first, some only
        the second.

        The fields of `error` are flat, as documented, and nested, as clients need them to raise an
        error.
        """
        error = refused.error.model_dump()
        flat = {name: error[name] for name in ("code", "message", "param")}
        said = {"code": "server_error", "message": error["message"]}
        failed = self._named("response.failed", response=self._response("failed", error=said))
        return failed + self._named("error", **flat, error=error)

    @property
    def _status(self) -> str:
        return "incomplete" if self._choices[0].finish == "length" else "completed"

    def _response(self, status: str, **rest: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **self._echoed_fields,
            **rest,
        }

    def _item(self, status: str) -> dict[str, Any]:
        item = {"id": self._item_id, "type": "message", "role": "assistant", "status": status}
        return item | {"content": [self._part()]}

    def _part(self) -> dict[str, Any]:
        choice = self._choices[0]
        text = self._messages[0].message.content
        part = {"type": "output_text", "text": text, "annotations": []}
        return part | {"logprobs": self._entries(choice.tokens)}

    def _entries(self, tokens: Sequence[TokenText]) -> list[dict[str, Any]]:
        shaped = self._logprobs(tokens)
        return [] if shaped is None else shaped["content"]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        entry = super()._entry(token_id, logprob)
        return entry | {"bytes": entry["bytes"] or []}  # this API has no null here

    def _of_part(self, kind: str, **rest: Any) -> str:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._named(f"response.{kind}", **place, **rest)

    def _named(self, kind: str, **rest: Any) -> str:
        event = {"type": kind, "sequence_number": self._num_events, **rest}
        self._num_events += 1
        return sse(event, kind)
