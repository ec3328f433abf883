"""The words that tasks are made of. Held-out tasks have other ones than training tasks."""

from __future__ import annotations

from sf_core.environments.splits import Split

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
