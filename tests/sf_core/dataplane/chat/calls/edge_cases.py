"""Edge cases of every format: what an answer says and which calls we read in it.

vLLM's parser of that name reads the same calls, but for those in `DIFFERENT`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sf_core.dataplane.chat.calls.formats import FORMATS
from sf_core.dataplane.chat.json_text import read_json
from sf_core.dataplane.chat.tool_formats import Tool, ToolCall

TYPES = {
    "text": {"type": "string"},
    "num": {"type": "integer"},
    "ratio": {"type": "number"},
    "sure": {"type": "boolean"},
    "some": {"type": "array", "items": {"type": "string"}},
    "more": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "level": {"enum": [1, 2]},
}
TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {"name": "find", "parameters": {"type": "object", "properties": TYPES}},
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]


class Case(NamedTuple):
    form: str
    title: str
    text: str
    ours: list[ToolCall]
    unparsed: int = 0


def call(**arguments: Any) -> ToolCall:
    return ToolCall("find", arguments)


STOP = ToolCall("stop", {})
BIG = read_json(str(2**70))
LONG = read_json("12345678901234567890123")
FORMS = ["hermes", "llama3_json", "qwen3_coder", "glm45", "mistral", "mistral_list", "mistral_named"]
VALUES = {
    "an integer": {"num": 7},
    "an integer of more than 64 bits": {"num": BIG},
    "a negative number": {"ratio": -0.25},
    "a long number": {"ratio": LONG},
    "true and false": {"sure": True},
    "a list": {"some": ["a", "1", ""]},
    "an object": {"more": {"a": {"b": [1, None, -3.5]}}},
    "null": {"maybe": None},
    "a value of an enumeration": {"level": 2},
    "a string that is a number": {"text": "12"},
    "a string that is JSON": {"text": '{"a": [1]}'},
    "unicode": {"text": "naïve 数学 \U0001f600"},
    "quotes and line ends": {"text": 'say "hi"\\n\n\tthen "bye"\n'},
    "an empty string": {"text": ""},
    "a string with tags": {"text": "<b>1 < 2</b> & </think>"},
    "a string with braces": {"text": "}{][ [ARGS]"},
    "several arguments": {"text": "a", "num": 1, "sure": False},
    "an argument that the tool does not have": {"other": "x"},
}
END = {"hermes": "</tool_call>", "qwen3_coder": "</parameter>", "glm45": "</arg_value>"}


def written(form: str, *calls: ToolCall) -> str:
    """Calls as a model of the family writes them in one answer."""
    one_by_one = [FORMATS[form].render(call) for call in calls]
    if form == "mistral_list":
        return "[TOOL_CALLS][" + ", ".join(text[len("[TOOL_CALLS][") : -1] for text in one_by_one) + "]"
    return {"llama3_json": "; ", "hermes": "\n", "qwen3_coder": "\n", "glm45": "\n"}.get(form, "").join(
        one_by_one
    )


def of_all(form: str) -> list[Case]:
    one = call(text="x")
    two = call(num=2)
    both = written(form, one, two)
    cases = [
        Case(form, title, written(form, call(**values)), [call(**values)]) for title, values in VALUES.items()
    ]
    cases += [
        Case(form, "no arguments", written(form, STOP), [STOP]),
        Case(form, "two calls", both, [one, two]),
        Case(form, "the same call twice", written(form, one, one), [one, one]),
        Case(form, "white space around", f"\n {written(form, one)}\n ", [one]),
        Case(form, "an unknown tool", written(form, ToolCall("rm", {"text": "x"})), [], 1),
        Case(form, "no call", "I find <nothing> in [] or {}", []),
    ]
    if form != "llama3_json":
        cases += [
            Case(form, "text before", f"So: {written(form, one)}", [one]),
            Case(form, "text after", f"{written(form, one)} and so on", [one]),
        ]
    return cases


def q(arguments: str = "", *, name: str = "find", end: bool = True, tag: bool = True) -> str:
    """A call of Qwen3-Coder, with or without what stands around it."""
    text = f"<function={name}>\n{arguments}" + ("</function>\n" if end else "")
    return f"<tool_call>\n{text}</tool_call>" if tag else text


X = call(text="Z")
HERMES = FORMS[0]
LLAMA = FORMS[1]
QWEN = FORMS[2]
GLM = FORMS[3]
LIST = "mistral_list"
ARGS = "mistral"
OPEN = "<tool_call>"
CLOSE = "</tool_call>"
J = '{"name": "find", "arguments": {"text": "Z"}}'
P = '{"name": "find", "parameters": {"text": "Z"}}'
A = "<parameter=text>\nZ\n</parameter>\n"
G = "<arg_key>text</arg_key>\n<arg_value>Z</arg_value>\n"
OWN_CASES = [
    Case(HERMES, "no closing tag", f"{OPEN}\n{J}", [X]),
    Case(HERMES, "a cut closing tag", f"{OPEN}\n{J}\n</tool", [X]),
    Case(HERMES, "cut arguments", f"{OPEN}\n{J[:-4]}", [], 1),
    Case(HERMES, "a whole call and a cut one", f"{OPEN}\n{J}\n{CLOSE}\n{OPEN}\n{J[:-4]}", [X], 1),
    Case(HERMES, "a second call without the first one's closing tag", f"{OPEN}{J}\n{OPEN}{J}{CLOSE}", [], 1),
    Case(HERMES, "no JSON", f"{OPEN}find x{CLOSE}", [], 1),
    Case(HERMES, "no name", f'{OPEN}{{"arguments": {{}}}}{CLOSE}', [], 1),
    Case(HERMES, "no arguments at all", f'{OPEN}{{"name": "stop"}}{CLOSE}', [], 1),
    Case(HERMES, "arguments by the other name", f"{OPEN}{P}{CLOSE}", [], 1),
    Case(HERMES, "arguments by both names", f'{OPEN}{J[:-1]}, "parameters": {{}}}}{CLOSE}', [X]),
    Case(HERMES, "arguments that are null", f'{OPEN}{{"name": "stop", "arguments": null}}{CLOSE}', [], 1),
    Case(HERMES, "arguments that are no object", f'{OPEN}{{"name": "find", "arguments": [1]}}{CLOSE}', [], 1),
    Case(HERMES, "arguments as a string", f'{OPEN}{{"name": "find", "arguments": "{{}}"}}{CLOSE}', [], 1),
    Case(HERMES, "a key twice", f'{OPEN}{J[:-2]}, "text": "y"}}}}{CLOSE}', [call(text="y")]),
    Case(HERMES, "its tag in a string", f"{OPEN}{J.replace('Z', CLOSE)}{CLOSE}", [], 1),
    Case(HERMES, "its opening tag in a string", f"{OPEN}{J.replace('Z', OPEN)}{CLOSE}", [call(text=OPEN)]),
    Case(HERMES, "a number of another type", f"{OPEN}{J.replace('text', 'num')}{CLOSE}", [call(num="Z")]),
    Case(HERMES, "a number that is none", f"{OPEN}{J.replace(chr(34) + 'Z' + chr(34), 'NaN')}{CLOSE}", [], 1),
    Case(HERMES, "half a character", f"{OPEN}{J.replace('Z', chr(92) + 'ud83d')}{CLOSE}", [], 1),
    Case(
        HERMES, "an escaped character", f"{OPEN}{J.replace('Z', chr(92) + 'u00e9')}{CLOSE}", [call(text="é")]
    ),
    Case(LLAMA, "its tag before", f"<|python_tag|>{P}", [X]),
    Case(LLAMA, "arguments by the other name", J, [X]),
    Case(LLAMA, "arguments by both names", f'{P[:-1]}, "arguments": {{"text": "y"}}}}', [call(text="y")]),
    Case(LLAMA, "arguments by a third name", P.replace("parameters", "args"), [], 1),
    Case(LLAMA, "no arguments at all", '{"name": "stop"}', [], 1),
    Case(LLAMA, "arguments that are null", '{"name": "stop", "parameters": null}', [], 1),
    Case(LLAMA, "text before", f"So: {P}", [], 1),
    Case(LLAMA, "text before an unknown tool", f"So: {P.replace('find', 'rm')}", [], 1),
    Case(LLAMA, "a space behind its tag", f"<|python_tag|> {P}", [X]),
    Case(LLAMA, "its tag and a space before the second", f"{P}<|python_tag|>\n{P}", [X, X]),
    Case(LLAMA, "text after", f"{P} and so on", [X]),
    Case(LLAMA, "cut arguments", P[:-4], [], 1),
    Case(LLAMA, "a whole call and a cut one", f"{P}; {P[:-4]}", [X], 1),
    Case(LLAMA, "an object that is no call", '{"text": "Z"}', [], 1),
    Case(LLAMA, "arguments that are no object", P.replace('{"text": "Z"}', "[1]"), [], 1),
    Case(LLAMA, "a key twice", f'{P[:-2]}, "text": "y"}}}}', [call(text="y")]),
    Case(QWEN, "no tag around", q(A, tag=False), [X]),
    Case(QWEN, "no opening tag", q(A, tag=False) + CLOSE, [X]),
    Case(QWEN, "no closing tag", q(A).removesuffix(CLOSE), [X]),
    Case(QWEN, "a cut closing tag", q(A)[:-3], [X]),
    Case(QWEN, "two calls between one pair of tags", OPEN + q(A, tag=False) * 2 + CLOSE, [X, X]),
    Case(QWEN, "a second call without the first one's closing tag", q(A)[:-12] + q(A), [X, X]),
    Case(QWEN, "cut behind an argument", q(A, end=False).removesuffix(CLOSE), [], 1),
    Case(QWEN, "cut in an argument", q(A[:-14], end=False).removesuffix(CLOSE), [], 1),
    Case(QWEN, "no end of the function", q(A, end=False), [], 1),
    Case(QWEN, "no end of an argument before the next", q(A[:17] + A), [X]),
    Case(QWEN, "no end of the last argument", q(A[:-13]), [], 1),
    Case(QWEN, "its tag in an argument", q(A.replace("Z", "a</parameter>b")), [], 1),
    Case(QWEN, "the closing tag in an argument", q(A.replace("Z", CLOSE)), [], 1),
    Case(QWEN, "an argument twice", q(A + A.replace("Z", "y")), [call(text="y")]),
    Case(QWEN, "an argument on one line", q("<parameter=text>Z</parameter>"), [X]),
    Case(QWEN, "an argument with white space", q(A.replace("Z", "\n x ")), [call(text="\n x ")]),
    Case(QWEN, "no integer where one is wanted", q(A.replace("text", "num")), [call(num="Z")]),
    Case(QWEN, "a fraction for an integer", q("<parameter=num>1.5</parameter>"), [call(num=1.5)]),
    Case(QWEN, "a whole number with a point", q("<parameter=ratio>2.0</parameter>"), [call(ratio=2)]),
    Case(QWEN, "True as Python writes it", q("<parameter=sure>True</parameter>"), [call(sure=True)]),
    Case(QWEN, "an endless number", q("<parameter=ratio>1e999</parameter>"), [call(ratio="1e999")]),
    Case(QWEN, "a broken list", q("<parameter=some>[1</parameter>"), [call(some="[1")]),
    Case(QWEN, "JSON instead", f"{OPEN}{J}{CLOSE}", [], 1),
    Case(QWEN, "text in the call", q(A + "so"), [], 1),
    Case(QWEN, "nothing in the tags", OPEN + CLOSE, [], 1),
    Case(GLM, "no line ends", f"{OPEN}find{G.replace(chr(10), '')}{CLOSE}", [X]),
    Case(GLM, "cut in a value", f"{OPEN}find\n{G[:-14]}", [], 1),
    Case(GLM, "cut behind a value", f"{OPEN}find\n{G}", [], 1),
    Case(GLM, "cut in the name", f"{OPEN}fin", [], 1),
    Case(GLM, "no end of a value", f"{OPEN}find\n{G.replace('</arg_value>', '')}{CLOSE}", [], 1),
    Case(GLM, "a key without a value", f"{OPEN}find\n<arg_key>text</arg_key>{CLOSE}", [], 1),
    Case(GLM, "the closing tag in a value", f"{OPEN}find\n{G.replace('Z', CLOSE)}{CLOSE}", [], 1),
    Case(GLM, "a key twice", f"{OPEN}find\n{G}{G.replace('Z', 'y')}{CLOSE}", [call(text="y")]),
    Case(
        GLM, "white space in a value", f"{OPEN}find\n{G.replace('>Z<', '> Z <')}{CLOSE}", [call(text=" Z ")]
    ),
    Case(GLM, "text in the call", f"{OPEN}find\n{G}so{CLOSE}", [], 1),
    Case(GLM, "JSON instead", f"{OPEN}{J}{CLOSE}", [], 1),
    Case(GLM, "nothing in the tags", OPEN + CLOSE, [], 1),
    Case(LIST, "one call without a list", f"[TOOL_CALLS]{J}", [X]),
    Case(LIST, "a space behind the mark", f"[TOOL_CALLS] [{J}]", [X]),
    Case(
        LIST,
        "arguments as a string",
        '[TOOL_CALLS][{"name": "find", "arguments": "{\\"text\\": \\"Z\\"}"}]',
        [X],
    ),
    Case(LIST, "a cut list", f"[TOOL_CALLS][{J}", [], 1),
    Case(LIST, "cut arguments", f"[TOOL_CALLS][{J[:-4]}", [], 1),
    Case(LIST, "no arguments at all", '[TOOL_CALLS][{"name": "stop"}]', [STOP]),
    Case(LIST, "no arguments and an id", '[TOOL_CALLS][{"name": "stop", "id": "abc123DEF"}]', [STOP]),
    Case(LIST, "arguments that are null", '[TOOL_CALLS][{"name": "stop", "arguments": null}]', [STOP]),
    Case(LIST, "arguments by the other name", f"[TOOL_CALLS][{P}]", [], 1),
    Case(LIST, "arguments by both names", f'[TOOL_CALLS][{J[:-1]}, "parameters": {{}}}}]', [X]),
    Case(LIST, "no name", '[TOOL_CALLS][{"arguments": {"text": "Z"}}]', [], 1),
    Case(LIST, "arguments that are no object", '[TOOL_CALLS][{"name": "find", "arguments": [1]}]', [], 1),
    Case(LIST, "one of two is no call", f'[TOOL_CALLS][{J}, {{"text": "Z"}}]', [], 1),
    Case(LIST, "an empty list", "[TOOL_CALLS][]", [], 1),
    Case(
        LIST,
        "its mark in a string",
        f"[TOOL_CALLS][{J.replace('Z', '[TOOL_CALLS]')}]",
        [call(text="[TOOL_CALLS]")],
    ),
    Case(ARGS, "cut arguments", '[TOOL_CALLS]find[ARGS]{"text": "x', [], 1),
    Case(ARGS, "cut in the name", "[TOOL_CALLS]fin", [], 1),
    Case(ARGS, "no arguments", "[TOOL_CALLS]stop[ARGS]", [], 1),
    Case(ARGS, "arguments that are no object", "[TOOL_CALLS]find[ARGS][1]", [], 1),
    Case(ARGS, "no JSON", "[TOOL_CALLS]find[ARGS]{Z}", [], 1),
    Case(ARGS, "a key twice", '[TOOL_CALLS]find[ARGS]{"text": "Z", "text": "y"}', [call(text="y")]),
    Case(ARGS, "a string where a number is wanted", '[TOOL_CALLS]find[ARGS]{"num": "7"}', [call(num="7")]),
    Case(ARGS, "an id of the call", '[TOOL_CALLS]find[CALL_ID]abc123DEF[ARGS]{"text": "Z"}', [X]),
    Case(
        ARGS,
        "its mark in a string",
        '[TOOL_CALLS]find[ARGS]{"text": "[TOOL_CALLS]"}',
        [call(text="[TOOL_CALLS]")],
    ),
    Case(
        ARGS,
        "a cut call before another",
        '[TOOL_CALLS]find[ARGS]{"text[TOOL_CALLS]find[ARGS]{"text": "Z"}',
        [X],
        1,
    ),
]
CASES = [case for form in FORMS for case in of_all(form)] + OWN_CASES

RM = [("rm", {"text": "x"})]
UNKNOWN = "an agent could not run it, and it could be no call of any tool"
AS_WRITTEN = "an argument that was written would be missing, or another one be there"
CUT = "what follows is not known: an argument may be missing"
NO_OBJECT = "arguments are an object in every API"
WHOLE = "what was a call stays one, whatever follows"
NO_JSON = "no client could read the arguments"
ROUNDED = [("find", {"ratio": 12345678901234567741440})]
FLOAT = "a float rounds a long integer"
DIFFERENT: dict[tuple[str, str], tuple[list[tuple[str, Any]], str]] = {
    **{(form, "an unknown tool"): (RM, UNKNOWN) for form in FORMS if form != GLM},
    **{(form, "a long number"): (ROUNDED, FLOAT) for form in (QWEN, GLM, ARGS, "mistral_named")},
    (HERMES, "a cut closing tag"): ([], "the arguments are whole; vLLM reads it where it streams"),
    (HERMES, "a whole call and a cut one"): ([], WHOLE),
    (HERMES, "arguments that are null"): ([("stop", None)], NO_OBJECT),
    (HERMES, "arguments that are no object"): ([("find", [1])], NO_OBJECT),
    (HERMES, "arguments as a string"): ([("find", "{}")], NO_OBJECT),
    (HERMES, "a number that is none"): ([("find", {"text": float("nan")})], "JSON has no such number"),
    (HERMES, "half a character"): ([("find", {"text": "\ud83d"})], "no UTF-8 text holds it"),
    (LLAMA, "text before"): (
        [("find", {"text": "Z"})],
        "text where vLLM streams; a call is the whole answer",
    ),
    (LLAMA, "text before an unknown tool"): ([("rm", {"text": "Z"})], UNKNOWN),
    (LLAMA, "a whole call and a cut one"): ([], WHOLE),
    (LLAMA, "arguments that are null"): ([("stop", None)], NO_OBJECT),
    (LLAMA, "arguments that are no object"): ([("find", [1])], NO_OBJECT),
    (QWEN, "cut behind an argument"): ([("find", {"text": "Z"})], CUT),
    (QWEN, "cut in an argument"): ([("find", {})], AS_WRITTEN),
    (QWEN, "no end of the function"): ([("find", {"text": "Z"})], CUT),
    (QWEN, "no end of the last argument"): ([("find", {})], AS_WRITTEN),
    (QWEN, "its tag in an argument"): ([("find", {"text": "a"})], AS_WRITTEN),
    (QWEN, "the closing tag in an argument"): (
        [("find", {"text": CLOSE})],
        "models of the family mean the tag",
    ),
    (QWEN, "text in the call"): ([("find", {"text": "Z"})], AS_WRITTEN),
    (GLM, "cut in a value"): ([("find", {})], AS_WRITTEN),
    (GLM, "cut behind a value"): ([("find", {"text": "Z"})], CUT),
    (GLM, "no end of a value"): ([("find", {})], AS_WRITTEN),
    (GLM, "a key without a value"): ([("find", {})], AS_WRITTEN),
    (GLM, "the closing tag in a value"): ([("find", {})], AS_WRITTEN),
    (GLM, "text in the call"): ([("find", {"text": "Z"})], AS_WRITTEN),
    (LIST, "arguments that are no object"): ([("find", [1])], NO_OBJECT),
    (LIST, "arguments by the other name"): ([("find", {})], AS_WRITTEN),
    (LIST, "no name"): ([("", {"text": "Z"})], UNKNOWN),
    (LIST, "one of two is no call"): ([("find", {"text": "Z"})], "the other one would be lost in silence"),
    (LIST, "its mark in a string"): ([], "the JSON is whole"),
    (ARGS, "cut arguments"): ([("find", '{"text": "x')], NO_JSON),
    (ARGS, "cut in the name"): ([("fin", {})], CUT),
    (ARGS, "no arguments"): ([("stop", {})], CUT),
    (ARGS, "arguments that are no object"): ([("find", [1])], NO_OBJECT),
    (ARGS, "no JSON"): ([("find", "{Z}")], NO_JSON),
    (ARGS, "a string where a number is wanted"): ([("find", {"num": 7})], AS_WRITTEN),
    (ARGS, "an id of the call"): (
        [("find[CALL_ID]abc123DEF", {"text": "Z"})],
        "the id is no part of the name",
    ),
    (ARGS, "its mark in a string"): ([("find", '{"text": "'), ('"}', {})], "the JSON is whole"),
    (ARGS, "a cut call before another"): ([("find", '{"text'), ("find", {"text": "Z"})], NO_JSON),
}
"""What vLLM reads in cases in which it differs, and why we do not follow."""
