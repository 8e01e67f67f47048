"""The gguf package's map from parameters of a model to tensors of a file.

The package knows which tensors an architecture has. Of one that is newer than the package, the file
says that; the names of its parameters are then those of any architecture.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf

from moe_infinity.gguf.file import GgufModel

SUFFIXES = (".weight", ".bias")


def name_map(file: GgufModel, num_layers: int) -> Callable[[str], str | None]:
    """Return a function that gives a parameter's name in the file, or None if it has none."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    if file.architecture in numbers:
        known = gguf.get_tensor_name_map(numbers[file.architecture], num_layers)
        return lambda param: known.get_name(param, SUFFIXES)
    found = _of_its_tensors(file, num_layers)

    def name_of(param: str) -> str | None:
        start, _, suffix = param.rpartition(".")
        return found.get(param) or (f"{found[start]}.{suffix}" if start in found else None)

    return name_of


def _of_its_tensors(file: GgufModel, num_layers: int) -> dict[str, str]:
    """Return names of tensors that are in the file, by names of modules, as the package does for an
    architecture: of two tensors with one module's name, the later counts.
    """
    stored = {name.rpartition(".")[0] for name in file.tensors}
    maps = gguf.TensorNameMap
    found: dict[str, str] = {}
    for tensor, modules in [*maps.mappings_cfg.items(), *maps.block_mappings_cfg.items()]:
        for number in range(num_layers):
            name = gguf.TENSOR_NAMES[tensor].format(bid=number)
            if name in stored:
                found |= {module.format(bid=number): name for module in modules}
    return found
