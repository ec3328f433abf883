"""How a version of the policy reaches a vLLM server: as weights that take the place of the server's own, or
as an adapter beside the one before, under a name of its own.

The base of adapters stays as the server was started with it, and nothing is ever sampled by it: beside
adapters vLLM's CPU build computes it wrongly.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

from sf_core.engines.host_weights import HostWeights
from sf_core.engines.vllm.client import VllmClient
from sf_core.engines.vllm.policy_folder import PolicyFolder
from sf_core.models.adapter import AdapterVersions
from sf_core.types import WeightsRef
from storage.files import join, read_bytes
from storage.scratch import scratch_folder
from storage.tensors.weights import ADAPTER_CONFIG, ADAPTER_NAME


class WeightLoading:
    model: str | None = None
    """What a request must name to be sampled by the version that was switched to; None: nothing."""
    is_in_start = False
    """Whether a new server begins with the version that was fetched last."""

    def fetch(self, weights: WeightsRef) -> str:
        """Have these weights, verified, in a folder of this host, which is returned. Called by one thread.
        Raises ValueError or OSError; the weights from before then stay."""
        raise NotImplementedError

    async def load(self, client: VllmClient, weights: WeightsRef, source: str) -> None:
        """Do what can be done while the server samples by other weights. Can be cancelled. Raises ValueError
        if it does not take them."""

    async def switch(self, client: VllmClient, weights: WeightsRef, source: str) -> None:
        """Have the server, which is paused, sample by the weights that were loaded."""
        raise NotImplementedError

    async def unload_others(self, client: VllmClient) -> None:
        """Forget all weights but those that were switched to."""

    def reset(self) -> None:
        """The server is not there any more."""

    def close(self) -> None:
        """Remove what was fetched."""
        raise NotImplementedError


class FullWeights(WeightLoading):
    is_in_start = True

    def __init__(self, policy: PolicyFolder) -> None:
        self._policy = policy
        self._weights = HostWeights()

    def fetch(self, weights: WeightsRef) -> str:
        self._policy.link_weights(self._weights.fetch(weights))
        return self._policy.path

    async def switch(self, client: VllmClient, weights: WeightsRef, source: str) -> None:
        await client.reload_weights(source)

    def close(self) -> None:
        self._weights.close()


class LoraWeights(WeightLoading):
    """Adapters of one shape. Each has a copy in a folder of its own that stays while the server may know it:
    vLLM ends if it looks for one whose folder is gone."""

    def __init__(self, start_dir: str, policy: PolicyFolder) -> None:
        """`policy`: the folder that a server is started from, which gets the base."""
        self._start_dir = start_dir
        self._policy = policy
        self._versions = AdapterVersions(join(start_dir, "adapter"))
        self._base: HostWeights | None = None
        """The base, from when it is fetched until a server has read it."""
        self._is_started = False
        self._copies = scratch_folder()
        self._folders: dict[WeightsRef, str] = {}
        """Folders of the copies. It is used where weights are fetched, and nowhere else."""
        self._names: dict[WeightsRef, str] = {}
        """The server's names of those that it may know."""
        self._numbers = itertools.count()
        self._current: WeightsRef | None = None

    @property
    def rank(self) -> int:
        return self._versions.first.rank

    def fetch(self, weights: WeightsRef) -> str:
        if self._base is None and not self._is_started:
            self._base = HostWeights()
            self._policy.link_weights(self._base.fetch(WeightsRef(0, self._start_dir)))
        for other in [other for other in self._folders if other != weights and other not in self._names]:
            shutil.rmtree(self._folders.pop(other))
        if weights not in self._folders:
            self._folders[weights] = self._copy(weights.uri)
        return self._folders[weights]

    async def load(self, client: VllmClient, weights: WeightsRef, source: str) -> None:
        # those that others took the place of before they sampled
        await self.unload_others(client)
        # a name is never given again: of a load that was cancelled nobody knows whether it was done
        name = self._names[weights] = f"policy.{weights.version}.{next(self._numbers)}"
        try:
            await client.load_adapter(name, source)
        except ValueError:
            del self._names[weights]
            raise
        self._is_started = True
        if self._base is not None:
            self._base.close()
            self._base = None

    async def switch(self, client: VllmClient, weights: WeightsRef, source: str) -> None:
        self._current = weights
        self.model = self._names[weights]

    async def unload_others(self, client: VllmClient) -> None:
        for weights in [weights for weights in self._names if weights != self._current]:
            await client.unload_adapter(self._names[weights])
            del self._names[weights]

    def reset(self) -> None:
        self._names.clear()
        self._current = None
        self.model = None
        self._is_started = False

    def close(self) -> None:
        self._copies.cleanup()
        if self._base is not None:
            self._base.close()

    def _copy(self, uri: str) -> str:
        """A folder with a copy of the adapter. Raises ValueError as `AdapterVersions.read`."""
        content = self._versions.read(uri)
        folder = tempfile.mkdtemp(dir=self._copies.name)
        Path(folder, ADAPTER_NAME).write_bytes(content)
        Path(folder, ADAPTER_CONFIG).write_bytes(read_bytes(join(uri, ADAPTER_CONFIG)))
        return folder
