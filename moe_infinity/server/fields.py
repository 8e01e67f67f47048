"""Rules for the fields of a request.

A body declares the fields that have an effect here, or that the answer repeats. A field that is
null, or an optional one that is empty, is as absent. What becomes of any other field is in the
tables of `field_tables`:

    SAME       another name of a field that the body declares: read as that field
    HARMLESS   cannot change the text of an answer: left out
    REFUSED    would change what is asked for, and cannot be done: a 400 that names the field,
    SAMPLERS   unless its value is one without effect
    ALWAYS     is done in any case: a 400 for false
    the rest   left out, with a line in the log for the first request that has such a field

With `--strict-fields` every field that is not declared is a 400.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moe_infinity.server.field_tables import EMPTY, HARMLESS, OTHER_NAMES, UNDONE, problem_of
from moe_infinity.server.limits import LENGTHS, NAME_CHARACTERS
from moe_infinity.server.refusals import BadRequest, Refused, require_within

logger = logging.getLogger(__name__)
MAX_LOGGED = 1000  # names come from clients, and each is kept to be logged once
KEEPS_EMPTY = "an empty value of this field means something"  # to be put into an annotation

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]  # the first wrong one ends the check of all


class BoundedBody(BaseModel):
    """A JSON object whose lists and objects have limits."""

    @model_validator(mode="before")
    @classmethod
    def _require_lengths(cls, fields: Any) -> Any:
        """Raises Refused, before any of the fields is looked into."""
        for name, value in fields.items() if isinstance(fields, dict) else ():
            if name in LENGTHS and isinstance(value, list | dict):
                require_within(LENGTHS[name], len(value), name)
        return fields


def whole(value: Any) -> Any:
    """Return a number without a fraction as an integer: JSON has one kind of numbers, and some
    languages write 4 as 4.0.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Body(BoundedBody):
    """A JSON object, without conversions, without NaN or infinity. FieldCheck decides on fields
    that it does not declare.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_empty_fields(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {
            name: whole(value) for name, value in fields.items() if not cls._is_absent(name, value)
        }

    @classmethod
    def _is_absent(cls, name: str, value: Any) -> bool:
        if value is None:
            return True
        if value not in EMPTY:
            return False
        known = {field.alias or name: field for name, field in cls.model_fields.items()}
        if name not in known:
            return True
        field = known[name]
        return not field.is_required() and KEEPS_EMPTY not in field.metadata

    def left_out(self) -> str | None:
        """Return what this is, if it is left out of the request as a whole; otherwise None."""
        return None


class RequestBody(Body):
    """The body of a request for a model."""

    model: Annotated[str | None, Field(max_length=NAME_CHARACTERS.most)] = None

    @model_validator(mode="before")
    @classmethod
    def _read_other_names(cls, fields: Any) -> Any:
        """Raises BadRequest for two names with different values."""
        if not isinstance(fields, dict):
            return fields
        declared = {field.alias or name for name, field in cls.model_fields.items()}
        read = dict(fields)
        for name, value in fields.items():
            line = () if name in declared else OTHER_NAMES.get(name, ())
            own = next((each for each in line if each in declared), None)
            # This one may be a text with strings in quotes.
            if own is None or (name == "custom_stopping_strings" and isinstance(value, str)):
                continue
            del read[name]
            if read.get(own) in EMPTY:
                read[own] = value
            elif value not in (*EMPTY, read[own]):
                raise BadRequest(f"this and {own} say different things", param=name)
        return read


class ToolOfType(Body):
    """A tool, which is left out unless it is of the one type that is known."""

    known_type: ClassVar[str]
    type: str | None = None  # None: of the known one

    @model_validator(mode="before")
    @classmethod
    def _read_no_fields_of_other_types(cls, fields: Any) -> Any:
        kind = fields.get("type") if isinstance(fields, dict) else None
        return fields if kind in (None, "", cls.known_type) else {"type": kind}

    def left_out(self) -> str | None:
        is_known = self.type in (None, self.known_type)
        return None if is_known else f"a tool of type {short(str(self.type))}"


class FieldCheck:
    """Decides on fields that bodies do not declare."""

    def __init__(self, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._logged: set[str] = set()

    def apply(self, body: Body) -> None:
        """Remove such fields from a body. Raises Refused for those that cannot be left out."""
        for path, part in parts_of(body):
            extra = part.__pydantic_extra__ or {}
            if (what := part.left_out()) is not None:
                self._leave_out(path, what)
            else:
                for name, value in extra.items():
                    self._decide((*path, name), value)
            extra.clear()

    def _decide(self, path: tuple[str, ...], value: Any) -> None:
        name = path[-1]
        if self._is_strict:
            raise refused_field(path, "this field is not supported")
        is_at_top = len(path) == 1
        if is_at_top and (problem := problem_of(name, value)) is not None:
            raise refused_field(path, problem)
        if name not in HARMLESS and not (is_at_top and name in UNDONE):
            self._leave_out(path, f"the field {short(name)}")

    def _leave_out(self, path: tuple[str, ...], what: str) -> None:
        if self._is_strict:
            raise refused_field(path, f"not supported: {what}")
        if what not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(what)
            logger.warning("requests have %s, which has no effect here", what)


def short(name: str) -> str:
    """Return a name that a client sent, for a log."""
    return repr(name[:80])


def refused_field(path: tuple[str, ...], message: str) -> Refused:
    """Return a refusal of the field at a path of names and positions."""
    return Refused(400, f"{'.'.join(path)}: {message}", param=path[0])


def parts_of(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Body]]:
    """Yield the bodies within a value, itself included, with their paths."""
    if isinstance(value, Body):
        yield path, value
        for name, field in type(value).model_fields.items():
            yield from parts_of(getattr(value, name), (*path, field.alias or name))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from parts_of(item, (*path, str(at)))
