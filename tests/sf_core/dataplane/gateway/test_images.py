"""Images in requests of every dialect, from the bytes that a client sends to what engine and files get."""

from __future__ import annotations

import contextlib
import io
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from PIL import Image

from sf_core.dataplane import media
from sf_core.dataplane.chat.messages import list_image_parts
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.gateway.endpoint import MAX_BODY_BYTES
from sf_core.models.images.decoder_process import preprocess_isolated
from sf_core.models.images.preprocess import PreprocessedImage
from sf_core.models.images.processor_config import ImageProcessorConfig
from sf_core.types import GenerationRequest
from storage.media import read_image
from storage.tables.schema import Trajectory
from storage.tables.trajectories import read_trajectories, to_rows
from tests.bench import dataplane, waits
from tests.bench.dataplane import planes

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
GOOGLE = "/v1/models/policy:generateContent"
DIALECTS: list[tuple[str, Callable[[str], Sequence[dataplane.images.Fields]], str]] = [
    (CHAT, dataplane.images.show_in_chat, "This model's maximum context length is"),
    (MESSAGES, dataplane.images.show_in_messages, "prompt is too long"),
    (RESPONSES, dataplane.images.show_in_responses, "Your input exceeds the context window"),
    (GOOGLE, dataplane.images.show_in_google, "exceeds the maximum number of tokens allowed"),
]
RED = dataplane.images.png("red")
BLUE = dataplane.images.png("blue")


@pytest.fixture
def seeing() -> Renderer:
    return dataplane.conversations.family("qwen2_5_vl")


@pytest.fixture
def plane(served_plane: planes.ServedPlane, seeing: Renderer) -> planes.ServedPlane:
    """A data plane with a run whose policy sees."""
    served_plane.model_dir = seeing.model_dir
    served_plane.register(group_size=1, groups_per_batch=1)
    served_plane.connect(lambda prompt, seed: planes.say(seeing, "yes"))
    return served_plane


def ask(plane: planes.ServedPlane, path: str, body: dataplane.images.Fields, **more: Any) -> httpx.Response:
    return plane.http.post(path, json={"model": "policy", "max_tokens": 8, **body}, **more)


def show_many(
    show: Callable[[str], Sequence[dataplane.images.Fields]], data: str, count: int
) -> dict[str, Any]:
    """The message that shows this image, so many times over."""
    [(name, [message]), *_] = show(data)[0].items()
    return {name: [message] * count}


def media_of(plane: planes.ServedPlane) -> str:
    return str(plane.run_dir / "run" / "media")


def seal(plane: planes.ServedPlane) -> list[Trajectory]:
    """The rows of the first batch."""
    sealed = plane.post("/runs/run/batches/0/seal", {"attempt": 1})
    return to_rows(read_trajectories(str(plane.run_dir / "run" / sealed["files"][0]["uri"])))


def check_image_placeholders(
    plane: planes.ServedPlane, asked: GenerationRequest, seeing: Renderer, *images: bytes
) -> None:
    """The engine is asked for these images, at the places of its placeholders."""
    ids = list(asked.prompt_ids)
    image_processor = seeing.image_processor
    assert image_processor is not None
    for span, image in zip(asked.images, images, strict=True):
        assert ids[span.start : span.start + span.length] == [image_processor.token_id] * span.length
        assert span.length == image_processor.count_tokens(span.height, span.width)
        stored, given = (
            Image.open(io.BytesIO(data)) for data in (read_image(media_of(plane), span.sha256), image)
        )
        assert stored.size == (span.width, span.height)
        assert stored.getpixel((0, 0)) == given.getpixel((0, 0))
    assert ids.count(image_processor.token_id) == sum(span.length for span in asked.images)


@pytest.mark.parametrize(("path", "show", "_"), DIALECTS)
def test_images_reach_the_engine(
    plane: planes.ServedPlane,
    seeing: Renderer,
    path: str,
    show: Callable[[str], Sequence[dataplane.images.Fields]],
    _: str,
) -> None:
    for number, body in enumerate(show(dataplane.images.encoded(RED))):
        response = ask(plane, path, body)
        assert response.status_code == 200, response.text
        check_image_placeholders(plane, plane.asked[number], seeing, RED)
    assert plane.get("/runs/run")["counters"].get("left_out.image") is None


