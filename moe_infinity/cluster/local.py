"""Expert hosts as processes of this machine: to try them, and one for each NUMA node."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

from moe_infinity.system.machine import numa_nodes

END_S = 5.0  # for a process to end by itself, once its head is gone

logger = logging.getLogger(__name__)


class LocalProcesses:
    """Each ends with the connection to its head, so none is left when the head dies."""

    is_one_machine = True
    listen_on = "127.0.0.1"
    command: tuple[str, ...] = (sys.executable, "-m", "moe_infinity.cluster.expert_host")

    def __init__(self) -> None:
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._nodes = numa_nodes()

    def start(self, share_idx: int, address: tuple[str, int], key: bytes) -> None:
        """The process before is killed if it still runs: it does not answer."""
        self._end(share_idx, 0.0)
        told = {
            "share_idx": share_idx,
            "host": address[0],
            "port": address[1],
            "key": key.hex(),
            # the head has all cores where there is one node, and the first one where there are more
            "cores": self._nodes[share_idx % len(self._nodes)] if len(self._nodes) > 1 else [],
        }
        try:
            # Ctrl-C is the head's to handle.
            process = subprocess.Popen(self.command, stdin=subprocess.PIPE, start_new_session=True)
            self.processes[share_idx] = process
            assert process.stdin is not None
            with process.stdin:
                process.stdin.write(json.dumps(told).encode() + b"\n")
        except OSError as error:  # too many processes; or it ended at once
            logger.warning("expert host %d cannot be started: %s", share_idx, error)

    def has_ended(self, share_idx: int) -> bool:
        """Return True if the process has ended or could not be started."""
        process = self.processes.get(share_idx)
        return process is None or process.poll() is not None

    def close(self) -> None:
        for share_idx in list(self.processes):
            self._end(share_idx, END_S)

    def _end(self, share_idx: int, timeout_s: float) -> None:
        process = self.processes.pop(share_idx, None)
        if process is None:
            return
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
