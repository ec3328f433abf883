"""What each architecture needs is what its folders have, whatever families call it and leave out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from sf_core.models.pretrained.needed_weights import (
    UnknownModelError,
    count_language_parameters,
    find_missing_quantized_modules,
    find_missing_weights,
)
from sf_core.training.policy_folder import read_model_config
from storage.tensors.weights import open_weights
from tests import bench
from tests.bench.engines import families
from tests.sf_core.models.pretrained import gguf_files

Shapes = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def stored(
    model_folders: bench.engines.model_folders.ModelFolders, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[dict[str, Any], Shapes]]:
    """The config.json of a folder of this architecture, and the shapes of its weights."""
    made: dict[str, tuple[dict[str, Any], Shapes]] = {}

    def find(kind: str) -> tuple[dict[str, Any], Shapes]:
        if kind not in made:
            folder = str(tmp_path_factory.mktemp(kind))
            if kind == "qwen2_5_vl":
                bench.training.images.multimodal_policy(folder)
            elif kind in bench.engines.model_folders.CONFIGS:
                folder = model_folders(kind)
            else:
                AutoModelForCausalLM.from_config(families.small_config(kind)).save_pretrained(folder)
            made[kind] = read_model_config(folder), open_weights(folder)[0].shapes
        return made[kind]

    return find


KINDS = [*bench.engines.model_folders.CONFIGS, *families.FAMILIES, "qwen2_5_vl"]
Stored = Callable[[str], tuple[dict[str, Any], Shapes]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_folder_lacks_nothing_and_each_tensor_is_missed(stored: Stored, kind: str) -> None:
    shape, shapes = stored(kind)
    assert not find_missing_weights(shape, shapes)
    assert not find_missing_quantized_modules(shape, shapes)
    # harmless: an old buffer, layers that predict more tokens
    assert not find_missing_weights(
        shape, shapes | {"model.rotary_emb.inv_freq": (8,), "mtp.layers.0.norm.weight": (32,)}
    )

    @given(st.sampled_from(sorted(shapes)))
    @settings(max_examples=bench.properties.examples(12), deadline=None)
    def check(name: str) -> None:
        fewer = {n: s for n, s in shapes.items() if n != name}
        assert find_missing_weights(shape, fewer), name
        other = shapes | {name: (*shapes[name][:-1], shapes[name][-1] + 1)}
        assert find_missing_weights(shape, other), name

    check()
    wrapped = {f"_orig_mod.{name}": size for name, size in shapes.items()}
    assert "'_orig_mod.', which torch.compile adds" in find_missing_weights(shape, wrapped).tell(
        "FOLDER", wrapped
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "qwen2_5_vl"])
def test_parameters_are_counted_by_the_architecture(stored: Stored, kind: str) -> None:
    shape, _ = stored(kind)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    assert count_language_parameters(shape) == sum(parameter.numel() for parameter in model.parameters())


def test_a_tied_head_may_be_stored_instead_of_the_embedding_or_with_it(stored: Stored) -> None:
    shape, shapes = stored("qwen3")
    embedding = "model.embed_tokens.weight"
    with_head = shapes | {"lm_head.weight": shapes[embedding]}
    assert not find_missing_weights(shape, with_head)
    without = {name: size for name, size in with_head.items() if name != embedding}
    assert not find_missing_weights(shape, without)
    assert find_missing_weights(
        shape, {n: s for n, s in without.items() if n != "lm_head.weight"}
    ).missing == [embedding]
    assert "lm_head.weight" in find_missing_weights(shape | {"tie_word_embeddings": False}, shapes).missing


def test_a_version_of_a_multimodal_policy_has_no_tower(stored: Stored) -> None:
    shape, shapes = stored("qwen2_5_vl")
    part = {name: size for name, size in shapes.items() if not name.startswith("visual.")}
    assert not find_missing_weights(shape, part, part=True)
    assert all("visual" in name for name in find_missing_weights(shape, part).missing)


def test_experts_that_are_missing_are_told(stored: Stored) -> None:
    shape, shapes = stored("qwen3-moe")
    fewer = {n: s for n, s in shapes.items() if "layers.1.mlp.experts.3." not in n}
    told = find_missing_weights(shape, fewer).tell("FOLDER", fewer)
    assert "model.layers.1.mlp.experts.down_proj has [3, 32, 24], expected [4, 32, 24]" in told


@pytest.mark.parametrize("shape", [{}, {"model_type": "nobody_knows_it"}, {"model_type": "t5"}])
def test_what_transformers_makes_no_policy_of_is_unknown(shape: dict[str, Any]) -> None:
    with pytest.raises(UnknownModelError):
        find_missing_weights(shape, {})


def test_a_gguf_file_that_lacks_a_tensor_is_not_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gguf_files.small_llama()
    add = gguf.GGUFWriter.add_tensor

    def leave_out(writer: gguf.GGUFWriter, name: str, *given: Any, **named: Any) -> None:
        if name != "blk.1.ffn_up.weight":
            add(writer, name, *given, **named)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", leave_out)
    gguf_files.write_gguf(tmp_path / "small.gguf", model)
    code, said = bench.commands.sf("model", str(tmp_path / "small.gguf"), str(tmp_path / "made"))
    assert code == 2
    assert f"{tmp_path / 'small.gguf'} lacks 1 of the 20 weights that a llama model needs" in said
    assert "(model.layers.1.mlp.up_proj.weight)" in said
    assert not (tmp_path / "made").exists()
