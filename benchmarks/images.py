"""What images cost, on two cores; one JSON line. Needs `make vllm`.

    python -m benchmarks.images                       everything, about ten minutes
    python -m benchmarks.images --only gateway

Baseline in the same run: the same conversations with a line of text in place of each screen. The policies are
built-in multimodal ones, with random weights. Figures by section:

gateway   sessions of 20 turns, each with a new drawn screen of 1280 by 720 pixels as PNG in a data URL, and
          the whole history in every request, to our data plane with an emulated engine: CPU of the data plane
          per turn, median latency of first and last turns; bytes sent, stored and written to the journal.
engine    vLLM. cached_share: prompt tokens that came from its prefix cache over a session of 20 screens, and
          the most that could have: all that an earlier turn had. tokens_per_second: 16 requests at once of 64
          tokens, a prompt with an image of its own, against text of as many tokens.
trainer   a step on 32 rows with an image each, of which 8 differ: the share that the tower takes in the
          first step on these images.

Predicted before the first run: 60 ms of CPU per turn with a screen for 2 ms with text (10 to decode, 15 to
resize, 25 to encode, 10 to parse and hash the history), 2 times the PNG stored, 5 kB more in the journal
(four bytes for each placeholder); cached_share 0.75 of 0.9 at most; with images 0.8 of the tokens per
second; the tower a tenth of the step.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import numpy as np
import typer
from PIL import Image, ImageDraw

from benchmarks.gateway_client import Connection, Target
from benchmarks.gateway_stand import gateway
from sf_core.cli.stack.local import local_stack
from sf_core.cli.stack.supervisor import Supervisor
from sf_core.config import PolicyConfig
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.engines.vllm.server import VllmServer, make_arguments
from sf_core.engines.vllm.weight_loading import PolicyFolder
from sf_core.models.builtin import make_policy
from sf_core.models.images.processor_config import (
    PREPROCESSOR_CONFIG,
    ImageProcessorConfig,
    read_image_processor,
)
from sf_core.training.packing.rows import SAMPLING, Row
from sf_core.training.packing.trie import Packing, pack
from sf_core.training.torch.network import Network
from sf_core.training.vision_tower import VisionTower
from storage.files import folder_bytes
from storage.media import ImageSpan, media_file, store_image

SCREEN = (1280, 720)
TURNS = 20
SESSIONS = 8
NUM_TOKENS = 20

Line = dict[str, Any]


def main(only: Annotated[list[str] | None, typer.Option(help="sections; all by default")] = None) -> None:
    unknown = set(only or ()) - set(SECTIONS)
    if unknown:
        raise typer.BadParameter(f"no such section: {sorted(unknown)}; there are {list(SECTIONS)}")
    line: Line = {}
    for name, section in SECTIONS.items():
        if not only or name in only:
            with tempfile.TemporaryDirectory() as temporary:
                line[name] = section(Path(temporary))
    print(json.dumps(line))


def make_multimodal(folder: Path, max_tokens: int, **shape: int) -> str:
    """A policy whose processor lets an image have as many tokens as Qwen2.5-VL's would give it."""
    make_policy(str(folder), PolicyConfig(sees=True, **shape), seed=0)
    processor = json.loads((folder / PREPROCESSOR_CONFIG).read_text(encoding="utf-8"))
    processor["size"]["longest_edge"] = max_tokens * 28 * 28
    (folder / PREPROCESSOR_CONFIG).write_text(json.dumps(processor), encoding="utf-8")
    return str(folder)


