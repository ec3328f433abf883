"""JSON schemas of what each dialect accepts, for the OpenAPI document.

Fields that are not named here are ignored. Unsupported fields are named with the values that change nothing
(sf_core/config/undone.py).
"""

from __future__ import annotations

from typing import Any

from sf_core.config.undone import UNDONE
from sf_core.dataplane.gateway.dialects.protocol import MAX_TURNS

Schema = dict[str, Any]


def _or_null(schema: Schema) -> Schema:
    """The schema or null, which means the same as an absent field."""
    return {"anyOf": [schema, {"type": "null"}]}


def fields(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _optional(**properties: Schema) -> dict[str, Schema]:
    return {name: _or_null(schema) for name, schema in properties.items()}


def _text(*types: str) -> Schema:
    part = fields(("type", "text"), type={"enum": list(types)}, text=STRING)
    return {"anyOf": [STRING, {"type": "array", "items": part}, {"type": "null"}]}


STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}
INT64: Schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
POSITIVE: Schema = {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}
SAMPLES: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_TURNS}
SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
STOP: Schema = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}},
    ]
}
FUNCTION = fields(("name",), name=STRING, description=STRING, parameters=ANY_OBJECT)
NAMED_TOOL = fields(("type", "function"), type={"const": "function"}, function=fields(("name",), name=STRING))
TOOL_WORDS: Schema = {"enum": ["auto", "none", "required"]}

_UNDONE: dict[str, Schema] = {name: {"enum": [*neutral, None]} for name, neutral in UNDONE.items()}
_SAMPLING = _UNDONE | _optional(
    temperature={"type": "number", "minimum": 0, "maximum": 2},
    top_p=SHARE,
    top_k={"type": "integer", "minimum": -1, "maximum": 2**63 - 1},
    stream=BOOLEAN,
)
_OPENAI = _SAMPLING | _optional(seed=INT64, stop=STOP, n=SAMPLES, stream_options=ANY_OBJECT)

CHAT = fields(
    ("model", "messages"),
    model=STRING,
    messages={
        "type": "array",
        "minItems": 1,
        "items": fields(
            ("role",),
            role={"enum": ["system", "developer", "user", "assistant", "tool"]},
            content=_text("text"),
            tool_calls={
                "type": "array",
                "items": fields(
                    ("id", "function"), id=STRING, function=fields(("name",), name=STRING, arguments=STRING)
                ),
            },
            tool_call_id=STRING,
        ),
    },
    **_OPENAI,
    **_optional(
        max_tokens=POSITIVE,
        max_completion_tokens=POSITIVE,
        logprobs=BOOLEAN,
        tools={
            "type": "array",
            "items": fields(("type", "function"), type={"const": "function"}, function=FUNCTION),
        },
        tool_choice={"anyOf": [TOOL_WORDS, NAMED_TOOL]},
        parallel_tool_calls=BOOLEAN,
    ),
)

_IDS: Schema = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT: Schema = {"type": "string", "minLength": 1}

COMPLETIONS = fields(
    ("model", "prompt"),
    model=STRING,
    prompt={
        "anyOf": [
            _PROMPT,
            _IDS,
            *({"type": "array", "minItems": 1, "items": one} for one in (_PROMPT, _IDS)),
        ]
    },
    **_OPENAI,
    **_optional(
        max_tokens=POSITIVE,
        best_of=SAMPLES,
        logprobs={"const": 0},
    ),
)

RESPONSES = fields(
    ("model", "input"),
    model=STRING,
    input={
        "anyOf": [
            STRING,
            {
                "type": "array",
                "minItems": 1,
                "items": {
                    "anyOf": [
                        fields(
                            ("role",),
                            type={"const": "message"},
                            role={"enum": ["system", "developer", "user", "assistant"]},
                            content=_text("input_text", "output_text", "text"),
                        ),
                        fields(
                            ("type", "name", "call_id"),
                            type={"const": "function_call"},
                            name=STRING,
                            call_id=STRING,
                            arguments=STRING,
                        ),
                        fields(
                            ("type", "call_id"),
                            type={"const": "function_call_output"},
                            call_id=STRING,
                            output=_text("input_text", "output_text", "text"),
                        ),
                        fields(("type",), type={"const": "reasoning"}),
                    ]
                },
            },
        ]
    },
    **_SAMPLING,
    **_optional(
        instructions=STRING,
        max_output_tokens=POSITIVE,
        previous_response_id=STRING,
        include={"type": "array", "items": STRING},
        store=BOOLEAN,
        tools={
            "type": "array",
            "items": {**FUNCTION, "required": ["type", "name"]}
            | {"properties": FUNCTION["properties"] | {"type": {"const": "function"}}},
        },
        tool_choice={
            "anyOf": [TOOL_WORDS, fields(("type", "name"), type={"const": "function"}, name=STRING)]
        },
        parallel_tool_calls=BOOLEAN,
        text=ANY_OBJECT,
    ),
)

_USER_BLOCKS = [
    fields(("type", "text"), type={"const": "text"}, text=STRING),
    fields(("type", "tool_use_id"), type={"const": "tool_result"}, tool_use_id=STRING, content=_text("text")),
]
_ASSISTANT_BLOCKS = [
    fields(("type", "text"), type={"const": "text"}, text=STRING),
    fields(("type", "id", "name"), type={"const": "tool_use"}, id=STRING, name=STRING, input=ANY_OBJECT),
    fields(("type",), type={"enum": ["thinking", "redacted_thinking"]}),
]

MESSAGES = fields(
    ("model", "messages", "max_tokens"),
    model=STRING,
    max_tokens=POSITIVE,
    messages={
        "type": "array",
        "minItems": 1,
        "items": {
            "anyOf": [
                fields(
                    ("role", "content"),
                    role={"const": role},
                    content={
                        "anyOf": [STRING, {"type": "array", "minItems": least, "items": {"anyOf": blocks}}]
                    },
                )
                for role, least, blocks in (("user", 1, _USER_BLOCKS), ("assistant", 0, _ASSISTANT_BLOCKS))
            ]
        },
    },
    **_UNDONE,
    **_optional(
        system=_text("text"),
        temperature=SHARE,
        top_p=SHARE,
        top_k=POSITIVE,
        stream=BOOLEAN,
        stop_sequences=STOP,
        tools={
            "type": "array",
            "items": fields(
                ("name",), name=STRING, description=STRING, type={"const": "custom"}, input_schema=ANY_OBJECT
            ),
        },
        tool_choice={
            "anyOf": [
                fields(("type",), type={"enum": ["auto", "none", "any"]}, disable_parallel_tool_use=BOOLEAN),
                fields(("type", "name"), type={"const": "tool"}, name=STRING),
            ]
        },
    ),
)

TOKEN_COUNT = MESSAGES | {"required": ["model", "messages"]}
