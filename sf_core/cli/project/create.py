"""Creates a project from the template, in which only the name of its module is filled in."""

from __future__ import annotations

import keyword
import tempfile
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template

_TEMPLATE = resources.files("sf_core.cli.project") / "template"

_FILES = {
    "agent.py": "$module.py",
    "train.yaml": "train.yaml",
    "test_agent.py": "test_$module.py",
    "README.md": "README.md",
}
"""Names of the files, by those that they have in the template."""


def create_project(name: str) -> list[Path]:
    """Write a project into the new folder `name`; returns its files. The module in it is named like the
    folder. Raises ValueError, one sentence, if the folder is there or no module can be named so."""
    folder = Path(name)
    module = folder.name.replace("-", "_")
    if not module.isidentifier() or keyword.iskeyword(module):
        raise ValueError(
            f"{name}: {folder.name!r} cannot be the name of a Python module: use letters, digits and _, and "
            "begin with a letter"
        )
    if (existing := find_spec(module)) is not None:
        raise ValueError(
            f"{name}: the module name {module} is already used by {existing.origin or 'a package'}: choose "
            "another name"
        )
    if folder.exists():
        raise ValueError(f"{name} already exists; choose another name or remove it")
    names = {source: Template(target).substitute(module=module) for source, target in _FILES.items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    # a disk that is full leaves nothing half written
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as begun:
        whole = Path(begun, folder.name)
        whole.mkdir()
        for source, name_there in names.items():
            text = (_TEMPLATE / f"{source}.template").read_text(encoding="utf-8")
            (whole / name_there).write_text(Template(text).substitute(module=module), encoding="utf-8")
        whole.rename(folder)
    return [folder / name_there for name_there in names.values()]
