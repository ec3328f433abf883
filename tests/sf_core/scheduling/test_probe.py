import subprocess
import sys

import pytest
import torch

from sf_core.scheduling.probe import measure_device, measure_products


def test_a_probe_measures_this_machine_within_what_a_cpu_can_be() -> None:
    threads = torch.get_num_threads()
    try:
        device = measure_device("cpu", threads=1, seconds=0.05)
    finally:
        torch.set_num_threads(threads)
    assert (device.kind, device.bytes_per_weight) == ("measured", 4)
    # one core: from a busy small one to more than any has
    assert 1e8 < device.peak_flops < 1e13
    assert 1e8 < device.bandwidth < 1e12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_a_policy_are_measured_by_a_command(dtype: str) -> None:
    threads = torch.get_num_threads()
    try:
        assert 1e7 < measure_products(getattr(torch, dtype), 256, 64, seconds=0.01) < 1e14
    finally:
        torch.set_num_threads(threads)
    command = [sys.executable, "-m", "sf_core.scheduling.probe", dtype, "256", "64"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert 1e7 < float(told) < 1e14


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"device cuda:0 cannot be measured: torch .* finds no CUDA device"):
        measure_device("cuda:0", threads=1)
