"""The kind of model that a checkpoint folder says it is: its config, the class that runs it, how
its weights are packed, its tokenizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from moe_infinity.checkpoint.file_names import find_gguf
from moe_infinity.checkpoint.packing import Format
from moe_infinity.errors import CheckpointError, ConfigError, UnsupportedModelError
from moe_infinity.experts import COMPUTE_DTYPES
from moe_infinity.formats.methods import find_format, is_packed
from moe_infinity.gguf.config import config_of
from moe_infinity.gguf.file import GgufModel, read_gguf
from moe_infinity.gguf.generation import generation_of
from moe_infinity.gguf.tokenizer import tokenizer_of
from moe_infinity.printable import printable
from moe_infinity.untrusted.config_limits import PACKING, read_object
from moe_infinity.untrusted.folder import check_adapter, check_configs, check_tokenizer, file_of

# Where older versions of tools say how weights are packed, and nothing in config.json; their method
# if the file names none.
OF_TOOLS = {
    "hf_quant_config.json": None, "quantize_config.json": "gptq", "quant_config.json": "awq",
}  # fmt: skip
TOKENIZER_FILES = ("*token*", "tekken.json", "vocab.*")


@dataclass(frozen=True, slots=True)
class Kind:
    """The facts about a model that are known before its weights are looked at."""

    config: Any  # transformers', without what it says of quantization: unpacking is our business
    model_class: Any
    packing: Format | None  # None: weights are stored as they are, or in a GGUF file
    gguf: GgufModel | None = None
    generation: transformers.GenerationConfig | None = None  # None: as transformers finds it
    # Of a file beside the GGUF file: weights of a model by name, and rules for them.
    weights_beside: Callable[[Any], tuple[dict[str, Any], list[Any]]] = lambda model: ({}, [])

    def compute_dtype(self, dtype: str) -> str:
        """The dtype for transformers; packed weights do not name one."""
        if self.packing is not None and dtype == "auto" and self.config.dtype is None:
            of_text = self.config.get_text_config().dtype
            return "bfloat16" if of_text is None else str(of_text).removeprefix("torch.")
        return dtype


def find_kind(
    checkpoint: str, *, config_from: str | None = None, trust_remote_code: bool = False
) -> Kind:
    """The kind of a folder, hub id or GGUF file, whose config may be elsewhere. Raises
    UnsupportedModelError, CheckpointError.
    """
    file = find_gguf(checkpoint)
    if file is not None:
        return _kind_of_gguf(file, config_from, trust_remote_code=trust_remote_code)
    kind = _kind_of_folder(checkpoint, trust_remote_code=trust_remote_code)
    if config_from is None:
        return kind
    other = _kind_elsewhere(config_from, trust_remote_code=trust_remote_code)
    if other.model_class.__name__ != kind.model_class.__name__:
        raise ConfigError(
            f"{config_from} is the config of a {other.model_class.__name__}, "
            f"{checkpoint} has the weights of a {kind.model_class.__name__}"
        )
    return replace(kind, config=other.config)


def _kind_elsewhere(config_from: str, *, trust_remote_code: bool) -> Kind:
    """A folder's config.json counts, whatever GGUF files lie beside it."""
    has_config = (Path(config_from) / "config.json").is_file()
    find = _kind_of_folder if has_config else find_kind
    return find(config_from, trust_remote_code=trust_remote_code)


