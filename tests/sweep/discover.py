"""Which architectures of the installed transformers have routed experts: found, not listed, so that
those of a newer transformers appear by themselves.

A config that names a number of routed experts, itself or in a sub-config, leads to its modelling
file; every class there that can generate and is made from such a config is one architecture.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

# num_experts, num_local_experts, n_routed_experts, moe_num_experts: how many, but not shared ones.
NUM_EXPERTS = re.compile(r"(^|_)(n|num)_((?!shared)\w+_)?experts$")
# What a config file says if its config may have experts: their number, or any model inside.
MAY_HAVE_EXPERTS = re.compile(r"(n|num)_\w*experts|AutoConfig|CONFIG_MAPPING")


class Architecture(NamedTuple):
    """One generating class of transformers with routed experts."""

    model_type: str
    model_class: Any
    config_class: Any

    @property
    def name(self) -> str:
        return str(self.model_class.__name__)


def with_sub_configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """The config and all configs inside it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from with_sub_configs(value)


def names_routed_experts(config_class: Any) -> bool:
    """Whether the config has a number of routed experts, even if it is none by default. A config
    that cannot be made without arguments or optional packages has not: it wraps models that are
    found by themselves."""
    try:
        parts = list(with_sub_configs(config_class()))
    except (ValueError, TypeError, OSError, ImportError, StrictDataclassError):
        return False
    return any(NUM_EXPERTS.search(name) for part in parts for name in vars(part))


@cache
def modelling_files() -> dict[str, list[str]]:
    """{folder in transformers.models: its model types with routed experts}. No modelling file is
    imported for this, so that collecting tests stays quick."""
    models = Path(transformers.__file__).parent / "models"
    texts = {file.parent.name: file.read_text("utf-8") for file in models.glob("*/config*_*.py")}
    found: dict[str, list[str]] = {}
    for model_type in CONFIG_MAPPING:
        folder = model_type_to_module_name(model_type)
        if not MAY_HAVE_EXPERTS.search(texts.get(folder, "")):
            continue
        config_class = CONFIG_MAPPING[model_type]
        if names_routed_experts(config_class):
            folder = config_class.__module__.split(".")[-2]
            if not (models / folder / f"modeling_{folder}.py").exists():
                continue  # the classes are those of another folder
            found.setdefault(folder, []).append(model_type)
    return {folder: sorted(found[folder]) for folder in sorted(found)}


def architectures_in(folder: str) -> list[Architecture]:
    """The generating classes with routed experts of one folder. A class derived from another of
    them, for the same config, is its deprecated alias and left out."""
    name = f"transformers.models.{folder}.modeling_{folder}"
    classes: list[Any] = [
        value
        for value in vars(importlib.import_module(name)).values()
        if inspect.isclass(value) and issubclass(value, PreTrainedModel)
    ]
    found = {
        model_class: Architecture(_model_type(folder, config_class), model_class, config_class)
        for model_class in classes
        if model_class.__module__ == name and model_class.can_generate()
        if (config_class := model_class.config_class) and names_routed_experts(config_class)
    }
    return sorted(
        architecture
        for model_class, architecture in found.items()
        for bases in [[found[base] for base in model_class.__mro__[1:] if base in found]]
        if all(base.config_class is not architecture.config_class for base in bases)
    )


def _model_type(folder: str, config_class: Any) -> str:
    """A part of a model may have no type of its own."""
    return config_class.model_type or f"(part of {folder})"
