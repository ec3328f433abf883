"""What requests hold: registrations of runs, as bodies of `POST /runs`, and definitions of tools."""

from __future__ import annotations

from typing import Any

from sf_core.config import RolloutConfig

SPEC: dict[str, Any] = {
    "run_id": "run",
    "seed": 0,
    "rollout": {"group_size": 2, "groups_per_batch": 2, "max_tokens": 8, "session_timeout_s": 10.0},
    "lag_bound": 1,
    "context_length": 64,
    "num_batches": 50,
    "iteration": 0,
    "version": 0,
    "weights_uri": "w",
    "done_groups": [],
    "attempt": 1,
}


def changed(spec: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The registration with other facts; settings of `rollout` are given by their own names."""
    rollout = {name: changes.pop(name) for name in RolloutConfig.model_fields.keys() & changes.keys()}
    return spec | {"rollout": spec["rollout"] | rollout} | changes


def make_tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """A tool as requests define it, with the type of each parameter."""
    properties = {parameter: {"type": kind} for parameter, kind in parameters.items()}
    function = {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties},
    }
    return {"type": "function", "function": function}
