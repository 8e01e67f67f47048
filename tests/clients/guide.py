"""How docs/guides/agents.md sets up a client: the code blocks under its heading."""

from __future__ import annotations

from pathlib import Path

from tests.documented_code import BLOCK, NAMED, ROOT, SERVER

GUIDE = ROOT / "docs" / "guides" / "agents.md"


def code_under(heading: str, url: str) -> str:
    """The first block under this heading, for the server at `url` and the bundled model."""
    text = GUIDE.read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = BLOCK.search(section)
    assert found is not None, f"{GUIDE} has no code under {heading}"
    return NAMED.sub("demo", found["code"]).replace(SERVER, url.removeprefix("http://"))


def write_under(heading: str, url: str, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code_under(heading, url))
