"""Arithmetic questions to answer with a calculator tool; answers are verified exactly."""

from __future__ import annotations

import operator
import re
from random import Random

from sf_core.agents.tool_loop import Tool
from sf_core.environments.splits import Question, Splits
from sf_core.types import Task

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXPRESSION = re.compile(r"(\d{1,9})([-+*])(\d{1,9})")


def evaluate(expression: str) -> str:
    """Value of two numbers joined by +, - or *.

    >>> evaluate("47*83")
    '3901'
    """
    match = EXPRESSION.fullmatch(expression.replace(" ", ""))
    if match is None:
        raise ValueError("expected NUMBER OPERATOR NUMBER")
    left, symbol, right = match.groups()
    return str(OPERATORS[symbol](int(left), int(right)))


CALCULATOR = Tool(
    name="calc",
    description="Evaluate an expression such as 47*83.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
    function=evaluate,
)


class Calculator(Splits):
    """Questions such as "What is 47*83?"."""

    def __init__(self) -> None:
        super().__init__("calculator", _make_question)

    def score(self, task: Task, answer: str) -> float:
        return float(answer.strip() == task.answer)


def _make_question(number: int) -> Question:
    random = Random(number)
    expression = f"{random.randint(10, 99)}{random.choice('+-*')}{random.randint(10, 99)}"
    return Question(f"What is {expression}?", evaluate(expression), {"expression": expression})
