"""Single-turn tasks of the public library reasoning-gym, made by its generators and scored by its scorers.

Only some answers may be scored: some scorers hand an answer to Python's `eval`, or to sympy, which does.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import math
from functools import cached_property
from typing import Any

from pydantic import Field, field_validator

from sf_core.agents.tool_loop import run_tool_loop
from sf_core.environments.environment import Demonstration, Environment
from sf_core.environments.splits import HOLDOUT_SIZE, Question, Split, Splits, in_equal_parts
from sf_core.settings import quote
from sf_core.types import Endpoint, Task

FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "sqrt")
)

MAX_LENGTH = 2000

MAX_POWER = 100
"""Largest power, of a power too: greater ones may be computed forever."""

_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load)


def is_literal(answer: str) -> bool:
    """Whether this is a Python literal, as a list of texts or numbers."""
    try:
        ast.literal_eval(answer)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    return len(answer) <= MAX_LENGTH


def is_formula(answer: str) -> bool:
    """Whether this is one expression of numbers, letters, arithmetic, small powers and functions.

    >>> is_formula("2*x**3/3 + exp(x)"), is_formula("__import__('os').getcwd()"), is_formula("9**9**9")
    (True, False, False)
    """
    try:
        tree = ast.parse(answer, mode="eval")
        return (
            len(answer) <= MAX_LENGTH and all(map(_is_harmless, ast.walk(tree))) and _power(tree) <= MAX_POWER
        )
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return len(node.id) == 1 or node.id in FUNCTIONS
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    return isinstance(node, _ARITHMETIC) and not isinstance(node, ast.LShift)


def _power(node: ast.AST) -> float:
    """Bound on the power to which anything in the expression is raised."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        constants: list[Any] = [
            inner.value for inner in ast.walk(node.right) if isinstance(inner, ast.Constant)
        ]
        raised = math.prod(max(1.0, abs(constant)) for constant in constants)
        return raised * _power(node.left) * _power(node.right)
    return max(map(_power, ast.iter_child_nodes(node)), default=1.0)


NUM_ITEMS = 1 << 62

FEWER_ITEMS = dict.fromkeys(("acre", "gsm_symbolic", "list_functions", "word_ladder"), 4999)
"""Datasets that make a table of all their items, or refuse more. A prime number, so that strides through the
items meet all of them."""

EVALUATED = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), is_literal),
    **dict.fromkeys(("countdown", "puzzle24", "polynomial_multiplication"), is_formula),
    **dict.fromkeys(("intermediate_integration", "simple_integration"), is_formula),
}
"""Datasets whose scorers evaluate what the model wrote, and what of it they may evaluate. Other answers score
as wrong, but for an equal one."""

OURS = ("seed", "size")
"""Parameters that the splits decide."""


class Dataset(Splits):
    """One dataset of the library, by its name there and its parameters. `level` is one of the library's
    levels of difficulty, from 0; other parameters count over it."""

    def __init__(self, name: str, held_out: int = HOLDOUT_SIZE, **parameters: Any) -> None:
        super().__init__(name, self._ask, held_out)
        self._parameters = parameters
        self._num_items = FEWER_ITEMS.get(name, NUM_ITEMS)

    @cached_property
    def _dataset(self) -> Any:
        settings = self.settings()
        return _library().DATASETS[self.environment][0](settings)

    def settings(self) -> Any:
        """The library's settings of this dataset. Raises ValueError if there is no such dataset or they are
        wrong."""
        datasets = _library().DATASETS
        name = self.environment
        if name not in datasets:
            near = difflib.get_close_matches(name, datasets, n=3) or sorted(datasets)
            raise ValueError(f"reasoning-gym has no dataset {quote(name)}; use for example {', '.join(near)}")
        kind = datasets[name][1]
        parameters = dict(self._parameters)
        field_names = {field.name for field in dataclasses.fields(kind)}.difference(OURS)
        level = parameters.pop("level", None)
        if unknown := sorted(parameters.keys() - field_names):
            allowed = ", ".join(["level", *sorted(field_names)])
            raise ValueError(f"{name} has no parameter {', '.join(unknown)}; use one of {allowed}")
        try:
            settings = dataclasses.replace(self._at_level(kind, level), **parameters)
            if hasattr(settings, "validate"):
                settings.validate()
        except Exception as error:  # whatever the library's checks raise
            raise ValueError(f"{name}: {error or type(error).__name__}") from error
        return settings

    def _at_level(self, kind: Any, level: Any) -> Any:
        ours = {"seed": 0, "size": self._num_items}
        if level is None:
            return kind(**ours)
        if self.environment not in _library().CURRICULA or not isinstance(level, int) or level < 0:
            raise ValueError(f"{self.environment} has no level {quote(level)}")
        curriculum = _library().create_curriculum(self.environment)
        curriculum.set_global_level(level)
        return curriculum.generate_configuration(ours)

    def _ask(self, number: int) -> Question:
        entry = self._dataset[number % self._num_items]
        return Question(entry["question"], entry["answer"] or "", entry["metadata"])

    def score(self, task: Task, answer: str) -> float:
        """Score between 0 and 1; some of the library's scorers give partial credit."""
        answer = answer.strip()
        may_be_evaluated = EVALUATED.get(self.environment)
        if may_be_evaluated and answer != task.answer and not may_be_evaluated(answer):
            return 0.0
        entry = {"question": task.prompt, "answer": task.answer, "metadata": task.metadata}
        try:
            return float(self._dataset.score_answer(answer, entry))
        except Exception:  # a scorer that cannot read what the model wrote
            return 0.0


class ReasoningGym(Environment):
    """Tasks of reasoning-gym. The agent answers each task in one turn. Every dataset provides the same share
    of the tasks."""

    datasets: dict[str, dict[str, Any]] = Field(min_length=1)
    """Names of datasets in reasoning-gym, each with the parameters of the dataset. The parameter `level` sets
    the level of difficulty, from 0."""
    held_out: int = Field(HOLDOUT_SIZE, ge=1)
    """Number of held-out tasks per dataset. Every process creates the held-out tasks before the first task,
    which takes long for some datasets."""

    @field_validator("datasets")
    @classmethod
    def _are_known(cls, datasets: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, parameters in datasets.items():
            Dataset(name, **parameters).settings()
        return datasets

    @cached_property
    def sources(self) -> dict[str, Dataset]:
        return {
            name: Dataset(name, self.held_out, **parameters) for name, parameters in self.datasets.items()
        }

    def tasks(self, split: Split, index: int) -> Task:
        return in_equal_parts(self.sources, split, index)

    async def agent(self, task: Task, endpoint: Endpoint) -> str:
        return await run_tool_loop(endpoint, task.prompt)

    def reward(self, task: Task, answer: str) -> float:
        return self.sources[task.environment].score(task, answer)

    def demonstrate(self, index: int) -> Demonstration | None:
        return demonstrate_answer(self.tasks("train", index))


def demonstrate_answer(task: Task) -> Demonstration | None:
    """The task and its answer; None if the library has none."""
    conversation = [("user", task.prompt), ("assistant", task.answer)]
    return (
        Demonstration([{"role": role, "content": text} for role, text in conversation])
        if task.answer
        else None
    )


def _library() -> Any:
    from reasoning_gym import factory  # costs more than a second; only a process that needs tasks pays it

    return factory