def draw_screen(number: int, size: tuple[int, int] = SCREEN) -> bytes:
    """A desktop with windows of text and a photo; no two are the same."""
    draws = random.Random(number)
    screen = Image.new("RGB", size, (40, 60, 90))
    pen = ImageDraw.Draw(screen)
    width, height = size
    for _ in range(4):
        left = draws.randrange(width // 2)
        top = draws.randrange(height // 2)
        pen.rectangle([left, top, left + width // 2, top + height // 2], fill="white", outline="black")
        for row in range(top + 10, top + height // 2 - 10, 16):
            words = " ".join("".join(draws.choices("etaoinshrdlu", k=5)) for _ in range(15))
            pen.text((left + 10, row), words[: width // 2 // 7], fill="black")
    coarse = np.random.default_rng(number).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    photo = Image.fromarray(coarse).resize((width // 4, height // 4), Image.Resampling.BICUBIC)
    screen.paste(photo, (width // 8, height // 8))
    file = io.BytesIO()
    screen.save(file, "PNG")
    return file.getvalue()


def measure_gateway(folder: Path) -> Line:
    make_multimodal(folder / "model", 16_384, hidden_size=32, num_layers=1)
    screens = [[draw_screen(TURNS * s + t) for t in range(TURNS)] for s in range(SESSIONS)]
    line: Line = {"png_kb": round(statistics.mean(len(png) for one in screens for png in one) / 1e3)}
    with local_stack(folder / "logs", {"PYTHONPATH": str(Path.cwd())}) as stack:
        line["text"] = load_gateway(stack, folder, "text", None)
        line["pictures"] = load_gateway(stack, folder, "pictures", screens)
    stored = list((folder / "pictures" / "media").iterdir())
    assert len(stored) == SESSIONS * TURNS
    line["stored_kb"] = round(statistics.mean(file.stat().st_size for file in stored) / 1e3)
    return line


def load_gateway(stack: Supervisor, folder: Path, name: str, screens: list[list[bytes]] | None) -> Line:
    with gateway(stack, folder) as ours:
        ours.register(name)
        ours.connect(name, "e0", 0.0)
        with ours.sessions(name, SESSIONS) as sessions:
            target = ours.target(sessions)
            before = ours.cpu_s()

            async def play_all() -> list[list[tuple[float, int]]]:
                plays = [
                    play(target, path, screens[i] if screens else None) for i, path in enumerate(target.paths)
                ]
                return await asyncio.gather(*plays)

            played = asyncio.run(play_all())
            cpu_s = ours.cpu_s() - before
    firsts, lasts = zip(*((one[0][0], one[-1][0]) for one in played), strict=True)
    return {
        "cpu_ms_per_turn": round(1e3 * cpu_s / (SESSIONS * TURNS), 2),
        "first_turn_ms": round(1e3 * statistics.median(firsts), 1),
        "last_turn_ms": round(1e3 * statistics.median(lasts), 1),
        "sent_mb_last_turn": round(statistics.mean(one[-1][1] for one in played) / 1e6, 2),
        "journal_kb_per_turn": round(
            folder_bytes(str(folder / name / "journal")) / 1e3 / SESSIONS / TURNS, 2
        ),
    }


async def play(target: Target, path: str, screens: list[bytes] | None) -> list[tuple[float, int]]:
    """Seconds and bytes sent of each turn of a session."""
    connection = await Connection.open(target.address)
    messages = list[Any]()
    turns = list[tuple[float, int]]()
    for number in range(TURNS):
        text: Line = {"type": "text", "text": f"screen {number} of {path}"}
        shown: list[Line] = [{"type": "text", "text": "a screen"}]
        if screens:
            url = "data:image/png;base64," + base64.b64encode(screens[number]).decode()
            shown = [{"type": "image_url", "image_url": {"url": url}}]
        messages.append({"role": "user", "content": [*shown, text]})
        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": NUM_TOKENS}).encode()
        start = time.perf_counter()
        status, answer = await connection.post(path, body, target.key(path))
        turns.append((time.perf_counter() - start, len(body)))
        assert status == 200, answer
        messages.append(json.loads(answer)["choices"][0]["message"])
    connection.close()
    return turns


def measure_engine(folder: Path) -> Line:
    """Screens of 40 tokens: the prompts are those of small policies."""
    model = make_multimodal(folder / "model", 40, hidden_size=128, num_layers=4)
    policy = PolicyFolder(model, untied=True)
    policy.link_weights(model)
    assert policy.image_processor is not None
    media = str(folder / "media")
    arguments = make_arguments(
        dtype="float32",
        context_length=1024 * 2,
        max_running=16,
        kv_bytes=policy.kv_bytes(16, 2048),
        on_cpu=True,
        adapter_rank=None,
        media_dir=media,
        more=["--enable-prompt-tokens-details"],
    )
    (folder / "media").mkdir()
    server = VllmServer(policy.path, arguments, on_cpu=True)
    try:
        return asyncio.run(ask_engine(server, Renderer(model), policy.image_processor, media))
    finally:
        server.end()


async def ask_engine(
    server: VllmServer, renderer: Renderer, image_processor: ImageProcessorConfig, media: str
) -> Line:
    names = [store_small(media, image_processor, number) for number in range(TURNS + 32)]
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(server.socket)) as session:
        await await_health(session, server)

        async def ask(ids: list[int], shown: list[str], salt: str, max_tokens: int) -> tuple[list[int], Line]:
            parts = [
                {"type": "image_url", "url": Path(media_file(media, name)).as_uri(), "uuid": name}
                for name in shown
            ]
            sampling = {
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "detokenize": False,
                "logit_bias": {image_processor.token_id: -100},
            }
            body = {
                "token_ids": ids,
                "cache_salt": salt,
                "sampling_params": sampling,
                "return_token_ids": True,
            }
            more = {"content_parts": parts} if parts else {}
            async with session.post("http://vllm/inference/v1/generate", json=body | more) as answer:
                told = await answer.json()
                assert answer.status == 200, told
                return told["choices"][0]["token_ids"], told["usage"]

        line = await measure_session(ask, renderer, names)
        for what, with_images in (("pictures", True), ("text", False)):
            rates = [
                await measure_rate(ask, renderer, names, image_processor, with_images, salt)
                for salt in range(4)
            ]
            # the first warms up
            line[f"tokens_per_second_{what}"] = round(max(rates[1:]))
    return line


def store_small(media: str, image_processor: ImageProcessorConfig, number: int) -> str:
    height, width = image_processor.smart_resize(SCREEN[1], SCREEN[0])
    return store_image(media, draw_screen(number, (width, height)))


async def await_health(session: aiohttp.ClientSession, server: VllmServer) -> None:
    while not server.has_ended:
        try:
            async with session.get("http://vllm/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.5)
    raise RuntimeError(server.last_lines())


Ask = Callable[[list[int], list[str], str, int], Any]


def screen_text(number: int) -> str:
    return f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>screen {number}<|im_end|>\n"


async def measure_session(ask: Ask, renderer: Renderer, names: list[str]) -> Line:
    """A conversation of screens: what of each prompt vLLM computed before."""
    ids: list[int] = []
    cached = possible = total = before = 0
    for number in range(TURNS):
        ids += renderer.encode(screen_text(number) + "<|im_start|>assistant\n").tolist()
        sampled, usage = await ask(ids, names[: number + 1], "session", NUM_TOKENS)
        details = usage.get("prompt_tokens_details") or {}
        cached += details.get("cached_tokens") or 0
        total += usage["prompt_tokens"]
        possible = possible + before
        before = usage["prompt_tokens"] + len(sampled)
        ids += [*sampled, *renderer.encode("<|im_end|>\n").tolist()]
    shares = {"cached_share": cached / total, "cached_share_at_most": possible / total}
    return {name: round(share, 3) for name, share in shares.items()} | {"prompt_tokens": total}


async def measure_rate(
    ask: Ask,
    renderer: Renderer,
    names: list[str],
    image_processor: ImageProcessorConfig,
    with_images: bool,
    salt: int,
) -> float:
    """Sampled tokens per second of 16 requests at once."""
    text = renderer.encode(screen_text(0) + "<|im_start|>assistant\n").tolist()
    height, width = image_processor.smart_resize(SCREEN[1], SCREEN[0])
    more = image_processor.count_tokens(height, width) - 1
    letters = renderer.encode("x" * (more + 1)).tolist()
    at = text.index(image_processor.token_id)
    plain = [*text[:at], *letters, *text[at + 1 :]]
    start = time.perf_counter()
    await asyncio.gather(
        *(
            ask(
                text if with_images else plain, [names[(salt * 16 + i) % 50]] * with_images, f"{salt}-{i}", 64
            )
            for i in range(16)
        )
    )
    return 16 * 64 / (time.perf_counter() - start)


def measure_trainer(folder: Path) -> Line:
    model = make_multimodal(folder / "model", 40, hidden_size=128, num_layers=4)
    image_processor = read_image_processor(model)
    media = str(folder / "media")
    assert image_processor is not None
    names = [store_small(media, image_processor, number) for number in range(8)]
    rows = [make_row(number, names[number % 8], image_processor) for number in range(32)]
    seconds: dict[str, list[float]] = {"first": [], "again": []}
    for _ in range(4):
        network = Network(model, tower=VisionTower(model, media))
        for which in seconds:
            start = time.perf_counter()
            for microbatch in pack(rows, Packing(4096)):
                logprobs, _ = network.scores(microbatch)
                (-logprobs.mean()).backward()
            seconds[which].append(time.perf_counter() - start)
    # the first round warms up
    first, again = (min(taken[1:]) for taken in seconds.values())
    tokens = sum(row.length for row in rows)
    return {"first_step_s": round(first, 3), "tower_share": round(1 - again / first, 3), "tokens": tokens}


def make_row(number: int, name: str, image_processor: ImageProcessorConfig) -> Row:
    """A prompt of an image and 200 tokens of text, of which half are trained."""
    height, width = image_processor.smart_resize(SCREEN[1], SCREEN[0])
    length = image_processor.count_tokens(height, width)
    random_ids = np.random.default_rng(number)
    ids = random_ids.integers(5, 100, length + 201).astype(np.int32)
    span = ImageSpan(name, 1, length, height, width)
    named = ids.copy()
    mask = np.arange(len(ids)) > length + 100
    named[1 : 1 + length] = -1 - number % 8
    sampling = np.zeros(len(ids), SAMPLING)
    ones = np.ones(len(ids), np.float32)
    sampling["temperature"] = sampling["top_p"] = 1
    versions = np.zeros(len(ids), np.int32)
    return Row(named, mask, ones, ones, versions, sampling, ones, "group", str(number), (span,), number)


SECTIONS: dict[str, Callable[[Path], Line]] = {
    "gateway": measure_gateway,
    "engine": measure_engine,
    "trainer": measure_trainer,
}


if __name__ == "__main__":
    typer.run(main)
