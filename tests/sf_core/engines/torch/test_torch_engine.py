import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sf_core.config import RunConfig
from sf_core.config.devices import WorkerDevice
from sf_core.engines.host_weights import HostWeights
from sf_core.engines.protocol import WeightsRefusedError
from sf_core.engines.torch import loading
from sf_core.engines.torch.cached_model import DecoderModel
from sf_core.engines.torch.kv_cache import KVCache
from sf_core.engines.torch.torch_engine import TorchEngine, make_engine
from sf_core.testing.engines import awake, drain
from sf_core.types import Chunk, FinishReason, GenerationRequest, Sampling, WeightsRef
from tests import bench
from tests.bench.engines.model_folders import ModelFolders
from tests.sf_core.engines.torch import asked

KINDS = ["qwen3", "qwen2", "llama", "llama-yarn", "gpt2", "qwen3-moe"]


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
class TestContract(bench.engines.grammar_contract.GrammarEngineTests):
    num_at_once = 40
    num_sequences = bench.properties.examples(20)

    @pytest.fixture(autouse=True)
    def _of(self, model_folders: ModelFolders, kind: str) -> None:
        self.folders = model_folders
        self.kind = kind

    def make(self) -> TorchEngine:
        return TorchEngine(self.folders(self.kind), max_running=8, context_length=100)

    def folder(self, version: int) -> str:
        return self.folders(self.kind, version % 3)


def generate(engine: TorchEngine, requests: Iterable[GenerationRequest]) -> dict[str, list[int]]:
    """Token ids by request."""
    for r in requests:
        engine.submit(r)
    return collect(drain(engine))


