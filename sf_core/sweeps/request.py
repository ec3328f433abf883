"""What a sweep is asked for: the form of its deployment, and what the command passes to the flow."""

from __future__ import annotations

from pydantic import Field

from sf_core.config.validation import ConfigError
from sf_core.settings import Settings
from sf_core.sweeps.expansion import expand
from sf_core.sweeps.sweep import OpenSweep, SweepFolder, SweepName
from storage.files import absolute

MOST_SEEDS = 1000


class SweepRequest(Settings):
    """One run for each combination of values and each seed."""

    config: str | None = Field("quickstart", min_length=1)
    """Name of a built-in configuration, or path of a YAML file where the flow runs. Empty: the sweep `name`
    goes on as it is stored."""
    seeds: int = Field(3, ge=1, le=MOST_SEEDS)
    """Number of seeds per setting. They count from the `seed` of the configuration."""
    settings: tuple[str, ...] = ()
    """Settings to vary, one per line, each with its values: train.learning_rate=1e-3,3e-3. All combinations
    of the values are run. A setting with one value is changed in all runs."""
    name: SweepName | None = None
    """Name of the sweep, with which the names of its runs begin. A sweep of this name goes on: its finished
    runs are not repeated. Empty: the name is made of the configuration and the settings."""
    at_once: int | None = Field(None, ge=1, le=1000)
    """Maximum number of runs at a time. Empty: as many as there are equal shares of the workers on which the
    configuration can run."""
    root: str | None = Field(None, min_length=1)
    """Folder of the runs, `storage.root`. Empty: that of the configuration."""

    @property
    def shown_name(self) -> str:
        """Name of the flow run."""
        return f"sweep-{self.name or self.config}"

    def open(self) -> OpenSweep:
        """The stored sweep, made or extended if a configuration is named. Raises ConfigError or ValueError,
        one sentence."""
        if self.config is None:
            if self.name is None:
                raise ConfigError("a sweep needs a config to begin, or the name of a stored sweep to go on")
            return OpenSweep.read(SweepFolder(absolute(self.root or "runs"), self.name))
        expanded = expand(self.config.split(), self.settings, self.seeds, self.name)
        root = absolute(self.root or expanded.root)
        folder = SweepFolder(root, expanded.name)
        return OpenSweep(folder, folder.put(expanded))
