"""The command `moe-infinity`, also `python -m moe_infinity`.

Here the command line and the tools are put together: no other module knows both.
"""

from moe_infinity.cli.app import build_app, run_app
from moe_infinity.tools.commands import COMMANDS, RUN_WATCHER

app = build_app(COMMANDS, RUN_WATCHER)


def main() -> None:
    """Run the command line."""
    run_app(app)


if __name__ == "__main__":
    main()
