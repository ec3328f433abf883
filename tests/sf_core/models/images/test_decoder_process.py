"""Processes that decode images: their limits, and what comes after their end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from sf_core.models.images.decoder_process import DecoderError, SlowImageError, preprocess_isolated
from sf_core.models.images.preprocess import preprocess_image
from sf_core.models.images.processor_config import ImageProcessorConfig
from tests.bench import waits
from tests.bench.dataplane import heavy_images
from tests.bench.dataplane.images import png

IMAGE_PROCESSOR = ImageProcessorConfig(token_id=5, token_side=28, min_pixels=28 * 28, max_pixels=16 * 28 * 28)
MUCH_S = 1000.0


def decoders() -> set[psutil.Process]:
    """The decoders of this process."""
    found = set()
    for process in psutil.Process().children():
        try:
            if process.cmdline()[-1:] == ["sf_core.models.images.decoder_process"]:
                found.add(process)
        except psutil.Error:
            # it has ended meanwhile
            continue
    return found


def test_images_are_as_without_a_process() -> None:
    for data in (png("red"), png((1, 2, 3), (300, 200)), heavy_images.many_scans(3)):
        assert preprocess_isolated(data, IMAGE_PROCESSOR, MUCH_S) == preprocess_image(data, IMAGE_PROCESSOR)


def test_refusals_are_as_without_a_process() -> None:
    with pytest.raises(ValueError) as expected:
        preprocess_image(png()[:60], IMAGE_PROCESSOR)
    with pytest.raises(ValueError) as refused:
        preprocess_isolated(png()[:60], IMAGE_PROCESSOR, MUCH_S)
    assert str(refused.value) == str(expected.value)


@pytest.mark.parametrize(
    "data", [heavy_images.many_scans(2000), heavy_images.many_chunks(200_000)], ids=["scans", "chunks"]
)
def test_the_cpu_time_of_an_image_has_a_limit(data: bytes) -> None:
    with pytest.raises(SlowImageError) as refused:
        preprocess_isolated(data, IMAGE_PROCESSOR, 0.05)
    assert str(refused.value) == (
        "the image takes more than 0.05 s of CPU time to decode, which is the limit"
    )
    # that of each image, not that of the process
    for _ in range(5):
        assert preprocess_isolated(png("red"), IMAGE_PROCESSOR, MUCH_S) == preprocess_image(
            png("red"), IMAGE_PROCESSOR
        )


def test_memory_has_a_limit() -> None:
    with pytest.raises(ValueError) as refused:
        preprocess_isolated(heavy_images.LARGE_WEBP, IMAGE_PROCESSOR, MUCH_S)
    assert str(refused.value) == (
        "the image takes more than 1024 MiB of memory to decode, which is the limit"
    )


def test_a_decoder_is_not_what_lies_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sf_core", "PIL"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit(3)", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(1) as another:
        preprocessed = another.submit(preprocess_isolated, png("red"), IMAGE_PROCESSOR, MUCH_S).result()
    assert preprocessed == preprocess_image(png("red"), IMAGE_PROCESSOR)


def test_a_decoder_that_was_killed_has_a_successor() -> None:
    before = decoders()
    failures: list[Exception] = []

    def decode() -> None:
        # all in one thread, because each has a decoder of its own
        preprocess_isolated(png("red"), IMAGE_PROCESSOR, MUCH_S)
        [idle] = decoders() - before
        idle.kill()
        waits.wait_until(lambda: not idle.is_running() or idle.status() == psutil.STATUS_ZOMBIE)
        preprocess_isolated(png("red"), IMAGE_PROCESSOR, MUCH_S)
        try:
            preprocess_isolated(heavy_images.many_scans(200_000), IMAGE_PROCESSOR, MUCH_S)
        except DecoderError as error:
            failures.append(error)
        preprocess_isolated(png("red"), IMAGE_PROCESSOR, MUCH_S)
        failures.append(EOFError())

    thread = threading.Thread(target=decode)
    thread.start()
    waits.wait_until(lambda: any(process.cpu_times().user > 0.6 for process in decoders() - before))
    for process in decoders() - before:
        process.kill()
    waits.join(thread)
    assert [str(failure) for failure in failures] == ["a decoder has ended with status -9", ""]
