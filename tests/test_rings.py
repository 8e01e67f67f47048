"""The count of code lines by ring, and the size of the core that was agreed on."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import rings


def package(root: Path, files: dict[str, str], agreed: str = "[tool.rings]\ncore_code_lines = 100"):
    for name, text in files.items():
        file = root / rings.PACKAGE / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "pyproject.toml").write_text(agreed)
    return root


def test_code_lines_leave_out_comments_docstrings_and_blank_lines():
    lines = ['"""A file."""', "# why", "x = (", "    1,  # one", ")", "", "def f():"]
    lines += ['    """Do it."""', "    return x", ""]
    text = "\n".join(lines)
    assert rings.code_lines(text) == 5


def test_folders_are_counted_in_their_rings(tmp_path):
    files = {"a.py": "x = 1\n", "cache/b.py": "y = 1\nz = 1\n", "tools/deep/c.py": "w = 1\n"}
    table = rings.table_of(rings.sizes_by_folder(package(tmp_path, files) / rings.PACKAGE))
    assert [line.split() for line in table.splitlines()] == [
        ["ring", "code", "lines", "files"],
        ["core", "3", "2"],
        [".", "1", "1"],
        ["cache", "2", "1"],
        ["shelf", "0", "0"],
        ["outside", "1", "1"],
        ["tools", "1", "1"],
        ["all", "4", "3"],
    ]


@pytest.mark.parametrize(("num_lines", "code"), [(102, 0), (103, 1)])
def test_the_core_may_grow_by_two_percent(tmp_path, capsys, num_lines, code):
    files = {"cache/b.py": "y = 1\n" * num_lines}
    assert rings.main(package(tmp_path, files)) == code
    assert ("were agreed on" in capsys.readouterr().err) == bool(code)


def test_a_folder_without_a_ring_is_refused(tmp_path, capsys):
    assert rings.main(package(tmp_path, {"attic/b.py": "y = 1\n"})) == 1
    assert "moe_infinity/attic belongs to no ring" in capsys.readouterr().err


def test_a_missing_number_is_refused(tmp_path, capsys):
    assert rings.main(package(tmp_path, {"a.py": "x = 1\n"}, agreed="")) == 1
    assert "no core_code_lines" in capsys.readouterr().err
