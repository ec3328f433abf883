"""What recording and exporting a session costs, for the kinds of sessions agents make. Prints one JSON line.

    python -m benchmarks.capture [--scale 1.0]

Every answer is sampled as tokens that its text would not be encoded to. Per kind: trained_fraction (sampled
tokens trained exactly once; must be 1), row_token_ratio (exported row tokens over distinct tokens), seconds,
peak_mb (above the arrays of the tokens), disk_bytes_per_token and turn_ms, the cost of the turns so numbered;
copy_ms is that of laying out the prompt for the engine.
`naive` is the store everyone writes first: render and encode the whole history on every turn, keep it all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sf_core.dataplane.api_schemas import FinishBody
from sf_core.dataplane.chat.messages import Message, assistant_message
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.routing.generation import Generation
from sf_core.dataplane.sessions.export import export_session
from sf_core.dataplane.sessions.session import Prompt, Session
from sf_core.types import Chunk, FinishReason, GenerationRequest, Sampling
from storage.run_directory import RunDirectory
from storage.tables.schema import Trajectory
from storage.tables.trajectories import write_trajectories

TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog, asks for 12 and 30 and is told that it is 42.\n"] * 50


def make_renderer(folder: str) -> Renderer:
    """ChatML over a byte-level BPE tokenizer of 500 ids."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(f"{folder}/tokenizer.json")
    Path(folder, "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    Path(folder, "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}', encoding="utf-8")
    return Renderer(folder)


class Capture:
    """Stands for the gateway: opens prompts, answers them with random tokens, and takes the time."""

    def __init__(self, renderer: Renderer, seed: int = 0) -> None:
        self.renderer = renderer
        self.session = Session("s")
        self.turn_seconds: list[float] = []
        self.copy_seconds: list[float] = []
        """Time to lay out each prompt for the engine, the one cost that must grow with the history."""
        self._rng = np.random.default_rng(seed)
        size = renderer._tokenizer.get_vocab_size()
        texts = {token: renderer.decode([token]) for token in range(size)}
        self._words = np.array(
            [i for i, text in texts.items() if text.isascii() and text.isprintable() and text]
        )

    def ask(self, messages: list[Message], num_tokens: int) -> Message:
        start = time.perf_counter()
        prompt = self.session.open_prompt(messages, [], self.renderer)
        return self._answer(prompt, num_tokens, start)

    def ask_ids(self, ids: list[int], num_tokens: int) -> list[int]:
        """Send a prompt of ids; returns the ids of the answer."""
        start = time.perf_counter()
        self._answer(self.session.open_prompt_from_ids(ids), num_tokens, start)
        return self.session.turns[-1].ids.tolist()

    def words(self, num_tokens: int) -> list[int]:
        return self._rng.choice(self._words, num_tokens).tolist()

    def text(self, num_tokens: int) -> str:
        return self.renderer.decode(self.words(num_tokens))

    def export(self) -> list[Trajectory]:
        report = FinishBody(status="finished", reward=1.0, task_id="t", environment="e")
        stop_ids = self.renderer.stop_token_ids
        return export_session(self.session, report, policy="policy", group_id="g", stop_ids=stop_ids)

    def _answer(self, prompt: Prompt, num_tokens: int, start: float) -> Message:
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        asked = prompt.full_ids()
        self.copy_seconds.append(time.perf_counter() - start)
        sample = self.session.begin_sample(prompt, 0)
        ids = [*self.words(num_tokens - 1), self.renderer.stop_token_ids[0]]
        logprobs = (-self._rng.exponential(0.5, num_tokens)).tolist()
        generation = Generation(GenerationRequest("r", asked, 0, num_tokens, (), Sampling()), floor=0)
        generation.append(Chunk("r", ids, logprobs, 0, FinishReason.STOP), "engine")
        message = assistant_message(self.renderer.decode(ids), [], str(len(self.session.turns)))
        start = time.perf_counter()
        self.session.commit(generation, prompt, sample, message, 0)
        self.turn_seconds.append(seconds + time.perf_counter() - start)
        return message


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def converse(capture: Capture, messages: list[Message], num_turns: int, tokens: int = 100) -> list[Message]:
    """Go on with a conversation; half the tokens are sampled."""
    for _ in range(num_turns):
        messages = [*messages, user(capture.text(tokens))]
        messages.append(capture.ask(messages, tokens))
    return messages


def times(num: int, scale: float) -> int:
    return max(1, round(num * scale))


def linear(capture: Capture, scale: float) -> None:
    """200 turns, 125,000 tokens."""
    converse(capture, [], times(200, scale), 312)


def short_turns(capture: Capture, scale: float) -> None:
    converse(capture, [], times(5000, scale), 8)


def retokenised(capture: Capture, scale: float) -> None:
    """50 turns of an agent that speaks in ids; every tenth time it has encoded the last answer anew."""
    ids: list[int] = capture.words(300)
    for turn in range(times(50, scale)):
        answer = capture.ask_ids(ids, 300)
        if turn % 10 == 9:
            answer = capture.renderer.encode(capture.renderer.decode(answer)).tolist()
        ids = [*ids, *answer, *capture.words(300)]


def sub_agents(capture: Capture, scale: float) -> None:
    """Ten sub-agents with system prompts of their own, called in turn by a main agent that goes on."""
    main: list[Message] = []
    subs: list[list[Message]] = [[{"role": "system", "content": f"You are agent {i}."}] for i in range(10)]
    for _ in range(times(10, scale)):
        for i, sub in enumerate(subs):
            main = converse(capture, main, 1)
            subs[i] = converse(capture, sub, 1)


