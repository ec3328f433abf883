"""Small operations on lists, texts and numbers, as descriptions and as code, and chains of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

Kind = Literal["list", "text", "number"]
KINDS: dict[Kind, str] = {"list": "a list of integers", "text": "a text", "number": "an integer"}

Value = list[int] | str | int


@dataclass(frozen=True, slots=True)
class Operation:
    takes: Kind
    gives: Kind
    says: str
    """What it does; {k} stands for a small number."""
    code: str
    """An expression of Python in which `value` is what it takes."""

    def with_number(self, k: int) -> Operation:
        says, code = (text.replace("{k}", str(k)) for text in (self.says, self.code))
        return Operation(self.takes, self.gives, says, code)


OPERATIONS = (
    Operation("list", "list", "sort the numbers from the smallest to the largest", "sorted(value)"),
    Operation("list", "list", "reverse the order of the numbers", "value[::-1]"),
    Operation("list", "list", "keep only the first of equal numbers", "list(dict.fromkeys(value))"),
    Operation("list", "list", "keep only the even numbers", "[n for n in value if n % 2 == 0]"),
    Operation("list", "list", "keep only the numbers greater than {k}", "[n for n in value if n > {k}]"),
    Operation("list", "list", "add {k} to each number", "[n + {k} for n in value]"),
    Operation("list", "list", "multiply each number by {k}", "[n * {k} for n in value]"),
    Operation(
        "list",
        "list",
        "replace each number by the sum of all numbers up to and including it",
        "[sum(value[: i + 1]) for i in range(len(value))]",
    ),
    Operation(
        "list",
        "list",
        "replace the list by the differences between neighbours, each number minus the one before it",
        "[b - a for a, b in zip(value, value[1:])]",
    ),
    Operation("list", "list", "drop the first {k} numbers", "value[{k}:]"),
    Operation("list", "list", "keep every second number, beginning with the first", "value[::2]"),
    Operation("list", "list", "move the first number to the end", "value[1:] + value[:1]"),
    Operation("list", "number", "take the sum of the numbers, 0 if there are none", "sum(value)"),
    Operation("list", "number", "take the largest number, 0 if there are none", "max(value, default=0)"),
    Operation("list", "number", "count the numbers", "len(value)"),
    Operation(
        "list", "text", "write the numbers one after the other, joined by commas", '",".join(map(str, value))'
    ),
    Operation("text", "text", "reverse the text", "value[::-1]"),
    Operation("text", "text", "turn all letters into capitals", "value.upper()"),
    Operation(
        "text",
        "text",
        "remove the vowels a, e, i, o and u, small or capital",
        '"".join(c for c in value if c not in "aeiouAEIOU")',
    ),
    Operation("text", "text", "write each character twice", '"".join(c + c for c in value)'),
    Operation("text", "text", "keep only the first of equal characters", '"".join(dict.fromkeys(value))'),
    Operation("text", "text", "sort the characters by their code points", '"".join(sorted(value))'),
    Operation("text", "text", "drop the first {k} characters", "value[{k}:]"),
    Operation("text", "text", "repeat the whole text {k} times", "value * {k}"),
    Operation("text", "number", "count the characters", "len(value)"),
    Operation(
        "text", "list", "replace the text by the list of its characters' code points", "[*map(ord, value)]"
    ),
    Operation(
        "text",
        "list",
        "replace the text by the list of the lengths of its words, which spaces separate",
        "[len(word) for word in value.split()]",
    ),
    Operation("number", "number", "add {k}", "value + {k}"),
    Operation("number", "number", "multiply by {k}", "value * {k}"),
    Operation(
        "number",
        "number",
        "take the sum of the decimal digits, without the sign",
        "sum(map(int, str(abs(value))))",
    ),
    Operation(
        "number", "number", "take the remainder of a division by {k}, which is never negative", "value % {k}"
    ),
    Operation("number", "text", "write the number in decimal digits", "str(value)"),
    Operation(
        "number",
        "list",
        "replace the number by the list of its decimal digits, without the sign",
        "[*map(int, str(abs(value)))]",
    ),
)
NUMBERS = 2, 9
"""Bounds of {k}."""

LONGEST = 300
"""Most characters of a value that a chain makes."""

NAME = "solve"
"""What the function is called."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Operations, each done on what the one before it gives."""

    operations: tuple[Operation, ...]

    @property
    def takes(self) -> Kind:
        return self.operations[0].takes

    @property
    def gives(self) -> Kind:
        return self.operations[-1].gives

    @property
    def source(self) -> str:
        """A Python function that does it."""
        lines = [f"    value = {operation.code}" for operation in self.operations]
        return "\n".join([f"def {NAME}(value):", *lines, "    return value", ""])

    def __call__(self, value: Value) -> Value:
        for operation in self.operations:
            value = _compiled(operation.code)(value)
        return value

    @property
    def behaviour(self) -> str:
        """What it returns for certain values: chains that do the same have the same."""
        return json.dumps([self.takes, [self(value) for value in PROBES[self.takes]]])

    @property
    def is_telling(self) -> bool:
        """Whether each operation changes something, the result depends on what is given, and stays short."""
        values = PROBES[self.takes]
        for operation in self.operations:
            done = [_compiled(operation.code)(value) for value in values]
            if done == values or any(len(str(value)) > LONGEST for value in done):
                return False
            values = done
        return len({str(value) for value in values}) > len(values) // 2


@functools.cache
def _compiled(code: str) -> Callable[[Any], Any]:
    return eval(f"lambda value: {code}")  # all codes are written above


def draw_chain(random: Random, length: int) -> Chain:
    """A telling chain of so many operations."""
    while True:
        kind: Kind = random.choice(("list", "text", "number"))
        operations: list[Operation] = []
        for _ in range(length):
            operation = random.choice([each for each in OPERATIONS if each.takes == kind])
            operations.append(operation.with_number(random.randint(*NUMBERS)))
            kind = operation.gives
        if (chain := Chain(tuple(operations))).is_telling:
            return chain


def draw_value(random: Random, kind: Kind) -> Value:
    if kind == "list":
        return [random.randint(-9, 20) for _ in range(random.randint(0, 8))]
    if kind == "text":
        return "".join(random.choices("abcdefghiklmnoprstuwABEKNRT   ", k=random.randint(0, 12)))
    return random.randint(-99, 999)


def draw_values(random: Random, kind: Kind, count: int) -> list[Value]:
    """So many different values."""
    found: dict[str, Value] = {}
    while len(found) < count:
        value = draw_value(random, kind)
        found[repr(value)] = value
    return list(found.values())


PROBES: dict[Kind, list[Any]] = {kind: draw_values(Random(kind), kind, 16) for kind in KINDS}
"""Values of each kind by which chains are told apart."""
