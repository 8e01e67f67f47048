"""How long does an exchange between two processes take: over our wire, over gloo?

One message of some bytes goes there, one of as many comes back. gloo has to know the size of what
it receives, so a message of another size needs two; here all have the same.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist

from moe_infinity.cluster.wire import Wire, WireMessage

SIZES = (8 << 10, 64 << 10, 1 << 20)
KEY = b"key"


def times_of(exchange: Callable[[torch.Tensor], None], num_bytes: int, rounds: int) -> list[float]:
    data = torch.zeros(num_bytes // 4)
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        exchange(data)
        found.append(time.perf_counter() - started)
    return found


def echo_by_wire(port: int, rounds: int) -> None:
    torch.set_num_threads(1)
    wire = Wire.call(("127.0.0.1", port), KEY)
    for _ in range(rounds * len(SIZES)):
        wire.send(WireMessage({}, wire.receive().tensors))


def by_wire(rounds: int) -> dict[int, list[float]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = get_context("spawn").Process(
            target=echo_by_wire, args=(listener.getsockname()[1], rounds)
        )
        process.start()
        wire = Wire(listener.accept()[0], KEY, is_caller=False)

    def exchange(data: torch.Tensor) -> None:
        wire.send(WireMessage({}, {"x": data}))
        wire.receive()

    found = {num_bytes: times_of(exchange, num_bytes, rounds) for num_bytes in SIZES}
    process.join()
    return found


def group(rank: int, port: int) -> dist.ProcessGroupGloo:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=60))
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))


def echo_by_gloo(port: int, rounds: int) -> None:
    torch.set_num_threads(1)
    gloo = group(1, port)
    for num_bytes in SIZES:
        data = torch.zeros(num_bytes // 4)
        for _ in range(rounds):
            gloo.recv([data], 0, 0).wait()
            gloo.send([data], 0, 0).wait()


def by_gloo(rounds: int) -> dict[int, list[float]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = get_context("spawn").Process(target=echo_by_gloo, args=(port, rounds))
    process.start()
    gloo = group(0, port)
    back = {num_bytes: torch.zeros(num_bytes // 4) for num_bytes in SIZES}

    def exchange(data: torch.Tensor) -> None:
        gloo.send([data], 1, 0).wait()
        gloo.recv([back[4 * len(data)]], 1, 0).wait()

    found = {num_bytes: times_of(exchange, num_bytes, rounds) for num_bytes in SIZES}
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for way, measure in (("wire", by_wire), ("gloo", by_gloo)) * 2:
        for num_bytes, found in measure(args.rounds).items():
            row = {
                "way": way,
                "bytes": num_bytes,
                "median_ms": 1e3 * statistics.median(found),
                "p95_ms": 1e3 * statistics.quantiles(found, n=20)[-1],
            }
            rows.append(row)
            print(
                f"{way:5} {num_bytes:>8,} bytes  {row['median_ms']:.3f} ms, p95 {row['p95_ms']:.3f}"
            )
    print(json.dumps({"benchmark": "exchange", "rows": rows}))


if __name__ == "__main__":
    main()
