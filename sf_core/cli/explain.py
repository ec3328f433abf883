"""The output of `sf plan`: what would run where, and why. Decides nothing itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sf_core.cli.duration import Estimate
from sf_core.config import RunConfig
from sf_core.models.images.processor_config import read_image_processor
from sf_core.models.pretrained.needed_weights import UnknownModelError
from sf_core.reports.tables import make_table
from sf_core.scheduling.cluster import describe_holders, find_workers, scheduler_of, workers_here
from sf_core.scheduling.plan import (
    COMPUTING,
    Plan,
    Worker,
    lends,
    list_able_to_train,
    make_plan,
    priority_of,
    trainer_order_key,
)
from sf_core.stages.preflight.checks import describe_lack_of_disk, list_warnings, preflight
from sf_core.stages.preflight.facts import SPLITS, Facts
from sf_core.stages.preflight.sizes import (
    PolicySizes,
    bytes_of_two_workers,
    disk_bytes,
    explain_sizes,
)
from sf_core.stages.preflight.start_folder import folder_to_start_from
from sf_core.training.policy_folder import count_parameters, describe_policy, policy_folder
from storage.tensors.weights import has_weights

CONCERN = "look at this"
"""Subject of what a user should look at before the run starts."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What would run where, and why, as `sf plan` shows it."""

    config: RunConfig
    workers: list[Worker]
    plan: Plan
    sizes: PolicySizes | None
    facts: list[tuple[str, str]]
    """Sentences with their subjects."""

    def as_table(self) -> RenderableType:
        details = make_table()
        details.show_header = False
        for subject, text in self.facts:
            details.add_row(subject, Text(text))
        return Group(_table(self.workers, self.plan, self.config), Text(), details)

    def as_data(self) -> dict[str, Any]:
        """The JSON document of `sf plan --json`."""
        plan = self.plan
        workers = sorted(self.workers, key=lambda worker: worker.name)
        return {
            "pipeline": self.config.pipeline or _name(plan, self.config.overlap),
            "lag_bound": self.config.lag_bound,
            "workers": [self._worker(worker) for worker in workers],
            "trainers": plan.trainers,
            "trainers_roll_out": plan.lent,
            "parameters": None if self.sizes is None else self.sizes.parameters,
            "bytes": None if self.sizes is None else self._bytes(self.sizes),
            "facts": {subject: text for subject, text in self.facts if subject != CONCERN},
            "concerns": [text for subject, text in self.facts if subject == CONCERN],
        }

    def _worker(self, worker: Worker) -> dict[str, Any]:
        return {
            "name": worker.name,
            "tags": sorted(worker.tags),
            "device": None if worker.device is None else asdict(worker.device),
            "train_priority": priority_of(worker, self.config),
            "duty": _duty(worker, self.workers, self.plan, self.config),
        }

    def _bytes(self, sizes: PolicySizes) -> dict[str, int]:
        return {
            "engine_weights": sizes.weights,
            "engine_cache": sizes.cache,
            "trainer": sizes.rank,
            "trainer_peak": sizes.peak(),
            "version": sizes.version,
            "checkpoint": sizes.checkpoint,
            "disk": disk_bytes(sizes),
        }


def explain_plan(config: RunConfig, *, scheduler: str | None = None) -> RunPlan:
    """The plan of a run on the workers of `scheduler`, else on those that the run would get.

    Raises ValueError, one sentence, if the run could not start or there is no such scheduler."""
    run_facts = Facts(config, splits=SPLITS)
    sizes = run_facts.sizes
    worker_bytes = bytes_of_two_workers(sizes)
    run_facts.workers = workers = find_workers(config, scheduler, worker_bytes)
    plan = make_plan(workers, config)
    preflight(run_facts)
    facts = [("pipeline", _pipeline(workers, plan, config)), ("lag bound", _lag(config))]
    folder = folder_to_start_from(config, by_a_worker=True) if config.policy.model else None
    if folder is not None:
        facts.append(("policy", describe_policy(folder)))
    if image_processor := read_image_processor(folder) if folder else None:
        facts.append(
            ("pictures", image_processor.with_max_tokens(config.rollout.max_picture_tokens).describe())
        )
    elif config.policy.sees:
        facts.append(("pictures", "the policy sees images"))
    if config.rollout.outside_groups:
        facts.append(("outside", _describe_external(plan, config)))
    facts += explain_sizes(config, sizes).items()
    if scheduler is None and (duration := Estimate(config, sizes).describe()):
        facts.append(("time", duration))
    facts += ((f"judge {name}", _judge(name, plan, config)) for name in config.environment.judges)
    lack = None if sizes is None else describe_lack_of_disk(config, sizes)
    facts += ((CONCERN, sentence) for sentence in (lack, *list_warnings(run_facts)) if sentence)
    able = list_able_to_train(workers, config)
    unknown = [worker.name for worker in able if worker.device is None]
    if unknown and len(able) > len(plan.trainers):
        hint = "set device_kind or use sf worker --probe to choose trainers by speed"
        facts.append(("unknown", f"the devices of {', '.join(unknown)}; {hint}"))
    address = scheduler or scheduler_of(config)
    if address is None:
        facts.append(("devices", _devices(config, worker_bytes)))
    if address and (holders := describe_holders(address, config.run_id)):
        facts.append(("held", f"{holders}; a run that starts now waits for them"))
    return RunPlan(config, workers, plan, sizes, facts)


