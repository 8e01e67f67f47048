"""The vision part of a GGUF model, which llama.cpp keeps in a file of its own, called mmproj.

the config       of both together: the text model's, and what the file's metadata say
the weights      under the names of transformers' class for both
the processor    images/processor.py makes it of the same metadata
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from math import prod
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import Concatenate, WeightConverter

from moe_infinity.checkpoint.file_names import MMPROJ, find_gguf
from moe_infinity.checkpoint.headers import StoredTensor
from moe_infinity.checkpoint.plan import Weights
from moe_infinity.errors import CheckpointError, ConfigError, UnsupportedModelError
from moe_infinity.gguf.file import GgufModel, read_gguf_header
from moe_infinity.gguf.map import SUFFIXES
from moe_infinity.gguf.names import weight_of
from moe_infinity.images.projectors import PROJECTORS, Projector
from moe_infinity.loading.kind import Kind
from moe_infinity.loading.model import NO_MODEL
from moe_infinity.printable import printable
from moe_infinity.system.files import expanded
from moe_infinity.untrusted.config_limits import check_config, few_modules

logger = logging.getLogger(__name__)

KEYS = "clip.vision."
TYPES = ("clip.vision.projector_type", "clip.projector_type")
PATCHES = "v.patch_embd.weight"
LIMITS = (".input_max", ".input_min", ".output_max", ".output_min")  # of linear layers that clip
SECOND_FRAME = f"{PATCHES}.1"
AUDIO = ("a.", "mm.a.")  # how names of an audio part begin
MAX_BLOCKS = 200


@dataclass(frozen=True, slots=True)
class Mmproj:
    """The header of a vision part."""

    path: Path
    projector: Projector
    metadata: Mapping[str, Any]  # those of `clip.vision.`, without that
    tensors: Mapping[str, StoredTensor]

    def fields(self, names: Mapping[str, str], most: int) -> dict[str, Any]:
        """Values of the metadata, by name instead of key. Raises CheckpointError for one that is
        neither a number above 0 and at most `most` nor three of them, for colours.
        """
        found = {}
        for key, name in names.items():
            value = self.metadata.get(key)
            if value is None:
                continue
            numbers = value if isinstance(value, list) and len(value) == 3 else [value]
            is_right = all(type(n) in (int, float) and 0 <= n <= most for n in numbers)
            if not is_right or value == 0:
                raise CheckpointError(f"{self.path}: {KEYS}{key} is {value!r:.40}")
            found[name] = value
        return found


def find_mmproj(checkpoint: str, named: str | Path | None) -> Path | None:
    """The file with the vision part of a GGUF model: the one that a user named, or the only one
    beside the model, or in the folder that was named, with "mmproj" in its name. None if there is
    none or several. Raises ConfigError for one that is named for another model, CheckpointError for
    one that is not there.
    """
    model = find_gguf(checkpoint)
    if model is None:
        if named is not None:
            raise ConfigError(f"mmproj is for a GGUF model, and {checkpoint} is none")
        return None
    if named is not None:
        path = expanded(str(named))
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        return path
    named_folder = expanded(checkpoint)  # the model may be one level below
    folders = {model.parent, named_folder if named_folder.is_dir() else model.parent}
    files = [path for folder in folders for path in folder.glob("*.gguf")]
    beside = sorted(path for path in files if MMPROJ.search(path.name))
    if len(beside) > 1:
        logger.info("%s: %d mmproj files, --mmproj names one of them", model.parent, len(beside))
    return beside[0] if len(beside) == 1 else None


def read_mmproj(path: Path) -> Mmproj:
    """Raise CheckpointError for a damaged file, UnsupportedModelError for a vision part that is not
    known.
    """
    header = read_gguf_header(path)
    if header.metadata.get("general.architecture") != "clip":
        raise CheckpointError(f"{path}: no vision part of a model (mmproj)")
    said = next((header.metadata[key] for key in TYPES if key in header.metadata), None)
    if said not in PROJECTORS:
        raise UnsupportedModelError(
            f"{path}: a vision part of type {said!r:.40}, expected one of {', '.join(PROJECTORS)}"
        )
    metadata = {
        key.removeprefix(KEYS): value
        for key, value in header.metadata.items()
        if key.startswith(KEYS)
    }
    return Mmproj(path, PROJECTORS[said], metadata, {each.name: each for each in header.tensors})


class VisionPart:
    """Makes one kind of a GGUF text model and its vision part, if there is one."""

    def __init__(self, checkpoint: str, named: str | Path | None = None) -> None:
        """`named`: a file that a user named; otherwise one may lie beside the model."""
        self.problem = ""  # of a file that was found and cannot be used
        self._checkpoint = checkpoint
        self._named = named

    def __call__(self, kind: Kind) -> Kind:
        """The kind of both together; without a vision part, that of a model that reads text. A file
        that nobody named is left aside with a warning if it cannot be used. Raises
        UnsupportedModelError, CheckpointError, ConfigError.
        """
        path = find_mmproj(self._checkpoint, self._named)
        if kind.gguf is None:
            return kind
        if path is None:
            return _blind(kind)
        try:
            return _together(read_mmproj(path), kind, kind.gguf)
        except (CheckpointError, UnsupportedModelError) as error:
            if self._named is not None:
                raise
            line = str(error).partition("\n")[0].replace(str(path), path.name)  # clients see it
            self.problem = printable(line, 500)
            logger.warning("%s\nwithout it, the model takes no images", error)
            return _blind(kind)


class Blind:
    """A mark of classes that could see, and whose model has no vision part."""


def _blind(kind: Kind) -> Kind:
    """The kind of a model without its vision part, where transformers has only a class for both."""
    stock = kind.model_class
    if "pixel_values" not in signature(stock.forward).parameters:
        return kind

    def __init__(self: Any, config: Any) -> None:
        stock.__init__(self, config)
        others = [name for name, _ in self.model.named_children() if name != "language_model"]
        for name in others:
            delattr(self.model, name)

    attributes = {
        "__module__": stock.__module__, "__qualname__": stock.__qualname__, "__init__": __init__,
    }  # fmt: skip
    model_class = type(stock.__name__, (stock, Blind), attributes)
    return dataclasses.replace(kind, model_class=model_class)


def _together(mmproj: Mmproj, kind: Kind, model: GgufModel) -> Kind:
    """The kind of a text model and a vision part whose tensors fit it."""
    config = _config_of(mmproj, kind.config, model)
    model_class = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    try:
        with few_modules(str(mmproj.path)), torch.device("meta"):
            _weights_of(mmproj, model_class._from_config(config))
    except NO_MODEL as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{mmproj.path}: no model can be built of it: {what}") from error
    return dataclasses.replace(
        kind,
        config=config,
        model_class=model_class,
        weights_beside=partial(_weights_of, mmproj),
    )


def _config_of(mmproj: Mmproj, text: Any, model: GgufModel) -> Any:
    """transformers' config of both parts together."""
    projector = mmproj.projector
    where = mmproj.path
    if model.architecture != projector.architecture:
        raise UnsupportedModelError(
            f"{where}: the vision part of a {projector.architecture} model, this one is "
            f"{model.architecture}"
        )
    width = mmproj.metadata.get("projection_dim")
    if width != text.hidden_size:
        raise CheckpointError(
            f"{where}: the vision part of a model whose width is {width}, not {text.hidden_size}"
        )
    tokens = {token: token_id for token_id, token in enumerate(model.vocabulary.tokens)}
    ids = {name: tokens[t] for name, t in projector.tokens.items() if t in tokens}
    first = next(iter(projector.tokens))
    if first not in ids:
        raise UnsupportedModelError(f"{where}: the model has no token {projector.tokens[first]}")
    text = copy.deepcopy(text)
    for name, value in projector.text.items():
        setattr(text, name, value)
    sections = model.value("rope.dimension_sections")
    if isinstance(sections, list):
        text.rope_parameters["mrope_section"] = sections[:3]
    try:
        largest = max(max(tensor.shape) for tensor in mmproj.tensors.values())
        said = mmproj.fields(projector.fields, most=largest)
        vision = said | projector.derived(mmproj.tensors)
    except (LookupError, ArithmeticError, ValueError) as error:
        raise CheckpointError(f"{where}: damaged, no usable tensor {error}") from error
    check_config(where, vision, trust_remote_code=False)
    try:
        config = transformers.AutoConfig.for_model(
            projector.model_type,
            text_config=text,
            vision_config=vision,
            tie_word_embeddings=text.tie_word_embeddings,
            **ids,
        )
    except Exception as error:  # each config class checks in its own way
        raise UnsupportedModelError(f"{where}: no config can be made of it: {error}") from error
    config.dtype = text.dtype
    return config


