"""The base model of a policy, its name and its licence, as far as files name them. Nothing is guessed."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from sf_core.config import RunConfig
from sf_core.models.pretrained.published import PUBLISHED, folder_of
from storage.files import join, read_if_there

LICENCE_KEYS = ("license", "license_name", "license_link")

_IN_THE_CACHE = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]+/?$")
"""Matches the folder of a model in the cache of huggingface_hub."""


@dataclass(frozen=True, slots=True)
class Base:
    name: str | None = None
    """Name on the Hugging Face Hub; None: it is not known there, or there is no base."""
    licence: Mapping[str, str] = field(default_factory=dict)
    """Entries of the head of a model card; empty if no file tells the licence."""
    is_built_in: bool = False


def find_base(config: RunConfig, start_dir: str) -> Base:
    """The base of a run's policy. `start_dir`: its start folder, with the card of the base if it had one."""
    source = config.policy.model
    if source is None:
        return Base(is_built_in=True)
    for name, published in PUBLISHED.items():
        if source in (name, str(folder_of(name))):
            named = {} if published.licence is None else {"license": published.licence}
            return Base(published.base, named)
    cached = _IN_THE_CACHE.search(source)
    head = read_head(join(start_dir, "README.md"))
    licence = {key: str(head[key]) for key in LICENCE_KEYS if isinstance(head.get(key), str)}
    # without the licence itself, its name and link say nothing
    return Base("/".join(cached.groups()) if cached else None, licence if "license" in licence else {})


def read_head(card: str) -> dict[str, Any]:
    """The head of a model card; empty if there is no card, or its head cannot be read."""
    text = (read_if_there(card) or b"").decode(errors="replace").replace("\r\n", "\n")
    found = re.match(r"---\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    if found is None:
        return {}
    try:
        head = YAML(typ="safe", pure=True).load(found[1])
    except (YAMLError, ValueError, RecursionError):
        return {}
    return head if isinstance(head, dict) else {}


def write_head(entries: Mapping[str, Any]) -> str:
    """The head of a model card."""
    text = io.StringIO()
    writer = YAML(pure=True)
    writer.indent(sequence=4, offset=2)
    writer.dump(dict(entries), text)
    return f"---\n{text.getvalue()}---\n"
