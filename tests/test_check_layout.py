"""Each rule of scripts/check_layout.py refuses a small tree that breaks it, and says where."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import check_layout
from scripts.check_layout import (
    ROOT,
    main,
    problems_of,
    read_prose,
    read_tree,
    too_wide_prose,
)


def problems(files: dict[str, str]) -> list[str]:
    """What is wrong with a package of these files, named without .py."""
    texts = {Path("moe_infinity", f"{name}.py"): text for name, text in files.items()}
    return list(problems_of(texts))


def test_a_tree_that_keeps_the_rules_has_no_problem():
    assert not problems(
        {
            "experts": "import torch\nclass Expert: ...\ntorch.zeros(2, dtype=d, device=c)\n",
            "cache/slots": "from moe_infinity.experts import Expert\nclass Slots: ...\n",
            "engine/layer": "from moe_infinity.cache import slots\nfrom ..experts import Expert\n",
        }
    )


# import circles


@pytest.mark.parametrize(
    "back",
    [
        "import moe_infinity.engine.layer",
        "from moe_infinity.engine import layer",
        "from moe_infinity.engine.layer import Layer",
        "from .layer import Layer",
        "from ..engine import layer",
        "def late():\n    from moe_infinity.engine import layer",
        "if TYPE_CHECKING:\n    from moe_infinity.engine import layer",
    ],
)
def test_an_import_circle_is_refused_however_it_is_written(back):
    found = problems(
        {
            "engine/layer": "import torch\nfrom moe_infinity.engine.device import Device",
            "engine/device": back,
        }
    )
    line = len(back.splitlines())
    assert len(found) == 1
    assert found[0].startswith("import circle: moe_infinity.engine.")
    assert "moe_infinity/engine/layer.py:2 moe_infinity.engine.device" in found[0]
    assert f"moe_infinity/engine/device.py:{line} moe_infinity.engine.layer" in found[0]


def test_a_circle_of_three_names_them_in_the_order_of_their_imports():
    (found,) = problems(
        {
            "a": "import moe_infinity.b",
            "b": "import moe_infinity.c",
            "c": "import moe_infinity.a",
        }
    )
    names = [part.removeprefix("moe_infinity.") for part in found.split() if "/" not in part]
    assert "".join(names[2:]).replace("->", "") in ("abca", "bcab", "cabc")


def test_every_circle_is_told():
    found = problems(
        {
            "a": "import moe_infinity.b\nimport moe_infinity.c",
            "b": "import moe_infinity.a",
            "c": "import moe_infinity.a",
        }
    )
    assert len(found) == 2


def test_a_package_that_its_own_modules_import_is_part_of_a_circle():
    (found,) = problems(
        {
            "__init__": "def late():\n    from moe_infinity.model import MoE",
            "model": "from moe_infinity import __version__",
        }
    )
    assert "moe_infinity/model.py:1 moe_infinity" in found


# folders


@pytest.mark.parametrize(
    ("file", "imported"),
    [
        ("kernels/cpu/rows", "engine.layer"),
        ("cache/policies", "predict.eamc"),
        ("predict/prefetcher", "memory.mover"),
        ("engine/layer", "server.app"),
        ("model", "cli.app"),
        ("server/app", "cli.terminal"),
    ],
)
def test_a_folder_imports_only_what_it_may(file, imported):
    module = imported.replace(".", "/")
    (found,) = problems({file: f"\nimport moe_infinity.{imported}", module: ""})
    assert found.startswith(f"moe_infinity/{file}.py:2: ")
    assert "must not import" in found


@pytest.mark.parametrize(
    ("file", "imported"),
    [
        ("kernels/cpu/rows", "layout"),
        ("kernels/cpu/rows", "kernels.reference"),
        ("cache/policies", "experts"),
        ("predict/predictor", "cache.policies"),
        ("cli/serve", "server.app"),
        ("entrypoints/api_server", "cli.app"),
    ],
)
def test_what_a_folder_may_import_is_no_problem(file, imported):
    module = imported.replace(".", "/")
    assert not problems({file: f"import moe_infinity.{imported}", module: ""})


def test_a_name_that_only_begins_like_an_allowed_one_is_refused():
    assert problems(
        {"cache/policies": "import moe_infinity.experts_backend", "experts_backend": ""}
    )


def test_folders_that_import_each_other_are_refused_with_the_names_of_both_sides():
    (found,) = problems(
        {
            "memory/slots": "import moe_infinity.checkpoint.layout",
            "memory/mover": "",
            "checkpoint/layout": "",
            "checkpoint/gguf/reader": "from moe_infinity.memory import mover",
        }
    )
    assert found == (
        "checkpoint/ and memory/ import each other: "
        "checkpoint/ imports memory.mover; memory/ imports checkpoint.layout"
    )


def test_folders_may_share_what_is_in_neither():
    assert not problems(
        {
            "layout": "",
            "memory/slots": "import moe_infinity.layout\nimport moe_infinity.checkpoint.reader",
            "checkpoint/reader": "from moe_infinity import layout",
            "model": "import moe_infinity.memory.slots",
        }
    )


@pytest.mark.parametrize("folder", ["cache", "predict", "tools/simulator"])
@pytest.mark.parametrize("text", ["import torch.nn", "def late():\n    from torch import Tensor"])
def test_bookkeeping_imports_no_torch(folder, text):
    (found,) = problems({f"{folder}/file": text})
    assert found.endswith(f"imports torch, which {folder}/ must do without")
    assert not problems({"engine/file": text})


# prose


@pytest.mark.parametrize("word", check_layout.HEADLESS)
@pytest.mark.parametrize(
    "text", ['"""{} it."""', 'class A:\n    """{} it."""', 'def a():\n    """{}: it."""']
)
def test_a_docstring_without_a_subject_is_refused(text, word):
    (found,) = problems({"cache/file": text.format(word)})
    assert found.endswith(f"a docstring begins with {word}, give it a subject")
    assert not problems({"cache/file": text.format(f"{word}s")})


@pytest.mark.parametrize(
    "text",
    [
        "def told(): ...",
        "class A:\n    def told(self): ...",
        "class A:\n    told: int",
        "class A:\n    def __init__(self):\n        self.told = 1",
    ],
)
def test_a_public_name_that_says_nothing_is_refused(text):
    (found,) = problems({"cache/file": text})
    assert "told is a name that says nothing" in found
    assert not problems({"cache/file": text.replace("told", "_told")})


def test_a_local_name_may_say_nothing():
    assert not problems({"cache/file": "def a(part):\n    found = part\n    return found"})


def test_prose_is_checked_in_every_folder():
    files = {"": "model", "kernels": "kernels/file", "tools": "tools/file"}
    text = '"""Of it."""'
    refused = {folder for folder, file in files.items() if problems({file: text})}
    assert refused == {*files}


# names


def test_two_public_classes_of_one_name_are_refused():
    (found,) = problems({"a": "class Step: ...", "b": "\nclass Step: ...", "c": "class _Step: ..."})
    assert found == ("2 public classes are named Step: moe_infinity/a.py:1, moe_infinity/b.py:2")


def test_private_and_nested_classes_may_share_a_name():
    text = "class _Step: ...\ndef make():\n    class Step: ...\n"
    assert not problems({"a": text, "b": text})


# lines


def test_a_file_has_at_most_400_lines():
    assert not problems({"a": "\n" * 400})
    assert problems({"a": "\n" * 401}) == ["moe_infinity/a.py: 401 lines, at most 400"]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_has_at_most_60_lines(kind):
    fits = f"{kind} long():\n" + "    pass\n" * 59
    assert not problems({"a": fits})
    assert problems({"a": fits + "    pass\n"}) == [
        "moe_infinity/a.py:1: long has 61 lines, at most 60"
    ]


@pytest.mark.parametrize("word", ["TODO", "FIXME", "XXX"])
def test_nothing_is_left_to_do_in_the_package(word):
    assert problems({"a": f"\n# {word}: later"}) == [
        f"moe_infinity/a.py:2: {word} left in the package"
    ]


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        ("torch.zeros(2)", "device and dtype"),
        ("torch.zeros(2, dtype=torch.int8)", "device"),
        ("torch.full((2,), 1, device='cpu')", "dtype"),
        ("torch.arange(2)", "device"),
    ],
)
def test_a_tensor_is_made_with_its_dtype_and_device(call, missing):
    assert problems({"a": f"x = {call}"}) == [f"moe_infinity/a.py:1: a tensor without {missing}"]


@pytest.mark.parametrize("line", ["a, b = 1, 2", "self.a, self.b = a, b", "x = a, b = 1, 2"])
def test_two_values_are_not_assigned_in_one_statement(line):
    (found,) = problems({"a": line})
    assert found.startswith("moe_infinity/a.py:1: ")
    assert found.endswith("assigned in one statement, give each its own")


@pytest.mark.parametrize(
    "line",
    [
        "a, b = b, a",
        "self.a, b = b, self.a",
        "taken, self.a = self.a, None",
        "a, b = b, a + b",
        "a, b = pair",
        "a = 1, 2",
        "a = b = 1",
    ],  # fmt: skip
)
def test_a_swap_and_an_unpacking_are_no_parallel_assignment(line):
    assert not problems({"a": line})


# the command


def test_the_command_fails_with_the_problems(tmp_path, capsys):
    file = tmp_path / "moe_infinity" / "a.py"
    log = tmp_path / "notes" / "log.md"
    for path, text in ((file, "x = 1\n"), (log, "word\n" * 6000)):
        path.parent.mkdir()
        path.write_text(text)
    assert main(tmp_path) == 0
    file.write_text("x, y = 1, 2\n")
    log.write_text("word\n" * 6001)
    assert main(tmp_path) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: moe_infinity/a.py:1: x, y assigned")
    assert second.startswith("error: notes/log.md: 6001 words, at most 6000")


def test_wide_prose_is_refused_and_tables_quotes_and_code_are_not():
    wide = "word " * 25
    text = f"{wide}\n- {wide}\n| {wide} |\n> {wide}\n    {wide}\n```sh\n{wide}\n```\n{'w' * 130}\n"
    found = list(too_wide_prose(Path("README.md"), text))
    assert [each.partition(": ")[0] for each in found] == ["README.md:1", "README.md:2"]


def test_the_rules_see_all_of_this_tree():
    assert {Path("README.md"), Path("notes/log.md"), Path("docs/serving.md")} <= {*read_prose(ROOT)}
    texts = read_tree(ROOT)
    assert {file.parts[0] for file in texts} >= {"moe_infinity", "tests", "scripts", "benchmarks"}
    assert Path("moe_infinity/model.py") in texts
