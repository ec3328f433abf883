"""A finished session's turn tree as trajectories, one per root-to-leaf path; and a turn tree as JSON, for
people and tools that inspect a session.

Every sampled token is trained in exactly one branch, the first that contains it; later branches repeat it
with mask False, as all do tokens that followed a grammar. Iterative, because trees may be thousands of turns
deep.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from sf_core.config.rollout_config import Status
from sf_core.dataplane.api_schemas import FinishBody, RunSpec
from sf_core.dataplane.chat.messages import Message
from sf_core.dataplane.sessions.session import Prompt, Session, Turn
from sf_core.dataplane.sessions.tree import Node, walk_path
from sf_core.models.images.processor_config import ImageProcessorConfig
from sf_core.types import ImageSpan
from storage.tables.schema import NOT_SAMPLED, Trajectory, TurnSpan

_Path = list[tuple[Node, int]]
"""The nodes of a branch from its root on, each with the position where its part of the branch ends."""

_Reach = dict[Node, tuple[int, int]]
"""First branch that reaches furthest into a node so far, and the position up to which it does."""


def export_session(
    session: Session,
    report: FinishBody,
    *,
    policy: str,
    group_id: str | None,
    stop_ids: tuple[int, ...],
    status: Status = "finished",
    image_processor: ImageProcessorConfig | None = None,
) -> list[Trajectory]:
    """The trajectories of a session that has ended. `report` has a reward, even for a failure, unless the
    answer could not be judged. `image_processor` is that of a policy that was shown images."""
    assert report.reward is not None or report.status == "unjudged"
    # the clock may have been changed since the session began, perhaps in another process
    finished_at = max(session.started_at, time.time())
    reward_by_turn_id = {
        session.find_turn_id(answer_id): reward for answer_id, reward in report.step_rewards.items()
    }
    step_rewards = {
        turn: reward_by_turn_id.get(session.turn_id(turn.prompt, turn.sample)) for turn in session.turns
    }
    reach: _Reach = {}
    trajectories = []
    for branch, leaf in enumerate(_leaves(session.turns)):
        path = list(walk_path(leaf, leaf.end))[::-1]
        parent, shared_prefix = _find_shared(path, reach)
        _mark_covered(path, branch, reach)
        token_ids, logprobs, versions = _token_columns(path, leaf.end)
        images: list[ImageSpan] = []
        if image_processor is not None:
            token_ids, images = session.images.read(token_ids, image_processor)
        mask = versions != NOT_SAMPLED
        for node, end in path:
            if isinstance(node, Turn) and node.constrained:
                # up to where the branch leaves the turn
                mask[node.start : end] = False
        # tokens that an earlier branch holds are trained there
        mask[:shared_prefix] = False
        trajectories.append(
            Trajectory(
                policy=policy,
                task_id=report.task_id or session.task_id,
                environment=report.environment or session.environment,
                group_id=group_id,
                session_id=session.session_id,
                branch_id=f"{session.session_id}.b{branch}",
                parent_branch_id=None if parent is None else f"{session.session_id}.b{parent}",
                shared_prefix=shared_prefix,
                token_ids=token_ids,
                loss_mask=mask,
                logprobs=logprobs,
                policy_versions=versions,
                turns=_spans(path, stop_ids, step_rewards),
                messages=msgspec.json.encode(_collect_messages(leaf)).decode(),
                reward=report.reward,
                reward_parts={name: part for name, part in report.reward_parts.items() if part is not None},
                status=status,
                interruptions=sum(node.interruptions for node, _ in path if isinstance(node, Turn)),
                started_at=session.started_at,
                finished_at=finished_at,
                tools=leaf.prompt.tools.decode() or None,
                output=None if branch else report.output,
                images=images,
            )
        )
    return trajectories


def _find_shared(path: _Path, reach: _Reach) -> tuple[int | None, int]:
    """The branch from which this path forks, and the number of shared tokens; (None, 0) for a new root."""
    branch = None
    shared = 0
    for node, end in path:
        if node not in reach:
            break
        branch, reached = reach[node]
        shared = min(reached, end)
        if shared < end:
            break
    return branch, shared


def _mark_covered(path: _Path, branch: int, reach: _Reach) -> None:
    """Note in `reach` that the branch holds this path."""
    for node, end in path:
        if node not in reach or reach[node][1] < end:
            reach[node] = (branch, end)


def _leaves(turns: list[Turn]) -> list[Turn]:
    """The last turns of the branches, ordered so that the first branch to hold a token of a turn holds the
    whole turn: each turn's own branch comes before those that later requests forked off inside it."""
    first_leaf: dict[Turn, Turn] = {}
    inner = {parent for turn in turns if (parent := _previous_whole_turn(turn)) is not None}
    for leaf in turns:
        node: Turn | None = leaf if leaf not in inner else None
        while node is not None and node not in first_leaf:
            first_leaf[node] = leaf
            node = _previous_whole_turn(node)
    return list(dict.fromkeys(first_leaf[turn] for turn in turns))


