"""The server, as the MoE-Infinity published with the paper started it:

    python -m moe_infinity.entrypoints.openai.api_server --model MODEL --offload-dir DIR

The same as `moe-infinity serve MODEL`, whose other options are taken, too.
"""

from __future__ import annotations

import argparse
import sys

from moe_infinity import cli
from moe_infinity.config import LEGACY_IGNORED
from moe_infinity.terminal import stderr

OLD_OPTIONS = {"--offload-dir": "offload_path", "--device-memory-ratio": "device_memory_ratio"}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="api_server",
        description="The same as `moe-infinity serve MODEL`, whose other options are taken, too.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="Checkpoint folder or hub id.")
    for option, name in OLD_OPTIONS.items():
        parser.add_argument(option, help=f"No effect: {LEGACY_IGNORED[name]}.")
    options, others = parser.parse_known_args()
    for option, name in OLD_OPTIONS.items():
        if getattr(options, option.removeprefix("--").replace("-", "_")) is not None:
            stderr.print(f"{option} has no effect: {LEGACY_IGNORED[name]}", soft_wrap=True)
    sys.argv = ["moe-infinity", "serve", options.model, *others]
    cli.main()


if __name__ == "__main__":
    main()
