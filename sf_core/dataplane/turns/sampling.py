"""The sampling of a turn. In the run's own sessions, the run's settings decide; in other sessions, the
request decides."""

from __future__ import annotations

import secrets
from hashlib import blake2b

from msgspec.structs import replace

from sf_core.dataplane.api_schemas import RunSpec
from sf_core.dataplane.sessions.claims import Claim
from sf_core.dataplane.turns.request import TurnRequest
from sf_core.types import Sampling


def choose_sampling(
    request: TurnRequest, spec: RunSpec, claim: Claim | None, prompt_index: int, sample: int, nth: int
) -> Sampling:
    """The sampling of a turn, the `sample`th of its prompt and the `nth` of its request."""
    if claim is None:
        seed = secrets.randbits(64) if request.seed is None else (request.seed + nth) % 2**64
        return replace(request.sampling, seed=seed)
    seed = derive_seed(spec.seed, claim.slot, prompt_index, sample, claim.draw)
    return Sampling(spec.rollout.temperature, spec.rollout.top_p, spec.rollout.top_k, seed)


def limit_tokens(request: TurnRequest, spec: RunSpec, claim: Claim | None, num_prompt: int) -> int:
    """Most tokens of a turn whose prompt has `num_prompt`."""
    turn_limit = spec.context_length if claim is None else spec.rollout.turn_tokens
    room_in_context = spec.context_length - num_prompt
    return min(room_in_context, request.max_tokens or turn_limit, turn_limit)


def derive_seed(
    run_seed: int, slot: tuple[str | int, ...], prompt_index: int, sample: int, draw: int = 0
) -> int:
    """Unsigned 64-bit key of a turn. It depends on the `draw` of the session's claim, not on its attempt: a
    session given out again because its runner was lost samples the same."""
    key: list[str | int] = [run_seed, *slot, prompt_index, sample]
    if draw:
        key.append(draw)
    text = ".".join(map(str, key))
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
