"""Starts the server with the command of the MoE-Infinity that was published with the paper:

    python -m moe_infinity.entrypoints.openai.api_server --model MODEL --offload-dir DIR

It does what `moe-infinity serve MODEL` does, and takes its other options too.
"""

from __future__ import annotations

import argparse
import sys

from moe_infinity.cli import app as cli
from moe_infinity.cli.terminal import stderr
from moe_infinity.config import OffloadConfig
from moe_infinity.errors import ConfigError
from moe_infinity.legacy_config import LEGACY_IGNORED, memory_of_ratio


def main() -> None:
    """Run `moe-infinity serve` with the old options translated."""
    parser = argparse.ArgumentParser(
        prog="api_server",
        description="Does what `moe-infinity serve MODEL` does, and takes its other options too.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="Checkpoint folder or hub id.")
    parser.add_argument(
        "--device", default="auto", help="Where to compute: as for `moe-infinity serve`."
    )
    parser.add_argument("--offload-dir", help=f"No effect: {LEGACY_IGNORED['offload_path']}.")
    parser.add_argument(
        "--device-memory-ratio",
        type=float,
        help="Share of the GPU's memory for experts, above 0 and at most 1; without a GPU, no "
        "effect. --device-memory takes bytes.",
    )
    options, others = parser.parse_known_args()
    memory: list[str] = []
    if options.offload_dir is not None:
        print_ignored("--offload-dir", "offload_path")
    if options.device_memory_ratio is not None:
        try:
            device = OffloadConfig(device=options.device).device
            size = memory_of_ratio(options.device_memory_ratio, device)
        except ConfigError as error:
            parser.error(str(error))
        if size is None:
            print_ignored("--device-memory-ratio", "device_memory_ratio")
        else:
            memory = ["--device-memory", str(size)]
    device_options = ["--device", options.device, *memory]
    sys.argv = ["moe-infinity", "serve", options.model, *device_options, *others]
    cli.main()


def print_ignored(option: str, name: str) -> None:
    """Say on stderr that an option has no effect, and why."""
    stderr.print(f"{option} has no effect: {LEGACY_IGNORED[name]}", soft_wrap=True)


if __name__ == "__main__":
    main()
