"""The settings of a run as a stranger may read them: without paths, addresses and keys of the user."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from sf_core.config import RunConfig
from sf_core.config.yaml_file import find_differences

PRIVATE = ("run_id", "cluster", "dataplane", "storage", "track")
"""Sections that say where a run was computed, not what was computed."""

LEFT_OUT = "(left out)"

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|AUTH|CREDENTIAL", re.IGNORECASE)
_SECRET_WORD = re.compile(r"\b(sk|hf|gh[opsu]|xox[abp]|AKIA)[-_A-Za-z0-9]{12,}")
_NAMES_A_FILE = re.compile(r"[/\\]|^~|^\.{1,2}$|@|\.(jsonl?|ya?ml|parquet|csv|txt|pem|env)$")


def public_settings(config: RunConfig) -> dict[str, Any]:
    """Each setting that differs from its default, by its key."""
    differing = find_differences(RunConfig(), config)
    return {
        key: public_value(key, value) for key, _, value in differing if key.partition(".")[0] not in PRIVATE
    }


def public_value(name: str, value: Any) -> Any:
    """The value with whatever may be a path, an address or a key left out; `name` is that of its setting."""
    if isinstance(value, BaseModel):
        return public_value(name, value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        return {str(key): public_value(str(key), inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [public_value(name, inner) for inner in value]
    if not isinstance(value, str):
        return value
    last = name.rpartition(".")[2]
    # `max_tokens` is a number, and no secret
    if _SECRET.search(last) or _SECRET_WORD.search(value) or _NAMES_A_FILE.search(value):
        return LEFT_OUT
    return value
