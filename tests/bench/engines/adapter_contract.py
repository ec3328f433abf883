"""The contract of engines that serve an adapter: tokens are those of the model with the factors merged in
float32."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from sf_core.engines.protocol import WeightsRefusedError
from sf_core.testing.driven_engine import DrivenEngine
from sf_core.testing.engines import awake, catch, ids_of, sample
from sf_core.types import GenerationRequest, WeightsRef
from storage.tensors.weights import ADAPTER_CONFIG, ADAPTER_NAME
from tests.bench.closeness import FORWARD
from tests.bench.engines.adapter_folders import AdapterFolders
from tests.bench.engines.model_contract import FolderEngineTests

LEAST_EFFECT = 0.01
"""Smallest mean difference of log-probs that an adapter makes, in nats."""


class AdapterEngineTests(FolderEngineTests):
    file_name = ADAPTER_NAME
    adapters: AdapterFolders
    kind: str

    def folder(self, version: int) -> str:
        return self.adapters.merged(self.kind, version)

    def weights(self, version: int) -> WeightsRef:
        return WeightsRef(version, self.adapters.version(self.kind, version))

    def test_each_of_twenty_versions_samples_what_the_merged_model_gives_and_not_what_the_base_does(
        self,
    ) -> None:
        with self.serve() as engine:
            self.check_effect(engine, 0)
            for version in range(1, 21):
                awake(engine, self.weights(version))
                self.check_effect(engine, version)

    def test_after_a_rest_the_newest_adapter_is_over_the_base(self) -> None:
        with self.serve() as engine:
            awake(engine, self.weights(4))
            for version in (4, 5, 0):
                engine.rest()
                awake(engine, self.weights(version))
                self.check_effect(engine, version)

    def test_an_adapter_that_is_refused_leaves_the_one_before(self) -> None:
        with self.serve() as engine:
            awake(engine, self.weights(1))
            for message, spoil in REFUSED.items():
                file = self.file_to_damage()
                spoil(file)
                refused = WeightsRef(2, str(file.parent))
                error = catch(lambda: awake(engine, refused), WeightsRefusedError)  # noqa: B023
                assert re.search(message, str(error)), error
                self.check_effect(engine, 1)
                engine.rest()
                # the same in front of an engine that has no weights yet
                assert re.search(message, str(catch(lambda: awake(engine, refused), ValueError)))  # noqa: B023
                awake(engine, self.weights(1))
                self.check_effect(engine, 1)

    def check_effect(self, engine: DrivenEngine, version: int) -> None:
        """Check that the log-probs are those of this version, and differ from those of the base."""
        request: GenerationRequest = replace(self.request("r"), max_tokens=self.num_tokens)
        chunks = sample(engine, request)
        assert {chunk.version for chunk in chunks} == {version}
        told = np.array([logprob for chunk in chunks for logprob in chunk.logprobs])
        ids = [*request.prompt_ids, *ids_of(chunks)]
        base, expected = (
            self.logprobs(each, ids, len(request.prompt_ids), request.sampling) for each in (0, version)
        )
        worst = FORWARD / 2 * np.finfo(np.float32).eps * np.abs([1.0, *expected]).max()
        assert np.abs(told - expected).mean() < worst
        assert np.abs(told - base).mean() > LEAST_EFFECT or version == 0


def _set(**values: object) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        config = file.with_name(ADAPTER_CONFIG)
        config.write_text(
            json.dumps(json.loads(config.read_text(encoding="utf-8")) | values), encoding="utf-8"
        )

    return spoil


def _remove_one(file: Path) -> None:
    factors = load_file(file)
    del factors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]
    save_file(factors, file)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


REFUSED: dict[str, Callable[[Path], None]] = {
    r"adapter_model\.safetensors: the tensors differ from those that were written": _flip,
    r"adapter_model\.safetensors: no such file": Path.unlink,
    r"adapter_config\.json cannot be read": lambda file: file.with_name(ADAPTER_CONFIG).unlink(),
    r"adapter_config\.json describes rank 5 .*; the adapter that the run began with has rank 4": _set(r=5),
    r"adapter_config\.json describes rank 4 and alpha 7 for .* has rank 4 and alpha 6": _set(lora_alpha=7),
    r"adapter_config\.json describes .* for q_proj; the adapter": _set(target_modules=["q_proj"]),
    r"adapter_config\.json describes DoRA \(use_dora\)": _set(use_dora=True),
    r"'base_model.*v_proj\.lora_B\.weight'.* \(1 tensors missing\)": _remove_one,
}
"""What is done to the file of an adapter, by what the refusal says."""
