import pytest
import torch

from sf_core.scheduling.probe import measure_device


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"device cuda:0 cannot be measured: torch .* finds no CUDA device"):
        measure_device("cuda:0", threads=1)
