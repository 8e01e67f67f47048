"""The OpenAPI document at /openapi.json.

FastAPI cannot write it: the routes read their bodies themselves, after the checks of key and size.
The bodies here are the models of protocol.py and responses.py.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from moe_infinity import __version__
from moe_infinity.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from moe_infinity.server.responses import ResponsesBody

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
KEYS = {  # fields of the answer to a POST
    "/v1/completions": ("id", "object", "created", "model", "choices", "usage"),
    "/v1/chat/completions": ("id", "object", "created", "model", "choices", "usage"),
    "/v1/responses": ("id", "object", "created_at", "model", "status", "output", "usage"),
    "/tokenize": ("tokens", "count", "max_model_len"),
    "/detokenize": ("prompt",),
}
REFUSALS = {
    "400": "a field is wrong or not supported; `param` names it",
    "401": "no key, or a wrong one",
    "403": "asked by a page of another site",
    "404": "no such model",
    "413": "the body is too large",
}
BUSY = {
    "429": "as many wait as may; Retry-After says when to come again",
    "500": "generation failed",
    "503": "stopping, or the engine died",
    "504": "not done within the deadline",
}
REF = "#/components/schemas/{model}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document_of(model_name: str) -> dict[str, Any]:
    """The document of a server of one model."""
    models: list[Any] = [(body, "validation") for body in BODIES.values()]
    _, definitions = models_json_schema(models, ref_template=REF)
    schemas: dict[str, Any] = {**definitions["$defs"], "Error": ERROR}
    for body in BODIES.values():
        schemas[body.__name__]["properties"]["model"]["anyOf"][0]["const"] = model_name
    paths = {path: {"post": _post(path)} for path in BODIES} | _gets(model_name)
    return {
        "openapi": "3.1.0",
        "info": {"title": "MoE-Infinity", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(path: str) -> dict[str, Any]:
    schema = {"$ref": REF.format(model=BODIES[path].__name__)}
    is_generating = path.startswith("/v1/")
    answer = _json({"type": "object", "required": list(KEYS[path])})
    if is_generating:
        answer["text/event-stream"] = {}
    return {
        "security": [{}, {"key": []}],
        "requestBody": {"required": True, "content": _json(schema)},
        "responses": {
            "200": {"description": "the answer", "content": answer},
            **_refusals(REFUSALS | (BUSY if is_generating else {})),
        },
    }


def _gets(model_name: str) -> dict[str, Any]:
    name = {"name": "name", "in": "path", "required": True}
    paths: dict[str, Any] = {
        "/v1/models": _get("the one model"),
        "/v1/models/{name}": _get("its name and context", more={"404": "no such model"}),
        "/stats": _get("what the page draws"),
        "/metrics": _get("for Prometheus", content={"text/plain": {"schema": {"type": "string"}}}),
    }
    schema = {"type": "string", "enum": [model_name]}
    paths["/v1/models/{name}"]["get"]["parameters"] = [name | {"schema": schema}]
    for path in ("/health", "/health/live", "/health/ready"):
        answers = {"200": "yes", "503": "no"}
        content = _json({"type": "object"})
        responses = {s: {"description": d, "content": content} for s, d in answers.items()}
        paths[path] = {"get": {"responses": responses}}
    return paths


def _get(
    what: str, *, content: dict[str, Any] | None = None, more: dict[str, str] | None = None
) -> dict[str, Any]:
    refusals = {status: REFUSALS[status] for status in ("401", "403")} | (more or {})
    answer = {"description": what, "content": content or _json({"type": "object"})}
    return {
        "get": {
            "security": [{}, {"key": []}],
            "responses": {"200": answer, **_refusals(refusals)},
        }
    }


def _refusals(refusals: dict[str, str]) -> dict[str, Any]:
    content = _json({"$ref": REF.format(model="Error")})
    return {status: {"description": what, "content": content} for status, what in refusals.items()}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
