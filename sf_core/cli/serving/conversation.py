"""Prints the conversation of one session as it goes on, and keeps it as data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import orjson
from rich.console import Console
from rich.text import Text

from sf_core.dataplane.chat.messages import IMAGE
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.sessions.session import Prompt, Session, Turn
from sf_core.models.images.placeholders import restore_placeholders
from sf_core.process.user_code import printable
from sf_core.reports.evaluations.judgements import describe_judgement
from sf_core.types import FinishReason, Ids, Task
from storage.tables.judgements import Judgement

LOOK_S = 0.1
"""Seconds between looks at a session."""

MOST_CHARACTERS = 2000
"""Length to which a text is cut."""


class Printer:
    """Messages with their roles, the text beneath. `record` has the same for programs (`sf try --json`)."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.record: dict[str, Any] = {
            **dict.fromkeys(("task", "policy")),
            "requests": [],
            **dict.fromkeys(("output", "answer", "reward", "reward_parts", "step_rewards")),
            **{"judgements": [], "notes": [], "error": None},
        }

    def task(self, task: Task, split: str, index: int) -> None:
        self.print_part(f"task {task.task_id} of {task.environment}", task.prompt)
        self.record["task"] = {
            "task_id": task.task_id,
            "environment": task.environment,
            "split": split,
            "index": index,
            "prompt": as_plain(task.prompt),
            "answer": as_plain(task.answer),
        }

    def policy(self, about: str) -> None:
        self.print_part("policy", about)
        self.record["policy"] = about

    def request(self, number: int, messages: list[dict[str, Any]], **facts: Any) -> None:
        """Keep what a request adds to the conversation. `facts` are further fields."""
        requests = self.record["requests"]
        while len(requests) <= number:
            requests.append({"messages": [], "answers": []})
        answers = requests[number]["answers"]
        requests[number] = {"messages": as_plain(messages), **facts, "answers": answers}

    def answer_to(self, number: int, **facts: Any) -> None:
        """Keep an answer to this request."""
        self.record["requests"][number]["answers"].append(as_plain(facts))

    def print_note(self, text: str) -> None:
        self.print_part("note", text, "bold yellow")
        self.record["notes"].append(text)

    def output(self, text: str) -> None:
        self.print_part("output of the command", text)
        self.record["output"] = text

    def answered(self, answer: Any) -> None:
        self.print_part("the agent answered", answer if isinstance(answer, str) else repr(answer))
        self.record["answer"] = as_plain(answer)

    def judged(self, judged: Judgement) -> None:
        self.print_part(f"judge {judged.judge}" if judged.judge else "noted", describe_judgement(judged))
        self.record["judgements"].append(msgspec.to_builtins(judged))

    def rewarded(self, scored: Mapping[str, Any]) -> None:
        """Show the fields of a report on what an answer earned."""
        parts = ", ".join(f"{name} {part:g}" for name, part in scored["reward_parts"].items())
        self.print_part("reward", f"{scored['reward']:g}" + (f" ({parts})" if parts else ""))
        self.record |= {name: scored[name] for name in ("reward", "reward_parts", "step_rewards")}

    def print_part(self, title: str, text: str, style: str = "bold") -> None:
        left_out = len(text) - MOST_CHARACTERS
        text = f"{text[:MOST_CHARACTERS]} ... ({left_out:,} more characters)" if left_out > 0 else text
        self._console.print(Text.assemble((f"{printable(title)}: ", style), printable(text)))

    def message(self, message: dict[str, Any]) -> None:
        self.print_part(str(message.get("role", "message")), in_words(message))


class SessionPrinter:
    """The prompts and turns of a session of the plane in this process."""

    def __init__(self, printer: Printer, renderer: Renderer, session: Session) -> None:
        self._printer = printer
        self._renderer = renderer
        self._session = session
        self._num_prompts = self._num_turns = 0
        self._one_at_a_time = threading.Lock()

    def print_new(self) -> None:
        """Print what is new."""
        with self._one_at_a_time:
            # the plane's thread only appends; turns first, so that each comes after its prompt
            turns = self._session.turns[self._num_turns :]
            for prompt in self._session.prompts[self._num_prompts :]:
                while prompt.continues is not None and prompt.continues in turns:
                    self._show_turn(turns.pop(0))
                self._show_prompt(prompt)
            for turn in turns:
                self._show_turn(turn)

    def _show_prompt(self, prompt: Prompt) -> None:
        self._num_prompts += 1
        for message in prompt.messages:
            self._printer.message(message)
        new = f", {len(prompt.ids)} of them new" if prompt.start else ""
        tokens = f"{prompt.end} tokens{new}"
        text = self._decode(prompt.ids)
        self._printer.print_part(f"prompt, {tokens}", text, "dim")
        counted = {"prompt_tokens": prompt.end, "new_tokens": len(prompt.ids)}
        self._printer.request(prompt.index, prompt.messages, prompt=text, **counted)

    def _decode(self, ids: Ids) -> str:
        """The text of a prompt, with one placeholder for each image."""
        if (image_processor := self._renderer.image_processor) is not None:
            ids = restore_placeholders(
                ids[(ids >= 0) | (np.diff(ids, prepend=0) != 0)], image_processor.token_id
            )
        return self._renderer.decode_with_special(ids.tolist())

    def _show_turn(self, turn: Turn) -> None:
        self._num_turns += 1
        cut = ", cut off there: rollout.max_tokens or engine.context_length"
        ended = cut if turn.finish_reason == FinishReason.LENGTH else ""
        title = f"assistant, {len(turn.ids)} tokens{ended}"
        self._printer.print_part(title, in_words(turn.message), "bold green")
        facts = {"tokens": len(turn.ids), "finish_reason": str(turn.finish_reason)}
        self._printer.answer_to(turn.prompt.index, message=turn.message, **facts)


@contextmanager
def keep_looking(print_new: Callable[[], None]) -> Iterator[None]:
    """Look again and again while the block runs, and once at its end."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(LOOK_S):
            print_new()

    thread = threading.Thread(target=watch, name="conversation", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        print_new()


def as_plain(value: Any) -> Any:
    """The value as JSON has it; its text if it cannot be written as JSON."""
    try:
        return orjson.loads(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))
    except TypeError:
        return repr(value)


def in_words(message: dict[str, Any]) -> str:
    """Content and calls of a message."""
    content = message.get("content") or ""
    lines = [content] if isinstance(content, str) else [_part_in_words(part) for part in content]
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        lines.append(f"calls {function.get('name')}({function.get('arguments')})")
    return "\n".join(filter(None, lines))


def _part_in_words(part: dict[str, Any]) -> str:
    if part.get("type") == IMAGE:
        return f"[image, {part.get('width')} by {part.get('height')}]"
    return str(part.get("text", part))
