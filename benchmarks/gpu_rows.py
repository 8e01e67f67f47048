"""The stages of gpu_check.py: what is measured, and beside which ceiling."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import statistics
import sysconfig
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from gpu_models import SCRATCH, Shape, token_ids
from gpu_routing import recorded_requests, replaying
from gpu_stage import Check

from moe_infinity import MoE
from moe_infinity.engine.compute import LayerComputer
from moe_infinity.engine.routing import Routing
from moe_infinity.experts import Phase, Step
from moe_infinity.memory.cuda import CudaDevice, TorchCudaDevice
from moe_infinity.memory.device_mover import DeviceMover
from moe_infinity.memory.machine import available_memory_bytes
from tests.cuda.fake_cuda import FakeCudaDevice

CAPS_GB = (8, 12, 24)
COPY_BYTES = 64 << 20
HOST_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
PROMPT, WARM_UP, TOKENS = 64, 8, 32  # of a decode measurement


def machine(check: Check) -> None:
    check.add("torch", torch.__version__, transformers=transformers.__version__)
    free, in_shm = available_memory_bytes(), shutil.disk_usage(SCRATCH).free
    check.add("machine", platform.machine(), free_gb=free / 1e9, scratch_gb=in_shm / 1e9)
    if check.is_fake:
        return
    properties = torch.cuda.get_device_properties(0)
    check.add("gpu", properties.name, memory_gb=properties.total_memory / 1e9)
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    took_s = check.seconds(lambda: source.view(torch.int64).sum())
    check.add("device memory, read", source.nbytes / took_s / 1e9, "GB/s")
    # Above 9.15 attention on Hopper is cuDNN's, which plans anew for every length of a cache.
    check.add("cudnn", str(torch.backends.cudnn.version()))
    is_mapped = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(is_mapped), HOST_POINTERS, 0)
    check.add("kernels read locked pages where the CPU does", bool(is_mapped.value))
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    check.add("triton can build what launches", compiler is not None and header.exists())


def link(check: Check) -> None:
    """Copies of experts: right bytes, asynchronous, and how fast."""
    device: CudaDevice = FakeCudaDevice()
    if not check.is_fake:
        device = TorchCudaDevice(torch.device("cuda", 0))
    num_bytes = COPY_BYTES >> 6 if check.is_fake else COPY_BYTES
    host = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    check.add("pages can be locked", device.page_lock(host))
    destination = device.empty(num_bytes)
    copy = device.copy(host, destination, device.mark())
    check.add("copy is asynchronous", not copy.query())
    device.let_kernels_wait(copy)
    check.add("kernels see the copied bytes", bool(torch.equal(destination.cpu(), host)))
    for name, size in (
        ("64 MiB", num_bytes),
        ("9.4 MB", num_bytes // 7),
        ("2.6 MB", num_bytes // 25),
    ):
        copies = [device.copy(host[:size], destination[:size], None) for _ in range(20)]
        copies[-1].synchronize()
        took_s = statistics.median(copy.took_s for copy in copies)
        check.add(f"host to device, {name}", size / took_s / 1e9, "GB/s")
        if check.found.h2d_gbps is None:
            check.found.h2d_gbps = size / took_s / 1e9
    device.page_unlock(host)


def tokens_of(model: Any, ids: torch.Tensor, num_tokens: int, **options: Any) -> list[int]:
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens,
        do_sample=False, pad_token_id=0, **options,
    )  # fmt: skip
    found: list[int] = out[0].tolist()
    return found


def correctness(check: Check, folder: Path) -> None:
    """The tokens of the run with all experts on the device, whatever the budgets."""
    ids = token_ids(256, 48)
    expected: dict[str, list[int]] = {}
    for experts in ("eager",) if is_mxfp4(folder) else ("grouped_mm", "eager"):
        with check.model(folder, device_memory="100%", experts_implementation=experts) as moe:
            expected[experts] = tokens_of(moe, ids, check.num_checked)
        for device_memory, host_memory, prefetch in (
            ("3%", "5%", False), ("25%", "100%", False), ("25%", "5%", True), ("60%", "40%", True),
        ):  # fmt: skip
            budgets = {"device_memory": device_memory, "host_memory": host_memory}
            with check.model(
                folder, prefetch=prefetch, experts_implementation=experts, **budgets
            ) as moe:
                found = [tokens_of(moe, ids, check.num_checked) for _ in range(2)]
                moe.check_invariants()
            same = found == [expected[experts]] * 2
            check.add("same tokens", same, experts=experts, prefetch=str(prefetch), **budgets)
    stock = stock_model(check, folder)
    found_ids = tokens_of(stock, ids.to(check.device), check.num_checked)
    equal = sum(a == b for a, b in zip(found_ids[48:], expected["eager"][48:], strict=True))
    check.add(
        "tokens equal to transformers eager", float(equal), "tokens",
        ceiling=float(check.num_checked),
    )  # fmt: skip


def is_mxfp4(folder: Path) -> bool:
    return '"mxfp4"' in (folder / "config.json").read_text()


def stock_model(check: Check, folder: Path, **options: Any) -> Any:
    """MXFP4 unpacked to bfloat16: to compute with it as it is takes kernels of the Hub's."""
    if is_mxfp4(folder):
        options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation="eager", **options
    ).to(check.device)


