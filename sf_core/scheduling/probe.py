"""Measures devices: their two roofline figures, by a large matrix product and a large copy; and products of
the shapes of a policy.

    python -m sf_core.scheduling.probe DTYPE WIDTH ROWS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sf_core.models.projections import fastest

if TYPE_CHECKING:
    from sf_core.config.devices import Device


def measure_device(device: str, *, threads: int, seconds: float = 1.0) -> Device:
    """Best of as many runs of each as fit into `seconds`, since disturbances only slow a run;
    float32 on `threads` threads of the "cpu", bfloat16 on "cuda:N". Raises ValueError if that cannot be."""
    from sf_core.config.devices import Device  # not for products, which each plan measures in a process

    on_cpu = device == "cpu"
    torch.set_num_threads(threads)
    if not on_cpu and not torch.cuda.is_available():
        raise ValueError(
            f"device {device} cannot be measured: torch {torch.__version__} finds no CUDA device"
        )
    size, dtype = (2048, torch.float32) if on_cpu else (8192, torch.bfloat16)
    # larger than any cache
    length = (256 << 20) if on_cpu else (2 << 30)
    try:
        left, right = torch.randn(2, size, size, device=device).to(dtype)
        source = torch.ones(length, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise ValueError(f"device {device} cannot be measured: {str(error).splitlines()[0]}") from None
    product = torch.empty_like(left)
    target = torch.empty_like(source)

    def finish() -> None:
        if not on_cpu:
            torch.cuda.synchronize(device)

    multiply = _fastest(lambda: torch.mm(left, right, out=product), finish, seconds)
    copy = _fastest(lambda: target.copy_(source), finish, seconds)
    return Device(
        "measured",
        peak_flops=2.0 * size**3 / multiply,
        # a copy reads and writes
        bandwidth=2.0 * length / copy,
        bytes_per_weight=dtype.itemsize,
    )


def measure_products(dtype: torch.dtype, width: int, rows: int, seconds: float = 0.5) -> float:
    """FLOP/s of one core in products of [rows, width] by [width, 4 * width], as engines compute them. One
    thread, because several wait for each other where other processes run too."""
    torch.set_num_threads(1)
    inputs = torch.randn(rows, width, dtype=dtype)
    weights = torch.randn(4 * width, width, dtype=dtype)
    project = fastest(dtype, torch.device("cpu")).linear(weights, None)
    elapsed_s = _fastest(lambda: project(inputs), lambda: None, seconds)
    return 8.0 * rows * width**2 / elapsed_s


def _fastest(work: Callable[[], object], finish: Callable[[], None], seconds: float) -> float:
    """Seconds of the fastest run, after one that warms up."""
    work()
    finish()
    best = float("inf")
    deadline = time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        work()
        finish()
        end = time.perf_counter()
        best = min(best, end - start)
        if end > deadline:
            return best


if __name__ == "__main__":
    kind, width, rows = sys.argv[1:]
    print(measure_products(getattr(torch, kind), int(width), int(rows)))
