"""Write the table of docs/guides/models.md: what `moe-infinity plan` predicts of published models.

    python -m scripts.predictions_table

Nothing is downloaded: `plan` gets checkpoints without weights (hollow_checkpoints.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.hollow_checkpoints import write_hollow

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "guides" / "models.md"
BEGIN = "<!-- predictions: begin (python -m scripts.predictions_table) -->\n"
END = "<!-- predictions: end -->"
HEADER = (
    "model", "GiB on disk", "dense", "experts", "a token uses", "memory, disk",
    "experts in memory", "hit rate", "tokens/s", "first token, s", "tokens/s in 4 bits",
)  # fmt: skip
# Memory in GiB and the disk's rate in GB/s, by model.
MACHINES = {
    "openai/gpt-oss-20b": ((8, 3), (16, 3)),
    "deepseek-ai/DeepSeek-V2-Lite": ((16, 3), (32, 3)),
    "Qwen/Qwen3-30B-A3B": ((16, 3), (32, 3)),
    "openai/gpt-oss-120b": ((32, 3), (64, 3)),
    "Qwen/Qwen3-235B-A22B": ((64, 6), (256, 6)),
    "deepseek-ai/DeepSeek-V3": ((128, 6), (512, 6)),
}
GIB = 1 << 30


def plan(model: str, folder: Path, memory_gib: int, disk_gb: int) -> dict[str, Any]:
    """What `moe-infinity plan --json` prints; models are folders below `folder`."""
    machine = f"ram={memory_gib}GiB,disk={disk_gb}GB/s"
    command = [sys.executable, "-m", "moe_infinity"]
    done = subprocess.run(
        ["env", f"PYTHONPATH={ROOT}", *command, "plan", model, "--machine", machine, "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{model}: {done.stderr}")
    planned: dict[str, Any] = json.loads(done.stdout)
    return planned


def sizes(planned: dict[str, Any]) -> list[str]:
    """GiB on disk, of dense weights, of all experts, and of the experts that a token uses."""
    model = planned["model"]
    a_layer = model["num_layers"] * model["slot_bytes"]
    disk = planned["fit"]["tiers"][-1]["available"]
    parts = (disk, model["dense_bytes"], a_layer * model["num_experts"], a_layer * model["top_k"])
    return [f"{part / GIB:.1f}" for part in parts]


def speeds(planned: dict[str, Any]) -> list[str]:
    host, disk = planned["fit"]["tiers"]
    speed = planned["speed"]
    # Of experts that are packed already there is only a GGUF variant, which saves nothing.
    packed = [each for each in planned["variants"] if each["name"].endswith("int4")]
    return [
        f"{host['num_slots'] / disk['num_slots']:.0%}",
        f"{planned['hit_rates']['host']['decode']:.0%}",
        rate(speed["tokens_per_s"]),
        f"{speed['first_token_cold']['seconds']:.0f}",
        rate(packed[0]["speed"]["tokens_per_s"]) if packed else "",
    ]


def rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:#.2g}"


def table(folder: Path) -> str:
    rows: list[list[str]] = []
    for model, machines in MACHINES.items():
        write_hollow(model, folder / model)
        for number, (memory_gib, disk_gb) in enumerate(machines):
            planned = plan(model, folder, memory_gib, disk_gb)
            about = ["", "", "", "", ""] if number else [model.partition("/")[2], *sizes(planned)]
            rows.append([*about, f"{memory_gib} GiB, {disk_gb} GB/s", *speeds(planned)])
    lines = [list(HEADER), ["---"] * len(HEADER), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    content = GUIDE.read_text("utf-8")
    before, _, rest = content.partition(BEGIN)
    _, _, after = rest.partition(END)
    with TemporaryDirectory() as name:
        GUIDE.write_text(before + BEGIN + table(Path(name)) + END + after, "utf-8")


if __name__ == "__main__":
    main()
