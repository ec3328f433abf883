"""A text about a subject under one to three constraints, each of which code checks."""

from __future__ import annotations

from random import Random
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from sf_core.environments.environment import Environment
from sf_core.environments.instructions.constraints import KINDS, draw_kinds, subjects, words_of
from sf_core.environments.splits import Split
from sf_core.settings import quote
from sf_core.types import Endpoint, Task


def _is_kind(name: str) -> str:
    if name not in KINDS:
        raise ValueError(f"unknown kind {quote(name)}; use one of {', '.join(KINDS)}")
    return name


FEWEST_WORDS = 5


class Instructions(Environment):
    """The policy writes a text that must keep some constraints. The reward is the share of the constraints
    that the text keeps, with one named part per constraint. A text that is cut off, too short or not about
    the subject earns 0, because even an empty text would keep some constraints."""

    kinds: tuple[Annotated[str, AfterValidator(_is_kind)], ...] = Field(tuple(KINDS), min_length=1)
    """Kinds of constraints that tasks use. By default all kinds."""
    constraints: tuple[int, int] = (1, 3)
    """Minimum and maximum number of constraints per task. A task has fewer if `kinds` are not compatible with
    each other."""
    text: str = "a sentence"
    """Kind of text that the task asks for."""
    answers: int = Field(1, ge=1, le=8)
    """Number of answers per session. After an answer that breaks a constraint, a message names the broken
    constraints, and the policy answers again. The last answer is scored."""

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Instructions:
        fewest, most = self.constraints
        if not 1 <= fewest <= most <= len(set(self.kinds)):
            raise ValueError(
                f"constraints: expected 1 <= minimum <= maximum <= {len(set(self.kinds))} (the number of "
                f"kinds), got {fewest} and {most}"
            )
        return self

    def tasks(self, split: Split, index: int) -> Task:
        random = Random(f"{split} {index}")
        subject = random.choice(subjects(split))
        number = random.randint(*self.constraints)
        drawn = {name: KINDS[name].draw(random, split) for name in draw_kinds(random, self.kinds, number)}
        sentences = [f"Write {self.text} about {subject}."]
        sentences += [KINDS[name].describe(constraint) for name, constraint in drawn.items()]
        metadata = {"subject": subject, "constraints": drawn}
        return Task(f"instructions-{split}-{index}", "instructions", " ".join(sentences), metadata=metadata)

    async def agent(self, task: Task, endpoint: Endpoint) -> dict[str, Any]:
        messages: list[Any] = [{"role": "user", "content": task.prompt}]
        client = endpoint.client()
        for _ in range(self.answers):
            reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
            [choice] = reply.choices
            answer = {"text": choice.message.content or "", "is_whole": choice.finish_reason == "stop"}
            if not answer["is_whole"] or not (broken := self._explain_broken(task, answer)):
                break
            messages.append({"role": "assistant", "content": answer["text"]})
            messages.append({"role": "user", "content": broken})
        return answer

    def reward(self, task: Task, answer: str | dict[str, Any]) -> dict[str, float]:
        """Score the agent's answer. A plain text, as a command prints it, counts as a whole answer."""
        drawn: dict[str, Any] = task.metadata["constraints"]
        whole_answer = {"text": answer, "is_whole": True} if isinstance(answer, str) else answer
        text = str(whole_answer["text"]).strip()
        counts = whole_answer["is_whole"] and is_about(text, task.metadata["subject"])
        return {
            name: KINDS[name].check(text, its) / len(drawn) if counts else 0.0 for name, its in drawn.items()
        }

    def _explain_broken(self, task: Task, answer: dict[str, Any]) -> str:
        """What to tell of an answer; empty if it keeps everything."""
        drawn = task.metadata["constraints"]
        rewards = self.reward(task, answer)
        broken = [
            KINDS[name].describe(parameters)
            for name, parameters in drawn.items()
            if rewards[name] < 1 / len(drawn)
        ]
        if broken and not any(rewards.values()):
            broken.insert(0, f"Write {self.text} about {task.metadata['subject']}.")
        return f"That is not right. {' '.join(broken)}" if broken else ""


def is_about(text: str, subject: str) -> bool:
    """Whether a text has some words, the subject in any form among them, and does not speak of the task."""
    words = words_of(text)
    speaks_of_task = not {"sentence", "comma", "commas"}.isdisjoint(words)
    if len(words) < FEWEST_WORDS or speaks_of_task:
        return False
    stem = subject[: max(3, len(subject) - 3)]
    return any(word.startswith(stem) for word in words)