@pytest.mark.parametrize(("path", "show", "overflow"), DIALECTS)
def test_what_cannot_be_shown_is_refused_and_the_session_goes_on(
    plane: planes.ServedPlane,
    path: str,
    show: Callable[[str], Sequence[dataplane.images.Fields]],
    overflow: str,
) -> None:
    [claim] = plane.claim()
    path = f"/sessions/{claim['session_id']}{path}"
    film = io.BytesIO()
    frames = [Image.new("RGB", (28, 28), color) for color in ("red", "blue")]
    frames[0].save(film, "GIF", save_all=True, append_images=frames[1:])
    for data, sentence in [
        (RED[:60], "the image cannot be decoded"),
        (b"no image", "the image is broken, or its format is not PNG, JPEG, WebP or GIF"),
        (film.getvalue(), "the image is animated"),
        (dataplane.images.png("red", (28 * 212, 28)), "the ratio of its sides must not exceed 200"),
        (dataplane.images.png("red", (9000, 9000), mode="1"), "the limit is 67108864 pixels"),
    ]:
        for body in show(dataplane.images.encoded(data)):
            response = ask(plane, path, body)
            message = response.json()["error"]["message"]
            assert response.status_code == 400 and sentence in message, message
            assert message.startswith(("messages[", "input[", "contents["))
    plane.register(group_size=1, groups_per_batch=1, context_length=12)
    response = ask(plane, path, show(dataplane.images.encoded(dataplane.images.png("red", (112, 112))))[0])
    assert response.status_code == 400 and overflow in response.text
    plane.register(group_size=1, groups_per_batch=1)
    assert ask(plane, path, show(dataplane.images.encoded(RED))[0]).status_code == 200
    assert len(plane.asked) == 1
    plane.register(group_size=1, groups_per_batch=1, context_length=12)
    many = ask(plane, path, show_many(show, dataplane.images.encoded(RED[:60]), 12))
    assert many.status_code == 400 and overflow in many.text
    planes.finish(plane, claim)
    [row] = seal(plane)
    assert row.status == "finished_after_overflow"


def test_prompts_tell_images_apart_and_rows_hold_them(plane: planes.ServedPlane, seeing: Renderer) -> None:
    [claim] = plane.claim()
    path = f"/sessions/{claim['session_id']}{CHAT}"
    turns = [[RED, RED], [RED, BLUE], [BLUE, RED]]
    for first, last in turns:
        before, after = (
            dataplane.images.show_in_chat(dataplane.images.encoded(image))[0]["messages"]
            for image in (first, last)
        )
        messages = [*before, {"role": "assistant", "content": "no"}, *after]
        assert ask(plane, path, {"messages": messages}).status_code == 200
    for asked, images in zip(plane.asked, turns, strict=True):
        check_image_placeholders(plane, asked, seeing, *images)
    assert len({tuple(asked.prompt_ids) for asked in plane.asked}) == 1
    planes.finish(plane, claim)
    rows = seal(plane)
    for row, asked in zip(rows, plane.asked, strict=True):
        assert row.token_ids.tolist() == [*asked.prompt_ids, *planes.say(seeing, "yes")]
        assert tuple(row.images) == asked.images
        shown = list_image_parts(json.loads(row.messages))
        assert [(part["sha256"], part["height"], part["width"]) for part in shown] == [
            (span.sha256, span.height, span.width) for span in asked.images
        ]
    streamed = plane.http.get("/runs/run/batches/0/stream")
    assert pa.ipc.open_stream(streamed.content).read_all()["images"].to_pylist()[0]
    assert len([*Path(media_of(plane)).iterdir()]) == 2
    journal = (plane.run_dir / "run" / "journal" / "run.journal").read_bytes()
    assert dataplane.images.encoded(RED).encode() not in journal


def test_limits_of_the_run_hold(plane: planes.ServedPlane) -> None:
    [body, _] = dataplane.images.show_in_chat(
        dataplane.images.encoded(dataplane.images.png("red", (112, 112)))
    )
    assert ask(plane, CHAT, body).status_code == 200
    plane.register(group_size=1, groups_per_batch=1, max_picture_tokens=4)
    assert ask(plane, CHAT, body).status_code == 200
    assert [asked.images[0].length for asked in plane.asked] == [16, 4]


