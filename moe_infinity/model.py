"""START HERE. A Mixture-of-Experts model that does not fit in memory, used like any Hugging Face
model.

    from moe_infinity import MoE
    with MoE("models/demo", host_memory="25%") as moe:
        inputs = moe.tokenizer("Once upon a time", return_tensors="pt")
        out = moe.generate(**inputs, max_new_tokens=64)
        print(moe.tokenizer.decode(out[0]), moe.report(), sep="\\n")

The path of a token: transformers runs the model (`generate`), and its experts modules call ours.

    not all experts in memory   engine/hooks.py ──> engine/engine.py ──> engine/layer.py:
                                find, load, hold and compute the experts that the router chose
    all experts in memory       architectures/decoder_layers.py: the first decoder layer computes
                                all layers in one call, and tells the engine what they activated

Both give the same bits. docs/architecture.md draws them and says which files to read next.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_infinity.architectures.adapters import BACKEND
from moe_infinity.architectures.early_router import EarlyRouter
from moe_infinity.architectures.prompt_blocks import PromptBlocks
from moe_infinity.architectures.without_experts import COPIED, refuse, refuse_what_needs_experts
from moe_infinity.checkpoint.signature import signature_of
from moe_infinity.config import OffloadConfig
from moe_infinity.engine import hooks
from moe_infinity.engine.build import build_experts, warn_of_slow_experts
from moe_infinity.engine.device import ComputeDevice
from moe_infinity.engine.engine import LocalExperts
from moe_infinity.engine.experts import Experts
from moe_infinity.errors import Cancelled, ClosedError
from moe_infinity.experts import Ints, Step
from moe_infinity.images.mmproj import VisionPart
from moe_infinity.kernels.kv_layers import require_packable
from moe_infinity.loading.kind import load_tokenizer
from moe_infinity.loading.model import LoadedModel, load_without_experts
from moe_infinity.long_prompts import in_passes
from moe_infinity.predict.eamc import RequestEam
from moe_infinity.predict.history import History
from moe_infinity.predict.predictor import check_policy
from moe_infinity.predict.tracefile import SequenceTrace
from moe_infinity.prefixes.own_cache import own_cache
from moe_infinity.report import Report
from moe_infinity.snapshot import report_of
from moe_infinity.streaming import TextStream, check_one_sequence, streamed_arguments
from moe_infinity.system.garbage import no_garbage_collection

if TYPE_CHECKING:
    from typing_extensions import Self

    from moe_infinity.prefixes.saved import Prefix, Prompt

POLL_S = 0.05  # between looks at whether experts are preloaded


class MoE:
    """A model with its dense weights in memory and its experts cached. Threads may share it; one at
    a time computes.
    """

    config_class = OffloadConfig

    def __init__(
        self,
        checkpoint: str | Path,
        config: OffloadConfig | dict[str, Any] | str | Path | None = None,
        *,
        on_bytes: Any = lambda done, total: None,  # Any: mypy checks a caller's **dict against it
        **options: Any,
    ) -> None:
        """Load a checkpoint folder, hub id or GGUF file; only headers and dense weights are read.

        `config` is an OffloadConfig, a dict (the older MoE-Infinity's is understood) or a JSON file
        with one; `options` are OffloadConfig fields and override it. `on_bytes` is called by
        threads with the bytes that were read and their total. Raises ConfigError, CheckpointError
        or UnsupportedModelError.
        """
        self.checkpoint = os.path.expanduser(checkpoint)
        self.config = self.config_class.from_options(config, options)
        check_policy(self.config)
        self.vision_part = VisionPart(self.checkpoint, self.config.mmproj)
        self._lock = threading.RLock()
        self._is_closed = False
        with torch.inference_mode(False), no_garbage_collection():  # that mode's tensors are fixed
            self._device = ComputeDevice(self.config)
            loaded = self._load(on_bytes)
            self.model: Any = loaded.model
            self._startup_bytes_read = loaded.startup_bytes_read
            self._device.speed_up_attention(self.model)
            layers = loaded.plan.layers
            early_router = EarlyRouter(self.model, layers) if self.config.early_router else None
            self._blocks = PromptBlocks(self.model, layers, self._lock, self.config.kv_dtype)
            try:
                require_packable(self.model, self.config.kv_dtype)
                self._experts = self._build_experts(loaded, early_router)
                warn_of_slow_experts(loaded.plan, self._experts.local)
            except BaseException:
                loaded.reader.close()
                raise
            try:
                self._history = History(self.config.history, signature_of(self.model, layers))
                self._history.load(self.engine.predictor)
            except BaseException:
                self._experts.close()
                raise
            refuse_what_needs_experts(
                self.model, layers, checkpoint=self.checkpoint, lock=self._lock
            )
            hooks.attach(self.model, layers, self._experts, early_router, self._blocks)
            self._steps = hooks.StepReader(self.model, self._experts, self._lock, self._blocks)
            self._small_batches = self._device.small_batch_steps(
                self.model, early_router, self._blocks
            )
            self._experts.note_state()
            if self.config.preload != "off":
                self.engine.start_preloading()

    def _load(self, on_bytes: Callable[[int, int], None]) -> LoadedModel:
        hooks.register()
        with self._device.explaining():
            return load_without_experts(
                self.checkpoint,
                config_from=self.config.config_from,
                beside=self.vision_part,
                dtype=self.config.dtype,
                experts_implementation=BACKEND,
                trust_remote_code=self.config.trust_remote_code,
                num_read_threads=self.config.num_read_threads,
                device=self._device.device,
                prepare=self._device.prepare,
                reads_packed=self._device.reads_packed,
                least_table_bytes=self._device.least_table_bytes,
                on_bytes=on_bytes,
            )

    def _build_experts(self, loaded: LoadedModel, early_router: EarlyRouter | None) -> Experts:
        local = build_experts(
            loaded.plan,
            loaded.reader,
            self.config,
            device_slots=self._device.slots,
            early_router=early_router,
            blocks=self._blocks,
        )
        engine = self.config.gpu_engine
        if engine == "host" or (engine == "auto" and self._device.slots is None):
            return local
        from moe_infinity.gpu.engine import drive

        return drive(local, self.model, loaded.plan, self.config)

    @property
    def engine(self) -> LocalExperts:
        """The experts of this process, with the bookkeeping that `report` reads."""
        return self._experts.local

    # Text

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, as transformers gives it. Raises CheckpointError."""
        return load_tokenizer(
            self.checkpoint,
            config_from=self.config.config_from,
            trust_remote_code=self.config.trust_remote_code,
        )

    @cached_property
    def processor(self) -> Any:
        """The checkpoint's processor, as transformers gives it: it takes text and images. None for
        a model that takes no images. Raises ConfigError for a missing package, and CheckpointError.
        """
        from moe_infinity.images.processor import load_processor

        return load_processor(self.model, self.checkpoint, self.config)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call transformers' `generate()`: same arguments, same result. Tensors may be on any
        device; the result is on the model's device. `prefix`, of `load_prefix`: the prompt begins
        with its tokens, and they are not computed.
        """
        return self._generate(None, *args, **kwargs)

    def stream(self, prompt: str | Mapping[str, Any], **kwargs: Any) -> TextStream:
        """Generate from text, or from what the tokenizer returned with return_tensors="pt"; iterate
        the result for pieces of text. `kwargs` are those of `generate()`. Raises ConfigError for
        more than one sequence, and for a setting that does not choose one token after another.
        """
        self._require_open()
        inputs = self.tokenizer(prompt, return_tensors="pt") if isinstance(prompt, str) else prompt
        check_one_sequence(inputs)
        arguments = streamed_arguments(self.model, self.tokenizer, {**inputs, **kwargs})
        return TextStream(self._generate, self.tokenizer, arguments)

    def _generate(self, cancelled: threading.Event | None, *args: Any, **kwargs: Any) -> Any:
        with self._lock, self._device.explaining():
            self._require_open()
            self._await_preload(cancelled)
            args = tuple(map(self._device.move, args))
            kwargs = {name: self._device.move(value) for name, value in kwargs.items()}
            if not self._device.is_cpu:
                kwargs.setdefault("disable_compile", True)  # which experts run depends on data
            prefix = kwargs.pop("prefix", None)
            named = signature(self.model.generate).bind_partial(*args).arguments | kwargs
            try:
                with self._steps.generating(named), self.engine.cancellable(cancelled):
                    begun = {} if prefix is None else prefix.begin(self, named)
                    passes = in_passes(self.model, self.engine.room, named, is_begun=bool(begun))
                    begun = begun or own_cache(self.model, self.config.kv_dtype, named)
                    return self.model.generate(*args, **begun | kwargs | passes)
            finally:
                self._experts.synchronize()

    def save_prefix(self, path: str | Path, prompt: Prompt) -> Prefix:
        """Compute the beginning of prompts, text or ids of one sequence, and write it to a file for
        its owner alone. Raises UnsupportedModelError, OutputError and ConfigError.
        """
        from moe_infinity.prefixes.saved import save_prefix

        with self._lock:
            return save_prefix(self, path, prompt)

    def load_prefix(self, path: str | Path) -> Prefix:
        """Read what `save_prefix` wrote. Raises CheckpointError; ConfigError says what differs."""
        from moe_infinity.prefixes.saved import load_prefix

        with self._lock:
            return load_prefix(self, path)

    # Steps of a caller that batches requests by itself, as the server does

    def forward(
        self,
        step: Step,
        *,
        cache: Any = None,
        others: Callable[[], None] = lambda: None,
        **inputs: Any,
    ) -> Any:
        """Run one forward pass of the model without gradients. `step` says which sequence each
        token belongs to, `cache` is the KV cache, whatever name the model has for it, and `inputs`
        are the other arguments. `others` is called between two layers of a prompt and may run other
        passes. Raises UnsupportedModelError if the model takes no cache.
        """
        if cache is not None:
            inputs[self._steps.cache_parameter] = cache
        with self._lock, torch.no_grad(), self._device.explaining():
            self._require_open()
            self._await_preload(None)
            with self._steps.naming(step), self.engine.letting_run(others):
                return self.model(**{k: self._device.move(v) for k, v in inputs.items()})

    def note_known(self, step: Step, top_k_index_TLK: Ints) -> None:
        """Record tokens that need no pass, because their keys and values are kept, with the experts
        that they activated, [T, MoE layers, K].
        """
        with self._lock:
            self._require_open()
            self._experts.synchronize()
            self.engine.note_known(step, top_k_index_TLK)

    def last_routing(self) -> Ints | None:
        """Return [T, MoE layers, K], the experts that the tokens of the last pass activated. None
        if layers choose different numbers of experts, or if a layer's routing is not known yet.
        """
        with self._lock:
            self._experts.synchronize()
            return self.engine.recorder.routing()

    # Preloading

    @property
    def is_ready(self) -> bool:
        """False as long as `preload="wait"` delays the first token."""
        return self.config.preload != "wait" or self.engine.is_preloaded

    def preload(self, on_experts: Callable[[int, int], None] | None = None) -> None:
        """Fill the free slots of host memory with experts, and wait until they are full.
        `on_experts` is called with the number of filled slots and of all slots.
        """
        with self._lock:
            self._require_open()
            self.engine.recover()
            self.engine.start_preloading()
        host_tier = self.engine.tiers[-1]
        while not self.engine.is_preloaded:
            if on_experts is not None:
                on_experts(host_tier.table.num_resident, host_tier.slots.num_slots)
            time.sleep(POLL_S)
            self.engine.recover()  # a step that was cut short holds the loads up

    def _await_preload(self, cancelled: threading.Event | None) -> None:
        """Wait until the model is ready, with the lock held: other calls wait as well. Raises
        Cancelled once that event is set.
        """
        while not self.is_ready:
            if cancelled is not None and cancelled.is_set():
                raise Cancelled("generation was stopped before its prompt")
            time.sleep(POLL_S)
            self.engine.recover()

    # What happened

    def report(self) -> Report:
        """Return hits, misses, bytes and waiting since the model was loaded, how full each tier is
        now, and which layers our kernels compute.
        """
        around = [] if self._small_batches is None else self._small_batches.paths()
        return report_of(self.model, self.engine, self.config, self._startup_bytes_read, around)

    def request_eams(self) -> list[RequestEam]:
        """Return the Expert Activation Matrices of the last request, one pair (prefill, decode) for
        each sequence of its batch.
        """
        with self._lock:
            self._experts.synchronize()
            return copy.deepcopy(self.engine.recorder.request_eams())

    @contextmanager
    def recording(self) -> Iterator[Callable[[], list[SequenceTrace]]]:
        """Record the routing of every token generated in the block. Yields a function that stops
        recording and returns the traces; call it in the block, or after the block if that raised
        nothing. Raises ConfigError in a block of another recording.
        """
        with self._lock:
            self._require_open()
            self._experts.synchronize()
            self.engine.recorder.begin_tokens()
        finish = cache(self._finish_tokens)
        try:
            yield finish
            finish()
        finally:
            self.engine.recorder.drop_tokens()

    def _finish_tokens(self) -> list[SequenceTrace]:
        self._experts.synchronize()
        self._steps.leave_pass()
        return self.engine.recorder.finish_tokens()

    def expert_states(self) -> NDArray[np.int8]:
        """Return [MoE layers, experts], where each expert is now: -1 no such expert, 0 absent, 1
        loading, 2 resident, 3 resident and activated by the last step, 4 resident in a slower tier
        only. It takes no lock, so an expert that moves meanwhile may be shown where it was.
        """
        return self.engine.bookkeeping.expert_states()

    # The end

    def check_invariants(self) -> None:
        """Assert that the bookkeeping of slots is consistent."""
        with self._lock:
            self._experts.check_invariants()

    def close(self) -> None:
        """Wait for a running `generate()`, stop the read threads, close the files, and write the
        history if one is configured. A second call does nothing. Raises TraceError if the history
        cannot be written; everything is closed then.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._small_batches is not None:
                self._small_batches.close()
            self._steps.close()
            self._experts.close()
            self._history.save(self.engine.predictor, self.engine.recorder.request_eams())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise UnsupportedModelError: threads and files cannot be copied."""
        refuse(COPIED)

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the model {self.checkpoint} was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
