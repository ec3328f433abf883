"""Cost of the weights' path from a trainer to the engines, with the code of a real run: bytes, seconds and
bytes per second of every step, in float32, for built-in policies of ten and a hundred million parameters.
Prints one JSON line.

    python -m benchmarks.weight_path

write: rank 0 copies, serialises, hashes and writes its weights and commits the manifest. checkpoint: the
same for weights and Adam's moments, awaited, though in a run the next step goes on beside it. verify: the
file is read again and hashed. load: an engine
that runs takes it over. loan: a device that is lent makes its engine from the start folder, which then takes
it over. Each is the best of the repeats, as the machine may be busy; files are read from the page cache, so a
slower storage takes longer.
`cpu_bytes_per_second` counts the process's CPU seconds alone, as if storage cost nothing.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers.utils import logging

from benchmarks.weights import batch
from sf_core.config import PolicyConfig, RunConfig, TrainConfig
from sf_core.engines.registry import make_engine
from sf_core.models.builtin import make_policy
from sf_core.testing.driven_engine import DrivenEngine
from sf_core.testing.engines import awake
from sf_core.training.torch.ranks import SingleRank
from sf_core.training.torch.torch_model import TorchModel
from sf_core.training.torch.trainer import ModelTrainer
from sf_core.types import WeightsRef
from storage.manifests import Manifest
from storage.run_directory import RunDirectory

POLICIES = {
    "10m": PolicyConfig(hidden_size=256, num_layers=10),
    "100m": PolicyConfig(hidden_size=768, num_layers=12),
}
SLOTS = 8
CONTEXT = 512


def main(
    size: Annotated[list[str] | None, typer.Option(help="10m, 100m; both by default")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Of torch.")] = 1,
    folder: Annotated[str | None, typer.Option(help="On the storage to be measured.")] = None,
) -> None:
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    line: dict[str, Any] = {"benchmark": "weight_path", "repeats": repeats, "threads": threads}
    for name in size or POLICIES:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            line[name] = measure(Path(temporary), POLICIES[name], repeats)
    print(json.dumps(line))


def measure(folder: Path, policy: PolicyConfig, repeats: int) -> dict[str, Any]:
    start = str(folder / "start")
    make_policy(start, policy, seed=0)
    model = TorchModel(start, SingleRank())
    trainer = ModelTrainer(lambda _: model, TrainConfig(), seed=0)
    trainer.step(batch(seed=0))  # makes Adam's moments, which the checkpoint holds
    run = RunDirectory(str(folder / "run"))
    attempt = run.begin_attempt()
    engine = _engine(start)
    awake(engine, WeightsRef(0, start))
    seconds: dict[str, list[tuple[float, float]]] = {}

    def timed(step: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        cpu_began = time.process_time()
        result = work()
        taken = time.perf_counter() - began, time.process_time() - cpu_began
        seconds.setdefault(step, []).append(taken)
        return result

    def write(version: int) -> Manifest:
        weights = trainer.save_weights(run.weights_dir(version), run.weights_dir(version - 1))
        return run.commit_manifest(
            Manifest(
                run_id=run.run_id,
                iteration=version,
                stage="train",
                attempt=attempt,
                outputs=weights,
                data={"started_at": 0.0, "finished_at": 0.0, "version": version, "device": "cpu"},
            )
        )

    def checkpoint(version: int) -> None:
        trainer.save_checkpoint(run.checkpoint_dir(version))
        trainer.await_checkpoint()

    def load(engine: DrivenEngine, version: int) -> None:
        awake(engine, WeightsRef(version, run.weights_dir(version)))

    def lend(version: int) -> None:
        lent = _engine(start)
        awake(lent, WeightsRef(0, start))
        load(lent, version)
        lent.close()

    for version in range(1, repeats + 1):
        manifest = timed("write", lambda: write(version))  # noqa: B023
        timed("checkpoint", lambda: checkpoint(version))  # noqa: B023
        timed("verify", lambda: run.verify(manifest))  # noqa: B023
        timed("load", lambda: load(engine, version))  # noqa: B023
        timed("loan", lambda: lend(version))  # noqa: B023
    sizes = dict.fromkeys(seconds, manifest.outputs[0].bytes)
    sizes["checkpoint"] = sum(file.stat().st_size for file in Path(run.checkpoint_dir(1)).iterdir())
    return {"parameters": sum(p.numel() for p in model.network.model.parameters())} | {
        step: figures(sizes[step], *map(min, zip(*taken, strict=True))) for step, taken in seconds.items()
    }


def figures(num_bytes: int, seconds: float, cpu_seconds: float) -> dict[str, float]:
    return {
        "bytes": num_bytes,
        "seconds": round(seconds, 4),
        "bytes_per_second": round(num_bytes / seconds),
        "cpu_bytes_per_second": round(num_bytes / cpu_seconds),
    }


def _engine(start: str) -> DrivenEngine:
    settings = {"max_running": SLOTS, "context_length": CONTEXT}
    return DrivenEngine(make_engine(RunConfig.model_validate({"engine": settings}), start))


if __name__ == "__main__":
    typer.run(main)
