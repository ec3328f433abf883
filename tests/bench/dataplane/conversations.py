"""Conversations as agents hold them, with real tokenizers, and the invariants of their records.

Owns the model folders of three families (their chat templates lie in templates/), a sampler whose ids are not
those the tokenizer would make of the same text, and the check of invariants 1 to 3
(docs/concepts/token-truth.md).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sf_core.dataplane.api_schemas import FinishBody
from sf_core.dataplane.chat.messages import Message, assistant_message
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.chat.tool_formats import ToolCall
from sf_core.dataplane.journal.journal_file import encode
from sf_core.dataplane.routing.generation import Generation
from sf_core.dataplane.sessions.export import export_session
from sf_core.dataplane.sessions.session import Prompt, Session, Turn
from sf_core.dataplane.sessions.tree import Node
from sf_core.dataplane.sessions.turn_events import (
    Begun,
    NewPrompt,
    TurnEnded,
    TurnEvent,
    TurnKey,
    read_turn_event,
)
from sf_core.engines.scripted import scripted_logprob
from sf_core.types import Chunk, FinishReason, GenerationRequest, ImageSpan, Sampling
from storage.tables.schema import NOT_SAMPLED, Trajectory
from tests.bench.dataplane.specs import make_tool

TEMPLATES = Path(__file__).parent / "templates"
FAMILIES = ("qwen3", "llama3", "chatml")
"""Folders of templates that show no images."""
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_SPECIAL = {
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"],
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "qwen2_5_vl": ["<|endoftext|>", *VISION, "<|im_start|>", "<|im_end|>"],
}
_ADDED = {"qwen3": ["<think>", "</think>", "<tool_call>", "</tool_call>"]}
# how the tokenizers of Qwen and Llama cut text before merging
_WORDS = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+",
    ]
)
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and asks what the answer is",
    "user assistant system tool think why found said again 12 30 42",
    '{"name": "find", "arguments": {"x": 1}}\n{"name": "find", "parameters": {"x": 1}}',
    "naïve café übergrößenträger 数学は楽しい",
] * 20

FIND = make_tool("find", "Finds.", x="integer")


@cache
def family(name: str) -> Renderer:
    """The renderer of a model folder with the family's template and a byte-level BPE tokenizer of 600 ids."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=_SPECIAL[name], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_tokens([AddedToken(text) for text in _ADDED.get(name, [])])
    folder = Path(mkdtemp(prefix=f"{name}-"))
    backend.save(str(folder / "tokenizer.json"))
    template = TEMPLATES / f"{name}.jinja"
    (folder / "chat_template.jinja").write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
    config = {"bos_token": _SPECIAL[name][0], "eos_token": _SPECIAL[name][-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    eos = [backend.token_to_id(text) for text in _SPECIAL[name][-2 if name == "llama3" else -1 :]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    if name == "qwen2_5_vl":
        seeing = {"model_type": name, "image_token_id": backend.token_to_id(VISION[2])}
        (folder / "config.json").write_text(json.dumps(seeing), encoding="utf-8")
        limits = {"min_pixels": 28 * 28, "max_pixels": 16 * 28 * 28}
        (folder / "preprocessor_config.json").write_text(json.dumps(limits), encoding="utf-8")
    return Renderer(str(folder))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def call_text(name: str, x: int) -> str:
    """A tool call in the family's format."""
    if name == "llama3":
        return f'{{"name": "find", "parameters": {{"x": {x}}}}}'
    return f'<tool_call>\n{{"name": "find", "arguments": {{"x": {x}}}}}\n</tool_call>'


def odd_ids(renderer: Renderer, text: str, rng: random.Random) -> list[int]:
    """Ids of a text that is cut at random places before encoding, mostly other ids than the whole text's."""
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), 1 + len(text) // 6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    ids = [token for piece in pieces for token in renderer.encode(piece).tolist()]
    whole = renderer.decode(renderer.encode(text).tolist())
    return ids if renderer.decode(ids) == whole else renderer.encode(text).tolist()


@dataclass
class Record:
    """A session, with the engine's input and output for every turn."""

    renderer: Renderer
    session: Session = field(default_factory=lambda: Session("s"))
    turns: list[tuple[list[int], Turn]] = field(default_factory=list)
    journal: list[TurnEvent] = field(default_factory=list)

    def answer(
        self,
        prompt: Prompt,
        ids: list[int],
        *,
        calls: Sequence[ToolCall] = (),
        forced: str = "",
        reasoning: str = "",
        version: int = 0,
        unparsed: int = 0,
        end: bool = True,
        grammar: str = "",
    ) -> Turn:
        """One turn as the gateway records it; `end` appends the end-of-turn token."""
        number = self.session.begin_sample(prompt, 0)
        key = TurnKey(self.session.session_id, prompt.index, number)
        prompts = [NewPrompt.from_prompt(prompt) for prompt in self.session.pop_unrecorded_prompts()]
        self._note(Begun(key, 0, b"%d" % len(self.turns), prompts))
        asked = self.read(prompt)[0]
        ids = ids + [self.renderer.stop_token_ids[-1]] * end
        version = max(version, prompt.version)
        generation = generation_of(prompt, grammar=grammar)
        logprobs = [scripted_logprob(token, i, version) for i, token in enumerate(ids)]
        reason = FinishReason.STOP if end else FinishReason.LENGTH
        generation.append(Chunk("r", ids, logprobs, version, reason), "engine")
        text = forced + self.renderer.decode(ids)
        turn_id = f"{prompt.index}.{number}"
        message = assistant_message("" if calls else text, list(calls), turn_id)
        if reasoning:
            message["reasoning_content"] = reasoning
        self.session.commit(generation, prompt, number, message, unparsed)
        turn = self.session.turns[-1]
        self._note(TurnEnded.from_turn(key, turn, 0))
        self.turns.append((asked, turn))
        return turn

    def read(self, prompt: Prompt) -> tuple[list[int], list[ImageSpan]]:
        """The ids of a prompt as an engine gets them, and its images."""
        named = prompt.full_ids()
        if self.renderer.image_processor is None:
            return named.tolist(), []
        ids, spans = self.session.images.read(np.frombuffer(named, np.int32), self.renderer.image_processor)
        return ids.tolist(), spans

    def replayed(self) -> Session:
        """The session as a restart makes it of its journal."""
        session = Session(self.session.session_id)
        for event in self.journal:
            session.apply(event)
        return session

    def restart(self) -> None:
        self.session = self.replayed()
        by_slot = {(turn.prompt.index, turn.sample): turn for turn in self.session.turns}
        self.turns = [(asked, by_slot[turn.prompt.index, turn.sample]) for asked, turn in self.turns]

    def _note(self, event: TurnEvent) -> None:
        self.journal.append(read_turn_event(encode(event)))

    def export(self) -> list[Trajectory]:
        report = FinishBody(status="finished", reward=1.0, task_id="t", environment="e")
        stop_ids = self.renderer.stop_token_ids
        options: Any = {"policy": "policy", "group_id": "g", "image_processor": self.renderer.image_processor}
        return export_session(self.session, report, stop_ids=stop_ids, **options)

    def num_trained(self) -> int:
        return sum(len(turn.ids) for _, turn in self.turns if not turn.constrained)


def generation_of(prompt: Prompt, sampling: Sampling | None = None, grammar: str = "") -> Generation:
    """A generation of this prompt that no router has."""
    sampling = sampling or Sampling()
    request = GenerationRequest("r", prompt.full_ids(), 0, 2**20, (), sampling, grammar=grammar)
    return Generation(request, floor=0)


def sample(
    session: Session,
    renderer: Renderer,
    messages: list[Message],
    ids: list[int],
    tools: list[dict[str, Any]] | None = None,
    *,
    version: int = 0,
    call: ToolCall | None = None,
) -> Turn:
    """Record a turn as the gateway would, answered with these ids."""
    prompt = session.open_prompt(messages, tools or [], renderer)
    number = session.begin_sample(prompt, 0)
    generation = generation_of(prompt)
    stopped = bool(ids) and ids[-1] in renderer.stop_token_ids
    reason = FinishReason.STOP if stopped else FinishReason.LENGTH
    logprobs = [scripted_logprob(token, i, version) for i, token in enumerate(ids)]
    generation.append(Chunk("r", ids, logprobs, version, reason), "engine")
    turn_id = f"{prompt.index}.{number}"
    message = assistant_message(renderer.decode(ids), [call] if call else [], turn_id)
    session.commit(generation, prompt, number, message, 0)
    return session.turns[-1]


def state_of(session: Session) -> dict[str, Any]:
    """All state of a session that affects answers and exports, without requests that may be retried."""
    return {
        "prompts": [
            (
                prompt.full_ids().tolist(),
                _number(prompt.parent),
                prompt.start,
                _number(prompt.continues),
                prompt.messages,
                prompt.num_messages,
                (prompt.chain, prompt.forced, list(prompt.opening), prompt.tools),
                (prompt.rendered, prompt.boundary),
                prompt.branch_reason,
                prompt.num_samples,
            )
            for prompt in session.prompts
        ],
        "turns": [_facts(turn) for turn in session.turns],
        "abandoned": [_facts(turn) for turn in session.abandoned],
        "branch_reasons": dict(session.branch_reasons),
        "unrecorded": session._num_recorded,
        "openings": session._openings,
    }


def _number(node: Node | None) -> tuple[type, int] | None:
    return None if node is None else (type(node), node.index)


def _facts(turn: Turn) -> tuple[Any, ...]:
    arrays = (turn.ids.tolist(), turn.logprobs.tolist(), turn.versions.tolist())
    return (
        *(turn.prompt.index, turn.sample, arrays, turn.message, turn.finish_reason, turn.engine),
        *(turn.sampling, turn.interruptions, turn.num_unparsed_calls, turn.index, turn.has_continuation),
        turn.constrained,
    )


def shown(renderer: Renderer, ids: list[int]) -> str:
    """Text of ids, special tokens included."""
    return str(renderer._tokenizer.decode(ids, skip_special_tokens=False))


def check(record: Record) -> list[Trajectory]:
    """Invariants 1 to 3: rows hold the engines' input and output bit for bit; every sampled token that
    followed no grammar is trained once, with its log-prob, version and tools; nothing else is trained."""
    rows = record.export()
    by_id = {row.branch_id: row for row in rows}
    assert len(by_id) == len(rows)
    assert sum(int(row.loss_mask.sum()) for row in rows) == record.num_trained()
    for asked, turn in record.turns:
        start = len(asked)
        end = len(asked) + len(turn.ids)
        holding = [row for row in rows if _holds(row, asked, turn)]
        assert holding
        num_training = sum(bool(row.loss_mask[start:end].any()) for row in holding)
        trains = bool(len(turn.ids)) and not turn.constrained
        assert num_training == trains or _has_equal(record, asked, turn)
        assert not trains or any(row.loss_mask[start:end].all() for row in holding)
        training = [row for row in holding if row.loss_mask[start:end].any()]
        tools = turn.prompt.tools.decode() or None
        assert {row.tools for row in training} <= {tools} or _has_equal(record, asked, turn)
    for row in rows:
        _check_row(row, by_id)
        _check_mask(row, record)
    return rows


def _holds(row: Trajectory, asked: list[int], turn: Turn) -> bool:
    start = len(asked)
    end = len(asked) + len(turn.ids)
    return (
        np.array_equal(row.token_ids[:start], asked)
        and np.array_equal(row.token_ids[start:end], turn.ids)
        and np.array_equal(row.logprobs[start:end], turn.logprobs)
        and np.array_equal(row.policy_versions[start:end], turn.versions)
    )


def _has_equal(record: Record, asked: list[int], turn: Turn) -> bool:
    """Whether another turn sampled the same tokens, which a row cannot tell apart."""
    first = turn.ids[: 1 if len(turn.ids) else 0]
    alike = [
        other
        for ids, other in record.turns
        if ids == asked and np.array_equal(other.ids[: len(turn.ids)], turn.ids)
    ]
    return len(alike) > 1 or not len(first)


def _check_mask(row: Trajectory, record: Record) -> None:
    held = [(asked, turn) for asked, turn in record.turns if _holds(row, asked, turn)]
    expected = row.policy_versions != NOT_SAMPLED
    expected[: row.shared_prefix] = False
    for asked, turn in held:
        if turn.constrained:
            expected[len(asked) : len(asked) + len(turn.ids)] = False
    assert np.array_equal(row.loss_mask, expected) or any(_has_equal(record, *one) for one in held)


def _check_row(row: Trajectory, by_id: dict[str, Trajectory]) -> None:
    sampled = row.policy_versions != NOT_SAMPLED
    assert np.array_equal(sampled, ~np.isnan(row.logprobs))
    assert not (row.loss_mask & ~sampled).any()
    assert (np.diff(row.policy_versions[sampled]) >= 0).all()
    assert not row.loss_mask[: row.shared_prefix].any()
    assert [span.start for span in row.turns] == [0, *(span.end for span in row.turns[:-1])]
    assert row.turns[-1].end == len(row.token_ids)
    messages: list[dict[str, Any]] = json.loads(row.messages)
    assert messages[-1]["role"] == "assistant"
    if row.parent_branch_id is not None:
        parent = by_id[row.parent_branch_id]
        assert np.array_equal(parent.token_ids[: row.shared_prefix], row.token_ids[: row.shared_prefix])
