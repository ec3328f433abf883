"""The public names of SeamlessFlow, for your tasks, agents, rewards and notebooks.

Each name is imported when it is first used, because some of them need packages that take a second to load.
`__init__.pyi` lists the names and the modules that define them.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any


def _read_modules() -> dict[str, str]:
    """The module of each public name."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [statement for statement in stub.body if isinstance(statement, ast.ImportFrom)]
    return {alias.name: str(found.module) for found in imports for alias in found.names}


_MODULES = _read_modules()

__all__ = sorted([*_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("seamlessflow")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
