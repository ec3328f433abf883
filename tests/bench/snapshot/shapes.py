"""The shape of what is stored or sent: names and order of fields as they are written, without names of
classes."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
from msgspec import inspect
from pydantic import BaseModel, SecretStr

Schema = dict[str, Any]


def shape(kind: Any) -> str:
    """How msgspec writes a value of this type. Fields of arrays have no names there, so none are shown."""
    return _shape(inspect.type_info(kind))


def _shape(info: inspect.Type) -> str:
    match info:
        case inspect.StructType(fields=fields, array_like=True, tag=tag):
            words = [repr(tag)] if tag is not None else []
            return f"[{', '.join([*words, *(_field(field) for field in fields)])}]"
        case inspect.StructType(fields=fields, tag=tag):
            words = [f"{info.tag_field}: {tag!r}"] if tag is not None else []
            return "{" + ", ".join([*words, *(f"{f.encode_name}: {_field(f)}" for f in fields)]) + "}"
        case inspect.NamedTupleType(fields=fields):
            return f"[{', '.join(_field(field) for field in fields)}]"
        case inspect.DataclassType(fields=fields) | inspect.TypedDictType(fields=fields):
            return "{" + ", ".join(f"{f.encode_name}: {_field(f)}" for f in fields) + "}"
        case inspect.UnionType(types=members):
            return " | ".join(sorted(map(_shape, members)))
        case (
            inspect.ListType(item_type=item)
            | inspect.VarTupleType(item_type=item)
            | inspect.SetType(item_type=item)
        ):
            return f"list[{_shape(item)}]"
        case inspect.TupleType(item_types=items):
            return f"[{', '.join(map(_shape, items))}]"
        case inspect.DictType(key_type=key, value_type=value):
            return f"dict[{_shape(key)}, {_shape(value)}]"
        case inspect.LiteralType(values=values):
            return f"one of {sorted(values, key=str)}"
        case inspect.Metadata(type=inner):
            return _shape(inner)
        case inspect.CustomType(cls=cls):
            return _custom(cls)
    return type(info).__name__.removesuffix("Type").lower()


def _field(field: inspect.Field) -> str:
    return _shape(field.type) + ("" if field.required else "?")


def _custom(cls: Any) -> str:
    origin = get_origin(cls) or cls
    if isinstance(origin, type) and issubclass(origin, np.ndarray):
        kinds = get_args(get_args(cls)[1]) if len(get_args(cls)) > 1 else ()
        return f"bytes of {np.dtype(kinds[0]).name}" if kinds else "bytes"
    if origin is SecretStr:
        return "str"
    if isinstance(origin, type) and issubclass(origin, BaseModel):
        return "settings"
    raise TypeError(f"{cls} has no shape here")


def field_lines(schema: Schema, definitions: Schema | None = None) -> list[str]:
    """Each field of a JSON Schema with its path, its type, and its default unless it is null."""
    return [*_lines(schema, definitions or schema.get("$defs", {}), "", ())]


def _lines(schema: Schema, definitions: Schema, path: str, above: tuple[str, ...]) -> Iterator[str]:
    if (reference := schema.get("$ref")) is not None:
        name = reference.rpartition("/")[2]
        if name not in above:
            yield from _lines(definitions[name] | _own(schema), definitions, path, (*above, name))
        return
    members = schema.get("anyOf") or schema.get("oneOf")
    if members is not None:
        for member in members:
            tag = member.get("$ref", "").rpartition("/")[2]
            inner = definitions.get(tag, member)
            names = inner.get("properties", {}).get("name", {})
            constant = names.get("const")
            yield from _lines(member, definitions, f"{path}[{constant}]" if constant else path, above)
        yield from _default(schema, path)
        return
    for key, inner in schema.get("properties", {}).items():
        yield from _lines(inner, definitions, f"{path}.{key}" if path else key, above)
    if isinstance(extra := schema.get("additionalProperties"), dict):
        yield from _lines(extra, definitions, f"{path}.*", above)
    if isinstance(items := schema.get("items"), dict):
        yield from _lines(items, definitions, f"{path}[]", above)
    if not schema.get("properties"):
        kind = schema.get("type") or ("const" if "const" in schema else "enum" if "enum" in schema else "any")
        allowed = [schema["const"]] if "const" in schema else schema.get("enum")
        yield f"{path}: {kind}" + (f" {allowed}" if allowed else "") + "".join(_default_of(schema))
    else:
        yield from _default(schema, path)


def _own(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key == "default"}


def _default(schema: Schema, path: str) -> Iterator[str]:
    for text in _default_of(schema):
        yield f"{path}{text}"


def _default_of(schema: Schema) -> Iterator[str]:
    if schema.get("default") is not None:
        yield f" = {msgspec.json.encode(schema['default'], order='sorted').decode()}"


def keys(value: Any, path: str = "") -> set[str]:
    """Paths of all keys of a JSON value; `[]` stands for the items of a list."""
    match value:
        case dict():
            own = {f"{path}.{key}" if path else str(key) for key in value}
            return own.union(*(keys(v, f"{path}.{k}" if path else str(k)) for k, v in value.items()))
        case list() | types.GeneratorType():
            return set().union(*(keys(item, f"{path}[]") for item in value))
    return set()
