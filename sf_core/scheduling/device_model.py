"""How long a device takes for what a run asks of it. Pure arithmetic: nothing is computed, nothing waits.

The emulated engine and trainer sleep for these times, and the simulator adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sf_core.config import EmulationConfig
from sf_core.scheduling.roofline import Device

TRAIN_STATE_BYTES = 12
"""Per parameter beside the weights: a float32 copy and Adam's two moments (Rajbhandari et al. 2020, ZeRO)."""


@dataclass(frozen=True)
class DeviceModel:
    """Seconds, real ones: emulated seconds divided by `time_dilation`.

    A kernel takes the longer of its arithmetic and its memory traffic (roofline: Williams et al. 2009). A
    token costs 2N FLOPs forward and 6N forward and backward, N parameters; attention's own FLOPs are left out
    (Kaplan et al. 2020).
    """

    settings: EmulationConfig
    device: Device | None = None
    """Whose peak and memory bandwidth count instead of those of the settings."""

    def prefill_s(self, num_tokens: int) -> float:
        """A prompt of T tokens: max(2NT / (peak x utilisation), bytes of the weights / bandwidth)."""
        if num_tokens <= 0:
            return 0.0
        compute = 2 * self.settings.parameters * num_tokens / self._flops
        return self._real(max(compute, self._weight_bytes / self._bandwidth))

    def decode_s(self, num_running: int, context: float) -> float:
        """One token for each of B requests that hold C tokens of context together:
        max(2NB / (peak x utilisation), (bytes of the weights + C x KV bytes per token) / bandwidth)."""
        compute = 2 * self.settings.parameters * num_running / self._flops
        traffic = self._weight_bytes + context * self.settings.kv_bytes_per_token
        return self._real(max(compute, traffic / self._bandwidth))

    def train_s(self, num_tokens: int, num_ranks: int = 1) -> float:
        """A step on T tokens over W ranks that share them evenly: 6NT / (W x peak x utilisation)."""
        return self._real(6 * self.settings.parameters * num_tokens / (num_ranks * self._flops))

    def weight_load_s(self) -> float:
        """An engine takes over new weights: their bytes / load bandwidth."""
        return self._real(self._weight_bytes / self.settings.load_bandwidth)

    def to_rollout_s(self) -> float:
        """The device becomes an engine: its weights come in."""
        if self.settings.to_rollout_s is not None:
            return self._real(self.settings.to_rollout_s)
        return self.weight_load_s()

    def to_train_s(self, num_ranks: int = 1) -> float:
        """The device becomes one of W ranks: its shard of weights and optimiser state comes in."""
        if self.settings.to_train_s is not None:
            return self._real(self.settings.to_train_s)
        per_parameter = self.settings.bytes_per_parameter + TRAIN_STATE_BYTES
        state = self.settings.parameters * per_parameter / num_ranks
        return self._real(state / self.settings.load_bandwidth)

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

    def _real(self, seconds: float) -> float:
        return seconds / self.settings.time_dilation
