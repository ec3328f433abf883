"""A sentence that asks somebody for a favour. Whether it is polite no rule can tell, so a judge is asked."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from sf_core.environments.environment import Environment
from sf_core.environments.splits import Split
from sf_core.types import Endpoint, Task

_PEOPLE = """
aunt baker boss brother captain colleague cousin customer dentist doctor driver friend gardener guest
hairdresser landlord lawyer librarian manager mother nephew neighbour nurse painter plumber postman pupil
secretary singer sister student tailor teacher tenant trainer uncle visitor waiter
"""

_FAVOURS = """
answer the letter|book a table|bring the bill|carry the suitcase|change the date|check the brakes
clean the kitchen|close the window|correct the mistake|explain the rules|feed the cat|find the keys
hold the lift|keep the dog quiet|lend a ladder|make some coffee|move the car|open the door|paint the fence
pay the rent|post a parcel|read the contract|repair the roof|return the book|save a seat|send the report
share the recipe|sign the form|speak more slowly|stop the machine|switch the lights off|take a photograph
translate a page|turn the music down|wait until noon|walk the dog|wash the dishes|water the plants
wrap the present|write a reference
"""

_EXAMPLES = (
    ("Give me the salt.", "no"),
    ("Would you kindly pass me the salt, please?", "yes"),
    ("Be quiet, I am working.", "no"),
    ("I am sorry, could you speak a little more softly? Thank you!", "yes"),
)
"""Sentences with what the judge is to say of them."""

_SMALL = {"a", "the", "some", "more", "down", "off", "until"}

FEWEST_WORDS = 5

_EVERY = 4
"""One of so many favours is held out."""


class Manners(Environment):
    """The policy writes a sentence that asks for a favour. The reward is the probability with which the judge
    `manners` says that the sentence is polite. Rules check two conditions without the judge: a sentence that
    is cut off, or does not name the favour, earns 0."""

    def tasks(self, split: Split, index: int) -> Task:
        random = Random(f"{split} {index}")
        person = random.choice(_PEOPLE.split())
        favour = random.choice(_favours(split))
        prompt = f"Write one sentence in which you ask your {person} to {favour}."
        return Task(f"manners-{split}-{index}", "manners", prompt, metadata={"favour": favour})

    async def agent(self, task: Task, endpoint: Endpoint) -> dict[str, Any]:
        client = endpoint.client()
        messages: Any = [{"role": "user", "content": task.prompt}]
        reply = await client.chat.completions.create(model=endpoint.model, messages=messages)
        [choice] = reply.choices
        return {"text": choice.message.content or "", "is_whole": choice.finish_reason == "stop"}

    async def reward(  # type: ignore[override]
        self, task: Task, answer: str | dict[str, Any], judges: Mapping[str, Any]
    ) -> dict[str, float]:
        """Score the agent's answer. A plain text, as a command prints it, counts as a whole answer."""
        if isinstance(answer, str):
            answer = {"text": answer, "is_whole": True}
        text = " ".join(str(answer["text"]).split())
        if not answer["is_whole"] or not names_favour(text, task.metadata["favour"]):
            return {"polite": 0.0}
        question = ask_about(text)
        chosen = await judges["manners"].choose(question, ["yes", "no"], item="polite")
        return {"polite": chosen["yes"]}


def names_favour(text: str, favour: str) -> bool:
    """Whether a text has some words, one of what the favour is about among them in any form."""
    words = [word.strip("\"'(*") for word in text.lower().split()]
    if len(words) < FEWEST_WORDS:
        return False
    subject = [word for word in favour.split()[1:] if word not in _SMALL]
    stems = tuple(word[:4] for word in subject)
    return any(word.startswith(stems) for word in words)


def ask_about(text: str) -> list[dict[str, str]]:
    """The question whether a text is polite, after those about the examples, which a small judge needs."""

    def ask(sentence: str) -> dict[str, str]:
        return {"role": "user", "content": f"Sentence: {sentence}\nPolite (yes or no)?"}

    examples = [
        message
        for request, reply in _EXAMPLES
        for message in (ask(request), {"role": "assistant", "content": reply})
    ]
    return [*examples, ask(text)]


def _favours(split: Split) -> list[str]:
    favours = _FAVOURS.strip().replace("\n", "|").split("|")
    return [favour for i, favour in enumerate(favours) if (i % _EVERY == 0) == (split == "holdout")]