def test_bodies_are_large_by_their_images_alone(plane: planes.ServedPlane) -> None:
    noise = Image.effect_noise((2400, 1600), 90)
    file = io.BytesIO()
    noise.save(file, "PNG", compress_level=0)
    data = dataplane.images.encoded(file.getvalue() * 2)  # what is behind an image's end is not read
    [body, _] = dataplane.images.show_in_chat(data)
    assert len(data) > MAX_BODY_BYTES
    response = ask(plane, CHAT, body)
    assert response.status_code == 200, response.text
    large: dataplane.images.Fields = {"messages": [{"role": "user", "content": "a" * MAX_BODY_BYTES}]}
    assert ask(plane, CHAT, large).status_code == 413
    many = ask(plane, CHAT, {"messages": [[]] * MAX_BODY_BYTES})
    assert many.status_code == 400 and "values" in many.text


@pytest.mark.parametrize(
    ("path", "show", "field"),
    [
        ("/v1/messages/count_tokens", dataplane.images.show_in_messages, "input_tokens"),
        ("/v1/models/policy:countTokens", dataplane.images.show_in_google, "totalTokens"),
    ],
)
def test_their_tokens_are_counted(
    plane: planes.ServedPlane,
    path: str,
    show: Callable[[str], Sequence[dataplane.images.Fields]],
    field: str,
) -> None:
    small, large = (
        plane.http.post(
            path,
            json={
                "model": "policy",
                **show(dataplane.images.encoded(dataplane.images.png("red", size)))[0],
            },
        ).json()[field]
        for size in ((28, 28), (112, 112))
    )
    assert large - small == 15


def test_placeholders_may_not_be_given_otherwise(plane: planes.ServedPlane, seeing: Renderer) -> None:
    assert seeing.image_processor is not None
    given = ask(plane, "/v1/completions", {"prompt": [5, seeing.image_processor.token_id]})
    assert given.status_code == 400 and "which is reserved for images" in given.text
    assert not plane.asked


def test_texts_that_spell_placeholders_are_mended_and_counted(
    plane: planes.ServedPlane, seeing: Renderer
) -> None:
    assert seeing.image_processor is not None
    said = {"messages": [{"role": "user", "content": "<|image_pad|>"}]}
    for path, body in ((CHAT, said), ("/v1/completions", {"prompt": "see <|image_pad|>"})):
        assert ask(plane, path, body).status_code == 200
        ids = plane.asked[-1].prompt_ids
        assert seeing.image_processor.token_id not in ids
        assert "<\N{REPLACEMENT CHARACTER}|image_pad|>" in seeing.decode_with_special(list(ids))
    assert plane.get("/runs/run")["counters"]["left_out.placeholders"] == 2


def test_nothing_is_acknowledged_that_is_not_stored(plane: planes.ServedPlane, seeing: Renderer) -> None:
    [claim] = plane.claim()
    path = f"/sessions/{claim['session_id']}{CHAT}"
    folder = Path(media_of(plane))
    folder.write_text("in the way", encoding="utf-8")
    [body, _] = dataplane.images.show_in_chat(dataplane.images.encoded(RED))
    refused = ask(plane, path, body)
    assert refused.status_code == 503 and refused.headers["retry-after"]
    assert "cannot write images" in refused.json()["error"]["message"]
    assert plane.get(f"/sessions/{claim['session_id']}")["prompts"] == []
    folder.unlink()
    assert ask(plane, path, body, headers={"x-stainless-retry-count": "1"}).status_code == 200
    check_image_placeholders(plane, plane.asked[0], seeing, RED)


