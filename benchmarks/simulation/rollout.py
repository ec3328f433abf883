"""The groups of a run without its journal and sessions: what is decided is applied at once."""

from __future__ import annotations

from sf_core.config.rollout_config import Reason
from sf_core.dataplane.runs import decide
from sf_core.dataplane.runs.ledger import Batch, Ledger
from sf_core.dataplane.sessions.claims import Claim
from sf_core.recipes.outcomes import Result


class Rollout(Ledger):
    def claim(self, limit: int, is_full: bool = False) -> list[Claim]:
        """Give out sessions to run."""
        for admitted in decide.admit(self, limit, is_full):
            self.begin(admitted.group, admitted.pick, admitted.version)
        return self._give_out(decide.claim(self, limit))

    def claim_external(self, size: int) -> list[Claim]:
        """Give out the sessions of a new external group; none if there is no place for it."""
        claims = decide.declare(self, size)
        if claims:
            self.declare(claims[0].slot.group, size)
        return self._give_out(claims)

    def claim_held_out(self, limit: int) -> list[Claim]:
        """Give out held-out sessions to an external agent."""
        return self._give_out(decide.claim_held_out(self, limit))

    def end(self, claim: Claim, result: Result, min_version: int | None) -> list[int]:
        """Count a finished session that counts. Returns the groups that are rejected by it."""
        if self.group_of(claim) is None:
            return []
        self.finish(claim, result, min_version)
        return self._judge(claim)

    def end_failed(self, claim: Claim, reason: Reason) -> list[int]:
        """Count a failed session. Returns the groups that are rejected by it."""
        self.fail(claim, reason)
        return self._judge(claim)

    def seal_next(self, index: int) -> Batch:
        """Have a batch take its groups. Raises ValueError if it is not ready."""
        batch = decide.choose(self, index)
        for dropped in batch.dropped:
            self.reject(dropped, "max_lag")
        self.seal(index, batch)
        return batch

    def _give_out(self, claims: list[Claim]) -> list[Claim]:
        for claim in claims:
            self.open(claim)
        return claims

    def _judge(self, claim: Claim) -> list[int]:
        group = self.train_group_of(claim)
        if group is None or not (reason := decide.judge(self, group)):
            return []
        self.reject(group.index, reason)
        return [group.index]
