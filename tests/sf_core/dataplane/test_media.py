"""Images of a run are decoded once, and stored before they are known."""

from __future__ import annotations

import asyncio
import io
import threading
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from sf_core.dataplane import media
from sf_core.dataplane.chat.messages import SentImage
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.media import Media
from sf_core.models.images.decoder_process import DecoderError, SlowImageError, preprocess_isolated
from sf_core.models.images.preprocess import PreprocessedImage
from sf_core.models.images.processor_config import ImageProcessorConfig
from storage.media import read_image
from tests.bench import dataplane
from tests.bench.dataplane.heavy_images import many_scans
from tests.bench.waits import patience

IMAGE_PROCESSOR = ImageProcessorConfig(token_id=5, token_side=28, min_pixels=28 * 28, max_pixels=16 * 28 * 28)

BROKEN = "the image is broken, or its format is not PNG, JPEG, WebP or GIF"


def sent(*images: bytes) -> list[SentImage]:
    return [
        SentImage(f"here[{i}]", dataplane.images.encoded(data), {"type": "image"})
        for i, data in enumerate(images)
    ]


async def complete(
    kept: Media, *rounds: list[SentImage], image_processor: ImageProcessorConfig = IMAGE_PROCESSOR
) -> None:
    """All rounds at once."""
    await asyncio.gather(*(kept.complete(one, image_processor) for one in rounds))


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was decoded."""
    data: list[bytes] = []

    def fit(given: bytes, image_processor: ImageProcessorConfig, cpu_s: float) -> PreprocessedImage:
        data.append(given)
        return preprocess_isolated(given, image_processor, cpu_s)

    monkeypatch.setattr(media, "preprocess_isolated", fit)
    return data


async def test_equal_images_are_decoded_once_and_stored_once(tmp_path: Path, fitted: list[bytes]) -> None:
    kept = Media(str(tmp_path))
    red = dataplane.images.png("red")
    blue = dataplane.images.png("blue", (300, 200))
    rounds = [sent(red, blue, red), sent(red), sent(blue)]
    await complete(kept, *rounds)
    await complete(kept, again := sent(blue, red))
    assert sorted(fitted) == sorted([red, blue])
    parts = [[one.part for one in round] for round in [*rounds, again]]
    assert parts[0][0] == parts[0][2] == parts[1][0] == parts[3][1]
    assert parts[0][1] == parts[2][0] == parts[3][0]
    for part in (parts[0][0], parts[0][1]):
        with Image.open(io.BytesIO(read_image(str(tmp_path), part["sha256"]))) as image:
            assert image.size == (part["width"], part["height"])
            assert (part["height"], part["width"]) == IMAGE_PROCESSOR.smart_resize(
                part["height"], part["width"]
            )
    assert len([*tmp_path.iterdir()]) == 2


async def test_a_client_that_goes_away_leaves_its_image_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    ends = threading.Event()
    num_decoded = Counter[str]()

    def fit(data: bytes, image_processor: ImageProcessorConfig, cpu_s: float) -> PreprocessedImage:
        num_decoded["red"] += 1
        begun.set()
        assert ends.wait(patience())
        return preprocess_isolated(data, image_processor, cpu_s)

    monkeypatch.setattr(media, "preprocess_isolated", fit)
    kept = Media(str(tmp_path))
    waiting = sent(dataplane.images.png("red"))
    first, second = (
        asyncio.create_task(kept.complete(one, IMAGE_PROCESSOR))
        for one in (sent(dataplane.images.png("red")), waiting)
    )
    await asyncio.to_thread(begun.wait, patience())
    first.cancel()
    await asyncio.wait([first])
    ends.set()
    await second
    assert waiting[0].part["sha256"] and num_decoded["red"] == 1


async def test_another_limit_is_another_image(tmp_path: Path, fitted: list[bytes]) -> None:
    kept = Media(str(tmp_path))
    data = dataplane.images.png("red", (112, 112))
    large = sent(data)
    small = sent(data)
    await complete(kept, large)
    await complete(kept, small, image_processor=IMAGE_PROCESSOR.with_max_tokens(4))
    assert (large[0].part["width"], small[0].part["width"]) == (112, 56)
    assert len(fitted) == 2


async def test_of_many_images_the_latest_are_known(
    tmp_path: Path, fitted: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "NUM_KNOWN", 2)
    kept = Media(str(tmp_path))
    images = [dataplane.images.png((0, 0, i)) for i in range(4)]
    await complete(kept, sent(*images))
    await complete(kept, sent(*images[2:]))
    assert len(fitted) == 4
    await complete(kept, sent(images[0]))
    assert len(fitted) == 5


async def test_letters_of_urls_are_read(tmp_path: Path) -> None:
    images = (dataplane.images.encoded(dataplane.images.png((level, 0, 0))) for level in range(256))
    data = next(data for data in images if {"+", "/"} & {*data})
    plain = [SentImage("a", data, {})]
    of_urls = [SentImage("b", data.replace("+", "-").replace("/", "_"), {})]
    await complete(Media(str(tmp_path)), plain, of_urls)
    assert plain[0].part == of_urls[0].part


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("", BROKEN),
        (
            dataplane.images.encoded(dataplane.images.png("red", kind="TIFF")),
            BROKEN,
        ),
        ("AAAA", BROKEN),
        ("A", "its base64 is broken"),
        (dataplane.images.encoded(dataplane.images.png("red")[:60]), "the image cannot be decoded"),
        (
            dataplane.images.encoded(dataplane.images.png("red", (28 * 212, 28))),
            "the image has 5936 by 28 pixels; the ratio of its sides must not exceed 200",
        ),
        ("A" * 45_000_000, "the image has 33750000 bytes; the limit is 33554432"),
    ],
)
async def test_an_image_that_cannot_be_shown_is_refused_by_its_place(
    tmp_path: Path, data: str, sentence: str
) -> None:
    kept = Media(str(tmp_path))
    for _ in range(2):
        with pytest.raises(ApiError) as refused:
            await complete(kept, [SentImage("messages[3].content[1]", data, {})])
        assert refused.value.status == 400
        assert refused.value.message.startswith("messages[3].content[1] has an image that cannot be used: ")
        assert sentence in refused.value.message
    assert not [*tmp_path.iterdir()]


async def test_what_cannot_be_stored_is_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.write_text("in the way", encoding="utf-8")
    kept = Media(str(folder))
    images = sent(dataplane.images.png("red"))
    with pytest.raises(ApiError, match=f"cannot write images to {folder}: ") as refused:
        await complete(kept, images)
    assert (refused.value.status, refused.value.code) == (503, "media_unwritable")
    assert refused.value.retry_after_s and images[0].part == {"type": "image"}
    folder.unlink()
    await complete(kept, images)
    assert read_image(str(folder), images[0].part["sha256"])


async def test_an_image_that_takes_long_is_refused_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fitted: list[bytes]
) -> None:
    monkeypatch.setattr(media, "QUICK_S", 0.01)
    monkeypatch.setattr(media, "SLOW_S", 0.05)
    kept = Media(str(tmp_path))
    slow = many_scans(1000)
    for _ in range(2):
        with pytest.raises(ApiError) as refused:
            await complete(kept, sent(slow, dataplane.images.png("red")))
        assert (refused.value.status, refused.value.message) == (
            400,
            "here[0] has an image that cannot be used: the image takes more than 0.05 s of CPU time to "
            "decode, which is the limit",
        )
    # once in each lane, and the others of its request not at all
    assert fitted == [slow, slow]


async def test_images_that_take_long_do_not_hold_up_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = dataplane.images.png("red")
    ends = threading.Event()

    def fit(data: bytes, image_processor: ImageProcessorConfig, cpu_s: float) -> PreprocessedImage:
        if data == quick:
            return preprocess_isolated(data, image_processor, cpu_s)
        if cpu_s == media.SLOW_S:
            assert ends.wait(patience())
        raise SlowImageError("slow")

    monkeypatch.setattr(media, "preprocess_isolated", fit)
    kept = Media(str(tmp_path))
    slow = [asyncio.create_task(kept.complete(sent(b"%d" % i), IMAGE_PROCESSOR)) for i in range(20)]
    await asyncio.sleep(0)
    await asyncio.wait_for(kept.complete(sent(quick), IMAGE_PROCESSOR), patience())
    assert not any(task.done() for task in slow)
    ends.set()
    errors = await asyncio.gather(*slow, return_exceptions=True)
    assert [getattr(error, "status", None) for error in errors] == [400] * 20


async def test_without_a_decoder_the_request_may_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(data: bytes, image_processor: ImageProcessorConfig, cpu_s: float) -> PreprocessedImage:
        raise DecoderError("no decoder can be started: Too many open files")

    kept = Media(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(media, "preprocess_isolated", fail)
        with pytest.raises(ApiError) as refused:
            await complete(kept, sent(dataplane.images.png("red")))
    assert (refused.value.status, refused.value.code, refused.value.message) == (
        503,
        "media_undecoded",
        "The data plane cannot decode images: no decoder can be started: Too many open files. Send this "
        "request again.",
    )
    await complete(kept, sent(dataplane.images.png("red")))
