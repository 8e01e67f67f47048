"""Responses that are kept, as their owners get and delete them."""

from __future__ import annotations

import json
from typing import Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from moe_infinity.server.backend import Backend
from moe_infinity.server.kept import ITEM_OF, RESPONSE_OF, TURN_OF, KeptTexts
from moe_infinity.server.refusals import BadRequest, Refused
from moe_infinity.server.routes import add_get


class KeptApi:
    """The routes below /v1/responses/ID. What another key said is not there."""

    def __init__(self, backend: Backend, kept: KeptTexts) -> None:
        self._backend = backend
        self._kept = kept

    def add_to(self, router: APIRouter) -> None:
        add_get(router, "/v1/responses/{response_id}", self.response)
        add_get(router, "/v1/responses/{response_id}/input_items", self.input_items)
        router.add_api_route("/v1/responses/{response_id}", self.delete, methods=["DELETE"])

    async def response(
        self, request: HttpRequest, response_id: str, stream: bool = False
    ) -> Response:
        """An answer as it was given."""
        if stream:
            raise BadRequest("no response here is made in the background", param="stream")
        text = self._text(request.state.owner, RESPONSE_OF, response_id)
        return Response(text, media_type="application/json")

    async def delete(self, request: HttpRequest, response_id: str) -> Response:
        """Forget an answer, and what was said before it in the same request."""
        owner = request.state.owner
        response = json.loads(self._text(owner, RESPONSE_OF, response_id))
        for item in response["output"]:
            self._kept.drop(owner, ITEM_OF + item["id"])
        self._kept.drop(owner, TURN_OF + response_id)
        self._kept.drop(owner, RESPONSE_OF + response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def input_items(
        self,
        request: HttpRequest,
        response_id: str,
        after: str | None = None,
        limit: int = Query(20, ge=1, le=100),
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """A page of what an answer was made from: its input, and all turns before."""

        def answered() -> Response:
            items = self._input_of(request.state.owner, response_id)
            if order == "desc":
                items.reverse()
            ids = [item["id"] for item in items]
            if after is not None and after not in ids:
                raise BadRequest(f"no such item: {after[:80]!r}", param="after")
            begin = 0 if after is None else ids.index(after) + 1
            page = items[begin : begin + limit]
            first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
            return JSONResponse(
                {
                    "object": "list",
                    "data": page,
                    "first_id": first,
                    "last_id": last,
                    "has_more": begin + limit < len(items),
                }
            )

        return await self._backend.prepared(request, answered)

    def _input_of(self, owner: str, id_: str) -> list[dict[str, Any]]:
        """The items of a conversation up to an answer, or those that are still kept."""
        turn = json.loads(self._text(owner, TURN_OF, id_))
        turns = [self._said(owner, id_, turn)]
        while (id_ := turn["previous"]) and (text := self._kept.get(owner, TURN_OF + id_)):
            turn = json.loads(text)
            turns.append([*self._said(owner, id_, turn), *turn["output"]])
        return [item for items in reversed(turns) for item in items]

    def _said(self, owner: str, id_: str, turn: dict[str, Any]) -> list[dict[str, Any]]:
        """The items that the client sent, each with an id. Of those that the model cannot read only
        the type is kept: they are left out.
        """
        items = []
        for at, item in enumerate(turn["said"]):
            if item["type"] == "item_reference":
                text = self._kept.get(owner, ITEM_OF + item["id"])
                item = {} if text is None else json.loads(text)
            if item.keys() - {"type"}:
                items.append({"id": f"item_{id_}_{at}", "status": "completed"} | in_parts(item))
        return items

    def _text(self, owner: str, kind: str, id_: str) -> str:
        text = self._kept.get(owner, kind + id_)
        if text is None:
            raise Refused(404, f"Response with id {id_[:80]!r} not found.")
        return text


def in_parts(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item with the text of a message as a part, as the API lists it."""
    if not isinstance(text := item.get("content"), str):
        return item
    is_answer = item["role"] == "assistant"
    part = {"type": "output_text" if is_answer else "input_text", "text": text}
    return item | {"content": [part | ({"annotations": []} if is_answer else {})]}
