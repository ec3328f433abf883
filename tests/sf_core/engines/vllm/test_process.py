"""The server's processes: those of an untied policy, killed in several ways, and starts that fail."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from sf_core.engines.protocol import EngineLostError
from sf_core.engines.registry import make_engine
from sf_core.process.child_processes import is_keeper
from sf_core.testing.driven_engine import DrivenEngine
from sf_core.testing.engines import awake, drain, ids_of, sample_by_both, until
from sf_core.types import Chunk, GenerationRequest, Sampling
from tests import bench
from tests.bench import waits
from tests.sf_core.engines.vllm import small_policies

pytestmark = pytest.mark.system

PROMPT = [5, 6, 7, 8]

API_SERVER = "vllm.entrypoints.openai.api_server"
WORKER = "VLLM::Worker"


def request(name: str, max_tokens: int = 300) -> GenerationRequest:
    return GenerationRequest(name, PROMPT, 0, max_tokens, (), Sampling(seed=len(name)), stream=True)


def check_logprobs(policy: small_policies.Policies, chunks: list[Chunk]) -> None:
    """Tokens of one request, each under the weights of its version."""
    ids = [*PROMPT, *ids_of(chunks)]
    place = len(PROMPT)
    expected = {c.version: policy.logits(c.version, ids).log_softmax(-1) for c in chunks}
    for chunk in chunks:
        for token, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
            assert abs(logprob - expected[chunk.version][place - 1, token].item()) < 1e-4
            place += 1


@pytest.fixture(scope="module")
def own(vllm: str, untied: small_policies.Policies) -> Iterator[DrivenEngine]:
    """An engine that each test leaves without a server, so that the next one has it started again."""
    # at temperature 1 these are no others
    arguments = ["--logprobs-mode=raw_logprobs"]
    engine = DrivenEngine(make_engine(small_policies.config(vllm={"arguments": arguments}), untied.folder(0)))
    yield engine
    engine.close()


# most tests here need a start of the server each, 90 CPU-seconds
@pytest.mark.nightly
def test_an_untied_policy_is_updated_in_the_middle_of_a_request_and_a_killed_server_is_lost(
    own: DrivenEngine, untied: small_policies.Policies, as_tcp: Callable[[str], str]
) -> None:
    processes = serving(own, untied)

    def update() -> list[Chunk]:
        awake(own, untied.ref(0))
        own.submit(request("r"))
        return sample(own, 3) + awake(own, untied.ref(1)) + drain(own)

    chunks = sample_by_both(update)
    assert len(ids_of(chunks)) == 300
    check_logprobs(untied, chunks)
    lose_requests(own, untied, one_of(processes, API_SERVER).kill)
    check_gone(processes)


@pytest.mark.nightly
def test_a_server_computes_in_the_dtype_of_the_run_whatever_that_of_the_file_is(
    vllm: str, tmp_path: Path
) -> None:
    policies = small_policies.Policies(tmp_path, tied=False)
    folder = policies.folder(0)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    settings = small_policies.config(vllm={"arguments": ["--logprobs-mode=raw_logprobs"]})
    engine = DrivenEngine(make_engine(settings, folder))
    awake(engine, policies.ref(0))
    engine.submit(request("r", max_tokens=20))
    check_logprobs(policies, drain(engine))
    engine.close()


@pytest.mark.nightly
def test_a_server_that_is_killed_while_it_starts_is_started_again(
    own: DrivenEngine, untied: small_policies.Policies
) -> None:
    processes = starting(own, untied)
    one_of(processes, API_SERVER).kill()
    assert lost(own) == []
    check_gone(processes)
    # and later tests


@pytest.mark.nightly
def test_a_server_whose_inner_process_is_killed_while_it_samples_is_lost(
    own: DrivenEngine, untied: small_policies.Policies
) -> None:
    processes = serving(own, untied)
    lose_requests(own, untied, one_of(processes, WORKER).kill)
    check_gone(processes)


@pytest.mark.nightly
def test_a_server_that_is_killed_at_rest_is_started_again(
    own: DrivenEngine, untied: small_policies.Policies
) -> None:
    processes = serving(own, untied)
    own.rest()
    one_of(processes, API_SERVER).kill()
    check_gone(processes)
    assert (own.version, own.step()) == (None, [])
    # and the next test


@pytest.mark.nightly
def test_a_server_whose_inner_process_is_killed_while_it_loads_is_lost(
    own: DrivenEngine, untied: small_policies.Policies
) -> None:
    processes = serving(own, untied)
    worker = one_of(processes, WORKER)
    command = one_of(processes, API_SERVER).cmdline()
    weights = Path(command[command.index("--model") + 1], "model.safetensors")

    def kill() -> None:
        loaded = weights.resolve()
        # so that it cannot end what it is told to do
        worker.suspend()
        own.update_weights(untied.ref(3))
        until(lambda: own.wait(0.01), lambda: weights.resolve() != loaded)
        worker.kill()

    lose_requests(own, untied, kill)
    check_gone(processes)


def starting(engine: DrivenEngine, policy: small_policies.Policies) -> set[psutil.Process]:
    """Have the engine start its server; returns the processes that there are when it has begun."""
    before = small_policies.servers()
    own = set[psutil.Process]()

    def look() -> None:
        assert engine.step() == []
        own.update(small_policies.servers() - before)

    engine.update_weights(policy.ref(0))
    until(look, lambda: any(process.cmdline()[1:3] == ["-m", API_SERVER] for process in own))
    return own


def serving(engine: DrivenEngine, policy: small_policies.Policies) -> set[psutil.Process]:
    """Have the engine start its server; returns the server's processes."""
    before = small_policies.servers()
    try:
        awake(engine, policy.ref(0))
    except EngineLostError:
        # the server was killed at rest, and this was the first to notice
        awake(engine, policy.ref(0))
    return small_policies.servers() - before


