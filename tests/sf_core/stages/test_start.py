import json
import re
import shutil
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import sf_core
from sf_core.config import PolicyConfig, RunConfig
from sf_core.dataplane.chat.renderer import open_renderer
from sf_core.engines.torch.cached_model import open_model
from sf_core.engines.torch.kv_cache import KVCache
from sf_core.environments.environment import Environment
from sf_core.environments.quickstart import Quickstart
from sf_core.environments.screen.environment import ScreenOfButtons
from sf_core.models import projections
from sf_core.models.builtin import make_policy
from sf_core.models.context import cache_bytes
from sf_core.scheduling.plan import Worker
from sf_core.stages.finish import export_policy
from sf_core.stages.preflight.checks import preflight
from sf_core.stages.preflight.facts import Facts
from sf_core.stages.run import OpenRun, RunRef
from sf_core.stages.start import _recipe_files, start
from sf_core.training.warmstart import warmstart
from storage import files
from storage.run_directory import RunDirectory
from storage.tensors.weights import load_weights, save_weights
from tests import bench
from tests.bench import runs, started


def test_an_export_that_was_cut_off_is_done_again_as_a_whole(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    runs.configure(directory)
    save_weights(directory.start_dir, {"w": torch.ones(2)}, 0)
    for name in ("config.json", "tokenizer.json"):
        files.write_atomic(f"{directory.start_dir}/{name}", b"{}")
    files.write_atomic(f"{directory.policy_dir}/config.json", b"{}")
    export_policy(OpenRun(RunRef("run", directory.uri, dataplane_url="", attempt=1)))
    names = [uri.rsplit("/", 1)[1] for uri in files.list_files(directory.policy_dir)]
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert load_weights(directory.policy_dir)["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_run_names_and_exports_the_dtype_that_is_served(tmp_path: Path, stored: str, dtype: str) -> None:
    """What it starts from is copied as it is: trainers start from it, and engines convert it."""
    model = tmp_path / "model"
    make_policy(str(model), PolicyConfig(hidden_size=32, num_layers=1), seed=0)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, stored))
    loaded.save_pretrained(model)
    directory = RunDirectory(str(tmp_path / "run"))
    runs.configure(directory, policy={"model": str(model), "dtype": dtype})
    started.started(directory)
    manifest = directory.read_manifest(None, "start")
    assert manifest is not None
    directory.verify(manifest)
    assert {str(t.dtype) for t in load_weights(directory.start_dir).values()} == {f"torch.{stored}"}
    export_policy(OpenRun(RunRef("run", directory.uri, dataplane_url="", attempt=1)))
    assert {str(t.dtype) for t in load_weights(directory.policy_dir).values()} == {f"torch.{dtype}"}
    for folder in (directory.start_dir, directory.policy_dir):
        served = AutoModelForCausalLM.from_pretrained(folder)
        assert str(served.dtype) == f"torch.{dtype}"


def test_the_dtype_is_named_by_the_word_that_the_configuration_has_for_it(
    tmp_path: Path, policy_copy: Path
) -> None:
    shape = json.loads((policy_copy / "config.json").read_text(encoding="utf-8"))
    del shape["dtype"]
    for known, named in (({}, "dtype"), ({"torch_dtype": "float32"}, "torch_dtype")):
        (policy_copy / "config.json").write_text(json.dumps(shape | known), encoding="utf-8")
        directory = RunDirectory(str(tmp_path / f"run-{named}"))
        runs.configure(directory, policy={"model": str(policy_copy), "dtype": "bfloat16"})
        started.started(directory)
        copied = json.loads((Path(directory.start_dir) / "config.json").read_text(encoding="utf-8"))
        assert copied == shape | {named: "bfloat16"}


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_run_keeps_the_dtype_that_was_fast_where_it_started(
    tmp_path: Path, policy_copy: Path, monkeypatch: pytest.MonkeyPatch, is_fast: bool
) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    runs.configure(directory, policy={"model": str(policy_copy), "dtype": "auto"})
    monkeypatch.setattr(projections, "has_fast_products", lambda dtype, device: is_fast)
    assert start(RunRef("run", directory.uri, dataplane_url="", attempt=1))["dtype"] == DTYPES[is_fast]
    # on a machine of the other kind
    monkeypatch.setattr(projections, "has_fast_products", lambda dtype, device: not is_fast)
    run = OpenRun(RunRef("run", directory.uri, dataplane_url="", attempt=2))
    assert run.config.policy.dtype == DTYPES[is_fast]
    assert (
        json.loads(Path(directory.start_dir, "config.json").read_text(encoding="utf-8"))["dtype"]
        == DTYPES[is_fast]
    )


DTYPES = {False: "float32", True: "bfloat16"}