def compaction(capture: Capture, scale: float) -> None:
    """Half-way the history is replaced by a summary."""
    system: Message = {"role": "system", "content": capture.text(200)}
    converse(capture, [system], times(50, scale))
    converse(capture, [system, user(capture.text(300))], times(50, scale))


def parallel_agents(capture: Capture, scale: float) -> None:
    """Four agents with the same system prompt, in turns."""
    agents: list[list[Message]] = [[{"role": "system", "content": capture.text(200)}]] * 4
    for _ in range(times(30, scale)):
        agents = [converse(capture, messages, 1) for messages in agents]


def asked_again(capture: Capture, scale: float) -> None:
    """One prompt, 200 answers."""
    messages = [user(capture.text(2000))]
    for _ in range(times(200, scale)):
        capture.ask(messages, 100)


KINDS: dict[str, Callable[[Capture, float], None]] = {
    kind.__name__: kind
    for kind in (linear, short_turns, retokenised, sub_agents, compaction, parallel_agents, asked_again)
}


def naive(renderer: Renderer, num_turns: int, tokens: int) -> dict[str, float]:
    """The linear kind, stored as whole prompts that are rendered and encoded every time."""
    capture = Capture(renderer)
    messages: list[Message] = []
    turns: list[tuple[list[int], list[int]]] = []
    seconds = 0.0
    for _ in range(num_turns):
        messages.append(user(capture.text(tokens)))
        start = time.perf_counter()
        prompt_ids = renderer.encode(renderer.render(messages, [])).tolist()
        seconds += time.perf_counter() - start
        answer = capture.words(tokens)
        turns.append((prompt_ids, answer))
        messages.append({"role": "assistant", "content": renderer.decode(answer)})
    exact = sum(
        later[: len(prompt) + len(answer)] == prompt + answer
        for (prompt, answer), (later, _) in pairwise(turns)
    )
    return {
        "record_seconds": round(seconds, 3),
        "stored_token_ratio": round(
            sum(len(p) + len(a) for p, a in turns) / (len(turns[-1][0]) + len(turns[-1][1])), 1
        ),
        "turns_whose_tokens_survive": exact / max(1, num_turns - 1),
    }


def measure(kind: Callable[[Capture, float], None], renderer: Renderer, scale: float) -> dict[str, Any]:
    capture = Capture(renderer)
    kind(capture, scale)
    start = time.perf_counter()
    rows = capture.export()
    export_seconds = time.perf_counter() - start
    sampled = sum(len(turn.ids) for turn in capture.session.turns)
    prompts = {turn.prompt for turn in capture.session.turns}
    distinct = sampled + sum(len(prompt.ids) for prompt in prompts)
    row_tokens = sum(len(row.token_ids) for row in rows)
    record_seconds = sum(capture.turn_seconds) + sum(capture.copy_seconds)
    result: dict[str, Any] = {
        "turns": len(capture.session.turns),
        "tokens": distinct,
        "sampled": sampled,
        "rows": len(rows),
        "trained_fraction": sum(int(row.loss_mask.sum()) for row in rows) / sampled,
        "row_token_ratio": round(row_tokens / distinct, 3),
        "record_seconds": round(record_seconds, 3),
        "export_seconds": round(export_seconds, 3),
        "seconds": round(record_seconds + export_seconds, 3),
        "peak_mb": round(_peak_mb(kind, renderer, scale), 2),
        "disk_bytes_per_token": round(_disk_bytes(rows) / row_tokens, 2),
    }
    marks = [turn for turn in (10, 100, 200, 5000) if turn <= len(capture.turn_seconds)]
    result["turn_ms"] = {turn: _around(capture.turn_seconds, turn) for turn in marks}
    result["copy_ms"] = {turn: _around(capture.copy_seconds, turn) for turn in marks}
    return result


def _around(seconds: list[float], turn: int) -> float:
    return round(1e3 * statistics.median(seconds[max(0, turn - 8) : turn]), 3)


def _peak_mb(kind: Callable[[Capture, float], None], renderer: Renderer, scale: float) -> float:
    """Peak memory of recording and export, less the arrays of tokens in the session and in the rows."""
    tracemalloc.start()
    capture = Capture(renderer)
    kind(capture, scale)
    rows = capture.export()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    turns = capture.session.turns
    arrays = sum(turn.ids.nbytes + turn.logprobs.nbytes + turn.versions.nbytes for turn in turns)
    arrays += sum(prompt.ids.nbytes for prompt in {turn.prompt for turn in turns})
    arrays += sum(
        row.token_ids.nbytes + row.loss_mask.nbytes + row.logprobs.nbytes + row.policy_versions.nbytes
        for row in rows
    )
    return (peak - arrays) / 2**20


def _disk_bytes(rows: list[Trajectory]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        write_trajectories(RunDirectory(folder), 0, rows, "part")
        return sum(path.stat().st_size for path in Path(folder).rglob("*.parquet"))


def main(scale: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        renderer = make_renderer(folder)
        results = {name: measure(kind, renderer, scale) for name, kind in KINDS.items()}
        results["naive"] = naive(renderer, times(200, scale), 312)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of turns")
    print(json.dumps(main(parser.parse_args().scale)))