def _previous_whole_turn(turn: Turn) -> Turn | None:
    """The previous turn on this turn's path, if the path holds all of that turn and its tools are the same:
    a branch has one set of tools, even where the template does not show them."""
    prompt = turn.prompt
    for node, end in walk_path(prompt.parent, prompt.start):
        if isinstance(node, Turn):
            return node if end == node.end and node.prompt.tools == prompt.tools else None
    return None


def _token_columns(path: _Path, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, log-probs and policy versions of a branch."""
    token_ids = np.empty(length, dtype=np.int32)
    logprobs = np.full(length, np.nan, dtype=np.float32)
    versions = np.full(length, NOT_SAMPLED, dtype=np.int32)
    for node, end in path:
        columns = slice(node.start, end)
        num_tokens = end - node.start
        token_ids[columns] = node.ids[:num_tokens]
        if isinstance(node, Turn):
            logprobs[columns] = node.logprobs[:num_tokens]
            versions[columns] = node.versions[:num_tokens]
    return token_ids, logprobs, versions


def _collect_messages(leaf: Turn) -> list[Message]:
    messages: list[Message] = []
    for turn in list(leaf.conversation())[::-1]:
        messages += turn.prompt.messages
        unparsed = {"unparsed_calls": turn.num_unparsed_calls} if turn.num_unparsed_calls else {}
        messages.append({**turn.message, **unparsed})
    return messages


def _spans(
    path: _Path, stop_ids: tuple[int, ...], step_rewards: Mapping[Turn, float | None]
) -> list[TurnSpan]:
    spans: list[TurnSpan] = []
    for node, end in path:
        if isinstance(node, Turn):
            sampling = node.sampling
            is_whole = end == node.end
            spans.append(
                TurnSpan(
                    "assistant",
                    node.start,
                    end,
                    # a branch that forks off inside a turn lacks the end of the turn
                    node.finish_reason.value if is_whole else None,
                    node.engine,
                    sampling.temperature,
                    sampling.top_p,
                    sampling.top_k,
                    step_rewards.get(node) if is_whole else None,
                )
            )
        elif end > node.start:
            spans += _prompt_spans(node, end, stop_ids)
    return spans


def _prompt_spans(prompt: Prompt, end: int, stop_ids: tuple[int, ...]) -> list[TurnSpan]:
    """One span per message, as far as end-of-turn tokens tell them apart. Template text before the first
    message belongs to the first span, the header of the coming answer to the last. A prompt that is shared in
    part, or that came as ids, is one span: `prompt`, unless all its messages are of one role."""
    roles = [message["role"] for message in prompt.messages]
    is_end = np.logical_or.reduce([prompt.ids == stop for stop in stop_ids])
    ends = (np.flatnonzero(is_end) + 1).tolist()[-len(roles) :]
    is_shared = end < prompt.end
    if not roles or is_shared or len(ends) < len(roles):
        role = roles[0] if len({*roles}) == 1 else "prompt"
        return [TurnSpan(role, prompt.start, end)]
    edges = [0, *ends[:-1], len(prompt.ids)]
    return [
        TurnSpan(role, prompt.start + start, prompt.start + stop)
        for role, (start, stop) in zip(roles, pairwise(edges), strict=True)
    ]


_NO_REWARD: dict[str, Any] = {"reward": None, "reward_parts": {}, "step_rewards": {}}
"""The fields of a session without a reward so far."""


def session_tree(spec: RunSpec, session: Session) -> dict[str, Any]:
    """Prompts and turns refer to each other by their positions in the two lists."""
    turn_indices = {turn: i for i, turn in enumerate(session.turns)}
    claim = session.claim
    return {
        "session_id": session.session_id,
        "run_id": spec.run_id,
        "policy": spec.served_model,
        "split": None if claim is None else claim.slot.split,
        "group": session.group if claim is None else claim.slot.group,
        "task_id": session.task_id,
        "environment": session.environment,
        "metadata": session.metadata,
        **(_NO_REWARD if session.earned is None else session.earned.model_dump()),
        "started_at": session.started_at,
        "turns_running": len(session.running),
        "branch_reasons": dict(session.branch_reasons),
        "prompts": [_describe_prompt(prompt, turn_indices) for prompt in session.prompts],
        "turns": [_describe_turn(turn) for turn in session.turns],
    }


def _describe_prompt(prompt: Prompt, turn_indices: dict[Turn, int]) -> dict[str, Any]:
    return {
        "parent_turn": None if prompt.continues is None else turn_indices[prompt.continues],
        "num_tokens": prompt.end,
        "num_new_tokens": len(prompt.ids),
        "messages": prompt.messages,
        "branch_reason": prompt.branch_reason,
    }


def _describe_turn(turn: Turn) -> dict[str, Any]:
    versions = turn.versions
    return {
        "prompt": turn.prompt.index,
        "message": turn.message,
        "num_tokens": len(turn.ids),
        "versions": [int(versions.min()), int(versions.max())] if len(versions) else None,
        "finish_reason": turn.finish_reason.value,
        "engine": turn.engine,
        "interruptions": turn.interruptions,
        "unparsed_calls": turn.num_unparsed_calls,
    }
