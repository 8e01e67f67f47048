"""The line budget, printed as a table, and the rules that keep the tree readable.

    python scripts/check_layout.py     # exit status 1 when a rule is broken

The budget counts lines that hold code; what explains it (docstrings, comments) is free. The limits
on one file and one function count every line, as an editor shows them.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "moe_infinity"
FOLDERS = (PACKAGE, "tests", "benchmarks", "scripts", "tools")

CORE_LINES = 5212  # without what is built around it: decisions 0005, 0011 to 0014, 0019, 0021
AROUND = (
    "server", "entrypoints", "simulator", "packer", "cli/app.py", "cli/options.py", "inspection.py",
    "profiling.py", "streaming.py", "cli/terminal.py", "tracing.py",
)  # fmt: skip
KERNEL_LINES = 3211  # arithmetic, each with a plain twin: decisions 0006, 0010, 0012 to 0020
CATALOGUE_LINES = 1200  # one entry per architecture or format, none on a token's way: 0006
CATALOGUE = [
    "architectures/adapters.py",
    "architectures/module_list.py",
    "checkpoint/formats.py",
    "checkpoint/packing.py",
    "checkpoint/packed_on_load.py",
    "checkpoint/pickled.py",
]
PATH_LINES = 1300  # the one-hour path below
FILE_LINES, FILE_LINES_SOFT = 400, 300
FUNCTION_LINES = 60

ONE_HOUR_PATH = [
    "model.py",
    "engine/layer.py",
    "cache/residency.py",
    "predict/eam.py",
    "predict/predictor.py",
    "predict/planner.py",
    "memory/mover.py",
    "architectures/experts_backend.py",
]
# What torch makes in its default dtype and on its default device, which are the user's.
MADE_BY_TORCH = (
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
)  # fmt: skip
OF_INTS = ("arange", "randint", "randperm")  # in int64 by themselves
NO_TORCH = ("cache", "predict", "simulator")  # bookkeeping that runs on any laptop
MARKER = re.compile(r"\b(TODO|FIXME|XXX)\b")


def is_core(file: Path) -> bool:
    return (
        file.parts[0] == PACKAGE
        and file.parts[1] not in (*AROUND, "kernels")
        and "/".join(file.parts[1:]) not in CATALOGUE
    )


def is_kernel(file: Path) -> bool:
    return file.parts[:2] == (PACKAGE, "kernels")


def folder_of(file: Path) -> str:
    """The row of the table: top folders, and the package one folder deeper."""
    parts = file.parts[:-1]
    return "/".join(parts[: 2 if parts[0] == PACKAGE else 1])


def imports_torch(node: ast.AST) -> bool:
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    return any("torch" in name.split(".") for name in names)


def left_to_torch(node: ast.Call) -> str:
    """What a call that makes a tensor does not name of its dtype and device."""
    if not isinstance(node.func, ast.Attribute):
        return ""
    name, owner = node.func.attr, node.func.value
    if name not in MADE_BY_TORCH or not (isinstance(owner, ast.Name) and owner.id == "torch"):
        return ""
    needed = ["device"] if name in OF_INTS else ["dtype", "device"]
    return " and ".join(sorted({*needed} - {keyword.arg for keyword in node.keywords}))


def problems_of(file: Path, text: str) -> Iterator[str]:
    num_lines = len(text.splitlines())
    if num_lines > FILE_LINES:
        yield f"{file}: {num_lines} lines, at most {FILE_LINES}"
    torch_free = file.parts[0] == PACKAGE and file.parts[1] in NO_TORCH
    for node in ast.walk(ast.parse(text, filename=str(file))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                where = f"{file}:{node.lineno}: {node.name}"
                yield f"{where} has {length} lines, at most {FUNCTION_LINES}"
        elif file.parts[0] == PACKAGE and isinstance(node, ast.Call) and left_to_torch(node):
            yield f"{file}:{node.lineno}: a tensor without {left_to_torch(node)}"
        elif torch_free and isinstance(node, ast.stmt) and imports_torch(node):
            yield f"{file}:{node.lineno}: imports torch, which {file.parts[1]}/ must do without"
    if file.parts[0] == PACKAGE:
        for line_number, line in enumerate(text.splitlines(), start=1):
            if match := MARKER.search(line):
                yield f"{file}:{line_number}: {match[0]} left in the package"


def code_lines(text: str) -> int:
    """Lines that hold code: no blank lines, no comments, no docstrings."""
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


def print_table(lines: Counter[Path], limited: list[tuple[str, int, int]]) -> None:
    per_folder: Counter[str] = Counter()
    for file, num_lines in lines.items():
        per_folder[folder_of(file)] += num_lines
    for folder, num_lines in sorted(per_folder.items()):
        print(f"{folder:<28}{num_lines:>7,}")
    print(f"{'total':<28}{lines.total():>7,}")
    for name, num_lines, limit in limited:
        print(f"{name:<28}{num_lines:>7,} of {limit:,}")


def main() -> int:
    paths = sorted(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}
    lines = Counter({file: code_lines(text) for file, text in texts.items()})
    limited = [  # a file not yet written has 0 lines
        ("core", sum(lines[file] for file in lines if is_core(file)), CORE_LINES),
        ("kernels", sum(lines[file] for file in lines if is_kernel(file)), KERNEL_LINES),
        ("catalogue", sum(lines[Path(PACKAGE, name)] for name in CATALOGUE), CATALOGUE_LINES),
        ("one-hour path", sum(lines[Path(PACKAGE, name)] for name in ONE_HOUR_PATH), PATH_LINES),
    ]
    print_table(lines, limited)

    for file, text in texts.items():
        num_lines = len(text.splitlines())
        if FILE_LINES_SOFT < num_lines <= FILE_LINES:
            print(f"warning: {file}: {num_lines} lines, aim at {FILE_LINES_SOFT}")
    problems = [problem for file, text in texts.items() for problem in problems_of(file, text)]
    problems += [
        f"{name}: {num_lines:,} lines, at most {limit:,}"
        for name, num_lines, limit in limited
        if num_lines > limit
    ]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
