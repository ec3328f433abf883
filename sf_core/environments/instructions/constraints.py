"""The kinds of constraints: how each is drawn, described and checked; and the words that tasks are made of.
Held-out tasks have other words than training tasks.

The kinds are those of IFEval (Zhou et al. 2023, arXiv 2311.07911) that need no detection of languages and no
splitting into sentences, with numbers for short texts; `first_words` and `question` are ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from sf_core.environments.splits import Split
from storage.json_files import load_json

_SUBJECTS = """
apples autumn bears bees bicycles birds boats books bread breakfast bridges butterflies cakes candles
castles cats cheese chess children chocolate cities clocks clouds coffee computers cooking cows dancing
deserts dinosaurs doctors dogs dolphins dragons dreams eagles elephants farms fire fish flowers football
forests foxes friendship frogs gardens ghosts giraffes glass gold grandmothers grass guitars history
holidays honey horses hospitals houses ice insects islands jazz kings kites knights lakes lemons libraries
lions magic maps markets mathematics milk mirrors monkeys mountains mushrooms music night numbers oceans
onions oranges owls painting paper parents parks penguins photography pianos pirates pizza planets poetry
potatoes rabbits rain rainbows rice rivers roads robots rockets roses sailors salt school science sharks
sheep ships shoes silence singing sleep snakes snow soup spiders spring stars stones storms stories summer
sunflowers swimming tea teachers telephones tennis theatre tigers time toys trains travel trees turtles
umbrellas valleys villages violins volcanoes walking water whales wheels wind windows winter wolves wood
writing
"""

_KEYWORDS = """
always beautiful because before blue bright early easy every friend gentle good green happy hard home
important large life light little long money moon morning never new often old people quiet red seven simple
slowly small soft special strange strong sunny sweet today together warm white wild wonderful world yellow
young
"""

_PHRASES = (
    "at the end of the day",
    "believe it or not",
    "here is the thing",
    "if you ask me",
    "in my opinion",
    "long ago",
    "once upon a time",
    "some people say",
    "that is all",
    "the truth is",
    "to be honest",
    "what a day",
)

_EVERY = 4
"""One of so many is held out."""


def subjects(split: Split) -> list[str]:
    return _of_split(_SUBJECTS.split(), split)


def keywords(split: Split) -> list[str]:
    """Words that a text must have."""
    return _of_split(_KEYWORDS.split(), split)


def phrases(split: Split) -> list[str]:
    """What a text must begin or end with."""
    return _of_split(list(_PHRASES), split)


def _of_split(pool: list[str], split: Split) -> list[str]:
    return [word for i, word in enumerate(pool) if (i % _EVERY == 0) == (split == "holdout")]


Parameters = dict[str, Any]
"""JSON values."""


@dataclass(frozen=True, slots=True)
class Kind:
    draw: Callable[[Random, Split], Parameters]
    describe: Callable[[Parameters], str]
    """The sentence that the policy reads."""
    check: Callable[[str, Parameters], float]
    """The share of the constraint that a text keeps, 0 to 1."""
    uses: tuple[str, ...] = ()
    """What it decides alone: a task has at most one constraint on each of these."""


def words_of(text: str) -> list[str]:
    """The words of a text in small letters, without punctuation.

    >>> words_of("It's <<Late>>, Bob.")
    ["it's", 'late', 'bob']
    """
    return re.findall(r"[a-z0-9]+(?:'[a-z]+)?", text.lower())


def _quote(words: list[str]) -> str:
    return " and ".join(f'"{word}"' for word in words)


def _make_fixed(text: str, is_met: Callable[[str], bool], *uses: str) -> Kind:
    """A constraint without parameters."""
    return Kind(lambda random, split: {}, lambda _: text, lambda answer, _: float(is_met(answer)), uses)


def _make_counted(low: int, high: int, text: str, count: Callable[[str], int], *uses: str) -> Kind:
    """At least `n` of something, with n from low to high. Fewer are worth their share."""
    return Kind(
        lambda random, split: {"n": random.randint(low, high)},
        lambda its: text.format(n=its["n"], s="s" if its["n"] > 1 else ""),
        lambda answer, its: min(1.0, count(answer) / its["n"]),
        uses,
    )


def _share(words: list[str], is_met: Callable[[str], bool]) -> float:
    return sum(map(is_met, words)) / len(words)


def _draw_words(count: int) -> Callable[[Random, Split], Parameters]:
    return lambda random, split: {"words": random.sample(keywords(split), count)}


def _draw_phrase(random: Random, split: Split) -> Parameters:
    return {"phrase": random.choice(phrases(split)).capitalize()}


def _is_json(text: str) -> bool:
    try:
        return isinstance(
            load_json(text.removeprefix("```json").removeprefix("```").removesuffix("```")), dict
        )
    except ValueError:
        return False


def _has_title(text: str) -> bool:
    return bool(re.search(r"<<[^\n<>]*\w[^\n<>]*>>", text))


def _plain(text: str) -> str:
    return " ".join(words_of(text))


KINDS: dict[str, Kind] = {
    "keywords": Kind(
        _draw_words(2),
        lambda its: f"Use the words {_quote(its['words'])}.",
        lambda answer, its: _share(its["words"], lambda word: word in words_of(answer)),
    ),
    "forbidden_words": Kind(
        lambda random, split: {"words": [random.choice(("the", "and", "is", "are", "of", "to", "in"))]},
        lambda its: f"Do not use the word {_quote(its['words'])}.",
        lambda answer, its: _share(its["words"], lambda word: word not in words_of(answer)),
    ),
    "keyword_frequency": Kind(
        lambda random, split: {"word": random.choice(keywords(split)), "n": 2},
        lambda its: f'Use the word "{its["word"]}" at least {its["n"]} times.',
        lambda answer, its: min(1.0, words_of(answer).count(its["word"]) / its["n"]),
    ),
    "letter_frequency": Kind(
        lambda random, split: {"letter": random.choice("bcdfgklmpuvwy"), "n": random.randint(3, 5)},
        lambda its: f'Use the letter "{its["letter"]}" at least {its["n"]} times.',
        lambda answer, its: min(1.0, answer.lower().count(its["letter"]) / its["n"]),
    ),
    "at_most_words": Kind(
        lambda random, split: {"n": random.randint(8, 15)},
        lambda its: f"Use at most {its['n']} words.",
        lambda answer, its: float(len(answer.split()) <= its["n"]),
        ("length",),
    ),
    "at_least_words": _make_counted(
        14, 22, "Use at least {n} words.", lambda answer: len(answer.split()), "length"
    ),
    "placeholders": _make_counted(
        1,
        2,
        "Use at least {n} placeholder{s} in square brackets, such as [name].",
        lambda answer: len(re.findall(r"\[[^\[\]]+\]", answer)),
    ),
    "highlights": _make_counted(
        1,
        2,
        "Highlight at least {n} word{s} with asterisks, such as *word*.",
        lambda answer: len(re.findall(r"\*[^\s*][^*\n]*\*", answer)),
    ),
    "bullets": _make_counted(
        2,
        3,
        "Write {n} bullet points that begin with a hyphen.",
        lambda answer: len(re.findall(r"^\s*[-*] +\S", answer, re.MULTILINE)),
        "start",
        "length",
    ),
    "capital_words": _make_counted(
        1,
        3,
        "Write at least {n} word{s} in all capital letters.",
        lambda answer: len(re.findall(r"\b[A-Z]{2,}\b", answer)),
        "case",
    ),
    "first_words": Kind(
        _draw_phrase,
        lambda its: f'Begin with the words "{its["phrase"]}".',
        lambda answer, its: float(_plain(answer).startswith(_plain(its["phrase"]))),
        ("start",),
    ),
    "last_words": Kind(
        _draw_phrase,
        lambda its: f'End with the words "{its["phrase"]}".',
        lambda answer, its: float(_plain(answer).endswith(_plain(its["phrase"]))),
        ("end",),
    ),
    "postscript": _make_fixed(
        'Add a postscript that begins with "P.S."', lambda answer: "P.S." in answer, "end", "case"
    ),
    "title": _make_fixed(
        "Give it a title in double angle brackets, such as <<title>>.", _has_title, "start", "case"
    ),
    "json": _make_fixed("Answer with a JSON object.", _is_json, "start", "end", "case", "length"),
    "quotation": _make_fixed(
        "Put the whole answer into double quotation marks.",
        lambda answer: (
            len(answer) > 2
            and answer[0] in '"\N{LEFT DOUBLE QUOTATION MARK}'
            and answer[-1] in '"\N{RIGHT DOUBLE QUOTATION MARK}'
        ),
        "start",
        "end",
    ),
    "lower_case": _make_fixed("Use small letters only.", lambda answer: answer == answer.lower(), "case"),
    "upper_case": _make_fixed("Use capital letters only.", lambda answer: answer == answer.upper(), "case"),
    "no_comma": _make_fixed("Do not use any commas.", lambda answer: "," not in answer),
    "question": _make_fixed("Write it as a question.", lambda answer: answer.rstrip('"').endswith("?")),
}


def draw_kinds(random: Random, names: Sequence[str], number: int) -> list[str]:
    """At most so many of these kinds, which go together."""
    drawn: list[str] = []
    used: set[str] = set()
    for name in random.sample(sorted(set(names)), len(set(names))):
        if len(drawn) < number and used.isdisjoint(KINDS[name].uses):
            drawn.append(name)
            used.update(KINDS[name].uses)
    return drawn
