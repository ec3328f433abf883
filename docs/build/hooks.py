"""Hooks of MkDocs: they add the pages that are made from code, the navigation of folders, and pages of files
outside docs to which documents link. A link to nothing is a warning, with which `make docs` fails."""

from __future__ import annotations

import logging
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from docs.build.commands import commands_page
from docs.build.repository import (
    ROOT,
    change_links,
    find_links,
    page_of,
    readme_of,
    relative,
    resolve,
    show_both,
    show_file,
)
from docs.build.routes import routes_page
from docs.build.settings import settings_page

log = logging.getLogger("mkdocs.hooks.seamlessflow")

MADE = {
    "reference/settings.md": settings_page,
    "reference/commands.md": commands_page,
    "reference/routes.md": routes_page,
}
FRONT_DOORS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/**/*.md", "tests/README.md")
"""Documents outside docs whose links are checked, linked to or not."""

_shown: dict[str, str] = {}
"""Files outside docs that the site shows, by their pages."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Names the pages of folders in the navigation."""
    for folder in ("recipes", "decisions"):
        pages = sorted(f"{folder}/{file.name}" for file in (ROOT / "docs" / folder).glob("*.md"))
        index = f"{folder}/README.md"
        _fill(config.nav or [], index, [page for page in pages if page != index])
    return config


def _fill(nav: list[Any], index: str, pages: list[str]) -> None:
    """Put pages behind the index of their folder, wherever the navigation has it."""
    if index in nav:
        nav += pages
        return
    for entry in nav:
        for inner in entry.values() if isinstance(entry, dict) else ():
            if isinstance(inner, list):
                _fill(inner, index, pages)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages made from code, and those of files outside docs."""
    for name, make in MADE.items():
        files.append(File.generated(config, name, content=make()))
    _shown.clear()
    doors = sorted(file for door in FRONT_DOORS for file in ROOT.glob(door))
    links = [str(file.relative_to(ROOT)) for file in doors]
    for file in files.documentation_pages():
        links += _outside(file.content_string, f"docs/{file.src_uri}")
    while links:
        path = readme_of(links.pop())
        if page_of(path) in _shown:
            continue
        _shown[page_of(path)] = path
        try:
            text = show_file(path)
        except UnicodeDecodeError:
            log.warning("%s is not a text file: move the file to docs, because a document links to it", path)
            continue
        files.append(File.generated(config, page_of(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV))
        links += _outside(text, f"{path}/." if (ROOT / path).is_dir() else path)
    return files


def _outside(markdown: str, source: str) -> list[str]:
    """Files outside docs to which a document links; links to nothing are named where they are changed."""
    found = (place[0] for target in find_links(markdown) if (place := resolve(target, source)))
    return [path for path in found if not _is_in_docs(path) and (ROOT / path).exists()]


def _is_in_docs(path: str) -> bool:
    return path == "docs" or path.startswith("docs/")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to files outside docs to their pages, and links of these back into docs."""
    here = page.file.src_uri
    if here.startswith("decisions/"):
        page.meta.setdefault("search", {"boost": 0.5})
    if here == "decisions/README.md":
        markdown += _list_decisions()
    if page.parent is None and page.file.inclusion is InclusionLevel.INCLUDED:
        # a column with the page alone
        page.meta.setdefault("hide", ["navigation"])
    return lead_links(show_both(markdown), here, _shown.get(here, f"docs/{here}"))


def lead_links(markdown: str, here: str, source: str) -> str:
    """The document `source` of the repository, with links for the page `here` of the site."""

    def change(target: str) -> str:
        place = resolve(target, f"{source}/." if (ROOT / source).is_dir() else source)
        if place is None:
            return target
        path, anchor = place
        if _is_in_docs(path):
            path = readme_of(path)
            inside = path.removeprefix("docs").removeprefix("/") or "index.md"
            if inside in MADE and not source.startswith("docs/"):
                log.warning("%s links to %s, which exists only on the site", source, path)
            return relative(inside, here) + anchor
        if path.startswith("..") or not (ROOT / path).exists():
            log.warning("%s links to %s, which does not exist", source, target)
            return target
        return relative(page_of(path), here) + anchor

    return change_links(markdown, change)


def _list_decisions() -> str:
    files = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    titles = [(file.name, file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")) for file in files]
    return "\n\n" + "\n".join(f"- [{title}]({name})" for name, title in titles) + "\n"
