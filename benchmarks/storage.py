"""Trajectories as this project stores them against JSONL with the same content. Prints one JSON line.

    python -m benchmarks.storage [--rows 4000]

The baselines are orjson, the fastest JSON library for Python, one line per row, as it is and through zstd.
A row is one session of TURNS turns and TOKENS tokens, of which every other turn is sampled; words are as
frequent as in a language (Zipf), one token each.

bytes_per_token, rows_per_s written and read (all columns) and rewards_ms, the time to get the rewards of
one iteration, are per format. bytes_ratio: Parquet over JSONL. read_speed_ratio: rewards of an iteration,
the faster JSONL over Parquet. peak_mb: memory that a process of its own needs to write such an iteration
and to read it piece by piece, above what it needed before, for `rows` rows and for four times as many.
dictionary_ratio: bytes of the file over bytes without any dictionary, and with one in every column.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from storage.run_directory import RunDirectory
from storage.tables.schema import Trajectory, TurnSpan
from storage.tables.trajectories import iter_trajectories, read_trajectories, to_rows, write_trajectories

TOKENS = 1000
TURNS = 10
VOCABULARY = 32_000
GROUP = 8
PIECE = 64
"""Number of rows held at once when memory is measured."""
REPEATS = 5


def sessions(rows: int) -> Iterator[Trajectory]:
    random = np.random.default_rng(0)
    frequency = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
    words = np.array([_word(random, rank) for rank in range(VOCABULARY)])
    length = TOKENS // TURNS
    sampled = np.arange(TOKENS) // length % 2 == 1
    turns = [
        TurnSpan("assistant", start, start + length, "stop", "e-r0", 1.0, 1.0, 0)
        if sampled[start]
        else TurnSpan("user", start, start + length)
        for start in range(0, TOKENS, length)
    ]
    for row in range(rows):
        ids = np.searchsorted(frequency, random.random(TOKENS) * frequency[-1]).astype(np.int32)
        messages = [{"role": t.role, "content": " ".join(words[ids[t.start : t.end]])} for t in turns]
        reward = float(random.random() < 0.5)
        yield Trajectory(
            policy="policy",
            task_id=f"task/{row // GROUP}",
            environment="calculator",
            group_id=f"g-{row // GROUP:06d}",
            session_id=f"s-{random.bytes(8).hex()}",
            branch_id="0",
            parent_branch_id=None,
            shared_prefix=0,
            token_ids=ids,
            loss_mask=sampled,
            logprobs=np.where(sampled, -random.exponential(0.7, TOKENS), np.nan).astype(np.float32),
            policy_versions=np.where(sampled, 3, -1).astype(np.int32),
            turns=turns,
            messages=json.dumps(messages),
            reward=reward,
            reward_parts={"answer": reward},
            status="finished",
            interruptions=0,
            started_at=1.7e9 + row,
            finished_at=1.7e9 + row + random.random(),
        )


def _word(random: np.random.Generator, rank: int) -> str:
    return "".join(random.choice(list("etaoinshrdlcu"), 1 + int(np.log2(rank + 2)) // 2))


@dataclass(frozen=True)
class Format:
    write: Callable[[str, Iterable[Trajectory]], str]
    """(folder, rows) -> file of one iteration."""
    rewards: Callable[[str], list[Any]]
    rows: Callable[[str], int]
    """Reads every column of all rows into Python objects; returns the number of rows."""


def _write_parquet(folder: str, rows: Iterable[Trajectory]) -> str:
    run = RunDirectory(f"{folder}/run")
    return run.path(write_trajectories(run, 0, rows, "part").uri)


def _parquet_rewards(file: str) -> list[Any]:
    rewards: list[Any] = read_trajectories(file, ["reward"])["reward"].to_pylist()
    return rewards


def _write_lines(folder: str, rows: Iterable[Trajectory], compression: str | None) -> str:
    file = f"{folder}/rows-{compression}.jsonl"
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    with pa.output_stream(file, compression=compression, buffer_size=2**20) as stream:
        for row in rows:
            stream.write(orjson.dumps(row, TurnSpan._asdict, options))
    return file


def _lines(file: str, compression: str | None) -> Iterator[Any]:
    with pa.input_stream(file, compression=compression) as stream:
        yield from map(orjson.loads, io.BufferedReader(stream, 2**20))


def _jsonl(compression: str | None) -> Format:
    return Format(
        partial(_write_lines, compression=compression),
        lambda file: [row["reward"] for row in _lines(file, compression)],
        lambda file: len(list(_lines(file, compression))),
    )


FORMATS = {
    "parquet": Format(_write_parquet, _parquet_rewards, lambda file: len(to_rows(read_trajectories(file)))),
    "jsonl": _jsonl(None),
    "jsonl_zstd": _jsonl("zstd"),
}


def compare(rows: int) -> dict[str, Any]:
    """Bytes and seconds of every format, for the same rows."""
    content = list(sessions(rows))
    result: dict[str, Any] = {
        name: {} for name in ("bytes_per_token", "rows_per_s_written", "rows_per_s_read", "rewards_ms")
    }
    rewards = [row.reward for row in content]
    with tempfile.TemporaryDirectory() as folder:
        for name, kind in FORMATS.items():
            written, file = _seconds(partial(kind.write, folder, content))
            read, count = _seconds(partial(kind.rows, file))
            looked, found = _seconds(partial(kind.rewards, file))
            if (count, found) != (rows, rewards):
                raise ValueError(f"{name}: what was read is not what was written")
            result["bytes_per_token"][name] = round(Path(file).stat().st_size / (rows * TOKENS), 3)
            result["rows_per_s_written"][name] = round(rows / written)
            result["rows_per_s_read"][name] = round(rows / read)
            result["rewards_ms"][name] = round(looked * 1e3, 2)
            if name == "parquet":
                result["dictionary_ratio"] = dictionary_ratio(file)
    size = result["bytes_per_token"]
    looked = result["rewards_ms"]
    result["bytes_ratio"] = round(size["parquet"] / size["jsonl"], 3)
    result["bytes_ratio_zstd"] = round(size["parquet"] / size["jsonl_zstd"], 3)
    fastest = min(looked["jsonl"], looked["jsonl_zstd"])
    result["read_speed_ratio"] = round(fastest / looked["parquet"], 1)
    return result


def _seconds(act: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the best of REPEATS, and the result."""
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        answer = act()
        best = min(best, time.perf_counter() - started)
    return best, answer


