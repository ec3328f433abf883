"""What a shell offers for the word at the cursor. Reads names of local files alone, and reports no errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from sf_core.config import StorageConfig
from sf_core.config.validation import list_settings
from sf_core.config.yaml_file import builtin_configs


def complete_config(incomplete: str) -> list[str]:
    """Built-in configurations and the YAML files of this folder. In other folders the shell completes."""
    files = sorted(name for name in _names(".") if name.endswith((".yaml", ".yml")))
    return [name for name in [*files, *builtin_configs()] if name.startswith(incomplete)]


def complete_override(incomplete: str) -> list[str]:
    """Paths of all settings. Sections are left out: their settings begin with their names. A path that is
    alone comes twice, because a shell puts a space behind a single word."""
    paths = list(dict.fromkeys(list_settings()))
    sections = {path.rpartition(".")[0] for path in paths}
    settings = [path for path in paths if path not in sections]
    offered = [f"{path}=" for path in settings if path.startswith(incomplete)]
    if len(offered) == 1:
        offered.append(f"{offered[0]}VALUE")
    return offered


def complete_setting(incomplete: str) -> list[str]:
    return [path for path in dict.fromkeys(list_settings()) if path.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Runs in the default of `storage.root`."""
    root = StorageConfig().root
    runs = (name for name in _names(root) if os.path.isfile(os.path.join(root, name, "config.json")))
    return sorted(name for name in runs if name.startswith(incomplete))


def complete_sweep(incomplete: str) -> list[str]:
    """Sweeps in the default of `storage.root`."""
    return sorted(
        name for name in _names(os.path.join(StorageConfig().root, "sweeps")) if name.startswith(incomplete)
    )


def _names(folder: str) -> Iterator[str]:
    try:
        yield from (path.name for path in Path(folder).iterdir())
    except OSError:
        return
