"""Policies that vLLM's CPU build can run, and the processes of its servers."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from sf_core.config import RunConfig
from sf_core.types import WeightsRef
from tests.bench.engines.model_folders import SIZE, ModelFolders, write_tokenizer

CONTEXT = 320


class Policies:
    """Weights by version; the folder of version 0 is the start folder."""

    def __init__(self, root: Path, *, tied: bool) -> None:
        self._root = root
        self._tied = tied

    def folder(self, version: int) -> str:
        folder = self._root / f"{'tied' if self._tied else 'untied'}-{version}"
        if not folder.exists():
            torch.manual_seed(version)
            size = SIZE | {"max_position_embeddings": CONTEXT}
            shape = Qwen3Config(**size, head_dim=32, tie_word_embeddings=self._tied)
            AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
            write_tokenizer(folder)
        return str(folder)

    def ref(self, version: int) -> WeightsRef:
        return WeightsRef(version, self.folder(version))

    def logits(self, version: int, ids: list[int]) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(self.folder(version), dtype=torch.float32)
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0]


class Bases(ModelFolders):
    """The start folders of policies, for which there are adapters."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies

    def __call__(self, kind: str = "", seed: int = 0) -> str:
        return self._policies.folder(seed)


def config(*, adapts: bool = False, **engine: object) -> RunConfig:
    settings = {"kind": "vllm", "context_length": CONTEXT, "max_running": 64}
    return RunConfig.model_validate({"engine": settings | engine, "train": {"lora": {} if adapts else None}})


def servers() -> set[psutil.Process]:
    """The processes of vLLM that this process has started."""
    return {
        process
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE
        and any(word in " ".join(process.cmdline()) for word in ("vllm", "VLLM"))
    }


def own_socket(*words: str) -> str:
    """That of the one server of an engine here whose command has all of these words."""
    commands = [process.cmdline() for process in servers()]
    (socket,) = {
        command[command.index("--uds") + 1] for command in commands if {"--uds", *words} <= {*command}
    }
    return socket
