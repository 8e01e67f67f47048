"""Folders as a user finds them: some may not be entered."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from moe_infinity.system.files import nearest_folder


def test_the_nearest_folder_is_one_that_may_be_looked_at(tmp_path, monkeypatch):
    """Before Python 3.14 `is_dir` raises inside a folder that may not be entered."""
    locked = tmp_path / "locked"
    locked.mkdir()
    is_dir = Path.is_dir

    def looked_at(path: Path, **options: Any) -> bool:
        if locked in path.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return is_dir(path, **options)

    monkeypatch.setattr(Path, "is_dir", looked_at)
    assert nearest_folder(locked / "a" / "b") == locked
    assert nearest_folder(tmp_path) == tmp_path


def test_where_no_folder_may_be_looked_at_it_is_the_top(tmp_path, monkeypatch):
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert nearest_folder(tmp_path / "a") == Path(tmp_path.anchor)