def one_of(processes: set[psutil.Process], word: str) -> psutil.Process:
    (found,) = (p for p in processes if word in " ".join(line := p.cmdline()) and not is_keeper(line))
    return found


def check_gone(processes: set[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=waits.patience())
    assert not alive


def sample(engine: DrivenEngine, number: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    while len(ids_of(chunks)) < number:
        chunks += engine.step()
    return chunks


def lost(engine: DrivenEngine) -> list[Chunk]:
    """Step until the engine says that it has lost its server; returns what it had reported before."""
    chunks: list[Chunk] = []
    with pytest.raises(EngineLostError):
        until(lambda: chunks.extend(engine.step()), lambda: False)
    assert (engine.version, engine.num_requests, engine.abort(), engine.step()) == (None, 0, [], [])
    return chunks


def lose_requests(engine: DrivenEngine, policy: small_policies.Policies, kill: Callable[[], None]) -> None:
    """Kill the server while it samples, and check that what was received stands."""
    engine.submit(request("one"))
    engine.submit(request("two"))
    chunks = sample(engine, 10)
    kill()
    chunks += lost(engine)
    for name in ("one", "two"):
        received = [chunk for chunk in chunks if chunk.request_id == name]
        # ended only if all was received before the server was killed
        assert len(ids_of(received)) == 300 or all(chunk.finish_reason is None for chunk in received)
        check_logprobs(policy, received)


WORKER_PROCESS = """
import sys, time
from sf_core.engines.registry import make_engine
from sf_core.testing.driven_engine import DrivenEngine
from sf_core.testing.engines import awake
from sf_core.types import GenerationRequest, Sampling, WeightsRef
from tests.sf_core.engines.vllm.small_policies import config
moment, folder, newer = sys.argv[1:]
engine = DrivenEngine(make_engine(config(), folder))
if moment == "starts":
    engine.take_weights(WeightsRef(0, folder))
else:
    awake(engine, WeightsRef(0, folder))
    engine.submit(GenerationRequest("r", [5], 0, 300, (), Sampling(seed=1)))
if moment == "rests":
    engine.rest()
print(moment, flush=True)
number = 0
while True:
    if moment == "loads":
        number += 1
        engine.take_weights(WeightsRef(number, newer if number % 2 else folder))
    time.sleep(0.005)
    engine.step()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["starts", "samples", "loads", "rests"])
def test_a_worker_that_is_killed_while_its_server_works_leaves_no_process_of_it(
    vllm: str, tied: small_policies.Policies, moment: str
) -> None:
    command = [sys.executable, "-c", WORKER_PROCESS, moment, tied.folder(0), tied.folder(1)]
    worker = psutil.Popen(command, stdout=subprocess.PIPE)
    try:
        assert worker.stdout.readline().strip() == moment.encode()
        size = 3 if moment == "starts" else 4
        waits.wait_until(
            lambda: len(worker.children(recursive=True)) >= size, "vLLM's processes", every_s=0.1
        )
        family = worker.children(recursive=True)
    finally:
        worker.kill()
    worker.wait()
    _, alive = psutil.wait_procs(family, timeout=waits.patience())
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_rest_leaves_a_server_starting_which_is_ended_with_the_engine_even_without_its_keeper(
    vllm: str, tied: small_policies.Policies
) -> None:
    before = small_policies.servers()
    engine = DrivenEngine(make_engine(small_policies.config(), tied.folder(0)))
    engine.update_weights(tied.ref(0))
    waits.wait_until(lambda: engine.step() == [] and small_policies.servers() - before, "a server")
    own = small_policies.servers() - before
    engine.rest()
    assert (engine.version, engine.step()) == (None, [])
    # without a GPU it takes nothing that a trainer needs
    assert small_policies.servers() >= own
    engine.update_weights(tied.ref(1))
    next(process for process in own if is_keeper(process.cmdline())).kill()
    engine.close()
    _, alive = psutil.wait_procs(own, timeout=waits.patience())
    assert not alive


def test_a_server_gets_neither_our_settings_nor_keys_but_the_mark_of_its_stack_and_vllms_own(
    vllm: str, tied: small_policies.Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    withheld = (
        "SF_DATAPLANE_KEY",
        "SF_PLANTED",
        "PREFECT_API_AUTH_STRING",
        "AWS_SECRET_ACCESS_KEY",
        "WANDB_API_KEY",
        "HF_TOKEN",
    )
    given = {"SF_STACK": "/planted", "VLLM_PLANTED": "planted", "OMP_NUM_THREADS": "1"}
    for name, value in (dict.fromkeys((*withheld, "PYTHONPATH"), "/planted") | given).items():
        monkeypatch.setenv(name, value)
    engine = DrivenEngine(make_engine(small_policies.config(), tied.folder(0)))
    environment = one_of(starting(engine, tied), API_SERVER).environ()
    shown = os.listdir(environment["PYTHONPATH"])
    engine.close()
    assert [name for name in withheld if name in environment] == []
    assert shown == ["sf_core"]
    assert {name: environment.get(name) for name in given} == given


def test_three_failed_starts_in_a_row_end_the_engine_with_the_last_lines_of_the_log(
    tied: small_policies.Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a Python without vLLM
    monkeypatch.setenv("SF_VLLM_PYTHON", sys.executable)
    engine = DrivenEngine(make_engine(small_policies.config(), tied.folder(0)))
    for _ in range(2):
        with pytest.raises(EngineLostError):
            awake(engine, tied.ref(0))
    with pytest.raises(RuntimeError, match="3 times in a row") as failure:
        awake(engine, tied.ref(0))
    assert "No module named" in str(failure.value)
    engine.close()


def test_a_policy_whose_heads_would_end_the_server_is_refused_where_its_engine_is_made(
    vllm: str, model_folders: bench.engines.model_folders.ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError) as refused:
        make_engine(small_policies.config(), model_folders("qwen3"))
    bench.refusals.check_sentence(str(refused.value), "a width of 16 (head_dim)")


def test_without_vllm_the_engine_says_where_it_looked(
    tied: small_policies.Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SF_VLLM_PYTHON", "/nowhere/python")
    with pytest.raises(FileNotFoundError, match=r"/nowhere/python.*make vllm"):
        make_engine(small_policies.config(), tied.folder(0))
