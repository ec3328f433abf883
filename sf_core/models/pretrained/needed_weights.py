"""Whether the weights of a folder are all those that its architecture needs, by their names and shapes.

Transformers draws what a folder lacks at random, and only logs that. So whoever reads a folder first asks
this module, which compares headers with a model that has no memory: no weights are read. The renamings are
those with which transformers itself loads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from sf_core.models.language import language_model
from sf_core.models.pretrained.apart import call_in_subprocess
from storage.tensors.weights import open_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MAX_NAMES_LISTED = 3
"""Most names that a sentence lists."""

_SUBCONFIG_KEYS = frozenset({"text_config", "vision_config"})
"""Keys in the config.json of a model with a tower: those of its parts."""

_WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "module.": "DistributedDataParallel",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
}
"""What wrappers put into the names of the weights of a model that is saved from without."""

_LAYER = re.compile(r"[a-z_]+\.\d+\.")

_DEFAULT_REMEDY = "download the model again, or save all of its weights"


class UnknownModelError(ValueError):
    """A configuration of which transformers makes no model that samples text."""


@dataclass(frozen=True, slots=True)
class MissingWeights:
    """What weights lack of a model."""

    kind: str
    """The model's `model_type`."""
    num_needed: int
    missing: Sequence[str] = ()
    """Names of the model."""
    misshapen: Mapping[str, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)
    """The shapes that are there, and those that are expected, by names of the model."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.misshapen)

    def tell(self, folder: str, stored: Collection[str] = (), remedy: str = _DEFAULT_REMEDY) -> str:
        """One sentence about the folder. `stored`: the names that are there."""
        if not self.missing:
            name, (found, expected) = next(iter(self.misshapen.items()))
            return (
                f"{folder} has another shape of {len(self.misshapen)} of the {self.num_needed} weights that "
                f"its config.json describes ({name} has {[*found]}, expected {[*expected]}): use the weights "
                f"and the config.json of the same model, or {remedy}"
            )
        if prefix := self._find_prefix(stored):
            wrapper = f", which {_WRAPPERS[prefix]} adds" if prefix in _WRAPPERS else ""
            return (
                f"the names of the weights in {folder} contain {prefix!r}{wrapper}, so {len(self.missing)} "
                f"of the {self.num_needed} weights that a {self.kind} model needs are not found: save the "
                f"model that is wrapped, or strip {prefix!r} from the names with safetensors.torch: "
                f"save_file({{name.replace({prefix!r}, ''): tensor for name, tensor in "
                "load_file(FILE).items()}, FILE)"
            )
        ellipsis = ", ..." if len(self.missing) > _MAX_NAMES_LISTED else ""
        names = ", ".join(self.missing[:_MAX_NAMES_LISTED]) + ellipsis
        return (
            f"{folder} lacks {len(self.missing)} of the {self.num_needed} weights that a {self.kind} model "
            f"needs ({names}): {remedy}"
        )

    def _find_prefix(self, stored: Collection[str]) -> str | None:
        """What must be removed from the stored names so that fewer are missing."""
        first = self.missing[0]
        before = (name.removesuffix(first) for name in stored if name.endswith(f".{first}"))
        for prefix in (*_WRAPPERS, *sorted({*before})):
            changed = {name.replace(prefix, "") for name in stored if prefix in name}
            # the model may call what is within otherwise than its files
            if changed and (len(changed) == len(stored) or changed.intersection(self.missing)):
                return prefix
        return None


def check_weights(
    shape: Mapping[str, Any], folder: str, setting: str, *, part: bool = False, remedy: str = _DEFAULT_REMEDY
) -> None:
    """Raises ValueError, one sentence that names the setting, if the weights in a folder are not all those of
    the model that a config.json describes. `part`: as that of `find_missing_weights`."""
    try:
        stored = open_weights(folder)[0].shapes
        missing_weights = find_missing_weights(shape, stored, part=part)
    except UnknownModelError as error:
        raise UnknownModelError(f"{setting}: {folder} cannot be used: {error}") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{setting}: {error}") from None
    if missing_weights:
        raise ValueError(f"{setting}: {missing_weights.tell(folder, stored, remedy)}")


def find_missing_weights(
    shape: Mapping[str, Any], stored: Mapping[str, Sequence[int]], *, part: bool = False
) -> MissingWeights:
    """What weights of these names and shapes lack of the model that a config.json describes. `part`: they
    have no tower that sees, which versions of a policy do not have. Raises UnknownModelError."""
    sizes = {name: [*size] for name, size in stored.items()}
    # of a model without a tower, a version is the whole: the question that was asked for version 0
    part = part and not _SUBCONFIG_KEYS.isdisjoint(shape)
    found = call_in_subprocess(_find_missing_weights, dict(shape), sizes, part, raises=[UnknownModelError])
    _parameter_counts[_cache_key(shape)] = found["parameters"]
    return MissingWeights(**found["lack"])


def _find_missing_weights(
    shape: Mapping[str, Any], stored: Mapping[str, Sequence[int]], part: bool
) -> dict[str, Any]:
    """What they lack, and the number of parameters."""
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    model: Any = build_on_meta_device(shape, part=part)
    num_needed = _count_tensors(model)
    tensors = {name: torch.empty(tuple(size), device="meta") for name, size in stored.items()}
    settings = LoadStateDictConfig(
        device_map={"": "meta"},
        dtype=torch.float32,
        weight_mapping=get_model_conversion_mapping(model),
    )
    with _silence_transformers():
        loading_info, _ = convert_and_load_state_dict_in_model(model, tensors, settings)
        model.tie_weights(missing_keys=loading_info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(loading_info)
    # both would be named where both are missing
    missing = loading_info.missing_keys - {
        name for name, of in _tied_weights(model).items() if of in loading_info.missing_keys
    }
    shapes = {name: (tuple(got), tuple(wanted)) for name, got, wanted in loading_info.mismatched_keys}
    misshapen = {name: shapes[name] for name in _sort_by_layer(shapes)}
    missing_weights = MissingWeights(str(shape["model_type"]), num_needed, _sort_by_layer(missing), misshapen)
    return {"lack": asdict(missing_weights), "parameters": count_language_parameters(shape)}


def find_missing_quantized_modules(shape: Mapping[str, Any], stored: Collection[str]) -> MissingWeights:
    """What weights of these names lack of the model that a config.json describes, if they are quantised:
    modules of which no tensor is there. Raises UnknownModelError."""
    return MissingWeights(
        **call_in_subprocess(
            _find_missing_quantized_modules, dict(shape), [*stored], raises=[UnknownModelError]
        )
    )


def _find_missing_quantized_modules(shape: Mapping[str, Any], stored: Collection[str]) -> dict[str, Any]:
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = build_on_meta_device(shape)
    tied = _tied_weights(model)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    needed = revert_weight_conversion(model, tensors)
    modules = {_module_name(_name_in_layer(name)) for name in stored}
    # codes may be in modules inside that of the weight
    modules |= {_module_name(module) for module in modules}
    missing = [name for name in needed if _module_name(_name_in_layer(name)) not in modules]
    return asdict(MissingWeights(str(shape["model_type"]), len(needed), _sort_by_layer(missing)))


def _module_name(name: str) -> str:
    return name.rpartition(".")[0]


def _tied_weights(model: Any) -> dict[str, str]:
    """Names of weights that are others, by the names of those."""
    return dict(getattr(model, "all_tied_weights_keys", {}))


def _name_in_layer(name: str) -> str:
    """A name from its layer on, as families name what is around differently."""
    found = _LAYER.search(name)
    return name[found.start() :] if found else ".".join(name.split(".")[-2:])


def count_language_parameters(shape: Mapping[str, Any]) -> int:
    """Number of parameters of the model that a config.json describes, without a vision tower. Weights that
    are tied count once. Raises UnknownModelError."""
    if (key := _cache_key(shape)) not in _parameter_counts:
        _parameter_counts[key] = call_in_subprocess(_count_on_meta, dict(shape), raises=[UnknownModelError])
    return _parameter_counts[key]


_parameter_counts: dict[str, int] = {}
"""Numbers of parameters, by the text of a config.json."""


def _cache_key(shape: Mapping[str, Any]) -> str:
    return json.dumps(shape, sort_keys=True)


def _count_on_meta(shape: Mapping[str, Any]) -> int:
    return sum(parameter.numel() for parameter in build_on_meta_device(shape, part=True).parameters())


def load_model(kind: Any, folder: str, **options: Any) -> Any:
    """A model with the weights of a folder, in evaluation mode. `kind`: its class in transformers. Raises
    ValueError as `check_loaded`."""
    model, loading_info = kind.from_pretrained(
        folder, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
    )
    check_loaded(folder, model, loading_info)
    return model.eval()


def check_loaded(folder: str, model: PreTrainedModel, loading_info: Mapping[str, Any]) -> None:
    """Raises ValueError, one sentence, if the loader of transformers has drawn weights of a model at random.
    `found`: what it says of its loading."""
    missing = _sort_by_layer(loading_info["missing_keys"])
    if missing:
        missing_weights = MissingWeights(model.config.model_type, _count_tensors(model), missing)
        raise ValueError(missing_weights.tell(folder, loading_info["unexpected_keys"]))


def _count_tensors(model: Any) -> int:
    """Number of weights of a model; those that are tied count once."""
    return len({id(tensor) for tensor in model.state_dict(keep_vars=True).values()})


def _sort_by_layer(names: Collection[str]) -> list[str]:
    """Names of weights in the order of their layers."""
    return sorted(names, key=lambda name: [(part.isdigit(), part.zfill(9)) for part in name.split(".")])


def build_on_meta_device(shape: Mapping[str, Any], *, part: bool = False) -> PreTrainedModel:
    """The model that a config.json describes, without memory. `part`: as that of `find_missing_weights`.
    Raises UnknownModelError."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    if "model_type" not in shape:
        raise UnknownModelError("its config.json names no model_type")
    try:
        config = AutoConfig.for_model(**shape)
        known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if config.model_type in known and config.model_type not in causal and not part:
            kind = AutoModelForImageTextToText
        else:
            kind, config = language_model(config)
        with torch.device("meta"):
            model: PreTrainedModel = kind.from_config(config, trust_remote_code=False)
    # whatever the code of an architecture raises for a configuration that it cannot use
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UnknownModelError(f"transformers makes no model from its config.json: {message}") from error
    return model


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Keeps the loader from writing to the terminal."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    shows_progress = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()