def collect(chunks: list[Chunk]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for chunk in chunks:
        tokens.setdefault(chunk.request_id, []).extend(chunk.token_ids)
    return tokens


def alone(folder: str, r: GenerationRequest, context_length: int = 100) -> list[int]:
    return generate(asked.engine_of(folder, context_length=context_length), [r])[r.request_id]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_equals_that_of_transformers(model_folders: ModelFolders, kind: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(model_folders(kind))
    model.generation_config.eos_token_id = None
    engine = asked.engine_of(model_folders(kind), max_running=2)
    lengths = 1, 7, 20, 33
    got = generate(engine, [asked.request(str(len(p)), p) for p in asked.prompts(*lengths)])
    for prompt in asked.prompts(*lengths):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=30)
        assert got[str(len(prompt))] == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_equal_those_of_a_full_forward_pass(
    model_folders: ModelFolders, kind: str, temperature: float
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(model_folders(kind))
    (prompt,) = asked.prompts(12)
    engine = asked.engine_of(model_folders(kind))
    engine.submit(asked.request("r", prompt, sampling=Sampling(temperature=temperature, seed=2**64 - 1)))
    chunks = drain(engine)
    tokens = collect(chunks)["r"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = (logits / (temperature or 1)).log_softmax(-1)[range(30), tokens]
    got = torch.tensor([logprob for chunk in chunks for logprob in chunk.logprobs])
    bench.closeness.assert_rounded(got, expected, bench.closeness.FORWARD)


def test_tokens_do_not_depend_on_the_batch_nor_on_when_a_request_joins(model_folders: ModelFolders) -> None:
    requests = [
        asked.request(
            str(i), prompt, sampling=Sampling(temperature=[0, 1, 0.8][i % 3], top_p=[1, 0.9][i % 2], seed=i)
        )
        for i, prompt in enumerate(asked.prompts(3, 9, 9, 14, 22, 30, 41))
    ]
    engine = asked.engine_of(model_folders(), max_running=3)
    chunks = []
    for i, r in enumerate(requests):
        engine.submit(r)
        for _ in range(i):
            chunks += engine.step()
    got = collect(chunks + drain(engine))
    assert got == {r.request_id: alone(model_folders(), r) for r in requests}


def test_members_of_a_group_share_their_prompt_and_differ_by_seed(model_folders: ModelFolders) -> None:
    (prompt,) = asked.prompts(25)
    group = [asked.request(str(i), prompt, sampling=Sampling(seed=i)) for i in range(8)]
    got = generate(asked.engine_of(model_folders(), max_running=5), group)
    assert got == {r.request_id: alone(model_folders(), r) for r in group}
    assert len({tuple(tokens) for tokens in got.values()}) == 8


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_a_next_turn_extends_the_cached_sequence_of_the_one_before(
    model_folders: ModelFolders, kind: str
) -> None:
    engine = asked.engine_of(model_folders(kind), max_running=3)
    first, other = asked.prompts(15, 30)
    answers = generate(engine, [asked.request("a", first), asked.request("b", other)])
    turns = [
        asked.request("extended", first + answers["a"] + [1, 2, 3]),
        asked.request("shortened", other[:20] + [5, 6]),
        asked.request("repeated", first),
    ]
    got = generate(engine, turns)
    assert got == {r.request_id: alone(model_folders(kind), r) for r in turns}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_aborted_request_resumed_on_another_engine_gives_the_same_tokens(
    model_folders: ModelFolders, temperature: float
) -> None:
    (prompt,) = asked.prompts(10)
    whole = asked.request("r", prompt, sampling=Sampling(temperature=temperature, seed=11))
    expected = alone(model_folders(), whole)
    for steps in (0, 1, 16, 21):
        engine = asked.engine_of(model_folders())
        engine.submit(whole)
        chunks = [chunk for _ in range(steps) for chunk in engine.step()]
        chunks += engine.abort(["r", "unknown"])
        assert chunks[-1].finish_reason is FinishReason.ABORT
        assert engine.num_requests == 0
        sofar = [token for chunk in chunks for token in chunk.token_ids]
        assert len(sofar) == steps
        rest = replace(whole, prompt_ids=prompt + sofar, position=steps, max_tokens=30 - steps)
        assert sofar + alone(model_folders(), rest) == expected


def test_budget_and_context_end_a_request_with_length(model_folders: ModelFolders) -> None:
    engine = asked.engine_of(model_folders(), context_length=20)
    short, long, almost = asked.prompts(5, 12, 19)
    for r in (
        asked.request("one", short, 1),
        asked.request("full", long, 100),
        asked.request("last", almost, 5),
    ):
        engine.submit(r)
    chunks = drain(engine)
    assert {name: len(tokens) for name, tokens in collect(chunks).items()} == {"one": 1, "full": 8, "last": 1}
    assert {c.finish_reason for c in chunks} == {FinishReason.LENGTH}
    (seventeen,) = asked.prompts(17)
    assert generate(engine, [asked.request("again", seventeen, 3)])["again"] == alone(
        model_folders(), asked.request("r", seventeen, 3)
    )


def test_plain_requests_report_every_16_tokens_and_streamed_ones_each(model_folders: ModelFolders) -> None:
    engine = asked.engine_of(model_folders())
    plain, streamed = asked.prompts(6, 8)
    engine.submit(asked.request("plain", plain, 37))
    engine.submit(asked.request("streamed", streamed, 3, stream=True))
    lengths = [(chunk.request_id, len(chunk.token_ids)) for chunk in drain(engine)]
    assert lengths == [("streamed", 1)] * 3 + [("plain", 16), ("plain", 16), ("plain", 5)]


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "qwen3-moe"])
def test_after_new_weights_tokens_are_those_the_new_model_gives(
    model_folders: ModelFolders, kind: str
) -> None:
    engine = asked.engine_of(model_folders(kind, 0))
    requests = [asked.request(str(i), p, 25) for i, p in enumerate(asked.prompts(4, 11, 30))]
    for r in requests:
        engine.submit(r)
    before = [chunk for _ in range(10) for chunk in engine.step()]
    before += asked.take(engine, model_folders(kind, 1), 7)
    chunks = before + drain(engine)
    assert [(chunk.version, len(chunk.token_ids)) for chunk in chunks[:3]] == [(0, 10)] * 3
    assert {chunk.version for chunk in chunks[3:]} == {7}
    for r in requests:
        tokens = collect(chunks)[r.request_id]
        assert tokens[:10] == alone(model_folders(kind, 0), replace(r, max_tokens=10))
        rest = replace(r, prompt_ids=r.prompt_ids + tokens[:10], max_tokens=15)
        assert tokens[10:] == alone(model_folders(kind, 1), rest)
    generate(engine, [asked.request("again", requests[2].prompt_ids)])


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_of_published_weights_reads_no_others(
    model_folders: ModelFolders, tmp_path: Path, kind: str
) -> None:
    start = tmp_path / "start"
    shutil.copytree(model_folders(kind, 0), start)
    config = RunConfig.model_validate({"engine": {"max_running": 2, "context_length": 100}})
    engine = make_engine(config, str(start), WorkerDevice())
    r = asked.request("r", asked.prompts(9)[0], 12)
    of_start = alone(model_folders(kind, 0), r)
    of_published = alone(model_folders(kind, 1), r)
    assert of_start != of_published
    asked.take(engine, str(start), 0)
    assert generate(engine, [r])["r"] == of_start
    engine.rest()
    (start / "model.safetensors").unlink()
    published = tmp_path / "v00007"
    published.mkdir()
    shutil.copy(f"{model_folders(kind, 1)}/model.safetensors", published)
    for used in (engine, make_engine(config, str(start), WorkerDevice())):
        assert used.version is None
        asked.take(used, str(published), 7)
        assert generate(used, [r])["r"] == of_published
        asked.take(used, model_folders(kind, 0), 8)
        assert generate(used, [r])["r"] == of_start


def test_an_engine_does_not_serve_weights_that_are_not_all_there(
    model_folders: ModelFolders, tmp_path: Path
) -> None:
    params = load_file(f"{model_folders()}/model.safetensors")
    del params["model.layers.1.mlp.up_proj.weight"]
    save_file(params, tmp_path / "model.safetensors", {"format": "pt"})
    engine = TorchEngine(model_folders(), max_running=2, context_length=100)
    with pytest.raises(ValueError, match=r"lacks 1 of the 24 weights .*\.1\.mlp\.up_proj\.weight"):
        awake(engine, WeightsRef(1, str(tmp_path)))
    assert engine.version is None
    asked.take(engine, model_folders(), 2)


def test_kept_kv_lets_running_requests_go_on_without_recomputation(model_folders: ModelFolders) -> None:
    (prompt,) = asked.prompts(20)

    def interrupted_by_weights(engine: TorchEngine) -> list[Chunk]:
        engine.submit(asked.request("r", prompt, 40))
        return engine.step() + asked.take(engine, model_folders(seed=1), 1) + drain(engine)

    kept = asked.engine_of(model_folders(), kv_on_update="keep")
    recomputed = asked.engine_of(model_folders())
    a, b = (interrupted_by_weights(engine) for engine in (kept, recomputed))
    assert sum(len(chunk.token_ids) for chunk in a) == 40
    assert a[-1].version == b[-1].version == 1
    assert collect(a) != collect(b)


def test_kept_kv_is_that_of_its_request_and_no_other_one_starts_from_it(model_folders: ModelFolders) -> None:
    (prompt,) = asked.prompts(20)
    engine = asked.engine_of(model_folders(), kv_on_update="keep")
    # one has ended, one goes on
    generate(engine, [asked.request("before", prompt, 2)])
    engine.submit(asked.request("going on", prompt, 40))
    engine.step()
    asked.take(engine, model_folders(seed=1), 1)
    new = asked.request("new", prompt, 10)
    expected = alone(model_folders(seed=1), new)
    assert generate(engine, [new])["new"] == expected
    # the one that went on has ended by now
    assert generate(engine, [replace(new, request_id="again")])["again"] == expected


def test_tokens_sampled_before_new_weights_are_reported_with_the_version_that_sampled(
    model_folders: ModelFolders,
) -> None:
    engine = asked.engine_of(model_folders())
    engine.submit(asked.request("r", asked.prompts(5)[0]))
    engine.step()
    (sampled,) = asked.take(engine, model_folders(), 1)
    (rest,) = engine.abort()
    assert (len(sampled.token_ids), sampled.version, sampled.finish_reason) == (1, 0, None)
    assert (rest.token_ids, rest.version) == ([], 1)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_sequences_longer_than_the_model_is_for_are_refused(model_folders: ModelFolders, kind: str) -> None:
    with pytest.raises(ValueError, match=r"is 129, but the model \(.*\) supports at most 128 tokens"):
        asked.engine_of(model_folders(kind), context_length=129)


def test_wrong_weights_are_refused_and_the_old_ones_stay(model_folders: ModelFolders, tmp_path: Path) -> None:
    engine = asked.engine_of(model_folders())
    good = load_file(f"{model_folders()}/model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    wrong = {
        "is missing": {k: v for k, v in good.items() if k != name},
        "does not belong to this model": good | {"extra": torch.zeros(1)},
        r"shape \[32, 48\]; expected \[48, 32\]": good | {name: good[name].t().contiguous()},
        "not a complete safetensors file": {},
    }
    for message, params in wrong.items():
        save_file(params, tmp_path / "model.safetensors")
        if not params:
            (tmp_path / "model.safetensors").write_bytes(b"cut off")
        with pytest.raises(WeightsRefusedError, match=message):
            awake(engine, WeightsRef(1, str(tmp_path)))
        assert engine.step() == []
    assert engine.version == 0
    r = asked.request("r", asked.prompts(9)[0])
    assert generate(engine, [r])["r"] == alone(model_folders(), r)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_without_memory_for_two_models_the_old_one_makes_room_first(
    model_folders: ModelFolders, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "free_memory", lambda device: 1)
    engine = asked.engine_of(model_folders(kind))
    r = asked.request("r", asked.prompts(9)[0])
    engine.submit(r)
    chunks = engine.step() + asked.take(engine, model_folders(kind, 1), 1) + drain(engine)
    (first, *rest) = collect(chunks)["r"]
    going_on = replace(r, prompt_ids=[*r.prompt_ids, first], max_tokens=29)
    assert rest == alone(model_folders(kind, 1), going_on)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_weights_in_use_do_not_change_with_the_file_that_they_came_from(
    model_folders: ModelFolders, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostWeights, "fetch", lambda _, weights: weights.uri)
    file = tmp_path / "model.safetensors"
    r = asked.request("r", asked.prompts(9)[0])
    shutil.copy(f"{model_folders(kind)}/model.safetensors", file)
    engine = TorchEngine(model_folders(kind), max_running=2, context_length=100)
    expected = alone(model_folders(kind), r)
    for version in (0, 1):
        asked.take(engine, str(tmp_path), version)
        with file.open("rb+") as opened:
            opened.seek(file.stat().st_size // 2)
            opened.write(bytes(file.stat().st_size // 4))
        assert generate(engine, [r])["r"] == expected
        shutil.copy(f"{model_folders(kind)}/model.safetensors", file)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_after_a_rest_an_engine_serves_again_and_what_was_coming_is_forgotten(
    model_folders: ModelFolders, kind: str
) -> None:
    engine = asked.engine_of(model_folders(kind))
    r = asked.request("r", asked.prompts(9)[0])
    engine.submit(r)
    engine.submit(replace(r, request_id="waits"))
    engine.step()
    engine.pause()
    engine.update_weights(WeightsRef(1, model_folders(kind, 1)))
    engine.rest()
    assert (engine.version, engine.num_requests, engine.abort(), engine.step()) == (None, 0, [], [])
    engine.update_weights(WeightsRef(2, model_folders(kind, 1)))
    awake(engine, WeightsRef(3, model_folders(kind, 2)))
    assert generate(engine, [r])["r"] == alone(model_folders(kind, 2), r)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
@settings(
    max_examples=bench.properties.examples(20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_sequence_of_calls_ends_every_request_once_with_the_tokens_of_an_undisturbed_run(
    model_folders: ModelFolders, kind: str, data: st.DataObject
) -> None:
    engine = asked.engine_of(model_folders(kind), max_running=data.draw(st.integers(1, 4)), context_length=40)
    submitted: dict[str, GenerationRequest] = {}
    chunks: list[Chunk] = []
    actions = st.lists(
        st.sampled_from(
            ["submit", "submit", "step", "step", "step", "abort", "take", "take and wait", "pause", "rest"]
        ),
        max_size=25,
    )
    versions = itertools.count(1)
    for action in data.draw(actions):
        if action == "submit":
            name = f"r{len(submitted)}"
            prompt = asked.prompts(30)[0][: data.draw(st.integers(1, 30))]
            r = asked.request(
                name,
                prompt,
                data.draw(st.integers(1, 30)),
                Sampling(
                    temperature=data.draw(st.sampled_from([0.0, 1.0])), seed=data.draw(st.integers(0, 2))
                ),
                stop_token_ids=data.draw(st.sampled_from([(), (7,), (3, 9, 12)])),
                stream=data.draw(st.booleans()),
            )
            submitted[name] = r
            engine.submit(r)
        elif action == "abort":
            chunks += engine.abort(data.draw(st.sampled_from([None, ["r0"], ["r1", "r3"]])))
        elif action == "take":
            engine.update_weights(WeightsRef(next(versions), model_folders(kind)))
        elif action == "take and wait":
            chunks += asked.take(engine, model_folders(kind), next(versions))
        elif action == "pause":
            engine.pause()
            chunks += engine.step()
            engine.resume()
        elif action == "rest":
            chunks += engine.abort()
            engine.rest()
            asked.take(engine, model_folders(kind), next(versions))
        else:
            chunks += engine.step()
    chunks += drain(engine)

    ends = [chunk.request_id for chunk in chunks if chunk.finish_reason is not None]
    assert sorted(ends) == sorted(submitted)
    tokens = collect(chunks)
    for name, r in submitted.items():
        mine = [chunk for chunk in chunks if chunk.request_id == name]
        assert [chunk.finish_reason is None for chunk in mine[:-1]] == [True] * (len(mine) - 1)
        assert [chunk.version for chunk in mine] == sorted(chunk.version for chunk in mine)
        expected = alone(model_folders(kind), replace(r, stream=False), context_length=40)
        if mine[-1].finish_reason is FinishReason.ABORT:
            expected = expected[: len(tokens[name])]
        assert tokens[name] == expected
        assert len(tokens[name]) <= r.max_tokens


@pytest.fixture
def fails_at(small_policy: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """A token with which the logits of built-in policies are NaN, and so are keys and values."""
    token = 33
    next_logits = DecoderModel.next_logits

    def spoiled(self: DecoderModel, cache: KVCache, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        bad = (ids == token).nonzero().flatten().tolist()
        logits = next_logits(self, cache, ids, starts)
        keys, values = cache.read(0, cache.place(None, starts, 1))
        keys[bad] = torch.nan
        values[bad] = torch.nan
        logits[bad] = torch.nan
        logits[:, token] = -torch.inf
        return logits

    monkeypatch.setattr(DecoderModel, "next_logits", spoiled)
    return token


def test_a_row_whose_logits_are_no_distribution_ends_its_request_alone(
    small_policy: str, fails_at: int
) -> None:
    sound = [asked.request(str(i), [5 + i] * 12, stream=True) for i in range(3)]
    expected = generate(asked.engine_of(small_policy, max_running=4), sound)
    engine = asked.engine_of(small_policy, max_running=4)
    for one in (sound[0], asked.request("bad", [5] * 11 + [fails_at]), *sound[1:]):
        engine.submit(one)
    chunks = drain(engine)
    [failed] = [chunk for chunk in chunks if chunk.fault]
    assert failed == Chunk.failed("bad", 0, failed.fault) and "no distribution" in failed.fault
    assert collect([chunk for chunk in chunks if not chunk.fault]) == expected
    # its slot is given to others
    assert generate(engine, sound) == expected


def test_an_engine_goes_on_after_a_step_that_failed(
    small_policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.engines.fatal.make_forward_fatal(33, bench.engines.fatal.fail, monkeypatch.setattr)
    engine = asked.engine_of(small_policy)
    expected = generate(engine, [asked.request("r", [5] * 12)])
    for name, prompt in (("r", [5] * 12), ("fatal", [5] * 11 + [33])):
        engine.submit(asked.request(name, prompt))
    with pytest.raises(RuntimeError, match="forward pass failed"):
        drain(engine)
    assert engine.num_requests == 0 and engine.abort() == []
    assert generate(engine, [asked.request("r", [5] * 12)]) == expected


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=float("nan")),
        Sampling(temperature=-1.0),
        Sampling(temperature=float("inf")),
        Sampling(top_p=float("nan")),
        Sampling(top_k=2**31),
        Sampling(top_k=-1),
        Sampling(seed=2**64),
        Sampling(seed=-1),
    ],
)
def test_sampling_that_is_out_of_range_is_refused_before_it_joins_a_batch(
    small_policy: str, sampling: Sampling
) -> None:
    with pytest.raises(ValueError, match="expected"):
        asked.engine_of(small_policy).submit(asked.request("r", [5], sampling=sampling))
