"""Calls of functions that need torch, for processes that need it for nothing else.

torch and transformers take 350 MB of a process as long as it lives, and a run has two that only watch.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from sf_core.process.import_path import module_environment, python_module


def call_in_subprocess(
    function: Callable[..., Any], *args: Any, raises: Iterable[type[ValueError]] = ()
) -> Any:
    """What a function of a module returns for these arguments, all in JSON. It runs in another process,
    unless this one has torch already, and equal calls get the same answer. Raises a ValueError, or one of
    `raises`, as the function does, and CalledProcessError if the process ends without an answer."""
    if "torch" in sys.modules:
        return function(*args)
    answer = json.loads(_ask(json.dumps([function.__module__, function.__qualname__, *args], sort_keys=True)))
    if "raised" in answer:
        kinds = {kind.__name__: kind for kind in raises}
        raise kinds.get(answer["raised"], ValueError)(answer["reason"])
    return answer["returned"]


@lru_cache(maxsize=64)
def _ask(call: str) -> str:
    command = python_module(__name__)
    env = module_environment()
    return subprocess.run(command, env=env, input=call, stdout=subprocess.PIPE, text=True, check=True).stdout


def _answer(call: str) -> dict[str, Any]:
    module, name, *args = json.loads(call)
    try:
        return {"returned": getattr(importlib.import_module(module), name)(*args)}
    except ValueError as error:
        return {"raised": type(error).__name__, "reason": str(error)}


if __name__ == "__main__":
    # what libraries print is no answer
    answers = sys.stdout
    sys.stdout = sys.stderr
    json.dump(_answer(sys.stdin.read()), answers)
