"""A cache with one new token of each sequence, for tests of attention.

Legend: as in gpu/kernels/attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from moe_infinity.gpu.kernels.descriptions import CachedLayer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class AttentionCase:
    """Caches have memory before their first number and after their last, which nobody may read or
    write: it is not a number.
    """

    num_seqs: int = 1
    groups: int = 2
    per_group: int = 4
    width: int = 32
    value_width: int = 32
    num_tokens: int = 65  # with the new one
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    padding: tuple[int, ...] = ()  # of each sequence, on the left
    capacity: int = 0  # tokens, beside those that there are
    offset: int = 0  # of the buffers, in numbers
    is_view: bool = False  # what is given, of wider rows
    scale: float = 0.0  # 0: one with which some tokens weigh far more than others
    device: str = "cpu"
    seed: int = 0
    tensors: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        if not self.scale:
            self.scale = 2 * self.width**-0.5
        heads = self.groups * self.per_group
        self.tensors = {
            "query": draw(self.num_seqs, heads, self.width),
            "key": draw(self.num_seqs, self.groups, self.width),
            "value": draw(self.num_seqs, self.groups, self.value_width),
            "keys": draw(self.num_seqs, self.groups, self.num_tokens, self.width),
            "values": draw(self.num_seqs, self.groups, self.num_tokens, self.value_width),
            "sinks": 3 * draw(heads),
        }

    def changed(self, **changes: Any) -> AttentionCase:
        """With the same numbers."""
        settings = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        other = AttentionCase(**(settings | changes))
        other.tensors = {name: each.to(other.dtype) for name, each in self.tensors.items()}
        return other

    def only(self, seq: int) -> AttentionCase:
        """One of the sequences."""
        alone = self.changed(num_seqs=1, padding=self.padding[seq : seq + 1])
        for name, tensor in self.tensors.items():
            if name != "sinks":
                alone.tensors[name] = tensor[seq : seq + 1]
        return alone

    def compute(self, attend: Any) -> tuple[Tensor, Tensor, Tensor]:
        """What it returns, and the memory of keys and of values afterwards."""
        keys = self.buffer(self.tensors["keys"])
        values = self.buffer(self.tensors["values"])
        mask_BN = torch.ones(self.num_seqs, self.num_tokens + 3, dtype=torch.uint8)
        for seq, num_padded in enumerate(self.padding):
            mask_BN[seq, :num_padded] = 0
        mask_BN[:, self.num_tokens - 1 :] = 0  # as if the new one were not to be looked at
        mask_BN = mask_BN.to(self.device)
        room = self.num_tokens + self.capacity
        cached = CachedLayer(
            keys=keys.data_ptr() + self.offset * keys.element_size(),
            values=values.data_ptr() + self.offset * values.element_size(),
            key_seq=self.groups * room * self.width,
            key_head=room * self.width,
            value_seq=self.groups * room * self.value_width,
            value_head=room * self.value_width,
            num_tokens=self.num_tokens,
            mask=mask_BN.data_ptr() if self.padding else 0,
            mask_seq=mask_BN.stride(0),
        )
        found = attend(
            *(self.given(name) for name in ("query", "key", "value")),
            torch.tensor(cached, device=self.device),
            self.tensors["sinks"].to(self.device) if self.has_sinks else None,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )
        return found.cpu(), keys.cpu(), values.cpu()

    def buffer(self, rows_BGNd: Tensor, *, is_last_written: bool = False) -> Tensor:
        """What is beyond the tokens is not a number, and so is what nobody looks at: the last
        token, which is still to be written, and padding.
        """
        rows_BGNd = rows_BGNd.clone()
        for seq, num_padded in enumerate(self.padding):
            rows_BGNd[seq, :, : min(num_padded, self.num_tokens - 1)] = torch.nan
        if not is_last_written:
            rows_BGNd[:, :, -1] = torch.nan
        room_BGNd = torch.nn.functional.pad(rows_BGNd, (0, 0, 0, self.capacity), value=torch.nan)
        edges = (self.offset, 64)
        memory = torch.nn.functional.pad(room_BGNd.flatten(), edges, value=torch.nan)
        return memory.to(self.device)

    def given(self, name: str) -> Tensor:
        """The query or the new key or value, perhaps a view of something larger."""
        tensor = self.tensors[name].to(self.device)
        if not self.is_view:
            return tensor
        return torch.nn.functional.pad(tensor, (5, 3, 1, 2), value=torch.nan)[:, 1:-2, 5:-3]

    def rows(self, name: str) -> Tensor:
        """[B, G, N, d]: keys or values, with the new one."""
        rows_BGNd = self.tensors[f"{name}s"].clone()
        rows_BGNd[:, :, -1] = self.tensors[name]
        return rows_BGNd

    def with_new_token(self) -> tuple[Tensor, Tensor]:
        """The memory of keys and of values, as it has to be afterwards."""
        keys, values = (
            self.buffer(self.rows(name), is_last_written=True).cpu() for name in ("key", "value")
        )
        return keys, values
