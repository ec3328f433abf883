"""Small pure-Python libraries that are installed here with tests of their own, as small repositories.

Some are parts of larger packages, which then have a short `__init__.py` of ours, so that a part is imported
without the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from sysconfig import get_path


@dataclass(frozen=True, slots=True)
class Library:
    repo: str
    """owner/name"""
    sources: tuple[str, ...]
    """Patterns of the files in which faults are planted."""
    tests: tuple[str, ...]
    """Patterns of the files with tests."""
    more: tuple[str, ...] = ()
    """Patterns of the files that those need."""
    ours: dict[str, str] = field(default_factory=dict)
    """Files that we write, by their names."""
    place: Path = Path(get_path("purelib"))

    def files(self) -> dict[str, bytes]:
        """All its files, by their names; empty if the library is not installed here."""
        named = dict.fromkeys([*self.source_names(), *self.test_names(), *self._matching(self.more)])
        if not named:
            return {}
        return {name: (self.place / name).read_bytes() for name in named} | {
            name: text.encode() for name, text in self.ours.items()
        }

    def source_names(self) -> list[str]:
        return list(self._matching(self.sources))

    def test_names(self) -> list[str]:
        return list(self._matching(self.tests))

    def _matching(self, patterns: tuple[str, ...]) -> Iterator[str]:
        for pattern in patterns:
            found = (path for path in self.place.glob(pattern) if path.is_file())
            yield from sorted(str(path.relative_to(self.place)) for path in found)


def _all(pattern: str, *words: str) -> tuple[str, ...]:
    return tuple(pattern.format(word) for word in words)


LIBRARIES = (
    Library(
        "pytoolz/toolz",
        sources=_all("toolz/{}.py", "dicttoolz", "functoolz", "itertoolz", "recipes"),
        tests=_all("toolz/tests/test_{}.py", "dicttoolz", "functoolz", "itertoolz", "recipes"),
        more=("toolz/*.py", "toolz/curried/*.py", "toolz/sandbox/*.py", "toolz/tests/__init__.py"),
    ),
    Library(
        "python-jsonschema/referencing",
        sources=("referencing/_core.py", "referencing/exceptions.py", "referencing/jsonschema.py"),
        tests=_all("referencing/tests/test_{}.py", "core", "exceptions", "jsonschema"),
        more=("referencing/*.py", "referencing/tests/__init__.py"),
    ),
    Library(
        "python-jsonschema/jsonschema",
        sources=_all("jsonschema/{}.py", "_keywords", "_types", "_utils", "exceptions", "validators"),
        tests=_all("jsonschema/tests/test_{}.py", "types", "utils", "validators", "format"),
        more=("jsonschema/*.py", "jsonschema/tests/__init__.py"),
    ),
    Library(
        "Supervisor/supervisor",
        sources=_all("supervisor/{}.py", "states", "datatypes", "childutils", "loggers", "events"),
        tests=_all("supervisor/tests/test_{}.py", "states", "datatypes", "childutils", "loggers", "events"),
        more=(
            "supervisor/*.py",
            "supervisor/medusa/*.py",
            "supervisor/version.txt",
            *_all("supervisor/tests/{}.py", "__init__", "base"),
        ),
    ),
    Library(
        "omnilib/aioitertools",
        sources=_all("aioitertools/{}.py", "builtins", "itertools", "more_itertools", "helpers"),
        tests=_all("aioitertools/tests/{}.py", "builtins", "itertools", "more_itertools"),
        more=("aioitertools/*.py", *_all("aioitertools/tests/{}.py", "__init__", "asyncio", "helpers")),
    ),
    Library(
        "tartley/colorama",
        sources=_all("colorama/{}.py", "ansi", "ansitowin32", "initialise"),
        tests=("colorama/tests/*_test.py",),
        more=("colorama/*.py", "colorama/tests/*.py"),
    ),
    Library(
        "gitpython-developers/smmap",
        sources=("smmap/util.py", "smmap/mman.py"),
        tests=("smmap/test/test_util.py", "smmap/test/test_tutorial.py"),
        more=("smmap/*.py", "smmap/test/__init__.py", "smmap/test/lib.py"),
    ),
    Library(
        "dask/zict",
        sources=("zict/common.py", "zict/zip.py"),
        tests=("zict/tests/test_common.py", "zict/tests/test_zip.py"),
        more=("zict/*.py", *_all("zict/tests/{}.py", "__init__", "conftest", "utils_test")),
    ),
    Library(
        "mpmath/libmp",
        sources=_all("mpmath/libmp/{}.py", "libintmath", "libmpf"),
        tests=("mpmath/tests/test_bitwise.py",),
        more=("mpmath/libmp/*.py", "mpmath/tests/__init__.py"),
        ours={"mpmath/__init__.py": ""},
    ),
    Library(
        "networkx/utils",
        sources=_all("networkx/utils/{}.py", "heaps", "mapped_queue", "union_find"),
        tests=_all("networkx/utils/tests/test_{}.py", "heaps", "mapped_queue", "unionfind"),
        more=("networkx/exception.py", "networkx/utils/misc.py", "networkx/utils/tests/__init__.py"),
        ours={
            "networkx/__init__.py": "from networkx.exception import *\nfrom networkx import utils\n",
            "networkx/utils/__init__.py": "".join(
                f"from networkx.utils.{name} import *\n"
                for name in ("misc", "heaps", "mapped_queue", "union_find")
            ),
        },
    ),
    Library(
        "sympy/multipledispatch",
        sources=_all("sympy/multipledispatch/{}.py", "conflict", "core", "dispatcher", "utils"),
        tests=("sympy/multipledispatch/tests/test_*.py",),
        more=("sympy/multipledispatch/**/*.py", "sympy/testing/pytest.py", "sympy/utilities/exceptions.py"),
        ours=dict.fromkeys(_all("sympy/{}__init__.py", "", "testing/", "utilities/"), ""),
    ),
    Library(
        "dask/core",
        sources=_all("dask/{}.py", "rewrite", "core", "_task_spec"),
        tests=_all("dask/tests/test_{}.py", "rewrite", "core", "task_spec"),
        more=("dask/*.py", "dask/dask.yaml", "dask/tests/__init__.py"),
        ours={"dask/__init__.py": ""},
    ),
)
