"""Losses, advantages and estimates of divergence against those of TRL and verl: makes
tests/data/references.npz and prints the largest difference of value and gradient by formula.

The libraries run in an environment of their own, which the first call makes (some minutes).

    python -m benchmarks.references
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.peers import formulas
from benchmarks.results import ROOT
from tests.sf_core.recipes.references import FILE, differences, inputs

VENV = ROOT / ".venvs" / "references"
# torch first and alone: with this exact version pip finds the CPU build
TORCH = ["torch==2.13.0"]
TRL = [*TORCH, "trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0"]
OTHERS = [
    "ray",
    "tensordict==0.10.0",
    "hydra-core",
    "codetiming",
    "torchdata",
    "peft",
    "pyvers",
    "dill",
    "orjson",
]
# it refuses this version of transformers, and works with it
VERL = ["--no-deps", "verl==0.9.1"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "inputs.npz")
        made = Path(folder, "references.npz")
        np.savez(given, **inputs())  # type: ignore[arg-type]
        subprocess.run([_python(), formulas.__file__, str(given), str(made)], check=True)
        theirs = dict(np.load(made))

    np.savez_compressed(FILE, **theirs)
    versions = {name.partition("/")[2]: str(theirs[name]) for name in theirs if name.startswith("version/")}
    print(json.dumps({"versions": versions, "largest_difference": differences(theirs)}))


def _python() -> str:
    python = VENV / "bin" / "python"
    marker = VENV / ".complete.json"
    wanted = json.dumps([TRL, OTHERS, VERL])
    if not marker.exists() or marker.read_text(encoding="utf-8") != wanted:
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        for packages in (TORCH, TRL, OTHERS, VERL):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        marker.write_text(wanted, encoding="utf-8")
    return str(python)


if __name__ == "__main__":
    main()
