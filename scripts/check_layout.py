"""The rules that keep the tree readable. scripts/rings.py counts its code lines.

    python scripts/check_layout.py     # exit status 1 when a rule is broken

Everywhere: a file has at most 400 lines and a function at most 60, as an editor counts them.
notes/log.md has at most 6,000 words. Text in Markdown is wrapped at 120 columns; tables, code and
quotes are not.

In the package:

- no import circle, so that every module can be read after those it imports;
- no two public classes of one name, so that a name means one thing;
- folders import only what ALLOWED and IMPORTED_BY say;
- no two folders import each other, so that a folder can be read alone;
- the folders of NO_TORCH import no torch;
- a tensor is made with its dtype and device, so that a user's defaults cannot change it;
- no two values assigned in one statement, except to swap or replace them;
- no TODO, FIXME or XXX;
- a docstring is a sentence with a subject, so that it can be read alone: none begins with a word of
  HEADLESS; no public name is one of EMPTY_NAMES, which say nothing.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "moe_infinity"
FOLDERS = (PACKAGE, "tests", "benchmarks", "scripts", "tools", "examples")
FILE_LINES = 400
FUNCTION_LINES = 60
LOG = Path("notes", "log.md")
LOG_WORDS = 6000
COLUMNS = 120  # of Markdown
NO_PROSE = ("|", ">", "    ")  # tables, quotes, code

# What torch makes in its default dtype and on its default device, which are the user's.
MADE_BY_TORCH = (
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
)  # fmt: skip
OF_INTS = ("arange", "randint", "randperm")  # in int64 by themselves
NO_TORCH = ("cache", "predict", "system", "tools/simulator")  # bookkeeping that runs on any laptop
HEADLESS = ("Also", "As", "By", "Of", "That", "What", "Whether")
EMPTY_NAMES = ("found", "own", "part", "place", "share", "told")
MARKER = re.compile(r"\b(TODO|FIXME|XXX)\b")


class Rule(NamedTuple):
    modules: tuple[str, ...]  # folders or modules of the package
    reason: str


# What a folder may import of the package beside itself.
ALLOWED = {
    "kernels": Rule(
        ("experts", "errors", "layout", "system"),
        "arithmetic is tested without an engine",
    ),
    "system": Rule((), "what differs between operating systems is below everything else"),
    "cache": Rule(("experts", "errors"), "who is evicted is decided on what the caller passes"),
    "predict": Rule(
        ("cache", "config", "experts", "errors", "output"),
        "a prediction needs the routing and no model",
    ),
}
ROOTS = ("__main__", "entrypoints")  # what puts the command line together, and starts it
# Who may import a folder beside itself.
IMPORTED_BY = {
    "cli": Rule((*ROOTS, "tools", "cluster"), "the library works without its command line"),
    "server": Rule(("cli", "cluster"), "the library works without its server's packages"),
    "prefixes": Rule(("model", "server", "cli"), "prompts are kept for those who compute them"),
    "tools": Rule(ROOTS, "what looks at runs and machines is not what runs"),
    "gpu": Rule(("model",), "a machine without a GPU imports none of it"),
    "entrypoints": Rule((), "commands of an older MoE-Infinity are nothing to build on"),
}


class Module(NamedTuple):
    file: Path
    name: str  # as Python imports it, moe_infinity.cache.policies
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.file.name == "__init__.py"


Imports = Mapping[str, Mapping[str, str]]  # importer -> imported -> where, as "file:line"


# one file


def too_long(file: Path, text: str, tree: ast.Module) -> Iterator[str]:
    num_lines = len(text.splitlines())
    if num_lines > FILE_LINES:
        yield f"{file}: {num_lines} lines, at most {FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                where = f"{file}:{node.lineno}: {node.name}"
                yield f"{where} has {length} lines, at most {FUNCTION_LINES}"


def too_long_log(text: str) -> Iterator[str]:
    num_words = len(text.split())
    if num_words > LOG_WORDS:
        yield f"{LOG}: {num_words} words, at most {LOG_WORDS}: delete what later entries supersede"


def too_wide_prose(file: Path, text: str) -> Iterator[str]:
    is_code = False
    for line_number, line in enumerate(text.splitlines(), start=1):
        is_code ^= line.lstrip().startswith("```")
        if len(line) > COLUMNS and " " in line and not is_code and not line.startswith(NO_PROSE):
            yield f"{file}:{line_number}: {len(line)} columns, at most {COLUMNS}"


def markers(file: Path, text: str) -> Iterator[str]:
    for line_number, line in enumerate(text.splitlines(), start=1):
        if match := MARKER.search(line):
            yield f"{file}:{line_number}: {match[0]} left in the package"


def torch_in_bookkeeping(file: Path, tree: ast.Module) -> Iterator[str]:
    folder = next((name for name in NO_TORCH if file.is_relative_to(f"{PACKAGE}/{name}")), None)
    if folder is None:
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        if any("torch" in name.split(".") for name in names):
            yield f"{file}:{node.lineno}: imports torch, which {folder}/ must do without"


def tensors_left_to_torch(file: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (missing := left_to_torch(node)):
            yield f"{file}:{node.lineno}: a tensor without {missing}"


def left_to_torch(node: ast.Call) -> str:
    """What a call that makes a tensor does not name of its dtype and device."""
    if not isinstance(node.func, ast.Attribute):
        return ""
    name = node.func.attr
    owner = node.func.value
    if name not in MADE_BY_TORCH or not (isinstance(owner, ast.Name) and owner.id == "torch"):
        return ""
    needed = ["device"] if name in OF_INTS else ["dtype", "device"]
    return " and ".join(sorted({*needed} - {keyword.arg for keyword in node.keywords}))


def parallel_assignments(file: Path, tree: ast.Module) -> Iterator[str]:
    """`a, b = x, y` saves a line and costs its reader the pairing. A swap needs it."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
            continue
        values = node.value.elts
        for target in node.targets:
            if not isinstance(target, ast.Tuple) or len(target.elts) != len(values) or not values:
                continue
            is_named = all(isinstance(name, ast.Name | ast.Attribute) for name in target.elts)
            # A swap, or taking a value and leaving another one in its place.
            is_swap = {*map(ast.unparse, target.elts)} & {*map(ast.unparse, values)}
            if len(values) > 1 and is_named and not is_swap:
                names = ", ".join(map(ast.unparse, target.elts))
                yield f"{file}:{node.lineno}: {names} assigned in one statement, give each its own"


