"""The site builds without a broken link, loads nothing from other hosts, and has short pages."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.bench import ROOT

DOCS = ROOT / "docs"
MOST_BYTES = 15_000
MOST_PAGES = 12
OF_ANY_SIZE = {"decisions", "recipes"}
"""Folders with a page for each of something."""
PAGES = sorted(str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md"))
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}


class Loads(HTMLParser):
    """Collects what a page loads when it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        loads = given.get(LOADING.get(tag, ""))
        if tag == "link" and given.get("rel") not in ("prev", "next", "canonical"):
            loads = given.get("href")
        self.found += [loads] if loads else []


def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 100
    outside = []
    for page in pages:
        parser = Loads()
        parser.feed(page.read_text(encoding="utf-8"))
        outside += [f"{page.name}: {url}" for url in parser.found if re.match(r"(https?:)?//", url)]
    for sheet in site.rglob("*.css"):
        urls = re.findall(r"(?:@import|url\()\s*[\"']?([^\"')]+)", sheet.read_text(encoding="utf-8"))
        outside += [f"{sheet.name}: {url}" for url in urls if re.match(r"(https?:)?//", url)]
    assert outside == []


def test_files_outside_docs_are_pages_that_no_search_finds(site: Path) -> None:
    assert "learning_rate" in (site / "repository" / "configs" / "smollm2.yaml.html").read_text(
        encoding="utf-8"
    )
    assert (site / "repository" / "CONTRIBUTING.html").exists()
    found = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert "reference/settings.html#train.learning_rate" in found
    assert "repository/" not in found


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short(page: str) -> None:
    size = (DOCS / page).stat().st_size
    assert size <= MOST_BYTES, f"docs/{page} has {size} bytes, {MOST_BYTES} are allowed: make two pages of it"


def test_a_folder_has_few_pages() -> None:
    folders = {file.parent for file in DOCS.rglob("*.md")} - {DOCS / name for name in OF_ANY_SIZE}
    full = {str(f.relative_to(ROOT)): n for f in folders if (n := len([*f.glob("*.md")])) > MOST_PAGES}
    assert full == {}
