"""A pytest plugin for transformers' own tests: every model with routed experts that a test makes or
loads is saved to a folder, and what the test gets is the model of MoE(folder).

    python -m pytest -p scripts.through_backend --through-backend exact tests/models/olmoe

A model that MoE does not take, because it has no experts say, stays what it was. The property
`through_backend` of a test case in --junitxml is the number of models that MoE took.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, set_seed

FORMS = {"default": {}, "exact": {"exact": True}}
SHARE = "60%"  # of two experts, with which some tests do, one is held


class Backend:
    """The models of one test."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._loaded: list[Any] = []
        self._folder = Path(tempfile.mkdtemp())
        self.is_busy = False  # a model is being made; those inside it stay what they are

    @property
    def num_loaded(self) -> int:
        return len(self._loaded)

    def take(self, stock: Any) -> Any:
        """The same model with its experts in a folder; `stock` if MoE does not take it."""
        from moe_infinity import MoE, UnsupportedModelError

        tensors = chain(stock.parameters(), stock.buffers())
        if not stock.can_generate() or any(tensor.is_meta for tensor in tensors):
            return stock
        folder = self._folder / str(len(self._loaded))
        stock.save_pretrained(folder)
        try:
            moe = MoE(folder, host_memory=SHARE, preload="off", **self._options)
        except UnsupportedModelError:
            shutil.rmtree(folder)
            return stock
        self._loaded.append(moe)
        return as_it_was(moe.model, stock, folder)

    def close(self) -> None:
        for moe in self._loaded:
            moe.close()
        shutil.rmtree(self._folder)


current: Backend | None = None


def is_stock() -> bool:
    """True while models are to be what they are without us."""
    return current is None or current.is_busy


def handed_over(make: Callable[[], Any]) -> Any:
    """The model that `make` makes, or a tuple that begins with it, by way of the backend."""
    if current is None or current.is_busy:
        return make()
    current.is_busy = True
    try:
        made = make()
        return (current.take(made[0]), *made[1:]) if isinstance(made, tuple) else current.take(made)
    finally:
        current.is_busy = False


def made_by_calling(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """The `__new__` of all models. What it returns is whole, and `__init__` leaves it alone."""
    empty = object.__new__(cls)
    if is_stock() or not (args or kwargs):  # without arguments it is for a copy
        return empty

    def make() -> Any:
        empty.__init__(*args, **kwargs)
        return empty

    return handed_over(make)


def leaving_whole_ones_alone(cls: Any) -> None:
    """Change the `__init__` of a class of models."""
    own = cls.__init__

    @wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_stock():
            own(self, *args, **kwargs)

    cls.__init__ = init


def watch_all_models() -> None:
    """See to it that models are handed over, whoever makes them. It has to come before modules with
    models are imported.
    """
    begin_subclass = vars(PreTrainedModel)["__init_subclass__"].__func__

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        begin_subclass(cls, **kwargs)
        if "__init__" in vars(cls):
            leaving_whole_ones_alone(cls)

    def handing_over(own: Any) -> Any:
        return lambda cls, *args, **kwargs: handed_over(partial(own, cls, *args, **kwargs))

    PreTrainedModel.__init_subclass__ = classmethod(init_subclass)
    PreTrainedModel.__new__ = made_by_calling
    leaving_whole_ones_alone(PreTrainedModel)
    for name in ("from_pretrained", "_from_config"):
        own = vars(PreTrainedModel)[name].__func__
        setattr(PreTrainedModel, name, classmethod(handing_over(own)))


def as_it_was(model: Any, stock: Any, folder: Path) -> Any:
    """`model` with what a folder does not say of `stock`."""
    for part, theirs in zip(model.modules(), stock.modules(), strict=False):
        if isinstance(part, PreTrainedModel):
            part.config._attn_implementation = theirs.config._attn_implementation
    model.train(stock.training)
    vars(model)["save_pretrained"] = partial(copy_checkpoint, folder)  # as its refusal advises
    return model


def copy_checkpoint(folder: Path, target: Any, *_: Any, **__: Any) -> None:
    shutil.copytree(folder, target, dirs_exist_ok=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--through-backend", choices=FORMS, help="how MoE loads models")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--through-backend") is not None:
        watch_all_models()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    global current
    form = item.config.getoption("--through-backend")
    set_seed(0)
    if form is not None:
        current = Backend(FORMS[form])
    try:
        return (yield)
    finally:
        if current is not None:
            item.user_properties.append(("through_backend", current.num_loaded))
            current.close()
            current = None
