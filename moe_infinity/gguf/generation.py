"""How answers of a GGUF file are generated unless the user says otherwise: what other checkpoints
have generation_config.json for.

llama.cpp's converter copies generation_config.json into `general.sampling.*`, but not whether it
samples. A file that has these keys therefore does, as in llama.cpp, unless its temperature is 0.
"""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
from transformers import GenerationConfig

from moe_infinity.gguf.file import GgufModel
from moe_infinity.gguf.vocabulary import logger, number_of

SAMPLING = "general.sampling."
LARGEST = float(np.finfo(np.float32).max)
FIELDS = {  # by their keys: what transformers calls them, and the least and largest value
    "temp": ("temperature", -inf, inf), "penalty_repeat": ("repetition_penalty", 1e-6, inf),
    "top_k": ("top_k", -inf, inf), "top_p": ("top_p", 0.0, 1.0), "min_p": ("min_p", 0.0, 1.0),
}  # fmt: skip
# What transformers has not, and values of theirs that change nothing.
OTHERS = {"sequence": (0,), "xtc_probability": (0,), "mirostat": (0,), "penalty_last_n": (0, -1)}


def generation_of(gguf: GgufModel, config: Any, named: GenerationConfig | None) -> GenerationConfig:
    """transformers' generation config of a model with this config. `named` is that of the folder
    that the user named, which replaces what the file says, except that its ends count, too.
    """
    found = named
    if found is None:
        found = GenerationConfig.from_model_config(config)
        found.update(**_sampling(gguf))
        if gguf.vocabulary.suppressed:
            found.suppress_tokens = gguf.vocabulary.suppressed
    ends = found.eos_token_id
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    ends = list(dict.fromkeys([*ends, *gguf.vocabulary.ends()]))
    found.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    return found


def _sampling(gguf: GgufModel) -> dict[str, Any]:
    """The settings of sampling. Those without a meaning here are left out with a warning."""
    said = gguf.metadata
    found: dict[str, Any] = {}
    for key, (name, least, most) in FIELDS.items():
        value = number_of(said.get(SAMPLING + key))
        if value is not None and abs(value) <= LARGEST and least <= value <= most:
            found[name] = float(str(np.float32(value)))  # 0.7, not 0.699999988
        elif SAMPLING + key in said:
            _warn(gguf, SAMPLING + key)
    for key, neutral in OTHERS.items():
        if number_of(said.get(SAMPLING + key, 0)) not in neutral:
            _warn(gguf, SAMPLING + key)
    if number_of(said.get(f"{SAMPLING}penalty_last_n")) == 0:  # of no token before
        found.pop("repetition_penalty", None)
    if "top_k" in found:
        found["top_k"] = max(int(found["top_k"]), 0)
    if found.get("temperature", 1.0) > 0:
        return found | ({"do_sample": True} if found else {})
    return {"do_sample": False, "repetition_penalty": found.get("repetition_penalty", 1.0)}


def _warn(gguf: GgufModel, key: str) -> None:
    logger.warning("%s: %s is %.60r, ignored", gguf.files[0], key, gguf.metadata[key])
