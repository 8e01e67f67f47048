"""Starts the server with the command of the MoE-Infinity that was published with the paper:

    python -m moe_infinity.entrypoints.openai.api_server --model MODEL --offload-dir DIR

It does what `moe-infinity serve MODEL` does, and takes its other options too.
"""

from __future__ import annotations

import argparse
import sys

from moe_infinity import __main__ as command_line
from moe_infinity.config import OffloadConfig
from moe_infinity.errors import ConfigError
from moe_infinity.legacy import IGNORED, memory_of_ratio


def main() -> None:
    """Run `moe-infinity serve` with the old options translated."""
    parser = argparse.ArgumentParser(
        prog="api_server",
        description="Does what `moe-infinity serve MODEL` does, and takes its other options too.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="Checkpoint folder or hub id.")
    parser.add_argument("--device", default="auto", help="As of `moe-infinity serve`.")
    parser.add_argument("--offload-dir", help=f"No effect: {IGNORED['offload_path']}.")
    parser.add_argument(
        "--device-memory-ratio",
        type=float,
        help="Share of the GPU's memory for experts, above 0 and at most 1; without a GPU, no "
        "effect. --device-memory takes bytes.",
    )
    options, others = parser.parse_known_args()
    if options.offload_dir is not None:
        _say_ignored("--offload-dir", "offload_path")
    if options.device_memory_ratio is not None:
        try:
            device = OffloadConfig(device=options.device).device
            memory = memory_of_ratio(options.device_memory_ratio, device)
        except ConfigError as error:
            parser.error(str(error))
        if memory is None:
            _say_ignored("--device-memory-ratio", "device_memory_ratio")
        else:
            others = ["--device-memory", str(memory), *others]
    sys.argv = ["moe-infinity", "serve", options.model, "--device", options.device, *others]
    command_line.main()


def _say_ignored(option: str, name: str) -> None:
    sys.stderr.write(f"{option} has no effect: {IGNORED[name]}\n")


if __name__ == "__main__":
    main()
