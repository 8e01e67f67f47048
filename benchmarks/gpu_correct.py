"""Is it correct? And the rates of the machine, which bound everything else."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_measure import generate
from gpu_models import Shape, token_ids
from gpu_stage import LINK, LOCKING, MEMORY, PRODUCT, Bound, Check
from torch import Tensor

from moe_infinity import MoE
from moe_infinity.architectures.attention_inputs import cache_parameter
from moe_infinity.memory.cuda import CudaDevice, TorchCudaDevice
from tests.fake_cuda import FakeCudaDevice

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = (("3%", "40%"), ("25%", "100%"), ("60%", "40%"), ("60%", "100%"))
GRAPHS: dict[str, Any] = {"gpu_engine": "graphs"}
HOST: dict[str, Any] = {"gpu_engine": "host"}
NEAR = 0.03  # of the norm of logits: two ways to round in bfloat16


def machine(check: Check) -> None:
    """What it is, and how fast: each rate is the bound of something."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    name = "fake" if check.is_fake else torch.cuda.get_device_name()
    check.add("GPU", name, cpus=os.cpu_count(), **versions)
    size = 1 << 20 if check.is_fake else 1 << 30
    source = torch.randint(256, (size,), dtype=torch.uint8, device=check.device)
    read_s = check.seconds(source.view(torch.int64).sum)
    check.add(MEMORY, size / read_s / 1e9, "GB/s")
    width = 256 if check.is_fake else 8192
    square = torch.randn(width, width, device=check.device).bfloat16()
    check.add(PRODUCT, 2 * width**3 / check.seconds(lambda: square @ square) / 1e12, "TFLOP/s")
    link(check, size)


def link(check: Check, num_bytes: int) -> None:
    """Copies, page-locking, and kernels that read locked pages where the CPU does."""
    device: CudaDevice = FakeCudaDevice()
    if not check.is_fake:
        device = TorchCudaDevice(torch.device("cuda", 0))
    host = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    started = time.perf_counter()
    is_locked = device.page_lock(host)
    check.add(LOCKING, num_bytes / (time.perf_counter() - started) / 1e9, "GB/s")
    check.add("pages can be locked", is_locked)
    destination = device.empty(num_bytes)
    copy = device.copy(host, destination, device.mark())
    check.add("a copy does not stop the CPU", not copy.query())
    device.let_kernels_wait(copy)
    check.add("kernels see the copied bytes", torch.equal(destination.cpu(), host))
    for name, size in ((LINK, num_bytes // 4), ("link, 9.4 MB", num_bytes // 114)):
        copies = [device.copy(host[:size], destination[:size], None) for _ in range(20)]
        copies[-1].synchronize()
        took_s = statistics.median(copy.took_s for copy in copies)
        bound = None if name == LINK else Bound(LINK, check.value(LINK))
        check.add(name, size / took_s / 1e9, "GB/s", bound)
    seen = host if check.is_fake else torch.as_tensor(AsKernelsSee(host), device="cuda")
    check.add("kernels read locked pages", bool(seen.sum().item() == host.sum().item()))
    took_s = check.seconds(seen.view(torch.int64).sum)
    bound = Bound(LINK, check.value(LINK))
    check.add("kernels read locked pages at", num_bytes / took_s / 1e9, "GB/s", bound)
    del seen  # before its pages are unlocked
    device.page_unlock(host)


class AsKernelsSee:
    """Page-locked memory, for torch to take as memory of the GPU at the CPU's address."""

    def __init__(self, host: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape), "typestr": "|u1", "data": (host.data_ptr(), False),
            "version": 2,
        }  # fmt: skip


def run_tests(check: Check, *, args: list[str]) -> None:
    """By pytest. Warnings that only a GPU gives are no failures here. Without a GPU the tests are
    found, and do not run.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
    command += [*args, "--collect-only"] if check.is_fake else args
    for more in ({}, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}):  # for streams that wait for others
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **more}, capture_output=True, text=True
        )
        lines = done.stdout.strip().splitlines() or [done.stderr[-200:]]
        is_right = done.returncode == 0 and ("passed" in lines[-1] or check.is_fake)
        check.add("all tests pass", is_right, summary=lines[-1], **more)
        for line in [line for line in lines if line.startswith(("FAILED", "ERROR"))][:20]:
            check.add("test", line[:200])
        if is_right:
            break


def same_tokens(check: Check, folder: Path, shape: Shape, **options: Any) -> None:
    """The tokens of the run with all experts on the device, whatever the budgets, for a step of one
    sequence or of several. The engine with graphs has to capture its steps.
    """
    num_tokens = 6 if check.is_fake else 48  # after a prompt of 48: a window of 64 fills up
    prompts = [token_ids(256, batch, 48) for batch in (1, 3)]

    def tokens_of(moe: MoE) -> list[str]:
        return [generate(moe, ids, num_tokens) for ids in prompts]

    with check.model(folder, device_memory="100%", **options) as moe:
        expected = tokens_of(moe)
        check.add("how experts compute", moe.report().experts)
    for device_memory, host_memory in BUDGETS:
        budgets = {"device_memory": device_memory, "host_memory": host_memory}
        with check.model(folder, **budgets, **options) as moe:
            found = [tokens_of(moe) for _ in range(2)]
            moe.check_invariants()
            has_graph = check.has_graph(moe)
        check.add("same tokens", found == [expected] * 2, **budgets)
        if options == GRAPHS:
            may_have = host_memory == "100%" and not check.is_fake
            check.add("a graph", has_graph is may_have, **budgets)


def near_exact(check: Check, folder: Path, shape: Shape, **options: Any) -> None:
    """Logits of our kernels at full width beside those of torch's, for a prompt and for single
    tokens: the median over tokens, as for some two experts are nearly as good.
    """
    ids = token_ids(shape.config.vocab_size, 1, 64).to(check.device)
    with check.model(folder, device_memory="100%", exact=True) as moe:
        exact_TV = logits_of(moe, ids, num_prompt=48)
    with check.model(folder, device_memory="100%", **options) as moe:
        found_TV = logits_of(moe, ids, num_prompt=48)
        check.add("how experts compute", moe.report().experts)
    error_T = (found_TV - exact_TV).norm(dim=1) / exact_TV.norm(dim=1)
    for name, part_T in (("a prompt", error_T[:48]), ("single tokens", error_T[48:])):
        median = float(part_T.median())
        check.add(f"logits of {name} are near", median <= NEAR, error=median, allowed=NEAR)


@torch.no_grad()
def logits_of(moe: MoE, ids: Tensor, *, num_prompt: int) -> Tensor:
    """[T, V] of these tokens, those behind the prompt one by one."""
    cached = {
        cache_parameter(moe.model.forward): transformers.DynamicCache(config=moe.model.config)
    }
    pieces = [ids[:, :num_prompt], *ids[:, num_prompt:].split(1, dim=1)]
    found, start = [], 0
    for piece in pieces:
        end = start + piece.shape[1]
        positions = torch.arange(start, end, device=ids.device)[None]
        given = {"input_ids": piece, "position_ids": positions}
        found.append(moe.model(**given, **cached, use_cache=True).logits[0].float().cpu())
        start = end
    return torch.cat(found)
