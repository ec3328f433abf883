"""Where our processes import from: our packages from one copy, the user's modules from the user's folders."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

NAMES = ("seamlessflow", "flows", "tasks", "storage", "sf_core")
"""Our top-level packages. Their names are common, and the first match on the path is imported."""

ROOT = Path(__file__).resolve().parents[2]
"""Folder of the copy of our packages that runs: a clone, or where packages are installed."""


class _OurPackages:
    """Finds our packages in ROOT alone, before anything else on the import path is asked."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(ROOT)]) if name in NAMES else None


def import_from(folders: Iterable[str]) -> None:
    """Let this process import the user's modules from these folders. Our packages come from ROOT, also if a
    folder has files with their names, or is another clone of ours."""
    if _OurPackages not in sys.meta_path:
        sys.meta_path.insert(0, _OurPackages)
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def user_folders() -> list[str]:
    """Folders of the user's modules (SF_MODULES), as the command that started this process has set them."""
    return [folder for folder in os.environ.get("SF_MODULES", "").split(os.pathsep) if folder]


def python_module(name: str, *arguments: str) -> list[str]:
    """The command that runs a Python module in a process of ours, with the variables of
    `module_environment`. Without -P, files in the current folder would hide the packages of all others."""
    return [sys.executable, "-P", "-m", name, *arguments]


def module_environment() -> dict[str, str]:
    """The variables of this process for a process of `python_module`, which imports the same copy of our
    packages as this one. Folders that hide them leave PYTHONPATH; `import_from` finds the user's modules in
    the current folder and in those of PYTHONPATH."""
    current = os.getcwd()
    python_path = [os.path.abspath(folder) for folder in _split_path(os.environ.get("PYTHONPATH"))]
    ours = [folder for folder in (current, *python_path) if Path(folder).resolve() == ROOT]
    others = [folder for folder in python_path if not _has_our_names(folder)]
    path = dict.fromkeys([*ours, *others])
    modules = user_folders() or dict.fromkeys([current, *python_path])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "SF_MODULES": os.pathsep.join(modules)}


def _has_our_names(folder: str) -> bool:
    return any(PathFinder.find_spec(name, [folder]) for name in NAMES)


def is_another_copy(folder: Path) -> bool:
    """Whether a folder has our packages, and those that run are elsewhere."""
    return folder.resolve() != ROOT and (folder / "sf_core" / "environment_variables.py").is_file()


def _split_path(value: str | None) -> list[str]:
    """The folders of a path; an empty entry is the current folder."""
    return value.split(os.pathsep) if value else []
