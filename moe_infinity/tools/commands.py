"""The commands of the tools, and what they add to `run`: the one table of them."""

from moe_infinity.tools.bench.command import bench
from moe_infinity.tools.doctor.command import doctor
from moe_infinity.tools.pictures.reporting import RunReports
from moe_infinity.tools.planning.command import plan
from moe_infinity.tools.simulator.command import simulate
from moe_infinity.tools.tracing import trace

COMMANDS = (doctor, plan, bench, trace, simulate)
RUN_WATCHER = RunReports
