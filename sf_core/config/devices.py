"""Devices: the settings of an emulated one, and whether a device suits training or decoding, by the roofline
model (Williams et al., CACM 52(4), 2009):

    attainable FLOP/s = min(peak FLOP/s, intensity [FLOP/byte] x memory bandwidth [bytes/s])

A pass over the weights does 2 FLOPs per weight and token, and reads each weight once, so its intensity is
2 x tokens / bytes per weight. Training passes thousands of tokens at once and is bound by the peak; decoding
passes one token of each running request and is bound by the bandwidth. KV caches and activations are left
out: they lower the intensity of decoding further.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field

from sf_core.settings import Settings


@dataclass(frozen=True, slots=True)
class Device:
    kind: str
    """A key of DEVICES, or "measured" for a device that a worker has measured."""
    peak_flops: float
    """Peak speed of dense matrix products in the number format of training, in FLOP/s."""
    bandwidth: float
    """Memory bandwidth, in bytes/s."""
    bytes_per_weight: int = 2
    """Size of one weight during training, in bytes: 2 in bfloat16, 4 in float32."""


DEVICES = {
    device.kind: device
    for device in (
        Device("a100", 312e12, 2.039e12),
        Device("h100", 989e12, 3.35e12),
        Device("h800", 989e12, 3.35e12),
        Device("h200", 989e12, 4.8e12),
        Device("h20", 148e12, 4.0e12),
        Device("b200", 2250e12, 8.0e12),
        Device("l40s", 362e12, 0.864e12),
        Device("l4", 121e12, 0.3e12),
        Device("mi300x", 1307e12, 5.3e12),
    )
}
"""Published peak figures, in bfloat16 without sparsity. If a device exists in several forms: the SXM or OAM
form; for the A100, the form with 80 GB. Sources are the data sheets of the makers (NVIDIA A100, H100, H200,
DGX B200, L40S, L4; AMD Instinct MI300X). The figures of H800 and H20 are the figures that board makers
list."""


@dataclass(slots=True)
class WorkerDevice:
    """The device of a worker process."""

    figures: Device | None = None
    """Figures that the worker declares for its device. None: the figures of the configuration."""
    tag: str | None = None
    """Tag for which an emulated device was used last. To switch to another tag takes emulated time."""


def find_device(kind: str) -> Device:
    """The device of this kind, in any case of letters. Raises ValueError if the kind is not in the table."""
    if (device := DEVICES.get(kind.lower())) is None:
        raise ValueError(
            f"unknown device kind {kind!r}; use one of {', '.join(sorted(DEVICES))}, or measure the device "
            "with sf worker --probe"
        )
    return device


def attainable_flops(device: Device, tokens: int) -> float:
    """Attainable FLOP/s of a pass over the weights with this number of tokens."""
    intensity = 2.0 * tokens / device.bytes_per_weight
    return min(device.peak_flops, intensity * device.bandwidth)


def train_priority(device: Device, *, tokens_per_microbatch: int, max_running: int) -> float:
    """Attainable FLOP/s of a device in training, divided by those in decoding; at least 1 if a microbatch
    holds more tokens than requests run at once.

    The SeamlessFlow paper names `train_priority` and the roofline model and, as far as we know, no formula.
    This dimensionless ratio is the device's comparative advantage in training. Devices with the highest ratio
    train: decoding would leave their compute idle, because it is large for their bandwidth.

    >>> h100, h20 = DEVICES["h100"], DEVICES["h20"]
    >>> [round(train_priority(d, tokens_per_microbatch=8192, max_running=64), 1) for d in (h100, h20)]
    [4.6, 1.0]
    """
    return attainable_flops(device, tokens_per_microbatch) / attainable_flops(device, max_running)


def step_of(priority: float) -> int:
    """The priority rounded on a log scale: those within about a fifth are equal, as a probe is no more exact.

    >>> step_of(2.0), step_of(2.1), step_of(2.6)
    (4, 4, 6)
    """
    return round(4 * math.log2(priority))


class EmulationConfig(Settings):
    """The device and the policy that emulated engines and trainers imitate. Default: an H100 (SXM, bfloat16,
    figures from its data sheet) and a policy of the shape of Qwen3-8B."""

    peak_flops: float = Field(989e12, gt=0)
    """Peak speed of the device, in FLOP/s, for the number format in which the device computes."""
    memory_bandwidth: float = Field(3.35e12, gt=0)
    """Memory bandwidth of the device, in bytes/s."""
    utilisation: float = Field(0.4, gt=0, le=1)
    """Fraction of `peak_flops` that the device reaches in prefill, decoding and training."""
    parameters: float = Field(8.2e9, gt=0)
    """Number of parameters of the policy."""
    bytes_per_parameter: float = Field(2.0, gt=0)
    """Size of one parameter in device memory, in bytes."""
    kv_bytes_per_token: float = Field(147456.0, ge=0)
    """Size of the KV cache of one token, in bytes: 2 x layers x KV heads x head width x bytes per element."""
    kv_tokens: int = Field(180_000, ge=0)
    """Capacity of the KV cache, in tokens. A turn reuses the cache entries of earlier turns of the same
    session. 0: no reuse."""
    stored_bytes_per_parameter: float = Field(2.0, gt=0)
    """Number of bytes that a trainer writes per parameter and version: 2 in bfloat16, 4 in float32."""
    delta_bytes_per_parameter: float = Field(0.03, gt=0)
    """Number of bytes that the host of an engine reads per parameter and version. In bfloat16: about 0.03,
    because hosts read deltas. In float32: 4, because hosts read all weights."""
    write_bandwidth: float = Field(0.45e9, gt=0)
    """Speed at which a trainer copies, hashes and writes weights and checkpoints, in bytes/s."""
    verify_bandwidth: float = Field(2e9, gt=0)
    """Speed at which the host of an engine verifies its copy of the weights and loads the copy into the
    engine, in bytes/s."""
    load_bandwidth: float = Field(0.7e9, gt=0)
    """Speed at which the host of an engine reads weights from storage, in bytes/s."""
    to_rollout_s: float | None = Field(None, ge=0)
    """Time for the emulated device to switch from training to rollout, in seconds. Empty: the size of the
    weights divided by `verify_bandwidth`."""
    to_train_s: float = Field(0.0, ge=0)
    """Time for the emulated device to switch from rollout to training, in seconds. The default is 0, because
    the trainer stays in memory."""
    time_dilation: float = Field(1.0, gt=0)
    """Number of emulated seconds per real second: every duration is divided by this number. Below 1 the
    emulation is slower than the real devices. One data plane can then serve the tokens of many emulated
    devices."""
