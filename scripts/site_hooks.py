"""What mkdocs.yml asks for beside Markdown: `mkdocs build` calls the functions named on_...

- Files outside of docs/ that a page links to (CHANGELOG.md, examples) are part of the site, and
  links to them lead there. A link that shows the name of a page shows its title on the site. So the
  pages read well on GitHub and on the site.
- The page of the command line is made from the commands themselves.
- A page that would load anything from another host is an error.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# In the navigation, so on the site even where no page links to them.
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "notes/log.md")
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
TITLE = re.compile(r"^# (.*)$", re.MULTILINE)
COMMANDS = "<!-- commands -->"
FROM_ELSEWHERE = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Decisions come into the navigation by themselves."""
    for section in config.nav or []:
        if section.get("Decisions") == "decisions":
            names = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
            section["Decisions"] = [f"decisions/{name}" for name in names if name[:4] != "0000"]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add what pages link to outside of docs/."""
    waiting = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    waiting += [ROOT / name for name in ALWAYS]
    while waiting:
        path = waiting.pop()
        name = site_name(path)
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(path)))
        if path.suffix == ".md":
            targets = (
                path.parent / found["path"]
                for found in LINK.finditer(path.read_text(encoding="utf-8"))
            )
            found = {Path(posixpath.normpath(target)) for target in targets}
            waiting += sorted(
                path
                for path in found
                if path.is_file() and files.get_file_from_path(site_name(path)) is None
            )
    return files


def site_name(path: Path) -> str:
    """Where a file of the repository lies on the site, from the site's top."""
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    return name.removeprefix("docs/")


def on_page_markdown(markdown: str, *, page: Page, **kwargs: Any) -> str:
    """Links as they lead on the site, and the text of the commands."""
    source = Path(page.file.abs_src_path or "")

    def on_site(link: re.Match[str]) -> str:
        path = Path(posixpath.normpath(source.parent / link["path"]))
        if not path.is_file():
            return link[0]  # mkdocs says what is wrong with it
        start = posixpath.dirname(page.file.src_uri) or "."
        target = posixpath.relpath(site_name(path), start) + (link["anchor"] or "")
        return f"[{shown(link['text'], path)}]({target})"

    text = LINK.sub(on_site, markdown)
    return text.replace(COMMANDS, commands()) if COMMANDS in text else text


def shown(text: str, path: Path) -> str:
    """The text of a link: where it is the name of a page, the page's title."""
    if not text.endswith(".md"):
        return text
    title = TITLE.search(path.read_text(encoding="utf-8"))
    return title[1] if title else text


def commands() -> str:
    """All commands with their options, as Markdown."""
    import typer.cli
    import typer.main

    from moe_infinity.__main__ import app

    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="moe-infinity")
    text = typer.cli.get_docs_for_click(obj=command, ctx=context, name="moe-infinity")
    return text.partition("\n## ")[1].lstrip() + text.partition("\n## ")[2]


def on_post_page(output: str, *, page: Page, **kwargs: Any) -> str:
    if found := FROM_ELSEWHERE.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another host: {found[0]}")
    return output