def headless_docstrings(file: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = re.match(r"\w*", ast.get_docstring(node) or "")
            if first is not None and first[0] in HEADLESS:
                line = node.body[0].lineno
                yield f"{file}:{line}: a docstring begins with {first[0]}, give it a subject"


def empty_names(file: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = {node.name}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names = {node.attr}
        else:
            continue
        if isinstance(node, ast.ClassDef):
            names |= {
                ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)
            }
        for name in sorted(names & {*EMPTY_NAMES}):
            yield f"{file}:{node.lineno}: {name} is a name that says nothing"


# the package


def imports_of(modules: Iterable[Module]) -> Imports:
    """Imports between modules of the package: also those in functions and under TYPE_CHECKING."""
    modules = list(modules)
    known = {module.name for module in modules}
    imports: dict[str, dict[str, str]] = {}
    for module in modules:
        found = imports.setdefault(module.name, {})
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name in imported_names(module, node):
                    # `from package import name` may mean a module or what the package defines.
                    imported = name if name in known else name.rpartition(".")[0]
                    if imported in known and imported != module.name:
                        found.setdefault(imported, f"{module.file}:{node.lineno}")
    return imports


def imported_names(module: Module, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        parts = module.name.split(".")
        num_dropped = node.level - module.is_package
        parents = parts[: len(parts) - num_dropped]
        base = ".".join([*parents, *([node.module] if node.module else [])])
    yield from (f"{base}.{alias.name}" for alias in node.names)


def import_circles(imports: Imports) -> Iterator[str]:
    """Circles until none is left, each without the last import of those before it."""
    left = {name: dict(sorted(found.items())) for name, found in sorted(imports.items())}
    while circle := a_circle(left):
        pairs = list(zip(circle, circle[1:], strict=False))
        steps = [f"{left[importer][imported]} {imported}" for importer, imported in pairs]
        yield f"import circle: {circle[0]} -> {' -> '.join(steps)}"
        importer, imported = pairs[-1]
        del left[importer][imported]


def a_circle(imports: Imports) -> list[str]:
    """Modules of which each imports the next, the first once more at the end; or none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]  # each is imported by the next
        return circle[::-1]
    return []


def forbidden_imports(imports: Imports) -> Iterator[str]:
    for importer, found in imports.items():
        for imported, where in found.items():
            for folder, rule in ALLOWED.items():
                if is_of(importer, [folder]) and not is_of(imported, [folder, *rule.modules]):
                    yield f"{where}: {folder}/ must not import {imported}: {rule.reason}"
            for folder, rule in IMPORTED_BY.items():
                if is_of(imported, [folder]) and not is_of(importer, [folder, *rule.modules]):
                    yield f"{where}: {importer} must not import {folder}/: {rule.reason}"


def folder_pairs(modules: Iterable[Module], imports: Imports) -> Iterator[str]:
    """Pairs of folders that import each other, and what each of them imports of the other."""
    folder_of = {module.name: folder_name(module) for module in modules}
    names: dict[tuple[str, str], set[str]] = defaultdict(set)
    for importer, found in imports.items():
        for imported in found:
            names[folder_of[importer], folder_of[imported]].add(imported)
    for (one, other), there in sorted(names.items()):
        back = names.get((other, one))
        if back and "" not in (one, other) and one < other:
            yield (
                f"{one}/ and {other}/ import each other: "
                f"{one}/ imports {listed(there)}; {other}/ imports {listed(back)}"
            )


def folder_name(module: Module) -> str:
    """The folder of the package that a module is in; empty for modules in none."""
    folders = module.file.parts[1:-1]
    return folders[0] if folders else ""


def listed(names: Iterable[str]) -> str:
    """Modules of the package, separated by commas."""
    return ", ".join(sorted(name.removeprefix(f"{PACKAGE}.") for name in names))


def is_of(module: str, parts: Iterable[str]) -> bool:
    """Whether a module is one of some folders or modules of the package."""
    return any(f"{module}.".startswith(f"{PACKAGE}.{part}.") for part in parts)


def classes_of_one_name(modules: Iterable[Module]) -> Iterator[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{module.file}:{node.lineno}")
    for name, where in sorted(places.items()):
        if len(where) > 1:
            yield f"{len(where)} public classes are named {name}: {', '.join(where)}"


# the tree


def read_tree(root: Path) -> dict[Path, str]:
    """The text of every Python file, by its path below `root`."""
    paths = sorted(path for name in FOLDERS for path in (root / name).rglob("*.py"))
    return {path.relative_to(root): path.read_text(encoding="utf-8") for path in paths}


def read_prose(root: Path) -> dict[Path, str]:
    """The text of every Markdown file, by its path below `root`."""
    places = (
        root.glob("*.md"),
        *((root / name).rglob("*.md") for name in ("docs", "notes", PACKAGE)),
    )
    paths = sorted(path for place in places for path in place)
    return {path.relative_to(root): path.read_text(encoding="utf-8") for path in paths}


def module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def problems_of(texts: Mapping[Path, str]) -> Iterator[str]:
    modules: list[Module] = []
    for file, text in texts.items():
        tree = ast.parse(text, filename=str(file))
        yield from too_long(file, text, tree)
        if file.parts[0] == PACKAGE:
            modules.append(Module(file, module_name(file), tree))
            yield from markers(file, text)
            yield from torch_in_bookkeeping(file, tree)
            yield from tensors_left_to_torch(file, tree)
            yield from parallel_assignments(file, tree)
            yield from headless_docstrings(file, tree)
            yield from empty_names(file, tree)
    imports = imports_of(modules)
    yield from forbidden_imports(imports)
    yield from import_circles(imports)
    yield from folder_pairs(modules, imports)
    yield from classes_of_one_name(modules)


def main(root: Path = ROOT) -> int:
    prose = read_prose(root)
    problems = [*problems_of(read_tree(root)), *too_long_log(prose[LOG])]
    for file, text in prose.items():
        problems += too_wide_prose(file, text)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