def test_a_session_that_ends_while_an_image_is_decoded_gets_no_turn(
    plane: planes.ServedPlane, seeing: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    [claim] = plane.claim()
    begun = threading.Event()
    ends = threading.Event()

    def fit(data: bytes, image_processor: ImageProcessorConfig, cpu_s: float) -> PreprocessedImage:
        begun.set()
        assert ends.wait(waits.patience())
        return preprocess_isolated(data, image_processor, cpu_s)

    monkeypatch.setattr(media, "preprocess_isolated", fit)
    path = f"/sessions/{claim['session_id']}{CHAT}"
    body = dataplane.images.show_in_chat(dataplane.images.encoded(RED))[0]
    with ThreadPoolExecutor(1) as agent:
        asking = agent.submit(ask, plane, path, body)
        assert begun.wait(waits.patience())
        planes.finish(plane, claim)
        ends.set()
        late = ask(plane, path, body)
        assert asking.result(waits.patience()).json() == late.json()
    assert late.status_code == 404
    assert not plane.asked


def test_many_at_once_are_each_their_own(plane: planes.ServedPlane, seeing: Renderer) -> None:
    colors = [(i * 8, 255 - i * 8, i) for i in range(8)] * 4
    claims = plane.claim(8)
    with ThreadPoolExecutor(8) as agents:

        def ask_for(number: int) -> int:
            path = f"/sessions/{claims[number % len(claims)]['session_id']}{CHAT}"
            return ask(
                plane,
                path,
                dataplane.images.show_in_chat(dataplane.images.encoded(dataplane.images.png(colors[number])))[
                    0
                ],
            ).status_code

        assert {*agents.map(ask_for, range(len(colors)))} == {200}
    assert len([*Path(media_of(plane)).iterdir()]) == 8
    shown = [asked.images[0].sha256 for asked in plane.asked]
    assert len({*shown}) == 8


def ask_until_answered(plane: planes.ServedPlane, path: str, body: dataplane.images.Fields) -> str:
    """The answer to an agent that sends its request again until it has one."""
    answers: list[str] = []

    def has_answer() -> bool:
        with contextlib.suppress(httpx.TransportError):
            asked = {"model": "policy", **body}
            response = plane.http.post(path, json=asked, headers=plane.agent_headers(path))
            if response.status_code == 200:
                answers.append(response.json()["choices"][0]["message"]["content"])
        return bool(answers)

    waits.wait_until(has_answer)
    return answers[0]


def test_a_killed_data_plane_goes_on_with_the_same_images(
    restarts: dataplane.restarts.Restarts, seeing: Renderer
) -> None:
    plane = restarts.plane
    plane.model_dir = seeing.model_dir
    plane.register(group_size=1, groups_per_batch=1)
    plane.connect(lambda prompt, seed: planes.say(seeing, "yes"))
    [claim] = plane.claim()
    path = f"/sessions/{claim['session_id']}{CHAT}"
    shown: list[bytes] = []
    messages: list[Any] = []
    engine = plane.engines["r0"]
    for turn in range(3):
        # the first image comes again, behind others, after each restart
        for image in (dataplane.images.png((0, 0, 50 * turn)), RED):
            shown.append(image)
            messages += dataplane.images.show_in_chat(dataplane.images.encoded(image))[0]["messages"]
        engine.steps_left = turn % 2
        num_asked = len(plane.asked)
        with ThreadPoolExecutor(1) as agent:
            asking = agent.submit(ask_until_answered, plane, path, {"messages": [*messages]})
            waits.wait_until(lambda: len(plane.asked) > num_asked and engine.steps_left == 0)  # noqa: B023
            restarts.restart()
            engine.steps_left = None
            assert asking.result(waits.patience()) == "yes"
        check_image_placeholders(plane, plane.asked[-1], seeing, *shown)
        messages.append({"role": "assistant", "content": "yes"})
    planes.finish(plane, claim)
    [row] = seal(plane)
    assert tuple(row.images) == plane.asked[-1].images
    assert row.token_ids.tolist() == [*plane.asked[-1].prompt_ids, *planes.say(seeing, "yes")]
    assert len([*Path(media_of(plane)).iterdir()]) == 4


def test_an_address_is_refused_in_one_sentence(plane: planes.ServedPlane) -> None:
    response = ask(plane, CHAT, dataplane.images.show_in_chat(url="https://example.com/a.png")[0])
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "messages[0].content[1] has an image whose bytes are not in the request: send the "
        "image "
        "as base64, in a field for URLs as a data URL; images are not downloaded, and files cannot be "
        "uploaded",
        "type": "invalid_request_error",
        "param": "messages[0].content[1]",
        "code": None,
    }
    without_base64 = dataplane.images.url_of(dataplane.images.encoded(RED)).replace(";base64", "")
    assert ask(plane, CHAT, dataplane.images.show_in_chat(url=without_base64)[0]).status_code == 400
