"""What a network that sees makes of trajectories with images, compared with transformers row by row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sf_core.config import RunConfig
from sf_core.config.devices import WorkerDevice
from sf_core.training import vision_tower as vision_tower
from sf_core.training.packing.rows import read_rows
from sf_core.training.packing.trie import Packing, pack
from sf_core.training.torch.backend import TorchBackend
from sf_core.training.torch.network import Network
from sf_core.training.torch.ranks import Ranks, SingleRank
from sf_core.training.torch.trained_model import TrainedModel
from sf_core.training.vision_tower import VisionTower
from storage.media import media_file
from tests.bench import closeness, training
from tests.bench.properties import examples


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return training.images.multimodal_policy(str(tmp_path_factory.mktemp("policy")))


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("media"))


PARTS = st.lists(st.integers(1, 5) | st.sampled_from("012345"), min_size=1, max_size=3).map(
    # as in a template, text is between two images
    lambda parts: [2, *(piece for part in parts for piece in (part, 1))]
)
NO_SHRINK = [Phase.explicit, Phase.generate]
"""A network is loaded for each example."""

ROWS = st.lists(st.lists(st.tuples(PARTS, st.integers(1, 4)), min_size=1, max_size=2), min_size=1, max_size=3)
"""Rows of one or two turns, each with up to three images."""


@settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=NO_SHRINK,
)
@given(rows=ROWS, data=st.data())
def test_scores_and_gradients_are_those_of_every_row_by_itself(
    policy: str, media: str, rows: list[list[tuple[list[training.images.Part], int]]], data: st.DataObject
) -> None:
    # others fork from them: with the same images, or with another one in the place of the first
    other = data.draw(st.sampled_from("012345"))
    forks = [[(_other(parts, other), sampled) for parts, sampled in turns] for turns in rows]
    batch = training.images.multimodal_batch(policy, media, [*rows, *rows, *forks])
    network = Network(policy, tower=VisionTower(policy, media))
    reference = training.images.loaded(policy)
    wanted = training.images.seen_by_transformers(reference, policy, media, batch)
    advantages = torch.tensor([row[0] for row in batch["advantages"].to_pylist()])
    sum((own.sum() * by for own, by in zip(wanted, advantages, strict=True)), torch.tensor(0.0)).backward()
    for microbatch in pack(read_rows(batch), Packing(data.draw(st.sampled_from([1 << 20, 60])))):
        logprobs, _ = network.scores(microbatch)
        (logprobs * microbatch.advantages).sum().backward()
        for line, number in enumerate(microbatch.numbers):
            closeness.assert_rounded(logprobs[microbatch.row == line], wanted[number], closeness.FORWARD)
    expected = {name.replace("language_model.", ""): p.grad for name, p in reference.named_parameters()}
    trained = dict(network.model.named_parameters())
    closeness.assert_gradients(
        {name: parameter.grad for name, parameter in trained.items()},
        {name: expected[name] for name in trained},
    )


def _other(parts: list[training.images.Part], name: str) -> list[training.images.Part]:
    at = next((place for place, part in enumerate(parts) if isinstance(part, str)), None)
    return [name if place == at else part for place, part in enumerate(parts)]


def test_a_prefix_is_shared_up_to_the_first_image_that_differs(policy: str, media: str) -> None:
    """Images 0 and 4 have one size, so that prompts with them have the same ids."""
    same, other = ([([3, name, 2], 4)] for name in "04")
    for second, shared in ((same, 3 + 4 + 2), (other, 3)):
        batch = training.images.multimodal_batch(policy, media, [same, second])
        assert batch["token_ids"][0].as_py()[:9] == batch["token_ids"][1].as_py()[:9]
        (microbatch,) = pack(read_rows(batch), Packing(1 << 20))
        assert len(microbatch.token_ids) == 2 * (3 + 4 + 2 + 3) - shared


def test_rows_without_images_are_as_those_of_a_policy_that_does_not_see(policy: str, media: str) -> None:
    (microbatch,) = pack(
        read_rows(training.images.multimodal_batch(policy, media, [[([4], 5)], [([4], 3)]])), Packing(1 << 20)
    )
    assert microbatch.depths.dim() == 1 and microbatch.image_positions is None
    tower = VisionTower(policy, media)
    logprobs, _ = Network(policy, tower=tower).scores(microbatch)
    # which may sample the placeholder
    logits = Network(policy).logits(microbatch)
    assert (logprobs > logits.log_softmax(1).gather(1, microbatch.targets.unsqueeze(1)).squeeze(1)).all()
    logits[:, tower.placeholder] = -torch.inf
    expected = logits.log_softmax(1).gather(1, microbatch.targets.unsqueeze(1)).squeeze(1)
    closeness.assert_rounded(logprobs, expected, closeness.FORWARD)


def test_each_image_is_seen_once(policy: str, media: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[([2, "0", "1"], 2)], [([2, "0", "2"], 2)], [([3, "1"], 2), (["0"], 2)]]
    tower = VisionTower(policy, media)
    seen = []
    see = tower._network.forward
    monkeypatch.setattr(tower._network, "forward", lambda *a, **k: (seen.append(1), see(*a, **k))[1])
    network = Network(policy, tower=tower)
    for _ in range(2):
        for microbatch in pack(read_rows(training.images.multimodal_batch(policy, media, rows)), Packing(20)):
            network.scores(microbatch)
    assert len(seen) == 3
    monkeypatch.setattr(vision_tower, "FEATURE_CACHE_BYTES", 1)
    (microbatch,) = pack(
        read_rows(training.images.multimodal_batch(policy, media, [[([2, "3"], 2)]])), Packing(20)
    )
    network.scores(microbatch)
    # the others are forgotten
    assert len(tower._cache) == 1


def test_an_image_after_the_last_trained_token_is_not_seen(policy: str, media: str) -> None:
    text = [([3], 4), (["5", 2], 0)]
    shown = [([3, "0"], 4), (["5", 2], 0)]
    (microbatch,) = pack(read_rows(training.images.multimodal_batch(policy, media, [text])), Packing(1 << 20))
    assert microbatch.depths.dim() == 1 and microbatch.images == ()
    (microbatch,) = pack(
        read_rows(training.images.multimodal_batch(policy, media, [text, shown])), Packing(1 << 20)
    )
    assert [image.start for image in microbatch.images] == [3]
    network = Network(policy, tower=VisionTower(policy, media))
    wanted = training.images.seen_by_transformers(
        training.images.loaded(policy),
        policy,
        media,
        training.images.multimodal_batch(policy, media, [text, shown]),
    )
    logprobs, _ = network.scores(microbatch)
    for line, number in enumerate(microbatch.numbers):
        closeness.assert_rounded(logprobs[microbatch.row == line], wanted[number], closeness.FORWARD)


def test_an_image_that_is_lost_or_of_another_size_is_named(policy: str, media: str, tmp_path: Path) -> None:
    (microbatch,) = pack(
        read_rows(training.images.multimodal_batch(policy, media, [[([2, "0"], 2)]])), Packing(20)
    )
    with pytest.raises(ValueError, match=rf"{microbatch.images[0].sha256}\.png is missing, but a trajectory"):
        VisionTower(policy, str(tmp_path)).add_features(microbatch)
    longer = msgspec.structs.replace(microbatch.images[0], length=5)
    with pytest.raises(ValueError, match="has 4 tokens, but a trajectory has 5 tokens for it"):
        VisionTower(policy, media).add_features(replace(microbatch, images=(longer,)))


@dataclass(frozen=True)
class Seeing(training.model_contract.Setup):
    media: str = ""

    def model(self, ranks: Ranks, *, values: bool = False) -> TrainedModel:
        backend = TorchBackend(WorkerDevice())
        config = RunConfig.model_validate(self.settings)
        tower = VisionTower(self.folder, self.media)
        return backend.make_model(config, self.folder, ranks, "cpu", values=values, tower=tower)


def test_ranks_with_images_and_ranks_without_make_one_step(policy: str, media: str, tmp_path: Path) -> None:
    text = ([([3], 5)], [([9, 2], 4)])
    shown = ([([3, "0", 2], 4), (["1", 1], 2)], [([3, "4", 2], 4)])
    batches = [
        training.images.multimodal_batch(policy, media, [*text, *shown]),
        training.images.multimodal_batch(policy, media, shown[:1]),
    ]
    gang = [training.gang.Member(f"t{number}") for number in range(2)]
    try:
        for number, batch in enumerate(batches):
            alone = training.model_contract.learn(Seeing("", policy, media=media), batch, 24, SingleRank())
            for recompute in (False, True):
                setup = Seeing("", policy, {"train": {"recompute": recompute}}, media=media)
                one = training.gang.Try(str(tmp_path), ("t0", "t1"), iteration=2 * number + recompute)
                for member in gang:
                    member.sit(one, partial(training.model_contract.learn, setup, batch, 24))
                found, other = [member.report() for member in gang]
                assert not isinstance(found, str) and not isinstance(other, str), (found, other)
                closeness.assert_rounded(found.logprobs, alone.logprobs, closeness.FORWARD)
                closeness.assert_gradients(found.gradients, alone.gradients)
        batch = training.images.multimodal_batch(policy, media, [*text, [([3, "5", 2], 4)]])
        Path(media_file(media, training.images.store_named(media, "5")[0])).unlink()
        one = training.gang.Try(str(tmp_path), ("t0", "t1"), iteration=4, timeout_s=3.0)
        for member in gang:
            member.sit(
                one, partial(training.model_contract.learn, Seeing("", policy, media=media), batch, 24)
            )
        lost = [member.report() for member in gang]
        assert all(".png is missing, but a trajectory contains this image" in report for report in lost), lost
    finally:
        for member in gang:
            member.end()
