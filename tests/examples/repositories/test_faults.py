import pytest

from examples.repositories.faults import faults_in, without_functions


def planted(body: str) -> dict[str, list[str]]:
    """Bodies of a function with a fault, by the kind of it."""
    head = "def f(a, b):\n    "
    source = (head + body + "\n").encode()
    found: dict[str, list[str]] = {}
    for fault in faults_in(source):
        text = fault.planted_in(source).decode().removeprefix(head).rstrip("\n")
        found.setdefault(fault.kind, []).append(text)
    return found


@pytest.mark.parametrize(
    ("body", "kind", "faulty"),
    [
        ("return a + b", "operator swapped", "return a - b"),
        ("return a<b", "comparison changed", "return a<=b"),
        ("return a not in b", "comparison changed", "return a in b"),
        ("return a and b", "and for or", "return a or b"),
        ("return not a", "negation lost", "return a"),
        ("return a[1]", "off by one", "return a[2]"),
        ("return True", "wrong constant", "return False"),
        ("a.append(b)", "statement lost", "pass"),
        ("a += b", "statement lost", "pass"),
        ("return g(a, b)", "arguments swapped", "return g(b, a)"),
        ("if a: return b", "case lost", "pass"),
        ("if a: b = 'é'", "condition negated", "if not (a): b = 'é'"),
    ],
)
def test_a_fault_is_a_small_edit(body: str, kind: str, faulty: str) -> None:
    assert faulty in planted(body)[kind]


def test_places_are_right_after_letters_of_several_bytes() -> None:
    assert planted("return 'é数' + b")["operator swapped"] == ["return 'é数' - b"]


def test_docstrings_annotations_and_what_is_outside_of_functions_are_left_alone() -> None:
    source = (
        b'A = 1 + 2\nclass B:\n    c = 3\n    def d(self, x: "1 + 1" = 5) -> int:\n        """Is 1 < 2."""\n'
    )
    assert faults_in(source) == []


def test_a_fault_names_its_function_with_its_class() -> None:
    [fault] = faults_in(b"class A:\n    async def b(self):\n        return 1\n")
    assert fault.function == "A.b"


def test_functions_are_removed_with_their_decorators() -> None:
    source = b"class A:\n    @d\n    def b(self):\n        pass\n\n    c = 1\n\ndef e(): pass\n"
    assert without_functions(source, {"A.b"}) == b"class A:\n\n    c = 1\n\ndef e(): pass\n"


@pytest.mark.parametrize("names", [{"A.b"}, {"c"}])
def test_a_class_is_not_left_empty_and_an_unknown_function_not_removed(names: set[str]) -> None:
    assert without_functions(b"class A:\n    def b(self): pass\n", names) is None
