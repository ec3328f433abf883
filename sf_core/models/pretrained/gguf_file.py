"""Makes a Hugging Face folder of a policy in a GGUF file, so that it can be trained."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

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