def test_an_emulated_run_exports_no_policy(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    runs.configure(directory, engine={"kind": "emulated"})
    save_weights(directory.start_dir, {"w": torch.ones(2)}, 0)
    export_policy(OpenRun(RunRef("run", directory.uri, dataplane_url="", attempt=1)))
    assert files.list_files(directory.policy_dir) == []


def test_a_run_does_not_go_on_from_a_start_folder_that_was_changed(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    runs.configure(directory)
    ref = RunRef("run", directory.uri, dataplane_url="", attempt=1)
    data = start(ref)
    assert Path(data["source"]).is_dir() and start(ref) == data
    tokenizer = Path(directory.start_dir) / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes().replace(b"a", b"b", 1))
    with pytest.raises(ValueError, match=r"tokenizer\.json: the content differs from what start wrote"):
        start(ref)


def test_an_engine_that_computes_nothing_goes_with_any_context_and_trainer() -> None:
    emulated = {"kind": "emulated", "context_length": 4096}
    for train in ({}, {"backend": "emulated"}):
        preflight(Facts(RunConfig.model_validate({"train": train, "engine": emulated})))


WITHOUT = [
    ("chat_template.jinja", "the tokenizer has no chat template; add chat_template.jinja there"),
    ("tokenizer.json", "no tokenizer.json; save a fast tokenizer there"),
]


@pytest.mark.parametrize(("file", "sentence"), WITHOUT)
def test_a_model_that_cannot_be_talked_to_is_refused_before_anything_starts(
    tmp_path: Path, policy_copy: Path, file: str, sentence: str
) -> None:
    (policy_copy / file).unlink()
    run = RunDirectory(str(tmp_path / "r"))
    config = started.from_model(run, policy_copy)
    for refuse in (lambda: preflight(Facts(config)), lambda: preflight(Facts(config, in_flow=True))):
        with bench.refusals.clear_refusal(f"policy.model: {policy_copy}: {sentence}"):
            refuse()
    with pytest.raises(ValueError, match=re.escape(sentence)):
        started.started(run)
    assert not Path(run.start_dir).exists()


def test_a_broken_tokenizer_is_refused_in_one_sentence(tmp_path: Path, policy_copy: Path) -> None:
    (policy_copy / "tokenizer.json").write_text("{}", encoding="utf-8")
    with bench.refusals.clear_refusal(f"policy.model: {policy_copy}: tokenizer or template is broken: "):
        preflight(Facts(started.from_model(RunDirectory(str(tmp_path / "r")), policy_copy)))


def test_a_folder_that_only_a_worker_has_is_left_to_it(tmp_path: Path) -> None:
    config = started.from_model(RunDirectory(str(tmp_path / "r")), Path("/nowhere"))
    facts = Facts(config, in_flow=True)
    facts.workers = [Worker("r0", frozenset({"rollout"}), memory=1)]
    preflight(facts)


def test_the_model_folder_is_needed_only_until_the_run_has_its_copy(
    tmp_path: Path, policy_copy: Path
) -> None:
    run = RunDirectory(str(tmp_path / "r"))
    config = started.from_model(run, policy_copy)
    started.started(run)
    shutil.rmtree(policy_copy)
    preflight(Facts(config))
    assert started.started(run)["source"] == str(policy_copy)


@pytest.mark.parametrize(("file", "sentence"), WITHOUT)
def test_a_run_that_copied_a_broken_folder_goes_on_once_the_folder_is_mended(
    tmp_path: Path, policy_copy: Path, file: str, sentence: str
) -> None:
    run = RunDirectory(str(tmp_path / "r"))
    config = started.from_model(run, policy_copy)
    missing = (policy_copy / file).read_bytes()
    (policy_copy / file).unlink()
    copies = files.copy_folder(str(policy_copy), run.start_dir)
    (Path(run.start_dir) / "left.json").write_bytes(b"{}")
    runs.commit(run, None, "start", outputs=copies, data={"source": str(policy_copy)})
    # as long as it is not mended, it is said what is wrong with it
    with pytest.raises(ValueError, match=re.escape(sentence)):
        preflight(Facts(config))
    with pytest.raises(ValueError, match=re.escape(sentence)):
        started.started(run)
    (policy_copy / file).write_bytes(missing)
    preflight(Facts(config))
    started.started(run)
    open_renderer(run.start_dir)
    assert sorted(path.name for path in Path(run.start_dir).iterdir()) == sorted(
        path.name for path in policy_copy.iterdir()
    )
    manifest = run.read_manifest(None, "start")
    assert manifest is not None
    run.verify(manifest)


def test_an_architecture_that_the_trainers_do_not_know_is_refused_before_the_start(
    tmp_path: Path, policy_copy: Path
) -> None:
    config = started.from_model(RunDirectory(str(tmp_path / "r")), policy_copy, train={"backend": "megatron"})
    preflight(Facts(config))
    shape = json.loads((policy_copy / "config.json").read_text(encoding="utf-8"))
    (policy_copy / "config.json").write_text(json.dumps(shape | {"model_type": "mistral"}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"model_type is mistral: use train\.backend torch"):
        preflight(Facts(config))


def test_heads_of_which_vllm_on_the_cpu_knows_none_are_refused_before_the_start(
    tmp_path: Path, policy_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shape = json.loads((policy_copy / "config.json").read_text(encoding="utf-8"))
    narrow = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape | {"head_dim": 16}))
    narrow.save_pretrained(policy_copy)

    def config(**engine: Any) -> RunConfig:
        return started.from_model(RunDirectory(str(tmp_path / "r")), policy_copy, engine=engine)

    with bench.refusals.clear_refusal("a width of 16 (head_dim)", "32, 64, 80,", "use engine.kind torch"):
        preflight(Facts(config(kind="vllm")))
    preflight(Facts(config(kind="torch")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    preflight(Facts(config(kind="vllm")))


def test_sequences_that_are_too_long_for_the_model_are_refused_before_the_start(
    tmp_path: Path, policy_copy: Path
) -> None:
    run = RunDirectory(str(tmp_path / "r"))
    config = started.from_model(run, policy_copy, engine={"context_length": 2048})
    shape = json.loads((policy_copy / "config.json").read_text(encoding="utf-8"))
    (policy_copy / "config.json").write_text(
        json.dumps(shape | {"max_position_embeddings": 1024}), encoding="utf-8"
    )
    with pytest.raises(ValueError, match=r"is 2048, but the model \(qwen3\) supports at most 1024 tokens"):
        preflight(Facts(config))
    (policy_copy / "config.json").write_text(
        json.dumps(shape | {"max_position_embeddings": 2048}), encoding="utf-8"
    )
    preflight(Facts(config))
    (policy_copy / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json cannot be read: "):
        preflight(Facts(config))


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_cache_larger_than_this_machine_is_refused_before_anything_starts(
    tmp_path: Path, command: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"storage: {{root: {tmp_path}}}\nengine: {{max_running: 2000000000}}\n", encoding="utf-8")
    code, output = bench.commands.sf(command, str(file))
    assert code != 0 and "worker t0 has " in output, output
    assert "for the KV cache of 2000000000 requests (engine.max_running)" in output
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_a_device_without_the_memory_refuses_the_cache_that_was_foretold(policy_copy: Path) -> None:
    config = json.loads((policy_copy / "config.json").read_text(encoding="utf-8"))
    foretold = cache_bytes(config, 10**11, 40)
    assert foretold is not None
    device = torch.device("cpu")
    opened = open_model(
        str(policy_copy), str(policy_copy), context_length=40, dtype=torch.float32, device=device
    )
    with bench.refusals.clear_refusal(
        f"needs {foretold / 1e9:,.1f} GB",
        "100000000000 requests (engine.max_running) of 40 tokens (engine.context_length)",
        "more than the cpu device has left",
    ):
        KVCache(opened.cache_shape, 10**11, 40, torch.float32, device)


@pytest.mark.parametrize("environment", [Quickstart(), ScreenOfButtons()], ids=["blind", "sees"])
def test_the_cache_of_warm_starts_knows_all_of_our_code_that_makes_them(
    tmp_path: Path, environment: Environment
) -> None:
    ran: set[str] = set()
    sees = isinstance(environment, ScreenOfButtons)
    policy = {"sees": sees, "hidden_size": 32, "num_layers": 1}

    def note(frame: FrameType, event: str, argument: object) -> None:
        ran.add(frame.f_code.co_filename)

    warm = {"steps": 1, "batch_size": 4}
    named = {"name": "screen" if sees else "quickstart"}
    config = RunConfig.model_validate({"policy": policy | {"warmstart": warm}, "environment": named})
    tracer = sys.gettrace()
    sys.settrace(note)
    try:
        make_policy(str(tmp_path), config.policy, seed=0)
        warmstart(str(tmp_path), config)
    finally:
        sys.settrace(tracer)
    ours = {file for file in map(Path, ran) if file.is_relative_to(sf_core.__path__[0])}
    assert {file.stem for file in ours} >= ({"preprocess"} if sees else {"network", "decoder", "tool_loop"})
    # settings are in the recipe by their values
    of_settings = {file for file in ours if file.parent.name == "config" or file.name == "settings.py"}
    # it decides from which folder modules are imported, and changes none of them
    of_imports = {file for file in ours if file.name == "import_path.py"}
    assert ours - of_settings - of_imports <= set(_recipe_files(environment))
