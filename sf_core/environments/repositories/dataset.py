"""Instances of a data set in the format of SWE-bench."""

from __future__ import annotations

import io
import re
from typing import Annotated, Any

import orjson
import pyarrow.parquet as pq
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from storage.files import read_bytes
from storage.json_files import load_json

_PATHS = re.compile(r"^(?:--- a|\+\+\+ b)/([^\t\n]+)", re.MULTILINE)


def _as_list(value: Any) -> Any:
    # JSON text in the public data set
    return load_json(value) if isinstance(value, str) else value


Tests = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[^:]+\.py::.+")], ...],
    BeforeValidator(_as_list),
]
"""Ids as pytest gives them, such as tests/test_a.py::test_b[1]."""


class Instance(BaseModel):
    """A row; further columns are ignored."""

    model_config = ConfigDict(frozen=True)

    instance_id: str = Field(min_length=1)
    repo: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    base_commit: str = Field(pattern=r"^[0-9a-f]{7,64}$")
    problem_statement: str
    patch: str
    test_patch: str
    fail_to_pass: Tests = Field(alias="FAIL_TO_PASS", min_length=1)
    pass_to_pass: Tests = Field(alias="PASS_TO_PASS")

    @property
    def tests(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.fail_to_pass + self.pass_to_pass))

    @property
    def test_files(self) -> list[str]:
        return sorted({test.partition("::")[0] for test in self.tests})


def paths_in(patch: str) -> set[str]:
    return set(_PATHS.findall(patch))


def read_instances(uri: str) -> list[Instance]:
    """All instances of a file of JSON lines or, by its name, Parquet. Raises ValueError with one sentence."""
    instances: dict[str, Instance] = {}
    for number, row in enumerate(_rows(uri), start=1):
        try:
            instance = Instance.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{uri}, row {number}: {where}: {first['msg']}") from None
        if instance.instance_id in instances:
            raise ValueError(
                f"{uri}, row {number}: another row already has the instance_id {instance.instance_id}"
            )
        instances[instance.instance_id] = instance
    if not instances:
        raise ValueError(f"{uri} has no instances")
    return list(instances.values())


def _rows(uri: str) -> list[Any]:
    try:
        content = read_bytes(uri)
        if uri.endswith(".parquet"):
            return pq.read_table(io.BytesIO(content)).to_pylist()
        return [orjson.loads(line) for line in content.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{uri} cannot be read: {error}") from None
