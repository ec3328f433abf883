"""The slot table: which request runs where, its tokens, how much of its KV is valid, what to report.

Owns no tensors. Running requests fill slots 0 to num_running - 1 after `holes` were closed by `swap`; an idle
slot keeps the tokens of its last request, whose KV a later prompt may extend.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sf_core.types import Chunk, FinishReason, GenerationRequest

_REPORT_EVERY = 16

_ROW = np.dtype(
    [
        ("running", "?"),
        ("length", "i4"),  # tokens known: prompt and sampled
        ("cached", "i4"),  # leading tokens whose KV the slot holds
        ("mixed", "?"),  # earlier weights computed part of that KV
        ("prompt", "i4"),  # tokens before the first one that was sampled in its turn
        ("limit", "i4"),  # length at which the budget or the context is used up
        ("reported", "i4"),  # length up to which tokens were reported
        ("report_every", "i4"),
        ("version", "i8"),  # of the tokens not yet reported
        ("position", "i8"),  # counter of the next draw
        ("seed", "u8"),
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("top_k", "i8"),
        ("since", "i8"),  # time by a counter: when the slot began to run or became idle
    ],
    align=True,
)


class SlotTable:
    def __init__(self, num_slots: int, context_length: int) -> None:
        self.rows = np.zeros(num_slots, _ROW)
        self.tokens = np.zeros((num_slots, context_length), np.int64)
        self.num_running = 0
        self._context_length = context_length
        self._logprobs = np.zeros((num_slots, context_length), np.float32)
        self._stops = np.full((num_slots, 1), -1, np.int64)
        self._requests: list[GenerationRequest | None] = [None] * num_slots
        self._slots: dict[str, int] = {}
        self._clock = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    @property
    def running(self) -> npt.NDArray[np.void]:
        """Rows of the running requests; valid once there are no holes."""
        return self.rows[: self.num_running]

    @property
    def longest(self) -> int:
        """Positions that the cache must hold, for running requests and for idle slots with valid KV."""
        return int(np.maximum(self.rows["cached"], self.rows["length"] * self.rows["running"]).max())

    @property
    def request_ids(self) -> list[str]:
        return list(self._slots)

    def request_id_at(self, slot: int) -> str:
        """Id of the request that runs in a slot."""
        request = self._requests[slot]
        assert request is not None
        return request.request_id

    def idle_slot(self, source: int, shared: int) -> int:
        """The slot for a prompt that shares so many tokens with `source`: the source, if it is idle and the
        prompt extends all of it, else the slot that has been idle for longest."""
        row = self.rows[source]
        if not row["running"] and shared == row["cached"]:
            return source
        idle = np.flatnonzero(~self.rows["running"])
        return int(idle[self.rows["since"][idle].argmin()])

    def longest_prefix(self, prompt: npt.NDArray[np.int64]) -> tuple[int, int]:
        """The slot whose cached tokens agree longest with the prompt, and how long."""
        # KV that earlier weights computed in part serves its own request only
        cached = np.where(self.rows["mixed"], 0, self.rows["cached"])
        if not cached.any():
            return 0, 0
        # the last column always differs, so that argmax gives the length of a full agreement too
        differs = np.ones((len(self.rows), len(prompt) + 1), np.bool_)
        np.not_equal(self.tokens[:, : len(prompt)], prompt, out=differs[:, :-1])
        shared = np.minimum(differs.argmax(axis=1), cached)
        best = int(shared.argmax())
        return best, int(shared[best])

    def occupy(self, slot: int, request: GenerationRequest, cached: int) -> None:
        """Start the request in an idle slot that holds the KV of its first `cached` tokens."""
        prompt = len(request.prompt_ids)
        sampling = request.sampling
        self.tokens[slot, :prompt] = request.prompt_ids
        row = self.rows[slot]
        row["running"] = True
        row["since"] = self._next_clock()
        row["length"] = prompt
        row["reported"] = prompt
        # without the tokens sampled before an interruption, which differ between the requests of a group
        row["prompt"] = prompt - request.position
        row["cached"] = cached
        row["mixed"] = False
        row["limit"] = min(prompt + request.max_tokens, self._context_length)
        row["report_every"] = 1 if request.stream else _REPORT_EVERY
        row["position"] = request.position
        row["seed"] = sampling.seed
        row["temperature"] = sampling.temperature
        row["top_p"] = sampling.top_p
        row["top_k"] = sampling.top_k
        missing = len(request.stop_token_ids) - self._stops.shape[1]
        if missing > 0:
            # -1 is no token
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=-1)
        self._stops[slot] = -1
        self._stops[slot, : len(request.stop_token_ids)] = request.stop_token_ids
        self._requests[slot] = request
        self._slots[request.request_id] = slot
        self.num_running += 1

    def holes(self) -> tuple[list[int], list[int]]:
        """Idle slots below num_running, and as many running ones above."""
        running = self.rows["running"]
        n = self.num_running
        return np.flatnonzero(~running[:n]).tolist(), (n + np.flatnonzero(running[n:])).tolist()

    def swap(self, a: list[int], b: list[int]) -> None:
        for array in (self.rows, self.tokens, self._logprobs, self._stops):
            array[a + b] = array[b + a]
        for i, j in zip(a, b, strict=True):
            self._requests[i], self._requests[j] = self._requests[j], self._requests[i]
            for slot in (i, j):
                request = self._requests[slot]
                if request is not None:
                    self._slots[request.request_id] = slot

    def append(
        self,
        slots: npt.NDArray[np.intp],
        token_ids: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        version: int,
    ) -> None:
        """Add one sampled token to each of these running requests."""
        rows = self.rows
        next_position = slots, rows["length"][slots]
        self.tokens[next_position] = token_ids
        self._logprobs[next_position] = logprobs
        rows["length"][slots] += 1
        rows["position"][slots] += 1
        rows["version"][slots] = version

    def report_due(self, slots: npt.NDArray[np.intp]) -> list[Chunk]:
        """Chunks of those requests, among these that got a token, that end now, which are released, or have
        enough to report."""
        rows = self.rows[slots]
        last = self.tokens[slots, rows["length"] - 1]
        stopped = (self._stops[slots] == last[:, None]).any(axis=1)
        ended = stopped | (rows["length"] >= rows["limit"])
        due = ended | (rows["length"] - rows["reported"] >= rows["report_every"])
        chunks = []
        for i in np.flatnonzero(due).tolist():
            slot = int(slots[i])
            if not ended[i]:
                chunks.append(self._report(slot, None))
            else:
                chunks.append(self.end(slot, FinishReason.STOP if stopped[i] else FinishReason.LENGTH))
        return chunks

    def report_older_than(self, version: int) -> list[Chunk]:
        """Chunks of the requests with unreported tokens of an earlier version."""
        rows = self.rows
        older = rows["running"] & (rows["length"] > rows["reported"]) & (rows["version"] != version)
        return [self._report(slot, None) for slot in np.flatnonzero(older).tolist()]

    def abort(self, request_id: str, version: int) -> Chunk:
        """The chunk carries `version` if there is nothing to report."""
        slot = self._slots[request_id]
        row = self.rows[slot]
        if row["length"] == row["reported"]:
            row["version"] = version
        return self.end(slot, FinishReason.ABORT)

    def end(self, slot: int, reason: FinishReason) -> Chunk:
        chunk = self._report(slot, reason)
        self.rows[slot]["running"] = False
        self.rows[slot]["since"] = self._next_clock()
        if self.rows[slot]["mixed"]:
            self.rows[slot]["cached"] = 0
        self._requests[slot] = None
        del self._slots[chunk.request_id]
        self.num_running -= 1
        return chunk

    def invalidate_kv(self, *, keep_kv: bool) -> None:
        """Mark all cached KV as invalid, or with `keep_kv` as valid only for the request that runs on it."""
        stays_valid = self.rows["running"] & keep_kv
        self.rows["cached"] *= stays_valid
        self.rows["mixed"] = stays_valid & (self.rows["cached"] > 0)

    def _next_clock(self) -> int:
        self._clock += 1
        return self._clock

    def _report(self, slot: int, reason: FinishReason | None) -> Chunk:
        row = self.rows[slot]
        request = self._requests[slot]
        assert request is not None
        new = slice(int(row["reported"]), int(row["length"]))
        row["reported"] = row["length"]
        return Chunk(
            request.request_id,
            self.tokens[slot, new].tolist(),
            self._logprobs[slot, new].tolist(),
            int(row["version"]),
            reason,
        )
