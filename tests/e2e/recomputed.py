"""Recorded log-probs against those of the published weights for the same tokens, by transformers alone."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from storage.files import local_folder
from storage.run_directory import RunDirectory
from storage.tables.schema import Trajectory
from storage.tables.trajectories import to_rows
from storage.tensors.weights import load_weights


class Policies:
    """The versions of a run's policy."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(local_folder(run.start_dir))
        self._model.eval()
        self._version = 0

    def largest_difference(self, rows: pa.Table) -> float:
        """Largest difference between the recorded log-probs of these rows' sampled tokens and those of the
        recorded versions. The tokens were sampled at temperature 1 from the whole vocabulary."""
        found = list(to_rows(rows))
        versions = np.unique(np.concatenate([row.policy_versions for row in found]))
        return max(self._difference(found, int(version)) for version in versions if version >= 0)

    @torch.inference_mode()
    def _difference(self, rows: list[Trajectory], version: int) -> float:
        rows = [row for row in rows if version in row.policy_versions]
        self._load(version)
        length = max(len(row.token_ids) for row in rows)
        ids = np.zeros((len(rows), length), np.int64)
        recorded = np.full((len(rows), length), np.nan)
        for i, row in enumerate(rows):
            ids[i, : len(row.token_ids)] = row.token_ids
            of_version = row.policy_versions == version
            recorded[i, : len(row.token_ids)][of_version] = row.logprobs[of_version]
        # padded on the right: what comes later changes nothing before it
        tokens = torch.from_numpy(ids)
        logprobs = self._model(tokens).logits[:, :-1].log_softmax(-1)
        said = logprobs.gather(-1, tokens[:, 1:, None])[..., 0].numpy()
        return float(np.nanmax(np.abs(said - recorded[:, 1:])))

    def _load(self, version: int) -> None:
        if version != self._version:
            folder = self._run.weights_dir(version) if version else self._run.start_dir
            missing, unexpected = self._model.load_state_dict(load_weights(folder), strict=False)
            # the head is the embedding
            assert (set(missing) - {"lm_head.weight"}, unexpected) == (set(), [])
            self._version = version