def decode_ms(check: Check, model: Any, config: Any, *, seed: int = 1) -> float:
    """Median milliseconds per token, given tokens one by one."""
    total = PROMPT + WARM_UP + TOKENS
    ids = token_ids(config.vocab_size, total, seed=seed).to(check.device)
    cache = transformers.DynamicCache(config=config)
    times = []
    with torch.inference_mode():
        model(ids[:, :PROMPT], past_key_values=cache, use_cache=True, logits_to_keep=1)
        for at in range(PROMPT, total):
            started = time.perf_counter()
            out = model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            out.logits[0, -1].argmax().item()
            times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times[WARM_UP:])


def resident(check: Check, folder: Path, shape: Shape) -> None:
    """Everything in device memory: transformers, ours with hits only, and our bookkeeping."""
    model = stock_model(check, folder)
    decode_ms(check, model, shape.config, seed=3)  # attention may be planned for every length
    eager_ms = decode_ms(check, model, shape.config)
    check.add("transformers eager, resident", eager_ms, "ms", shape=shape.name, layers=shape.layers)
    del model
    with check.model(folder, device_memory="100%") as moe:
        warm_every_expert(check, moe)
        decode_ms(check, moe.model, shape.config, seed=3)
        hit_ms = decode_ms(check, moe.model, shape.config)
        decode = moe.report().decode
        check.add(
            "reference path, all hits", hit_ms, "ms", ceiling=eager_ms, shape=shape.name,
            layers=shape.layers, hit_rate=decode.hit_rate,
        )  # fmt: skip
        machinery(check, moe, shape)


def warm_every_expert(check: Check, moe: MoE) -> None:
    """A prompt of every token id, so that all experts come in."""
    ids = torch.randint(0, moe.model.config.vocab_size, (1, 4096 if not check.is_fake else 256))
    with torch.inference_mode():
        moe.model(ids.to(check.device), use_cache=False, logits_to_keep=1)


def request_of(check: Check, shape: Shape, seed: int) -> torch.Tensor | None:
    """The routing of a recorded one; None: as the routers of random weights say."""
    requests = recorded_requests(check.traces, shape, PROMPT + WARM_UP + TOKENS)
    return None if requests is None else requests[seed % len(requests)]


def routing_of(check: Check, shape: Shape) -> str:
    return "random" if request_of(check, shape, 0) is None else "recorded"


def offloaded_ms(check: Check, moe: MoE, shape: Shape, *, seed: int = 1) -> float:
    """As decode_ms, where it matters which experts come next."""
    with replaying(moe, request_of(check, shape, seed), check.device):
        return decode_ms(check, moe.model, shape.config, seed=seed)


def machinery(check: Check, moe: MoE, shape: Shape) -> None:
    """Microseconds per MoE layer of everything that is not arithmetic, its wait for the routing
    included.
    """
    config, engine = shape.config, moe.engine
    x_TD = torch.randn(1, config.hidden_size, dtype=torch.bfloat16, device=check.device)
    index_TK = torch.arange(config.num_experts_per_tok, device=check.device)[None]
    weights_TK = torch.rand(index_TK.shape, device=check.device)
    num_layers = len(engine.bookkeeping.keys)

    def step() -> None:
        engine.begin_step(Step(Phase.DECODE, 1, 1, begins_B=np.zeros(1, dtype=bool)))
        for moe_layer_idx in range(num_layers):
            engine.moe_layer(moe_layer_idx, x_TD, index_TK, weights_TK)

    for name, without in (
        ("machinery", mock.patch.object(LayerComputer, "begin", NoArithmetic)),
        ("MoE layer", nullcontext()),
    ):
        with without:
            took_us = 1e6 * check.seconds(step, rounds=20) / num_layers
        check.add(f"{name}, per layer", took_us, "us", shape=shape.name)


class NoArithmetic:
    """The work of a layer that touches no tensor."""

    def __init__(self, x_TD: torch.Tensor, routing: Routing) -> None:
        self._x_TD = x_TD

    def run(self, expert_idxs: Sequence[int], slot_ids: Sequence[int]) -> None:
        """Compute nothing."""

    def sum(self) -> torch.Tensor:
        """The hidden states, as they came."""
        return self._x_TD


