"""How long a device takes for the work of a run. Pure arithmetic: nothing is computed, nothing waits.

The emulated engine and trainer sleep for these times, and the simulator adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sf_core.config import EmulationConfig
from sf_core.config.devices import Device
from sf_core.config.train_config import CHECKPOINT_BYTES


@dataclass(frozen=True)
class DeviceModel:
    """Durations in real seconds: emulated seconds divided by `time_dilation`.

    A kernel takes the longer of its arithmetic and its memory traffic (roofline: Williams et al. 2009). A
    token costs 2N FLOPs forward and 6N forward and backward, N parameters; attention's own FLOPs are left out
    (Kaplan et al. 2020).
    """

    settings: EmulationConfig
    device: Device | None = None
    """If given, its peak and memory bandwidth replace those of the settings."""

    def prefill_s(self, num_tokens: int) -> float:
        """Prefill of T tokens: max(2NT / (peak x utilisation), bytes of the weights / bandwidth)."""
        if num_tokens <= 0:
            return 0.0
        compute = 2 * self.settings.parameters * num_tokens / self._flops
        return self.real_s(max(compute, self._weight_bytes / self._bandwidth))

    def decode_s(self, num_running: int, context: float) -> float:
        """One token for each of B requests that hold C tokens of context together:
        max(2NB / (peak x utilisation), (bytes of the weights + C x KV bytes per token) / bandwidth)."""
        compute = 2 * self.settings.parameters * num_running / self._flops
        traffic = self._weight_bytes + context * self.settings.kv_bytes_per_token
        return self.real_s(max(compute, traffic / self._bandwidth))

    def train_s(self, num_tokens: int, num_ranks: int = 1) -> float:
        """A step on T tokens over W ranks that share them evenly: 6NT / (W x peak x utilisation)."""
        return self.real_s(6 * self.settings.parameters * num_tokens / (num_ranks * self._flops))

    def save_s(self) -> float:
        """Rank 0 stores the weights, and all ranks wait for it: their bytes / write bandwidth."""
        stored = self.settings.parameters * self.settings.stored_bytes_per_parameter
        return self.real_s(stored / self.settings.write_bandwidth)

    def save_checkpoint_s(self) -> float:
        """The same for a checkpoint, for which no rank waits."""
        return self.real_s(self.settings.parameters * CHECKPOINT_BYTES / self.settings.write_bandwidth)

    def weight_load_s(self) -> float:
        """An engine takes a new version: its host reads what changed, and then does what `wake_s` says."""
        read = self.settings.parameters * self.settings.delta_bytes_per_parameter
        return self.real_s(read / self.settings.load_bandwidth) + self.wake_s()

    def wake_s(self) -> float:
        """An engine takes the weights that its host has: their bytes in device memory / verify bandwidth."""
        return self.real_s(self._weight_bytes / self.settings.verify_bandwidth)

    def to_rollout_s(self) -> float:
        """The device becomes an engine: it wakes, unless the settings say how long that takes."""
        if self.settings.to_rollout_s is not None:
            return self.real_s(self.settings.to_rollout_s)
        return self.wake_s()

    def to_train_s(self) -> float:
        """The device becomes a rank: nothing is loaded unless the settings say so."""
        return self.real_s(self.settings.to_train_s)

    def real_s(self, seconds: float) -> float:
        """Emulated seconds on the clock of the machine; the times of agents' tools are divided alike."""
        return seconds / self.settings.time_dilation

    @cached_property
    def _flops(self) -> float:
        peak = self.device.peak_flops if self.device else self.settings.peak_flops
        return peak * self.settings.utilisation

    @cached_property
    def _bandwidth(self) -> float:
        return self.device.bandwidth if self.device else self.settings.memory_bandwidth

    @cached_property
    def _weight_bytes(self) -> float:
        return self.settings.parameters * self.settings.bytes_per_parameter
