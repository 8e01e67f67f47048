"""Count the package's code lines and files by ring, and refuse a core that grows unnoticed.

    python scripts/rings.py     # exit status 1 when the core has grown or a folder has no ring

    core      what a token passes
    shelf     catalogues, of which a model uses one entry each, and ways to use the core
    outside   tools and other hosts; nothing imports them

`core_code_lines` in pyproject.toml, under [tool.rings], is the size of the core that was agreed on.
The core may be 2 % larger. A change that raises the number says what was refused in exchange.
Code lines leave out blank lines, comments and docstrings.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "moe_infinity"
RINGS = {
    "core": (
        ".", "engine", "cache", "predict", "memory", "architectures", "checkpoint", "loading",
        "system",
    ),
    "shelf": (
        "kernels", "gpu", "gguf", "formats", "quantize", "prefixes", "images", "server", "cli",
        "entrypoints", "untrusted",
    ),
    "outside": ("tools", "cluster"),
}  # fmt: skip
ROOM_TO_GROW = 0.02
AGREED = re.compile(r"^core_code_lines = (\d+)", re.MULTILINE)


class Size(NamedTuple):
    """How large some files are together."""

    lines: int
    files: int


def code_lines(text: str) -> int:
    """Count lines that hold code: no blank lines, no comments, no docstrings."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    skipped |= {tokenize.ENCODING, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def sizes_by_folder(package: Path) -> dict[str, Size]:
    """Return the size of each folder of the package, with "." for the files beside them."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).parts
        folder = parts[0] if len(parts) > 1 else "."
        lines[folder] += code_lines(file.read_text(encoding="utf-8"))
        files[folder] += 1
    return {folder: Size(lines[folder], files[folder]) for folder in sorted(lines)}


def sum_of(sizes: list[Size]) -> Size:
    return Size(sum(size.lines for size in sizes), sum(size.files for size in sizes))


def table_of(sizes: dict[str, Size]) -> str:
    """Return the sizes of rings, and below each those of its folders."""
    rows = []
    for ring, folders in RINGS.items():
        inside = {folder: sizes[folder] for folder in folders if folder in sizes}
        rows += [(ring, sum_of(list(inside.values())))]
        rows += [(f"  {folder}", size) for folder, size in inside.items()]
    rows.append(("all", sum_of(list(sizes.values()))))
    head = f"{'ring':<18}{'code lines':>11}{'files':>7}"
    return "\n".join(
        [head, *(f"{name:<18}{size.lines:>11,}{size.files:>7}" for name, size in rows)]
    )


def problems_of(sizes: dict[str, Size], agreed_lines: int) -> list[str]:
    """Say what is wrong with these sizes."""
    known = {folder for folders in RINGS.values() for folder in folders}
    problems = [f"{PACKAGE}/{folder} belongs to no ring" for folder in sizes if folder not in known]
    core = sum_of([sizes[folder] for folder in RINGS["core"] if folder in sizes]).lines
    if core > agreed_lines * (1 + ROOM_TO_GROW):
        problems.append(
            f"the core has {core:,} code lines, {agreed_lines:,} were agreed on\n"
            "hint: delete something, or raise core_code_lines in pyproject.toml and say in the "
            "same commit what was refused in exchange"
        )
    return problems


def main(root: Path = ROOT) -> int:
    sizes = sizes_by_folder(root / PACKAGE)
    print(table_of(sizes))
    agreed = AGREED.search((root / "pyproject.toml").read_text(encoding="utf-8"))
    if agreed is None:
        print("error: pyproject.toml has no core_code_lines under [tool.rings]", file=sys.stderr)
        return 1
    problems = problems_of(sizes, int(agreed[1]))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