def _kind_of_folder(checkpoint: str, *, trust_remote_code: bool) -> Kind:
    path = Path(checkpoint)
    if not path.is_dir() and (path.exists() or checkpoint.startswith((".", "/", "~"))):
        hint = f"\nhint: its folder is {path.parent}" if path.is_file() else ""
        if ".gguf.part" in path.name:
            whole = path.name.partition(".part")[0]
            hint = f"\nhint: a part of a file: cat {whole}.part* > {whole}"
        raise CheckpointError(
            f"{checkpoint}: not a folder; give a checkpoint folder or a hub id{hint}"
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(
            f"{checkpoint}: no usable config.json: the folder has none\n"
            "hint: name the folder that has it beside the weights"
        )
    for entry in path.iterdir() if path.is_dir() else ():
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise CheckpointError(f"{entry}: neither a file nor a folder: nobody can read it twice")
    check_configs(checkpoint, trust_remote_code=trust_remote_code)
    check_adapter(checkpoint)
    try:
        config = transformers.AutoConfig.from_pretrained(
            checkpoint, trust_remote_code=trust_remote_code
        )
        model_class = _class_of(checkpoint, config, trust_remote_code=trust_remote_code)
    except UnsupportedModelError:
        raise
    except OSError as error:
        raise CheckpointError(f"{checkpoint}: no usable config.json: {error}") from error
    except Exception as error:  # each config class checks in its own way
        if sys.flags.optimize > 1:
            raise UnsupportedModelError(
                "transformers reads docstrings, which python -OO leaves out; -O keeps them"
            ) from error
        raise UnsupportedModelError(
            f"{checkpoint}: transformers {transformers.__version__} does not understand "
            f"its config.json: {error}"
        ) from error
    if "flash" in str(config._attn_implementation):  # of the machine that wrote it
        config._attn_implementation = None
    dtype = str(config.dtype).removeprefix("torch.")
    if dtype not in ("None", *COMPUTE_DTYPES):
        raise UnsupportedModelError(
            f"{checkpoint}: dtype {dtype}, expected one of {', '.join(COMPUTE_DTYPES)}"
        )
    return Kind(config, model_class, _packing_of(checkpoint, config))


def _kind_of_gguf(file: Path, config_from: str | None, *, trust_remote_code: bool) -> Kind:
    gguf = read_gguf(file)
    if config_from is None:
        config = config_of(gguf)
        kind = Kind(config, _class_of(str(file), config, trust_remote_code=False), None, gguf)
    else:
        kind = _kind_elsewhere(config_from, trust_remote_code=trust_remote_code)
        kind = replace(kind, packing=None, gguf=gguf)  # the file's weights are not packed so
        text = kind.config.get_text_config()
        text_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), kind.model_class)
        if text_class.config_class is type(text):  # what else there is, is in a file of its own
            kind = replace(kind, config=text, model_class=text_class)
    if kind.config.dtype is None or config_from is None:
        kind.config.dtype = gguf.dtype
    named = kind.generation
    if named is None and config_from is not None:
        with suppress(OSError):  # it may have none
            named = transformers.GenerationConfig.from_pretrained(config_from)
    return replace(kind, generation=generation_of(gguf, kind.config, named))


def _class_of(checkpoint: str, config: Any, *, trust_remote_code: bool) -> Any:
    own_code = getattr(config, "auto_map", None) or {}
    if trust_remote_code:
        for name in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM"):
            if name in own_code:
                return get_class_from_dynamic_module(own_code[name], checkpoint)
    for name in config.architectures or []:
        found = getattr(transformers, name, None)
        if found is not None and found.can_generate() and isinstance(config, found.config_class):
            return found
    for mapping in (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    ):
        if type(config) in mapping and mapping[type(config)].can_generate():
            return mapping[type(config)]
    hint = "\nhint: it brings its own code, run by `trust_remote_code`" if own_code else ""
    raise UnsupportedModelError(
        f"{checkpoint}: transformers {transformers.__version__} has no generating class for "
        f"architectures {config.architectures}{hint}"
    )


def _packing_of(checkpoint: str, config: Any) -> Format | None:
    """How its weights are packed; the config does not say it any more afterwards."""
    found: dict[str, Any] = {}
    for part in (config, config.get_text_config()):
        for key in PACKING:
            if (said := getattr(part, key, None)) is not None:
                items = dict(said).items()  # null is as absent, but for ModelOpt's algorithm
                found = found or {k: v for k, v in items if v is not None or k == "quant_algo"}
                delattr(part, key)
    for name, method in OF_TOOLS.items():
        if not found and (file := file_of(checkpoint, name)) is not None:
            found = {"quant_method": method} | read_object(file)
    if not is_packed(found):
        return None
    try:
        return find_format(found)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{checkpoint}: {error}") from error


def load_tokenizer(checkpoint: str, *, config_from: str | None, trust_remote_code: bool) -> Any:
    """The tokenizer that transformers makes of a folder or hub id, or that of the vocabulary in a
    GGUF file unless `config_from` has one. A blank chat template is none. Raises CheckpointError,
    UnsupportedModelError.
    """
    tokenizer = _tokenizer_of(checkpoint, config_from, trust_remote_code)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str) and not template.strip():
        tokenizer.chat_template = None
    return tokenizer


def _tokenizer_of(checkpoint: str, config_from: str | None, trust_remote_code: bool) -> Any:
    file = find_gguf(checkpoint)
    beside = Path(config_from or "")
    is_bare = beside.is_dir() and not any(any(beside.glob(files)) for files in TOKENIZER_FILES)
    if file is not None and (config_from is None or is_bare):
        return tokenizer_of(read_gguf(file))
    folder = config_from or checkpoint
    try:
        check_tokenizer(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
        tokenizer.decode(tokenizer("a").input_ids)  # some values are first used here
        return tokenizer
    except Exception as error:  # of any kind: values of its files go wherever they are used
        is_ours = isinstance(error, CheckpointError)
        what = printable(error if is_ours else f"{type(error).__name__}: {error}", 2000)
        raise CheckpointError(f"{checkpoint}: no usable tokenizer: {what}") from error
