"""Links of documents are found and resolved, and one that leads nowhere is a warning."""

from __future__ import annotations

import pytest

from docs.build.hooks import lead_links
from docs.build.repository import change_links, find_links, page_of, resolve, show_file

SOURCES = {"repository/README.md": "README.md"}
DOCUMENT = """# Title

[one](one.md#part), ![a picture](two.png "its title") and [`code`](three/) twice: [x](four.md)[y](five.md).
`[not](this.md)` and [named].

```python
call[0](not_this.md)
```

[named]: https://example.org/a_(b)
"""


def test_links_are_found_but_not_in_code() -> None:
    assert find_links(DOCUMENT) == [
        "one.md#part",
        "two.png",
        "three/",
        "four.md",
        "five.md",
        "https://example.org/a_(b)",
    ]
    assert change_links(DOCUMENT, lambda target: target) == DOCUMENT
    assert "[`code`](new/three/)" in change_links(DOCUMENT, lambda target: f"new/{target}")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("../../configs/grpo.yaml", ("configs/grpo.yaml", "")),
        ("page.md#a-part", ("docs/start/page.md", "#a-part")),
        ("#a-part", None),
        ("https://example.org", None),
        ("mailto:someone@example.org", None),
    ],
)
def test_links_lead_to_files_of_the_repository(target: str, expected: tuple[str, str] | None) -> None:
    assert resolve(target, "docs/start/install.md") == expected


def test_files_and_folders_are_shown_as_pages() -> None:
    assert page_of("configs/smollm2.yaml") == "repository/configs/smollm2.yaml.md"
    assert "\n# `configs/smollm2.yaml`\n\n```yaml\n" in show_file("configs/smollm2.yaml")
    assert page_of("tests") == page_of("tests/README.md") == "repository/tests/README.md"
    assert page_of("configs") == "repository/configs/index.md"
    assert "- [`smollm2.yaml`](smollm2.yaml)" in show_file("configs")
    # the fence is longer than any in the file
    assert "\n" + "`" * 4 + "python\n" in show_file("tests/docs/test_links.py")


@pytest.mark.parametrize(
    ("page", "given", "expected"),
    [
        ("start/a.md", "../../configs/smollm2.yaml", "../repository/configs/smollm2.yaml.md"),
        ("start/a.md", "../../CONTRIBUTING.md#rules", "../repository/CONTRIBUTING.md#rules"),
        ("start/a.md", "../guides/b.md#part", "../guides/b.md#part"),
        ("repository/README.md", "docs/start/a.md#part", "../start/a.md#part"),
        ("repository/README.md", "docs/decisions", "../decisions/README.md"),
        ("repository/README.md", "LICENSE", "LICENSE.md"),
    ],
)
def test_links_are_changed_to_pages(page: str, given: str, expected: str) -> None:
    assert lead_links(f"[x]({given})", page, SOURCES.get(page, f"docs/{page}")) == f"[x]({expected})"


@pytest.mark.parametrize(
    ("page", "given", "told"),
    [
        (
            "start/a.md",
            "../../configs/none.yaml",
            "docs/start/a.md links to ../../configs/none.yaml, which does not exist",
        ),
        ("start/a.md", "../../../else.md", "docs/start/a.md links to ../../../else.md, which does not exist"),
        (
            "repository/README.md",
            "docs/reference/settings.md",
            "README.md links to docs/reference/settings.md, which exists only on the site",
        ),
    ],
)
def test_a_link_to_nothing_is_a_warning(
    caplog: pytest.LogCaptureFixture, page: str, given: str, told: str
) -> None:
    lead_links(f"[x]({given})", page, SOURCES.get(page, f"docs/{page}"))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", told)]