def expert_bytes(moe: MoE) -> int:
    """Copied for one expert."""
    return max(recipes.layout.slot_bytes for recipes in moe.engine.loader.recipes)


def capped(check: Check, folder: Path, shape: Shape) -> None:
    """Decode with the share of experts that a smaller device would hold."""
    for cap in CAPS_GB:
        if cap < shape.total_gb:
            share = f"{100 * cap / shape.total_gb:.1f}%"
            offloaded(check, folder, shape, f"{cap} GB", device_memory=share)


def offloaded(check: Check, folder: Path, shape: Shape, name: str, **options: Any) -> None:
    """One cell: time per token, beside the time its copies take on the link."""
    with check.model(folder, **options) as moe:
        warm_every_expert(check, moe)  # into HOST
        for seed in range(2, 5):
            offloaded_ms(check, moe, shape, seed=seed)
        before = moe.report()
        took_ms = offloaded_ms(check, moe, shape)
        after = moe.report()
        num_tokens = after.decode.steps - before.decode.steps
        copies = after.decode.misses - before.decode.misses
        copies += after.prefetches.begun - before.prefetches.begun
        copied_mb = copies * expert_bytes(moe) / num_tokens / 1e6
        lookups = after.decode.lookups - before.decode.lookups
        check.add(
            f"decode, {name}", took_ms, "ms", ceiling=check.link_ms(copied_mb), shape=shape.name,
            layers=shape.layers, copied_mb_per_token=copied_mb, routing=routing_of(check, shape),
            hit_rate=(after.decode.hits - before.decode.hits) / lookups,
            stall_ms=1e3 * (after.decode.stall_s - before.decode.stall_s) / num_tokens,
            **{key: str(value) for key, value in options.items()},
        )  # fmt: skip


def prefill(check: Check, folder: Path, shape: Shape) -> None:
    """A long prompt against the time its copies take on the link."""
    num_tokens = 512 if check.is_fake else 8192
    share = f"{100 * 8 / shape.total_gb:.1f}%"
    for is_streaming in (True, False):
        without = mock.patch.object(DeviceMover, "stream", return_value=[])
        with (
            nullcontext() if is_streaming else without,
            check.model(folder, device_memory=share) as moe,
            torch.inference_mode(),
        ):
            ids = token_ids(shape.config.vocab_size, num_tokens, seed=2).to(check.device)
            run = partial(moe.model, ids, use_cache=False, logits_to_keep=1)
            run()
            before = moe.report().prefill
            took_s = check.seconds(run, rounds=2)
            after = moe.report().prefill
            steps = after.steps - before.steps
            copies = after.misses + after.late_hits - before.misses - before.late_hits
            copied_gb = copies / steps * expert_bytes(moe) / 1e9
            check.add(
                f"prefill, {num_tokens} tokens", 1e3 * took_s, "ms", shape=shape.name,
                ceiling=check.link_ms(1e3 * copied_gb), layers=shape.layers, copied_gb=copied_gb,
                device_memory=share, streaming=str(is_streaming),
            )  # fmt: skip


def accelerate_offload(check: Check, folder: Path, shape: Shape) -> None:
    """transformers + accelerate on the same weights and the same share of device memory."""
    try:
        import accelerate
    except ImportError:
        check.add("transformers + accelerate", "left out: accelerate is not installed")
        return
    if check.is_fake:
        check.add("transformers + accelerate", "left out: no GPU")
        return
    if is_mxfp4(folder):
        check.add("transformers + accelerate", "left out: it unpacks MXFP4, four times as large")
        return
    experts_gb = (folder / "model.safetensors").stat().st_size / 1e9
    for cap in CAPS_GB[:1]:
        memory = {0: int(1e9 * experts_gb * cap / shape.total_gb), "cpu": int(100e9)}
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, device_map="auto", max_memory=memory
        )
        took_ms = decode_ms(check, model, shape.config)
        check.add(
            f"transformers + accelerate {accelerate.__version__}, {cap} GB", took_ms, "ms",
            shape=shape.name, layers=shape.layers,
        )  # fmt: skip


def ablation(check: Check, folder: Path, shape: Shape) -> None:
    """What each part is worth at 12 GB, or 8 where 12 hold all."""
    share = f"{100 * max(cap for cap in (8, 12) if cap < shape.total_gb) / shape.total_gb:.1f}%"
    for name, options in {
        "policy lru": {"policy": "lru"},
        "prefetch": {"prefetch": True},
        "prefetch, early router": {"prefetch": True, "early_router": True},
        "half of HOST": {"host_memory": "50%"},
    }.items():
        offloaded(check, folder, shape, name, device_memory=share, **options)
