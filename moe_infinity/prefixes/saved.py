"""One prefix in one file, which its user names: a long system prompt is computed once.

The file is an .npz archive: token ids; keys and values in blocks of BLOCK tokens, and of the rest;
the state behind all tokens, if the model has one; the experts that the tokens activated; the name
and value of all that these depend on; and a checksum.

Legend: T tokens, N blocks, L MoE layers, K experts of a token.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moe_infinity.checkpoint.signature import digest_of
from moe_infinity.errors import CheckpointError, ConfigError, OutputError
from moe_infinity.experts import Ints
from moe_infinity.output import DAMAGED, read_arrays, whole_file, why_unwritable
from moe_infinity.prefixes.cache_bytes import Block, CacheBytes
from moe_infinity.prefixes.loaded import Loaded
from moe_infinity.prefixes.prefix_cache import FILLING_COPIES
from moe_infinity.prefixes.prefix_tree import BLOCK
from moe_infinity.prefixes.prompt_passes import PromptPasses, one_prompt
from moe_infinity.prefixes.store_key import identity_of
from moe_infinity.prefixes.stored_file import checksum_of
from moe_infinity.system.files import expanded

logger = logging.getLogger(__name__)
NAMES = {"token_ids", "blocks", "rest", "state", "parts", "identity", "checksum"}
MOST_SHOWN = 24  # characters of a value that differs; it may be a checksum
Array = NDArray[Any]
Prompt = str | Sequence[int] | Tensor | Mapping[str, Any]


@dataclass(frozen=True, eq=False, slots=True)
class Prefix:
    """Tokens that prompts may begin with. `generate()` and `stream()` take it as `prefix=`, as
    often as wanted: each call goes on from a copy.
    """

    token_ids: list[int]
    _blocks: list[Block]
    _state: Tensor | None  # uint8, of a model with recurrent layers
    _parts: CacheBytes
    _experts_TLK: Ints | None  # None: layers choose different numbers
    _passes: PromptPasses
    _model: weakref.ref[Any]  # the `MoE` that computes with it
    _weights: str  # what the weights were, see `_weights_of`

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        states = 0 if self._state is None else self._state.nbytes
        return sum(block.data.nbytes for block in self._blocks) + states

    def begin(self, moe: Loaded, named: Mapping[str, Any]) -> dict[str, Any]:
        """Begin the request of these arguments of `generate()` behind the tokens that its prompt
        shares with the prefix. Returns the argument that goes on from there; none if all has to be
        computed. Raises ConfigError for a prompt that cannot go on from the prefix.
        """
        if self._model() is not moe:
            raise ConfigError("this prefix was loaded by another model: each loads its own")
        if _weights_of(moe.model) != self._weights:
            raise ConfigError(
                "the model's weights are not those that this prefix was computed with\n"
                "hint: save it anew, with the adapter or the change"
            )
        ids = one_prompt(moe.model, named)
        num_known = self._num_known(ids)
        if not self._passes.is_usual(len(ids)):
            logger.warning(
                "a prompt of %d tokens has another rotary embedding than its prefix: all of it "
                "is computed",
                len(ids),
            )
            return {}
        cache = self._passes.empty_cache()
        blocks = self._blocks[: -(-num_known // BLOCK)]
        moe.engine.room.keep_free(FILLING_COPIES * sum(block.data.nbytes for block in blocks))
        self._parts.fill(cache, blocks, self._state, moe.model.device, num_tokens=num_known)
        experts_TLK = self._experts_TLK
        self._passes.begin(
            ids[:num_known], None if experts_TLK is None else experts_TLK[:num_known]
        )
        self._passes.leave_one_pass(cache, ids, num_known)
        return self._passes.arguments(cache)

    def _num_known(self, ids: Sequence[int]) -> int:
        """Tokens that need no computing: all that are shared, but not the last of the prompt."""
        pairs = zip(self.token_ids, ids[:-1], strict=False)
        shared = next(
            (at for at, (own, other) in enumerate(pairs) if own != other),
            min(len(self.token_ids), len(ids) - 1),
        )
        if shared == 0 or (self._state is not None and shared < len(self.token_ids)):
            why = "" if self._state is None else ": recurrent layers go on from all of them only"
            raise ConfigError(
                f"the prompt has {shared} of the prefix's {len(self.token_ids)} tokens before its "
                f"last{why}\n"
                "hint: a text that is cut at a space or in a word may have other tokens alone; let "
                "the prefix end with a line or a special token"
            )
        return shared


def save_prefix(moe: Loaded, path: str | Path, prompt: Prompt) -> Prefix:
    """Compute a prompt and write what others go on from to a file; see `MoE.save_prefix`."""
    file = expanded(path)
    why = why_unwritable(file)
    if why is not None:
        raise OutputError(f"{file}: {why}")
    token_ids = ids_of(moe, prompt)
    passes = PromptPasses(moe)
    if not passes.is_usual(len(token_ids)):
        raise ConfigError(
            f"a prefix of {len(token_ids)} tokens is beyond the original length of the model's "
            "rotary embedding, where keys depend on the length of the whole prompt"
        )
    prefix = _computed(moe, passes, token_ids)
    try:
        with whole_file(file, is_private=True) as opened:
            moe.engine.room.keep_free(prefix.num_bytes)  # blocks are put together
            arrays: dict[str, Any] = _arrays_of(prefix, identity_of(moe))  # Any: for savez
            np.savez(opened, **arrays)
    except OSError as error:
        raise OutputError(f"{file}: the prefix could not be written: {error}") from error
    return prefix


def load_prefix(moe: Loaded, path: str | Path) -> Prefix:
    """Read the file of a prefix; see `MoE.load_prefix`."""
    file = expanded(path)
    try:
        arrays = read_arrays(file, expected=NAMES, make_room=moe.engine.room.keep_free)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: there is no such file") from error
    except MemoryError as error:
        raise CheckpointError(f"{file}: there is too little memory for it: {error}") from error
    except DAMAGED as error:
        raise CheckpointError(f"{file} is no prefix, or it is damaged: {error}") from error
    if not np.array_equal(arrays.pop("checksum"), checksum_of("", arrays)):
        raise CheckpointError(f"{file} is damaged: its checksum is wrong")
    try:
        identity = dict(json.loads(arrays["identity"].tobytes()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file} is no prefix: {error}") from error
    _require_same(file, identity, identity_of(moe))
    try:
        return _prefix_of(moe, arrays)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is no prefix: {error}") from error


def _prefix_of(moe: Loaded, arrays: Mapping[str, Array]) -> Prefix:
    """Raises ValueError, TypeError or AttributeError for arrays that do not fit each other."""
    parts = CacheBytes.read(arrays["parts"].tobytes().decode())
    token_ids = ids_of(moe, arrays["token_ids"].tolist())
    num_whole, num_rest = divmod(len(token_ids), BLOCK)
    shapes = {
        "blocks": (num_whole, BLOCK * parts.token_bytes),
        "rest": (num_rest * parts.token_bytes,),
        "experts": (len(token_ids), len(moe.engine.bookkeeping.keys)),
    }
    for name, shape in shapes.items():
        if name in arrays and arrays[name].shape[:2] != shape:
            raise ValueError(f"{name} of shape {arrays[name].shape}, expected {shape}")
    blocks = [Block(BLOCK, data) for data in torch.from_numpy(arrays["blocks"])]
    if num_rest:
        blocks.append(Block(num_rest, torch.from_numpy(arrays["rest"])))
    state = torch.from_numpy(arrays["state"]) if parts.states else None
    experts_TLK = arrays.get("experts")
    passes = PromptPasses(moe, is_tried=True)
    weights = _weights_of(moe.model)
    return Prefix(token_ids, blocks, state, parts, experts_TLK, passes, weakref.ref(moe), weights)


def _weights_of(model: nn.Module) -> str:
    """Some values of all weights, and how often each was changed in place."""
    changes = [0 if p.is_inference() else p._version for p in model.parameters()]
    return f"{digest_of(model)} {changes}"


def ids_of(moe: Loaded, prompt: Prompt) -> list[int]:
    """The token ids of a prompt of one sequence. Raises ConfigError."""
    if isinstance(prompt, str):
        prompt = moe.tokenizer(prompt)
    ids = prompt["input_ids"] if isinstance(prompt, Mapping) else prompt
    found = np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids)
    if found.ndim == 2 and len(found) == 1:
        found = found[0]
    num_known = moe.model.config.get_text_config().vocab_size
    is_ids = found.ndim == 1 and np.issubdtype(found.dtype, np.integer) and found.size > 0
    if not is_ids or found.min() < 0 or found.max() >= num_known:
        raise ConfigError(
            f"a prefix is text, or ids from 0 to {num_known - 1} of at least one token of one "
            "sequence"
        )
    token_ids: list[int] = found.tolist()
    return token_ids


def _computed(moe: Loaded, passes: PromptPasses, token_ids: list[int]) -> Prefix:
    cache = passes.empty_cache()
    passes.begin([], None)
    blocks: list[Block] = []
    experts: list[Ints | None] = []
    start = 0
    while start < len(token_ids):
        end = passes.end_of_pass(start, len(token_ids))
        with passes.keeping_windows(cache, is_last=end == len(token_ids)):
            experts.append(passes.compute(cache, token_ids, start, end))
            parts = CacheBytes.of(cache)
            num_new = end - start
            moe.engine.room.keep_free(FILLING_COPIES * num_new * parts.token_bytes)
            for size, num_blocks in ((BLOCK, num_new // BLOCK), (num_new % BLOCK, 1)):
                behind = num_new if size == BLOCK else size
                blocks += parts.blocks(cache, 0, behind=behind, size=size, num_blocks=num_blocks)
        start = end
    known = [each.astype(np.uint16) for each in experts if each is not None]
    return Prefix(
        token_ids,
        [block for block in blocks if block.num_tokens > 0],
        parts.state_of(cache, 0, len(token_ids)) if parts.states else None,
        parts,
        np.concatenate(known) if len(known) == len(experts) else None,
        passes,
        weakref.ref(moe),
        _weights_of(moe.model),
    )


def _arrays_of(prefix: Prefix, identity: Mapping[str, str]) -> dict[str, Array]:
    num_whole = len(prefix.token_ids) // BLOCK
    whole = prefix._blocks[:num_whole]
    rest = prefix._blocks[num_whole:]
    empty = np.zeros(0, dtype=np.uint8)
    arrays = {
        "token_ids": np.array(prefix.token_ids, dtype=np.int64),
        "blocks": np.stack([block.data.numpy() for block in whole])
        if whole
        else empty.reshape(0, BLOCK * prefix._parts.token_bytes),
        "rest": rest[0].data.numpy() if rest else empty,
        "state": empty if prefix._state is None else prefix._state.numpy(),
        "parts": np.frombuffer(prefix._parts.text().encode(), dtype=np.uint8),
        "identity": np.frombuffer(json.dumps(identity).encode(), dtype=np.uint8),
    }
    if prefix._experts_TLK is not None:
        arrays["experts"] = prefix._experts_TLK
    return arrays | {"checksum": checksum_of("", arrays)}


def _require_same(file: Path, then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise ConfigError that names what the prefix was computed with and the model has not."""
    differing = [
        f"{name}: {str(then.get(name))[:MOST_SHOWN]}, here {value[:MOST_SHOWN]}"
        for name, value in now.items()
        if then.get(name) != value
    ]
    if differing:
        listed = "\n".join(differing)
        raise ConfigError(f"{file} was computed with another\n{listed}\nhint: save it anew")
