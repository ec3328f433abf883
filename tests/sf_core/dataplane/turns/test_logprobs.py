"""The log-probs of an answer are those of its tokens: their bytes, joined, are the text that was sampled."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sf_core.dataplane.api_schemas import RunSpec
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.journal.journal import Journal
from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.runs.state import RunState
from sf_core.dataplane.sessions.memory_budget import MemoryBudget
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.answer import Answer
from sf_core.dataplane.turns.opening import open_turns
from sf_core.dataplane.turns.request import RequestFingerprint, TurnRequest
from sf_core.types import Chunk, FinishReason
from tests.bench import dataplane
from tests.bench.properties import examples
from tests.bench.waits import patience

STOP = "the la"
TEXTS = ["the lazy fox", " the", "naïve", "数学は", "\U0001f600", " ", "  ", "\n", STOP]
SPACE = "▁"


def sentence_piece(decoder: decoders.Decoder) -> Tokenizer:
    """A tokenizer of the SentencePiece kind: a few words, and bytes for every other character."""
    pieces = ["<unk>", "<|im_start|>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [SPACE, "t", "h", "e", "l", "a", "th", "the", SPACE + "the", "la", SPACE * 2]
    merges = [("t", "h"), ("th", "e"), (SPACE, "the"), ("l", "a"), (SPACE, SPACE)]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *words])}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoder
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return backend


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<|im_start|>", "<|im_end|>", *alphabet, "th", "the", "Ġthe", "la"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("l", "a")]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return backend


SPACES = decoders.Replace(SPACE, " ")
TOKENIZERS = {
    "bytes": byte_level(),
    "space first": sentence_piece(
        decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    ),
    "space always": sentence_piece(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    ),
    "space never": sentence_piece(
        decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse()]),
    ),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def run_of_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedRun:
    folder: Path = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZERS[request.param],
        eos_token="<|im_end|>",
        chat_template=dataplane.tokenizers.TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    changes = {"run_dir": str(folder), "model_dir": str(folder), "context_length": 4096}
    spec = RunSpec.model_validate(dataplane.specs.SPEC | changes)
    state = RunState(spec, MemoryBudget())
    return ServedRun(state, Renderer(str(folder)), Journal(folder / "run.journal"), 10.0)


async def answer_of(run: ServedRun, chunks: list[Chunk], stop: list[str]) -> Answer:
    """The answer of a turn whose engine samples these chunks."""
    session = Session("s")
    request = TurnRequest(text_or_ids="the", stop=stop, logprobs=True)
    [subscriber] = await open_turns(run.turns, session, [request], RequestFingerprint.from_request([], b""))

    async def read() -> None:
        async for _ in subscriber.pieces():
            pass

    reading = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    [generation] = session.running
    for chunk in chunks:
        if not generation.is_over:
            generation.append(chunk, "e0")
        for _ in range(6):
            await asyncio.sleep(0)
    await asyncio.wait_for(reading, patience())
    subscriber.leave()
    return subscriber.turn.answer()


@settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    parts=st.lists(st.one_of(st.sampled_from(TEXTS), st.integers(3, 258)), min_size=1, max_size=8),
    length=st.integers(1, 60),
    is_stopped=st.booleans(),
    has_stop=st.booleans(),
    data=st.data(),
)
async def test_the_bytes_of_the_log_probs_are_the_text_that_was_sampled(
    run_of_tokenizer: ServedRun,
    parts: list[str | int],
    length: int,
    is_stopped: bool,
    has_stop: bool,
    data: st.DataObject,
) -> None:
    renderer = run_of_tokenizer.renderer
    # single ids are mostly bytes, and a length cuts characters
    ids = [i for part in parts for i in ([part] if isinstance(part, int) else renderer.encode(part).tolist())]
    ids = ids[:length]
    end = ""
    reason = FinishReason.LENGTH
    if is_stopped:
        end = "<|im_end|>"
        reason = FinishReason.STOP
        ids.append(renderer.stop_token_ids[0])
    cut = data.draw(st.integers(0, len(ids) - 1), "cut")
    chunks = [Chunk("r", ids[cut:], [-0.5] * (len(ids) - cut), 0, reason)]
    if cut:
        chunks.insert(0, Chunk("r", ids[:cut], [-0.5] * cut, 0, None))
    answer = await answer_of(run_of_tokenizer, chunks, [STOP] if has_stop else [])
    entries = answer.logprobs or []
    assert len(entries) == answer.num_sampled_tokens
    said = b"".join(entry.data for entry in entries)
    shown = said.decode(errors="replace")
    # where bytes are no text, the decoder of SentencePiece gives up the text beside them too
    if "\ufffd" not in shown or Path(renderer.model_dir).name.startswith("bytes"):
        if answer.stop is None:
            assert shown == answer.content + end
        else:
            assert shown.startswith(answer.content + STOP)
    # the characters of the entries are the text up to one that is not complete
    texts = "".join(entry.text for entry in entries)
    assert shown.startswith(texts)
    assert shown == texts or shown.endswith("\ufffd")


async def test_a_token_inside_a_character_has_its_bytes_and_no_text(run_of_tokenizer: ServedRun) -> None:
    ids = [*run_of_tokenizer.renderer.encode("é").tolist(), run_of_tokenizer.renderer.stop_token_ids[0]]
    answer = await answer_of(run_of_tokenizer, [Chunk("r", ids, [-0.5] * len(ids), 0, FinishReason.STOP)], [])
    told = [(entry.text, entry.data) for entry in answer.logprobs or []]
    assert told == [("", b"\xc3"), ("é", b"\xa9"), ("<|im_end|>", b"<|im_end|>")]
