"""Options of the server."""

from __future__ import annotations

from dataclasses import dataclass

from moe_infinity.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Options of `moe-infinity serve` that are not the model's. Raises ConfigError."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None  # None: requests need no key
    model_name: str | None = None  # as clients call it; None: the folder's name, or the hub id
    max_batch: int = 8  # sequences that decode together
    max_queue: int = 64  # sequences that may wait for a seat
    max_context: int | None = None  # tokens of prompt and answer; None: as the model was trained
    max_new_tokens: int = 512  # of a chat answer whose request sets no limit
    prefill_chunk: int = 512  # tokens of a prompt per step
    deadline_s: float = 600.0  # from submission to the last token
    max_body_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "max_new_tokens", "prefill_chunk", "max_body_bytes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a whole number above 0, got {value!r}")
        if not self.deadline_s > 0:
            raise ConfigError(f"deadline_s must be above 0, got {self.deadline_s!r}")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("the API key is empty")