def dictionary_ratio(file: str) -> dict[str, float]:
    table = pq.ParquetFile(file).read()
    size = Path(file).stat().st_size
    other: dict[str, float] = {}
    for name, use in (("none", False), ("all", True)):
        with tempfile.NamedTemporaryFile() as written:
            pq.write_table(table, written.name, compression="zstd", use_dictionary=use)
            other[name] = round(size / Path(written.name).stat().st_size, 3)
    return other


def peak_memory(rows: int) -> dict[str, float]:
    """MB that writing an iteration, and reading it in pieces, add to a process."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(RunDirectory(f"{folder}/run").partition("trajectories", 0)) + "/part.parquet"
        return {"write": _alone(_write_all, folder, rows), "read": _alone(_read_all, file, rows)}


def _alone(act: Callable[[str, int], None], *arguments: Any) -> float:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(_grown, act, *arguments).result(timeout=600)


def _grown(act: Callable[[str, int], None], place: str, rows: int) -> float:
    before = _resident_mb("VmRSS")
    # on Linux this resets VmHWM to the current size
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    act(place, rows)
    return round(_resident_mb("VmHWM") - before, 1)


def _write_all(folder: str, rows: int) -> None:
    _write_parquet(folder, sessions(rows))


def _read_all(file: str, rows: int) -> None:
    if sum(len(to_rows(pa.Table.from_batches([piece]))) for piece in iter_trajectories(file, PIECE)) != rows:
        raise ValueError(f"{file}: not all rows were read")


def _resident_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def main(rows: int) -> dict[str, Any]:
    result = {"rows": rows, "tokens": rows * TOKENS, **compare(rows)}
    sizes = (rows, 4 * rows)
    peaks = [peak_memory(size) for size in sizes]
    return result | {
        "peak_mb": {
            act: dict(zip(map(str, sizes), [peak[act] for peak in peaks], strict=True))
            for act in ("write", "read")
        }
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4000, help="of the smaller of the two sizes")
    print(json.dumps(main(parser.parse_args().rows)))