def _weights_of(mmproj: Mmproj, model: Any) -> tuple[Weights, list[WeightConverter]]:
    """The weights of the vision part, by name in the model, and rules that make parameters of them.
    Raises CheckpointError for a tensor that is missing, of another shape, or no parameter.
    """
    weights: Weights = {}
    rules = []
    unused = {name for name in mmproj.tensors if not name.startswith(AUDIO)}
    num_blocks = min(len(mmproj.tensors), MAX_BLOCKS)
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, num_blocks)
    for param, value in model.state_dict().items():
        if not param.startswith(mmproj.projector.towers):
            continue
        tensor = _tensor_of(param, mmproj, known)
        if tensor is None:
            raise CheckpointError(f"{mmproj.path}: no tensor for {param}")
        unused -= {tensor.name}
        wanted = tuple(value.shape)
        second = mmproj.tensors.get(SECOND_FRAME) if tensor.name == PATCHES else None
        if second is not None:
            unused -= {second.name}
            for frame, each in enumerate((tensor, second)):
                shape = *each.shape[:2], 1, *each.shape[2:]
                each = dataclasses.replace(each, shape=shape)
                weights[f"{param}.{frame}"] = weight_of(f"{param}.{frame}", each)
            patterns = [rf"{re.escape(param)}\.{frame}$" for frame in (0, 1)]
            rules.append(WeightConverter(patterns, [param], [Concatenate(2)]))
            continue
        if tensor.shape != wanted and prod(tensor.shape) == prod(wanted):
            is_of_patches = tensor.name == PATCHES
            undo = partial(_colours_last, tensor.shape) if is_of_patches else None
            tensor = dataclasses.replace(tensor, shape=wanted, undo=undo)
        if tensor.shape != wanted:
            raise CheckpointError(
                f"{mmproj.path}: {tensor.name} has shape {list(tensor.shape)}, the model wants "
                f"{list(wanted)}"
            )
        weights[param] = weight_of(param, tensor)
    if unused:
        raise CheckpointError(f"{mmproj.path}: tensor {min(unused)} is no parameter of this model")
    return weights, rules


def _tensor_of(param: str, mmproj: Mmproj, known: Any) -> StoredTensor | None:
    """The tensor that is this parameter. The package gives some names without their end."""
    name = param
    for ours, theirs in mmproj.projector.renamed:
        name = name.replace(ours, theirs)
    found = known.get_name(name, SUFFIXES + LIMITS) or name
    return mmproj.tensors.get(found) or mmproj.tensors.get(f"{found}.weight")


def _colours_last(shape: tuple[int, ...], stored: Tensor) -> Tensor:
    """[C, P * P * 3] of a weight that the converter stored as [C, 3, P, P]."""
    return stored.view(shape).permute(0, 2, 3, 1).reshape(stored.shape)
