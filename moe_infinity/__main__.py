"""The command `moe-infinity`, also `python -m moe_infinity`.

Here the command line and the tools are put together: no other module knows both.
"""

import os

from moe_infinity.cli.app import build_app, run_app
from moe_infinity.tools.commands import COMMANDS, RUN_WATCHER

app = build_app(COMMANDS, RUN_WATCHER)


def main() -> None:
    """Run the command line. Torch's threads sleep while they have no work: where they look for it,
    they take the cores from ours, and a prompt takes 6 % more processor time.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    run_app(app)


if __name__ == "__main__":
    main()