def _devices(config: RunConfig, worker_bytes: int) -> str:
    """The device of each worker that computes, if the run starts them here."""
    computing = COMPUTING
    if config.environment.served_judges:
        computing = COMPUTING | {"reward"}
    devices = [
        f"{name} {worker.device}"
        for name, worker in workers_here(config, worker_bytes).items()
        if computing.intersection(worker.tags)
    ]
    return f"{', '.join(devices)}; all other workers use the CPU"


def _table(workers: list[Worker], plan: Plan, config: RunConfig) -> Table:
    table = make_table()
    some_device = any(worker.device is not None for worker in workers)
    for name in ("worker", "tags", *(("device", "train_priority") if some_device else ())):
        table.add_column(name, no_wrap=name == "train_priority")
    table.add_column("duty, and why", overflow="fold")
    for worker in sorted(workers, key=lambda w: w.name):
        cells = [worker.name, " ".join(sorted(worker.tags))]
        if some_device:
            cells += _figures(worker, config)
        cells.append(_duty(worker, workers, plan, config))
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _figures(worker: Worker, config: RunConfig) -> list[str]:
    device = worker.device
    priority = priority_of(worker, config)
    if device is None or priority is None:
        return ["unknown" if COMPUTING & worker.tags else "", ""]
    flops = device.peak_flops / 1e12
    bandwidth = device.bandwidth / 1e12
    return [f"{device.kind}: {flops:.3g} TFLOP/s, {bandwidth:.3g} TB/s", f"{priority:.2f}"]


def _duty(worker: Worker, workers: list[Worker], plan: Plan, config: RunConfig) -> str:
    """The duty of a worker in this plan, and the reason."""
    if worker.name in plan.trainers:
        lent = ", rolls out between steps" if plan.lent else ""
        return (
            f"trains as rank {plan.trainers.index(worker.name)}{lent}: {_why_trainer(workers, plan, config)}"
        )
    if worker.name in plan.rollout:
        return "rolls out: " + ("others train first" if "train" in worker.tags else "is not tagged train")
    if worker.name in plan.agent:
        return "runs agents"
    if worker.name in plan.reward:
        served = ", ".join(config.environment.served_judges)
        return "scores the answers of agents" + (f", and serves the judges {served}" if served else "")
    if "cpu" in worker.tags:
        return "filters, publishes, evaluates"
    if "train" in worker.tags:
        return "nothing: not chosen to train, and is not tagged rollout"
    return "nothing: no task of this run needs its tags"


def _why_trainer(workers: list[Worker], plan: Plan, config: RunConfig) -> str:
    able = list_able_to_train(workers, config)
    chosen = able[: len(plan.trainers)]
    left = able[len(plan.trainers) :]
    if not left:
        return "no other worker can train"
    reasons = ("tags of cluster.prefer", "higher train_priority", "is not tagged rollout", "first by name")
    last = trainer_order_key(chosen[-1], config)
    next_best = trainer_order_key(left[0], config)
    return next(reason for reason, a, b in zip(reasons, last, next_best, strict=True) if a != b)


def _pipeline(workers: list[Worker], plan: Plan, config: RunConfig) -> str:
    trainers = ", ".join(plan.trainers)
    others = ", ".join(plan.rollout)
    lending = "train steps and rollout in turn" if plan.lent else "train steps only"
    meanwhile = f"; {others}: rollout{', during train steps too' if config.overlap else ''}" if others else ""
    decides = "tags and rollout.overlap"
    if not plan.lent and all("rollout" in worker.tags for worker in workers if worker.name in plan.trainers):
        decides = f"rollout.overlap; {trainers} would take cores from {others}"
    if lends(config) is False:
        decides = "rollout.overlap; vLLM with train.lora lends no trainer"
    named = config.pipeline or f"{_name(plan, config.overlap)} by {decides}"
    return f"{named}; {trainers}: {lending}{meanwhile}"


def _name(plan: Plan, overlap: bool) -> str:
    if not plan.lent:
        return "async" if overlap else "disaggregated"
    if not plan.rollout:
        return "colocated"
    return "multiplexed" if overlap else "multiplexed without overlap"


def _lag(config: RunConfig) -> str:
    if config.lag_bound == 0:
        return "0: every token is trained on by the version that sampled it"
    older = {
        "wait": "training waits for sessions that would exceed this lag",
        "drop": "groups that would exceed this lag are dropped",
    }
    return f"{config.lag_bound}: sampling continues during training; {older[config.rollout.on_max_lag]}"


def _judge(name: str, plan: Plan, config: RunConfig) -> str:
    judge = config.environment.judges[name]
    asking = ", ".join(plan.reward or plan.agent)
    if judge.model is not None:
        where = f"{judge.model}{_size_of(policy_folder(judge.model))}, served by vLLM on {asking}"
    else:
        where = f"{judge.name or 'the model'} at {judge.url}, asked by {asking}"
    bound = judge.max_tokens_per_iteration
    most = "no limit on tokens" if bound is None else f"at most {bound:,} tokens per iteration"
    return f"{where}; {judge.concurrency} calls at once per worker, {most}"


def _size_of(folder: str) -> str:
    """The size of a judge in words; empty if its folder is elsewhere, or only vLLM knows its architecture."""
    try:
        return f", {count_parameters(folder) / 1e6:,.0f} million parameters" if has_weights(folder) else ""
    except UnknownModelError:
        return ""


def _describe_external(plan: Plan, config: RunConfig) -> str:
    rollout = config.rollout
    share = f"{rollout.outside_groups} of {rollout.groups_per_batch} groups of each batch"
    held_out = "" if plan.agent else "; so do held-out tasks, because no worker is tagged agent"
    return f"{share} come from external agents (POST /runs/RUN/groups){held_out}"
