"""Links of documents: found in Markdown, resolved in the repository; and the pages that show files outside
docs."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).parents[2]
PAGES = "repository"
"""Folder of the site with the pages of files outside docs."""
FRONT = "---\nsearch:\n  exclude: true\n---\n"

_CODE = re.compile(
    r"^(?P<fence> *(?:```+|~~~+)).*?(?:^(?P=fence)[`~]* *$|\Z)|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)",
    re.M | re.S,
)
_LINK = re.compile(
    r"\]\((?P<inline>[^()\s]*(?:\([^()\s]*\)[^()\s]*)*)(?:\s+\"[^\"]*\")?\)"
    r"|^ {0,3}\[[^\]]+\]: +(?P<named>\S+)",
    re.M,
)
_PICTURE = re.compile(
    r"<picture>\s*"
    r'<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<told>[^"]*)" src="(?P<light>[^"]+)">\s*'
    r"</picture>"
)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.I)


def show_both(markdown: str) -> str:
    """The document with two pictures for each picture that has a dark variant. The site hides one of the two
    by the colours that the reader has chosen there; `<picture>` knows only those of the system."""
    return _PICTURE.sub(r"![\g<told>](\g<light>#only-light)![\g<told>](\g<dark>#only-dark)", markdown)


def change_links(markdown: str, change: Callable[[str], str]) -> str:
    """The document with another target for each link and picture; those in code are not links."""
    hidden = _CODE.sub(lambda code: re.sub(r"[^\n]", "x", code[0]), markdown)
    parts = []
    end = 0
    for link in _LINK.finditer(hidden):
        group = "inline" if link["inline"] is not None else "named"
        parts += [markdown[end : link.start(group)], change(link[group])]
        end = link.end(group)
    return "".join(parts) + markdown[end:]


def find_links(markdown: str) -> list[str]:
    """Targets of all links and pictures, in their order."""
    found: list[str] = []
    change_links(markdown, lambda target: found.append(target) or target)  # type: ignore[func-returns-value]
    return found


def resolve(target: str, source: str) -> tuple[str, str] | None:
    """The file or folder of the repository to which a link in the document `source` leads, and its `#anchor`;
    None if the link leads elsewhere: to another host, or within its document."""
    path, sign, anchor = target.partition("#")
    if not path or _SCHEME.match(target):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), unquote(path))), sign + anchor


def readme_of(path: str) -> str:
    """The README of a folder that has one, else the path itself."""
    readme = posixpath.normpath(f"{path}/README.md")
    return readme if (ROOT / readme).is_file() else path


def page_of(path: str) -> str:
    """Source of the page that shows this file or folder of the repository, relative to docs."""
    path = readme_of(path)
    if (ROOT / path).is_dir():
        return f"{PAGES}/{path}/index.md"
    return f"{PAGES}/{path}" if path.endswith(".md") else f"{PAGES}/{path}.md"


def relative(path: str, source: str) -> str:
    """A link from the page `source` to `path`, both relative to the same folder."""
    return posixpath.relpath(path, posixpath.dirname(source) or ".")


def show_file(path: str) -> str:
    """Markdown of the page that shows a file or folder outside docs, with the links that the file has."""
    file = ROOT / path
    if file.is_dir():
        return f"{FRONT}# `{path}/`\n\n" + "\n".join(_list(file))
    text = file.read_text(encoding="utf-8")
    if path.endswith(".md"):
        return FRONT + text
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{FRONT}# `{path}`\n\n{fence}{_language(path, text)}\n{text.rstrip()}\n{fence}\n"


def _list(folder: Path) -> list[str]:
    shown = [file for file in folder.iterdir() if not file.name.startswith((".", "__pycache__"))]
    shown.sort(key=lambda file: (file.is_file(), file.name))
    return [f"- [`{file.name}`]({file.name})" if file.is_file() else f"- `{file.name}/`" for file in shown]


def _language(path: str, text: str) -> str:
    try:
        return str(get_lexer_for_filename(path, text).aliases[0])
    except (ClassNotFound, IndexError):
        return "text"
