"""Write the table of docs/guides/models.md: what `moe-infinity plan` predicts of published models.

    python -m scripts.predictions_table

Nothing is downloaded: `plan` gets checkpoints and GGUF files without weights (hollow_checkpoints.py
and tools/make_random_gguf.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.hollow_checkpoints import write_hollow
from tools.make_random_gguf import write_hollow as write_hollow_gguf

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
# The same by the shape of tools/model_shapes.py, and what people call such a GGUF file.
MACHINES_OF_GGUF = {
    "gemma4-26b-a4b": ("Gemma 4 26B-A4B, Q4_K_M", (8, 3), (16, 3)),
    "glm-4.7-flash": ("GLM-4.7-Flash, Q4_K_M", (8, 3), (16, 3)),
    "qwen3.6-35b-a3b": ("Qwen3.6-35B-A3B, Q4_K_M", (8, 3), (16, 3)),
    "qwen3-next-80b-a3b": ("Qwen3-Next-80B-A3B, Q4_K_M", (16, 3), (32, 3)),
    "qwen3.8-flash-next": ("Qwen3.8-Flash-Next, Q4_K_M", (16, 3), (32, 3)),
    "deepseek-v4-flash": ("DeepSeek-V4-Flash, MXFP4", (32, 3), (64, 3)),
    "minimax-m3": ("MiniMax-M3, Q4_K_M", (64, 6), (128, 6)),
}
GIB = 1 << 30


def plan(model: str, folder: Path, memory_gib: int, disk_gb: int, *options: str) -> dict[str, Any]:
    """What `moe-infinity plan --json` prints; models are below `folder`."""
    machine = f"ram={memory_gib}GiB,disk={disk_gb}GB/s"
    command = [sys.executable, "-m", "moe_infinity"]
    done = subprocess.run(
        ["env", f"PYTHONPATH={ROOT}", *command, "plan", model, "--machine", machine]
        + ["--json", *options],
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
    for shape, (name, *gguf_machines) in MACHINES_OF_GGUF.items():
        (folder / shape).mkdir()
        write_hollow_gguf(shape, folder / shape / "model.gguf")
        for number, (memory_gib, disk_gb) in enumerate(gguf_machines):
            file = f"{shape}/model.gguf"
            planned = plan(file, folder, memory_gib, disk_gb, "--config", shape)
            about = ["", "", "", "", ""] if number else [name, *sizes(planned)]
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
