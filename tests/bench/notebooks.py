"""Executes notebooks of the examples as a user does, in a kernel of its own."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.bench.waits import patience

ROOT = Path(__file__).parents[2]


def execute(name: str, folder: Path) -> list[str]:
    """Execute a notebook of the examples as if it lay in FOLDER/examples; returns the text of each code cell.
    Raises CellExecutionError if a cell raises an error."""
    notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
    place = folder / "examples"
    place.mkdir()
    client = NotebookClient(notebook, timeout=int(patience(60)), resources={"metadata": {"path": str(place)}})
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    env = {"PYTHONPATH": os.pathsep.join(paths), "IPYTHONDIR": str(folder / "ipython")}
    client.execute(env=os.environ | env)
    return ["\n".join(map(_text, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"]


def _text(output: nbformat.NotebookNode) -> str:
    return str(output.get("text") or output.data["text/plain"])
