"""A finished session's turn tree as trajectories, one per root-to-leaf path.

Every sampled token is trained in exactly one branch, the first that contains it; later branches repeat it
with mask False. Iterative: trees may be thousands of turns deep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import orjson

from sf_core.dataplane.messages import Message
from sf_core.dataplane.session import Prompt, Session, Turn
from storage.schema import NOT_SAMPLED, Trajectory, TurnSpan

_OfPrompt = Callable[[Prompt], np.ndarray]
_OfTurn = Callable[[Turn], np.ndarray]


def export_session(
    session: Session,
    *,
    policy: str,
    group_id: str | None,
    stop_ids: tuple[int, ...],
    task_id: str,
    environment: str,
    reward: float,
    reward_parts: Mapping[str, float],
) -> list[Trajectory]:
    finished_at = time.time()
    owners = _Owners()
    trajectories = []
    for branch, leaf in enumerate(_leaves(session.turns)):
        path = list(leaf.lineage())[::-1]
        parent, shared_prefix = owners.shared_with(path)
        first_own = sum(turn in owners.turns for turn in path)
        owners.take(path, branch)
        trajectories.append(
            Trajectory(
                policy=policy,
                task_id=task_id,
                environment=environment,
                group_id=group_id,
                session_id=session.session_id,
                branch_id=f"{session.session_id}.b{branch}",
                parent_branch_id=None if parent is None else f"{session.session_id}.b{parent}",
                shared_prefix=shared_prefix,
                token_ids=_interleave(path, lambda p: p.ids, lambda t: t.ids),
                loss_mask=_mask(path, first_own),
                logprobs=_interleave(path, _no_logprobs, lambda t: t.logprobs),
                policy_versions=_interleave(path, _no_versions, lambda t: t.versions),
                turns=_spans(path, stop_ids),
                messages=orjson.dumps(_conversation(path)).decode(),
                reward=reward,
                reward_parts=dict(reward_parts),
                status="finished",
                interruptions=sum(turn.interruptions for turn in path),
                started_at=session.started_at,
                finished_at=finished_at,
            )
        )
    return trajectories


@dataclass
class _Owners:
    """The branch that trains each turn, and the first that holds each prompt."""

    turns: dict[Turn, int] = field(default_factory=dict)
    prompts: dict[Prompt, int] = field(default_factory=dict)

    def shared_with(self, path: list[Turn]) -> tuple[int | None, int]:
        """The branch this path forks from, and how many tokens they share; (None, 0) for a new root."""
        branch, shared = None, 0
        for turn in path:
            if turn.prompt in self.prompts:
                branch, shared = self.prompts[turn.prompt], turn.prompt.end
            if turn not in self.turns:
                break
            branch, shared = self.turns[turn], turn.end
        return branch, shared

    def take(self, path: list[Turn], branch: int) -> None:
        for turn in path:
            self.turns.setdefault(turn, branch)
            self.prompts.setdefault(turn.prompt, branch)


def _leaves(turns: list[Turn]) -> list[Turn]:
    inner = {turn.prompt.parent for turn in turns}
    return [turn for turn in turns if turn not in inner]


def _interleave(path: list[Turn], of_prompt: _OfPrompt, of_turn: _OfTurn) -> np.ndarray:
    return np.concatenate([part for turn in path for part in (of_prompt(turn.prompt), of_turn(turn))])


def _mask(path: list[Turn], first_own: int) -> np.ndarray:
    mask = np.zeros(path[-1].end, dtype=np.bool_)
    for turn in path[first_own:]:
        mask[turn.prompt.end : turn.end] = True
    return mask


def _no_logprobs(prompt: Prompt) -> np.ndarray:
    return np.full(len(prompt.ids), np.nan, dtype=np.float32)


def _no_versions(prompt: Prompt) -> np.ndarray:
    return np.full(len(prompt.ids), NOT_SAMPLED, dtype=np.int32)


def _conversation(path: list[Turn]) -> list[Message]:
    messages: list[Message] = []
    for turn in path:
        messages += turn.prompt.messages
        unparsed = {"unparsed_calls": turn.num_unparsed_calls} if turn.num_unparsed_calls else {}
        messages.append({**turn.message, **unparsed})
    return messages


def _spans(path: list[Turn], stop_ids: tuple[int, ...]) -> list[TurnSpan]:
    spans: list[TurnSpan] = []
    for turn in path:
        spans += _prompt_spans(turn.prompt, stop_ids)
        sampling = turn.sampling
        spans.append(
            TurnSpan(
                "assistant",
                turn.prompt.end,
                turn.end,
                turn.finish_reason.value,
                turn.engine,
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
            )
        )
    return spans


def _prompt_spans(prompt: Prompt, stop_ids: tuple[int, ...]) -> list[TurnSpan]:
    """One span per message, as far as end-of-turn tokens tell them apart. What a template puts before the
    first message belongs to that one, the header of the coming answer to the last."""
    roles = [message["role"] for message in prompt.messages]
    is_end = np.logical_or.reduce([prompt.ids == stop for stop in stop_ids])
    ends = (np.flatnonzero(is_end) + 1).tolist()[-len(roles) :]
    if len(ends) < len(roles):
        return [TurnSpan(roles[-1], prompt.start, prompt.end)] if roles else []
    edges = [0, *ends[:-1], len(prompt.ids)]
    return [
        TurnSpan(role, prompt.start + start, prompt.start + end)
        for role, start, end in zip(roles, edges, edges[1:], strict=False)
    ]
