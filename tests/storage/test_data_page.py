"""The tables of docs/data.md name every column. That its code runs is shown in tests/e2e/test_data.py."""

import re
from pathlib import Path

import pyarrow as pa

from storage.batches import BATCH_SCHEMA
from storage.parquet import SCHEMA_VERSION
from storage.schema import SCHEMA, TURN

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def documented(section: str, header: str) -> dict[str, str]:
    """Name -> type of the rows of one table."""
    _, text = PAGE.split(f"\n## {section}\n")
    _, table = text.split(f"| {header} | type | meaning |\n|---|---|---|\n", 1)
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .+ \|$", table.split("\n\n")[0], re.MULTILINE)
    return {
        name: kind
        for names, kinds in rows
        for name, kind in zip(re.findall(r"`(\w+)`", names), [kinds] * 9, strict=False)
    }


def types(schema: pa.Schema) -> dict[str, str]:
    shown = {field.name: str(field.type) for field in schema}
    return {
        name: "list<struct>" if name == "turns" else re.sub(r"<(element|item): ", "<", kind)
        for name, kind in shown.items()
    }


def test_every_column_is_documented_with_its_type_in_its_place() -> None:
    columns = documented("Trajectories", "column")
    assert columns.pop("iteration") == "partition, int"
    assert list(columns.items()) == list(types(SCHEMA).items())


def test_every_column_a_batch_adds_is_documented() -> None:
    added = pa.schema([field for field in BATCH_SCHEMA if field.name not in SCHEMA.names])
    assert documented("Batches", "column") == types(added)


def test_every_field_of_a_turn_is_documented() -> None:
    assert list(documented("Trajectories", "field of a turn")) == [field.name for field in TURN]


def test_the_schema_version_is_documented() -> None:
    assert f"key `seamlessflow.schema`; it is {SCHEMA_VERSION}." in PAGE
