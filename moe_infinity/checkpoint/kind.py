"""The kind of model that a checkpoint folder says it is: its config, the class that runs it, how
its weights are packed, its tokenizer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from moe_infinity.checkpoint.file_names import find_gguf
from moe_infinity.checkpoint.formats import find_format
from moe_infinity.checkpoint.gguf_config import config_of
from moe_infinity.checkpoint.gguf_file import GgufModel, read_gguf
from moe_infinity.checkpoint.gguf_generation import generation_of
from moe_infinity.checkpoint.gguf_tokenizer import tokenizer_of
from moe_infinity.checkpoint.packing import Format
from moe_infinity.errors import CheckpointError, ConfigError, UnsupportedModelError
from moe_infinity.experts import COMPUTE_DTYPES

TOKENIZER_FILES = ("*token*", "tekken.json", "vocab.*")
TOKEN_IDS = (
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip
NUMBERS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "max_length",
    "max_new_tokens", "min_length", "min_new_tokens", "no_repeat_ngram_size", "num_beams",
    "guidance_scale", "penalty_alpha", "epsilon_cutoff", "eta_cutoff", "num_return_sequences",
)  # fmt: skip
PACKING_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class Kind:
    """The facts about a model that are known before its weights are looked at."""

    config: Any  # transformers', without what it says of quantization: unpacking is our business
    model_class: Any
    packing: Format | None  # None: weights are stored as they are, or in a GGUF file
    gguf: GgufModel | None = None
    generation: transformers.GenerationConfig | None = None  # None: as transformers finds it

    def compute_dtype(self, dtype: str) -> str:
        """The dtype for transformers; packed weights do not name one."""
        if self.packing is not None and dtype == "auto" and self.config.dtype is None:
            return "bfloat16"
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
    other = find_kind(config_from, trust_remote_code=trust_remote_code)
    if other.model_class.__name__ != kind.model_class.__name__:
        raise ConfigError(
            f"{config_from} is the config of a {other.model_class.__name__}, "
            f"{checkpoint} has the weights of a {kind.model_class.__name__}"
        )
    return replace(kind, config=other.config)


def _kind_of_folder(checkpoint: str, *, trust_remote_code: bool) -> Kind:
    path = Path(checkpoint)
    if not path.is_dir() and (path.exists() or checkpoint.startswith((".", "/", "~"))):
        hint = f"\nhint: its folder is {path.parent}" if path.is_file() else ""
        raise CheckpointError(
            f"{checkpoint}: not a folder; give a checkpoint folder or a hub id{hint}"
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(
            f"{checkpoint}: no usable config.json: the folder has none\n"
            "hint: name the folder that has it beside the weights"
        )
    if path.is_dir():
        _check_generation_config(path / "generation_config.json")
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
        raise UnsupportedModelError(
            f"{checkpoint}: transformers {transformers.__version__} does not understand "
            f"its config.json: {error}"
        ) from error
    dtype = str(config.dtype).removeprefix("torch.")
    if dtype not in ("None", *COMPUTE_DTYPES):
        raise UnsupportedModelError(
            f"{checkpoint}: dtype {dtype}, expected one of {', '.join(COMPUTE_DTYPES)}"
        )
    return Kind(config, model_class, _packing_of(checkpoint, config))


def _check_generation_config(file: Path) -> None:
    """Raise CheckpointError if transformers cannot read the file; not if there is none."""
    if not file.exists():
        return
    try:
        transformers.GenerationConfig.from_pretrained(file.parent)
    except Exception as error:  # of any kind: its values go wherever they are used
        raise CheckpointError(
            f"{file}: not a JSON object that transformers understands: {error}"
        ) from error
    for key, value in json.loads(file.read_text("utf-8")).items():
        expected = "a number" if key in NUMBERS else "ids of tokens" if key in TOKEN_IDS else None
        if expected is None or value is None or _is_number(value):
            continue
        if key in TOKEN_IDS and isinstance(value, list) and all(map(_is_number, value)):
            continue
        raise CheckpointError(f"{file}: {key} is {value!r}, expected {expected}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind_of_gguf(file: Path, config_from: str | None, *, trust_remote_code: bool) -> Kind:
    gguf = read_gguf(file)
    if config_from is None:
        config = config_of(gguf)
        kind = Kind(config, _class_of(str(file), config, trust_remote_code=False), None, gguf)
    else:
        kind = find_kind(config_from, trust_remote_code=trust_remote_code)
        kind = replace(kind, packing=None, gguf=gguf)  # the file's weights are not packed so
        text = kind.config.get_text_config()
        if text is not kind.config:  # what else there is, is in a file of its own
            text_class = _class_of(config_from, text, trust_remote_code=trust_remote_code)
            kind = replace(kind, config=text, model_class=text_class)
    if kind.config.dtype is None or config_from is None:
        kind.config.dtype = gguf.dtype
    named = None if config_from is None else kind.generation or _generation_config(config_from)
    return replace(kind, generation=generation_of(gguf, kind.config, named))


def _generation_config(checkpoint: str) -> Any:
    """The generation config of a folder or hub id, None if it has none."""
    try:
        return transformers.GenerationConfig.from_pretrained(checkpoint)
    except OSError:
        return None


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
    ):
        if type(config) in mapping:
            return mapping[type(config)]
    hint = "\nhint: it brings its own code, run by `trust_remote_code`" if own_code else ""
    raise UnsupportedModelError(
        f"{checkpoint}: transformers {transformers.__version__} has no generating class for "
        f"architectures {config.architectures}{hint}"
    )


def _packing_of(checkpoint: str, config: Any) -> Format | None:
    """How its weights are packed; the config does not say it any more afterwards."""
    found = None
    for part in (config, config.get_text_config()):
        for key in PACKING_KEYS:
            if getattr(part, key, None) is not None:
                found = found or dict(getattr(part, key))
                delattr(part, key)
    if found is None:
        return None
    try:
        return find_format(found)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{checkpoint}: {error}") from error


def load_tokenizer(checkpoint: str, *, config_from: str | None, trust_remote_code: bool) -> Any:
    """The tokenizer that transformers makes of a folder or hub id, or that of the vocabulary in a
    GGUF file unless `config_from` has one. Raises CheckpointError, UnsupportedModelError.
    """
    file = find_gguf(checkpoint)
    if file is not None and (config_from is None or _has_no_tokenizer(Path(config_from))):
        return tokenizer_of(read_gguf(file))
    folder = config_from or checkpoint
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # of any kind: values of its files go wherever they are used
        what = _odd_tokenizer_file(Path(folder)) or f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{checkpoint}: no usable tokenizer: {what}") from error


def _odd_tokenizer_file(folder: Path) -> str | None:
    """Return what is wrong with the first file that should be a JSON object and is none."""
    for file in sorted({*folder.glob("*token*.json"), *folder.glob("chat_template.json")}):
        try:
            if not isinstance(json.loads(file.read_bytes()), dict):
                return f"{file} is not a JSON object"
        except (OSError, ValueError, RecursionError) as error:
            return f"{file} is not a JSON file: {error}"
    return None


def _has_no_tokenizer(folder: Path) -> bool:
    return folder.is_dir() and not any(any(folder.glob(files)) for files in TOKENIZER_FILES)
