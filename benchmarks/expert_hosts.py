"""How fast does a model decode whose experts are on two hosts, each with too little memory?

Two processes of this machine stand for the hosts, each in a memory cgroup of its own; they share
its cores and its disk. A proxy between them delays every message. Beside them: one host with as
much memory, and llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

from limits import drop_from_page_cache, memory_cgroup, result_of, start
from peers import token_ids
from peers_cell import run_cell

from moe_infinity.sizes import parse_size
from moe_infinity.system.machine import machine_memory_bytes

CELL = str(Path(__file__))
PEER_CELL = str(Path(__file__).with_name("peers_cell.py"))
PROMPTS = [[1, 32, 40]]  # sequences, tokens at once, tokens one by one
LEFT_BYTES = 1100 << 20  # of a limit, for the interpreter, dense weights and reading
CHUNK_BYTES = 1 << 20


def forward(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    """What comes from one to the other, so much later. A chunk is taken for a message."""
    try:
        while data := source.recv(CHUNK_BYTES):
            until = time.perf_counter() + delay_s
            while (left := until - time.perf_counter()) > 0:
                time.sleep(left)
            target.sendall(data)
    except OSError:
        pass
    finally:
        target.close()


def proxy(address: tuple[str, int], delay_s: float) -> tuple[str, int]:
    """The address of a proxy for one connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        near = listener.accept()[0]
        far = socket.create_connection(address)
        for connected in (near, far):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pair in ((near, far), (far, near)):
            Thread(target=forward, args=(*pair, delay_s), daemon=True).start()

    Thread(target=run, daemon=True).start()
    found: tuple[str, int] = listener.getsockname()
    return found


def run_hosts(groups: list[str], delay_s: float, asked: dict[str, Any]) -> dict[str, Any]:
    """One cell: hosts in these groups, the head in that of this process."""
    from moe_infinity.cluster import model
    from moe_infinity.cluster.local import LocalProcesses

    class Limited(LocalProcesses):
        def start(self, share_idx: int, address: tuple[str, int], key: bytes) -> None:
            super().start(share_idx, proxy(address, delay_s) if delay_s else address, key)
            pid = str(self.processes[share_idx].pid)
            (Path(groups[share_idx - 1]) / "cgroup.procs").write_text(pid)

    model.LocalProcesses = Limited  # type: ignore[misc]
    return run_cell(**asked)


def measured(args: argparse.Namespace, name: str, num_hosts: int, delay_ms: float) -> float:
    """Tokens per second."""
    limit = parse_size(args.limit, whole_bytes=0)
    ids = token_ids(args.model)
    for path in (args.model, args.gguf):
        drop_from_page_cache(path)
    with ExitStack() as stack:
        groups = [stack.enter_context(memory_cgroup(limit)) for _ in range(num_hosts + 1)]
        if name == "llama.cpp":
            options: dict[str, Any] = {
                "gguf": str(args.gguf), "threads": os.cpu_count(), "repack": False,
            }  # fmt: skip
            asked = {"runner": "llama.cpp", "options": options, "prompts": PROMPTS, "ids": ids}
            found = result_of(start(PEER_CELL, asked, groups[0], args.llama_python))
        else:
            model = {"expert_hosts": num_hosts, "host_memory": limit - LEFT_BYTES}
            options = {"model": str(args.model), "options": model}
            asked = {"runner": "ours", "options": options, "prompts": PROMPTS, "ids": ids}
            cell = {
                "groups": list(map(str, groups[1:])), "delay_s": delay_ms / 1e3, "asked": asked,
            }  # fmt: skip
            found = result_of(start(CELL, cell, groups[0]))
        give_up_at = time.monotonic() + 30
        while any((group / "cgroup.procs").read_text() for group in groups):
            if time.monotonic() > give_up_at:
                raise SystemExit("processes are left")
            time.sleep(0.1)
    if "failed" in found:
        raise SystemExit(f"{name}: {found['failed']}")
    rate: float = found["prompts"][0]["decode"]["tok_per_s"]
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="folder of a Qwen3-MoE in bf16")
    parser.add_argument("gguf", type=Path, nargs="?", help="the same for llama.cpp")
    parser.add_argument("--limit", default="2560MiB", help="of each host; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(run_hosts(**args.cell)))
        return
    cells = [("one host", 0, 0.0), ("two hosts", 1, 0.0), ("llama.cpp", 0, 0.0)]
    cells += [(f"two hosts, {delay} ms later", 1, delay) for delay in (0.1, 0.5, 1.0)]
    found: dict[str, list[float]] = {name: [] for name, _, _ in cells}
    for _ in range(args.rounds):
        for cell in cells:
            found[cell[0]].append(measured(args, *cell))
            print(f"{cell[0]:24} {found[cell[0]][-1]:.2f} tokens/s", flush=True)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    memory = machine_memory_bytes()
    print(json.dumps({"benchmark": "expert_hosts", "memory": memory, "tok_per_s": medians}))


if __name__ == "__main__":
    main()
