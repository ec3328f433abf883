"""The filter stage: decides which sealed trajectories train, and turns them into a batch with advantages."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sf_core.config.rollout_config import LOST_IMAGE
from sf_core.engines.vllm.teacher import ask_teacher
from sf_core.recipes.samples import Samples, Values
from sf_core.recipes.selections import AnySelection
from sf_core.recipes.tables import samples_of
from sf_core.recipes.weights import weigh
from sf_core.stages.run import OpenRun, StageResult, commits_once
from sf_core.training.teacher_folder import count_rows, read_tokenizer
from storage.files import FileRef
from storage.media import read_image
from storage.tables.batches import TRAIN, write_batch
from storage.tables.parquet import numpy_rows
from storage.tables.scores import write_scores
from storage.tables.trajectories import images_of, read_trajectories

log = logging.getLogger(__name__)

NUM_READERS = 16
"""Images that are read at once."""


@commits_once
def filter(run: OpenRun, iteration: int) -> StageResult:
    """Write the batch: the advantage and the weight of every token, unless the train step must make them.
    Raises ValueError if nothing of what was sampled trains, which no iteration would change."""
    source = run.directory.read_committed(iteration, "rollout")
    files = source.files("trajectories")
    rows = pa.concat_tables(read_trajectories(run.directory.path(ref.uri)) for ref in files)
    settings = run.config.train
    sampled = samples_of(rows, iteration)
    lost = find_lost(run.directory.media_dir, rows)
    for session, fault in lost.items():
        log.warning("session %s is not trained on: %s", session, fault)
    decisions = [
        LOST_IMAGE if session in lost else decision
        for session, decision in zip(
            rows["session_id"].to_pylist(), decide(sampled, settings.select), strict=True
        )
    ]
    trains = np.equal(decisions, TRAIN)
    if lost and not trains.any():
        raise ValueError(
            f"no session of iteration {iteration} can be trained on: {next(iter(lost.values()))}"
        )
    trained_rows = rows.filter(pa.array(trains))
    has_sampled = trained_rows["min_version"].null_count < len(trained_rows)
    if has_sampled and pc.any(pc.list_flatten(trained_rows["loss_mask"])).as_py() is False:
        raise ValueError(
            f"no token of iteration {iteration} can be trained on, because every answer followed a schema. "
            "Let the agent ask without a schema, or add the field (response_format, ...) to "
            "rollout.ignored_fields"
        )
    advantages = weights = None
    figures = {}
    if not settings.needs:
        # made of what trains alone, so that what does not has no part in any mean or deviation
        samples = sampled if trains.all() else samples_of(trained_rows, iteration)
        made = weigh(samples, settings.advantage, settings.weights)
        if settings.teacher is None:
            teaching = [bool(np.any(row)) for row in made[0]]
            of_sessions = np.bincount(samples.sessions, weights=teaching) > 0
            figures["zero_advantage_share"] = float(np.mean(~of_sessions))
        advantages, weights = (_in_places(values, trains, sampled) for values in made)
    batch = write_batch(
        run.directory,
        iteration,
        rows,
        advantages=advantages,
        weights=weights,
        decisions=decisions,
        part=f"batch-{run.ref.attempt}",
    )
    return StageResult(
        inputs={ref.uri: ref.sha256 for ref in files},
        outputs=[batch, *ask_server(run, iteration, rows, trains)],
        data={
            "rows": len(rows),
            "reward_mean": float(sampled.rewards.mean()),
            **figures,
            **({"lost_pictures": lost} if lost else {}),
            "lags": lag_histogram(trained_rows, iteration),
        },
    )


def ask_server(run: OpenRun, iteration: int, rows: pa.Table, trains: npt.NDArray[np.bool_]) -> list[FileRef]:
    """What a teacher at a URL says of the tokens that train, as files; none without one. Raises ValueError,
    which names the row, if the teacher does not know one of its ids, refuses it, or says of it what is no
    finite number."""
    teacher = run.config.train.teacher
    if teacher is None or teacher.url is None or teacher.tokenizer is None:
        return []
    masks = numpy_rows(rows["loss_mask"])
    ids = numpy_rows(rows["token_ids"])
    branches = rows["branch_id"].to_pylist()
    sessions = rows["session_id"].to_pylist()
    vocab_size = count_rows(teacher.tokenizer)
    vocab_size = vocab_size or read_tokenizer(teacher.tokenizer, "train.teacher.tokenizer").get_vocab_size()
    questions: dict[int, tuple[str, list[int]]] = {}
    for row in np.flatnonzero(trains).tolist():
        trained = np.flatnonzero(masks[row])
        if not trained.size:
            continue
        name = f"row {branches[row]} of session {sessions[row]}"
        read = ids[row][: trained[-1] + 1]
        most = read.max()
        if most >= vocab_size:
            raise ValueError(
                f"token id {most} in {name} is outside the vocabulary of the teacher at {teacher.url}, "
                f"which has {vocab_size:,} tokens (train.teacher.tokenizer {teacher.tokenizer})"
            )
        questions[row] = name, read.tolist()
    scores = [np.zeros(len(mask), np.float32) for mask in masks]
    answers = ask_teacher(teacher.url, [*questions.values()], teacher.timeout_s)
    for row, logprobs in zip(questions, answers, strict=True):
        scores[row][: len(logprobs)] = np.where(masks[row][: len(logprobs)], logprobs, 0.0)
    return [write_scores(run.directory, iteration, rows, scores, f"scores-{run.ref.attempt}")]


def find_lost(media: str, rows: pa.Table) -> dict[str, str]:
    """Sessions that cannot train because the folder of images lacks one of theirs, and why."""
    of_rows = images_of(rows)
    images = {image.sha256 for images in of_rows for image in images}

    def find_fault(sha256: str) -> str:
        try:
            read_image(media, sha256)
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(NUM_READERS) as readers:
        faults = dict(zip(images, readers.map(find_fault, images), strict=True))
    return {
        session: faults[image.sha256]
        for session, images in zip(rows["session_id"].to_pylist(), of_rows, strict=True)
        for image in images
        if faults[image.sha256]
    }


def decide(sampled: Samples, select: AnySelection | None) -> list[str]:
    """For each row TRAIN, or why its session does not train."""
    if select is None:
        return [TRAIN] * len(sampled.sessions)
    return [TRAIN if trains else select.reason for trains in select(sampled)[sampled.sessions]]


def _in_places(values: Values, trains: npt.NDArray[np.bool_], sampled: Samples) -> Values:
    """The values of the rows that train at their places among all rows; 0 at the others."""
    of_kept = iter(values)
    rows = zip(trains, sampled.masks, strict=True)
    return [next(of_kept) if does else np.zeros(len(mask), np.float32) for does, mask in rows]


def lag_histogram(rows: pa.Table, iteration: int) -> list[int]:
    """Number of trained tokens with lag 0, 1, ...; `rows` are trajectories."""
    mask = pc.list_flatten(rows["loss_mask"])
    versions = pc.list_flatten(rows["policy_versions"]).filter(mask).to_numpy()
    return [int(number) for number in np.bincount(iteration - versions)]
