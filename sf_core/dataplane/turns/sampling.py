"""How a turn is sampled: as the run says in its sessions, whatever the agent asks; else as the request
says."""

from __future__ import annotations

import secrets
from hashlib import blake2b

from msgspec.structs import replace

from sf_core.dataplane.bodies import RunSpec
from sf_core.dataplane.sessions.claims import Claim
from sf_core.dataplane.turns.request import TurnRequest
from sf_core.types import Sampling


def choose_sampling(
    request: TurnRequest, spec: RunSpec, claim: Claim | None, prompt_index: int, sample: int, nth: int
) -> Sampling:
    """How a turn is drawn: the `sample`th of its prompt, the `nth` of its request."""
    if claim is None:
        seed = secrets.randbits(64) if request.seed is None else (request.seed + nth) % 2**64
        return replace(request.sampling, seed=seed)
    seed = derive_seed(spec.seed, claim.place, prompt_index, sample, claim.draw)
    return Sampling(spec.rollout.temperature, spec.rollout.top_p, spec.rollout.top_k, seed)


def limit_tokens(request: TurnRequest, spec: RunSpec, claim: Claim | None, num_prompt: int) -> int:
    """Most tokens of a turn whose prompt has `num_prompt`."""
    most = spec.context_length if claim is None else spec.rollout.turn_tokens
    return min(spec.context_length - num_prompt, request.max_tokens or most, most)


def derive_seed(
    run_seed: int, place: tuple[str | int, ...], prompt_index: int, sample: int, draw: int = 0
) -> int:
    """Unsigned 64-bit key of a turn. It depends on the `draw` of the session's claim, not on its attempt: a
    session given out again because its runner was lost samples the same."""
    key: list[str | int] = [run_seed, *place, prompt_index, sample]
    if draw:
        key.append(draw)
    text = ".".join(map(str, key))
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
