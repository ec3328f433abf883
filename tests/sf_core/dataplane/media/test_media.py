"""Pictures of a run are decoded once, and stored before they are known."""

from __future__ import annotations

import asyncio
import io
import threading
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from sf_core.dataplane.chat.contents import SentPicture
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.media import media
from sf_core.dataplane.media.media import Media
from sf_core.pictures.fitting import Fitted, fit_picture
from sf_core.pictures.sight import Sight
from storage.media import read_picture
from tests.bench.dataplane.pictures import encoded, png
from tests.patience import patience

SIGHT = Sight(token_id=5, side=28, min_pixels=28 * 28, max_pixels=16 * 28 * 28)


def sent(*pictures: bytes) -> list[SentPicture]:
    return [SentPicture(f"here[{i}]", encoded(data), {"type": "image"}) for i, data in enumerate(pictures)]


def complete(kept: Media, *rounds: list[SentPicture], sight: Sight = SIGHT) -> None:
    """All rounds at once."""

    async def all_rounds() -> None:
        await asyncio.gather(*(kept.complete(one, sight) for one in rounds))

    asyncio.run(all_rounds())


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was decoded."""
    data: list[bytes] = []

    def fit(given: bytes, sight: Sight) -> Fitted:
        data.append(given)
        return fit_picture(given, sight)

    monkeypatch.setattr(media, "fit_picture", fit)
    return data


def test_equal_pictures_are_decoded_once_and_stored_once(tmp_path: Path, fitted: list[bytes]) -> None:
    kept, red, blue = Media(str(tmp_path)), png("red"), png("blue", (300, 200))
    rounds = [sent(red, blue, red), sent(red), sent(blue)]
    complete(kept, *rounds)
    complete(kept, again := sent(blue, red))
    assert sorted(fitted) == sorted([red, blue])
    parts = [[one.part for one in round] for round in [*rounds, again]]
    assert parts[0][0] == parts[0][2] == parts[1][0] == parts[3][1]
    assert parts[0][1] == parts[2][0] == parts[3][0]
    for part in (parts[0][0], parts[0][1]):
        with Image.open(io.BytesIO(read_picture(str(tmp_path), part["sha256"]))) as picture:
            assert picture.size == (part["width"], part["height"])
            assert (part["height"], part["width"]) == SIGHT.fit(part["height"], part["width"])
    assert len([*tmp_path.iterdir()]) == 2


def test_a_client_that_goes_away_leaves_its_picture_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ends, num_decoded = threading.Event(), threading.Event(), Counter[str]()

    def fit(data: bytes, sight: Sight) -> Fitted:
        num_decoded["red"] += 1
        begun.set()
        assert ends.wait(patience())
        return fit_picture(data, sight)

    monkeypatch.setattr(media, "fit_picture", fit)
    kept, waiting = Media(str(tmp_path)), sent(png("red"))

    async def leave() -> None:
        first, second = (
            asyncio.create_task(kept.complete(one, SIGHT)) for one in (sent(png("red")), waiting)
        )
        await asyncio.to_thread(begun.wait, patience())
        first.cancel()
        await asyncio.wait([first])
        ends.set()
        await second

    asyncio.run(leave())
    assert waiting[0].part["sha256"] and num_decoded["red"] == 1


def test_another_limit_is_another_picture(tmp_path: Path, fitted: list[bytes]) -> None:
    kept, data = Media(str(tmp_path)), png("red", (112, 112))
    large, small = sent(data), sent(data)
    complete(kept, large)
    complete(kept, small, sight=SIGHT.limit(4))
    assert (large[0].part["width"], small[0].part["width"]) == (112, 56)
    assert len(fitted) == 2


def test_of_many_pictures_the_latest_are_known(
    tmp_path: Path, fitted: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "NUM_KNOWN", 2)
    kept, pictures = Media(str(tmp_path)), [png((0, 0, i)) for i in range(4)]
    complete(kept, sent(*pictures))
    complete(kept, sent(*pictures[2:]))
    assert len(fitted) == 4
    complete(kept, sent(pictures[0]))
    assert len(fitted) == 5


def test_letters_of_urls_are_read(tmp_path: Path) -> None:
    pictures = (encoded(png((level, 0, 0))) for level in range(256))
    data = next(data for data in pictures if {"+", "/"} & {*data})
    plain = [SentPicture("a", data, {})]
    of_urls = [SentPicture("b", data.replace("+", "-").replace("/", "_"), {})]
    complete(Media(str(tmp_path)), plain, of_urls)
    assert plain[0].part == of_urls[0].part


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("", "the picture is broken, or in an unknown format"),
        (encoded(png("red", kind="EPS")), "the picture is broken, or in an unknown format"),
        ("AAAA", "the picture is broken, or in an unknown format"),
        ("A", "its base64 is broken"),
        (encoded(png("red")[:60]), "the picture cannot be decoded"),
        (
            encoded(png("red", (28 * 212, 28))),
            "the picture has 5936 by 28 pixels; the ratio of its sides must not exceed 200",
        ),
        ("A" * 45_000_000, "the picture has 33750000 bytes; the limit is 33554432"),
    ],
)
def test_a_picture_that_cannot_be_shown_is_refused_by_its_place(
    tmp_path: Path, data: str, sentence: str
) -> None:
    kept = Media(str(tmp_path))
    for _ in range(2):
        with pytest.raises(ApiError) as refused:
            complete(kept, [SentPicture("messages[3].content[1]", data, {})])
        assert refused.value.status == 400
        assert refused.value.message.startswith("messages[3].content[1] has a picture that cannot be used: ")
        assert sentence in refused.value.message
    assert not [*tmp_path.iterdir()]


def test_what_cannot_be_stored_is_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.write_text("in the way", encoding="utf-8")
    kept, pictures = Media(str(folder)), sent(png("red"))
    with pytest.raises(ApiError, match=f"cannot write pictures to {folder}: ") as refused:
        complete(kept, pictures)
    assert (refused.value.status, refused.value.code) == (503, "media_unwritable")
    assert refused.value.retry_after_s and pictures[0].part == {"type": "image"}
    folder.unlink()
    complete(kept, pictures)
    assert read_picture(str(folder), pictures[0].part["sha256"])
