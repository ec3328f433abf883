"""How a version of the policy reaches a vLLM server: as weights that replace those of the server, or as an
adapter beside the one before, under a name of its own.

The base of adapters stays as the server was started with it, and nothing is ever sampled by it: beside
adapters vLLM's CPU build computes it wrongly.

The model folder that vLLM reads has the policy's configuration and tokenizer, and links to the newest
weights. Of safetensors files only headers are read; no tensor library is imported.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from dataclasses import replace
from os import SEEK_CUR
from pathlib import Path
from typing import Any, BinaryIO

from sf_core.engines.host_weights import HostWeights
from sf_core.engines.vllm.client import VllmClient
from sf_core.models.adapter import AdapterVersions
from sf_core.models.context import cache_bytes
from sf_core.models.images.processor_config import (
    PREPROCESSOR_CONFIG,
    ImageProcessorConfig,
    read_image_processor,
)
from sf_core.models.language import VISION_TOWER_PREFIX
from sf_core.types import WeightsRef
from storage.files import join, read_bytes, read_if_there
from storage.json_files import load_json
from storage.scratch import scratch_folder
from storage.tensors.tensor_bytes import Entry, Header, Shapes, find_difference, read_header
from storage.tensors.weights import ADAPTER_CONFIG, ADAPTER_NAME, FILE_NAME, INDEX_NAME, open_weights

TOKENIZER = "tokenizer.json"
"""Read where an answer must follow a grammar, here and by the server (grammar_processor.py)."""

_PROCESSOR_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""What the server of a multimodal policy reads beside TOKENIZER and PREPROCESSOR_CONFIG, if it is there."""

_OUTPUT_HEAD = "lm_head.weight"
_HEAD_FILE = "lm_head.safetensors"

_VISION_TOWER_FILE = "tower.safetensors"

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
"""Ends of the names that input embeddings have."""

_MAX_KV_BYTES = 4 * 2**30
"""vLLM's own default on the CPU. With less than all requests need it lets some wait."""

_KV_BLOCK = 128
"""vLLM's CPU build gives KV in blocks of this many tokens."""


class PolicyFolder:
    """A folder of this process. On the CPU vLLM packs the head when it starts, and a reload does not reach a
    head that is tied to the embedding; there it is a tensor of its own, and the configuration says so. The
    tower of a multimodal policy is always that of the start folder, whose files say how it sees."""

    def __init__(self, start_dir: str, *, untied: bool, max_picture_tokens: int | None = None) -> None:
        self._scratch = scratch_folder()
        self.path = self._scratch.name
        self.config: dict[str, Any] = load_json(read_bytes(join(start_dir, "config.json")))
        self._start_dir = start_dir
        self._untied = untied
        image_processor = read_image_processor(start_dir)
        self.image_processor = image_processor and image_processor.with_max_tokens(max_picture_tokens)
        """None: the policy reads no images."""
        for name in [TOKENIZER, *(_PROCESSOR_FILES if self.image_processor else ())]:
            if (content := read_if_there(join(start_dir, name))) is not None:
                Path(self.path, name).write_bytes(content)
        if self.image_processor is not None:
            self._write_processor(self.image_processor)
        self._shapes: Shapes = {}
        """Shapes of the weights that were taken last, by name, without the tower."""
        self._tower: list[str] | None = None
        """Names of the tensors of the tower, once it has a file of its own."""

    def read_tokenizer(self) -> bytes:
        """Raises FileNotFoundError if the policy has none."""
        return Path(self.path, TOKENIZER).read_bytes()

    @property
    def vocab_size(self) -> int:
        return int((self.config.get("text_config") or self.config)["vocab_size"])

    def kv_bytes(self, max_running: int, context_length: int) -> int:
        """Memory for the KV of so many requests."""
        rounded = -(-context_length // _KV_BLOCK) * _KV_BLOCK
        # one request more, because vLLM keeps a block for itself
        needed = cache_bytes(self.config, max_running + 1, rounded)
        return _MAX_KV_BYTES if needed is None else min(needed, _MAX_KV_BYTES)

    def link_weights(self, folder: str) -> None:
        """Link to the weights of this folder, which must stay while a server reads them. Raises ValueError,
        and changes nothing, if they are not of the shapes of those that were taken before: vLLM would find
        out half-way."""
        path = join(folder, FILE_NAME)
        with open(path, "rb") as file:
            header = read_header(path, file)
            shapes = {
                name: shape
                for name, shape in header.shapes.items()
                if not name.startswith(VISION_TOWER_PREFIX)
            }
            if self._shapes and (fault := find_difference(shapes, self._shapes)):
                raise ValueError(f"{path}: {fault}")
            config = self.config
            files = dict.fromkeys(header.entries, FILE_NAME)
            if self.image_processor and shapes.keys() == files.keys():
                files |= dict.fromkeys(self._write_vision_tower(), _VISION_TOWER_FILE)
            if self._untied and _OUTPUT_HEAD not in header.entries:
                self._write_head(path, file, header.entries)
                files[_OUTPUT_HEAD] = _HEAD_FILE
                config = config | {"tie_word_embeddings": False}
                if "text_config" in config:
                    config["text_config"] = config["text_config"] | {"tie_word_embeddings": False}
        needs_index = any(file != FILE_NAME for file in files.values())
        if needs_index:
            Path(self.path, INDEX_NAME).write_text(
                json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8"
            )
        link = Path(self.path, FILE_NAME)
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        Path(self.path, "config.json").write_text(json.dumps(config), encoding="utf-8")
        self._shapes = shapes

    def _write_head(self, path: str, file: BinaryIO, entries: dict[str, Entry]) -> None:
        """Write the embedding as the head, into a file of its own. The file is read from where its data
        starts."""
        name = next((name for name in entries if name.endswith(_EMBEDDINGS)), None)
        if name is None:
            raise ValueError(
                f"{path} has neither {_OUTPUT_HEAD} nor an embedding (*{', *'.join(_EMBEDDINGS)}): the CPU "
                "build of vLLM needs one of these tensors to load a new output layer"
            )
        begin, end = entries[name].data_offsets
        file.seek(begin, SEEK_CUR)
        head = Header({}, {_OUTPUT_HEAD: replace(entries[name], data_offsets=(0, end - begin))})
        Path(self.path, _HEAD_FILE).write_bytes(head.encode() + file.read(end - begin))

    def _write_vision_tower(self) -> list[str]:
        """Write the tower into a file of its own, once, and return the names of its tensors."""
        if self._tower is None:
            whole, pieces = open_weights(self._start_dir)
            ranges = list[tuple[int, int]]()
            entries = dict[str, Entry]()
            begin = 0
            for name, entry in sorted(whole.entries.items(), key=lambda item: item[1].data_offsets):
                if name.startswith(VISION_TOWER_PREFIX):
                    ranges.append(entry.data_offsets)
                    end = begin + entry.data_offsets[1] - entry.data_offsets[0]
                    entries[name] = replace(entry, data_offsets=(begin, end))
                    begin = end
            with Path(self.path, _VISION_TOWER_FILE).open("wb") as file:
                file.write(Header({}, entries).encode())
                offset = 0
                for piece in pieces:
                    # the parts of the ranges that lie in this piece
                    file.writelines(
                        piece[max(0, begin - offset) : max(0, end - offset)] for begin, end in ranges
                    )
                    offset += len(piece)
            self._tower = [*entries]
        return self._tower

    def _write_processor(self, image_processor: ImageProcessorConfig) -> None:
        """Write how images are resized so that none is that has a size of the sight."""
        processor = load_json(read_bytes(join(self._start_dir, PREPROCESSOR_CONFIG)))
        size = {"shortest_edge": image_processor.min_pixels, "longest_edge": image_processor.max_pixels}
        other_settings = {
            key: value for key, value in processor.items() if key not in ("min_pixels", "max_pixels")
        }
        Path(self.path, PREPROCESSOR_CONFIG).write_text(
            json.dumps(other_settings | {"size": size}), encoding="utf-8"
        )


class WeightLoading:
    model: str | None = None
    """What a request must name to be sampled by the version that was switched to; None: nothing."""
    is_in_start = False
    """Whether a new server begins with the version that was fetched last."""

    def fetch(self, weights: WeightsRef) -> str:
        """Have these weights, verified, in a folder of this host, which is returned. Called by one thread.
        Raises ValueError or OSError; the weights from before then stay."""
        raise NotImplementedError

    async def load(self, client: VllmClient, weights: WeightsRef, source: str) -> None:
        """Do what can be done while the server samples by other weights. Can be cancelled. Raises ValueError
        if it does not take them."""

    async def switch(self, client: VllmClient, weights: WeightsRef, source: str) -> None:
        """Have the server, which is paused, sample by the weights that were loaded."""
        raise NotImplementedError

    async def unload_others(self, client: VllmClient) -> None:
        """Forget all weights but those that were switched to."""

    def reset(self) -> None:
        """The server is not there any more."""

    def close(self) -> None:
        """Remove what was fetched."""
        raise NotImplementedError


class FullWeights(WeightLoading):
    is_in_start = True

    def __init__(self, policy: PolicyFolder) -> None:
        self._policy = policy
        self._weights = HostWeights()

    def fetch(self, weights: WeightsRef) -> str:
        self._policy.link_weights(self._weights.fetch(weights))
        return self._policy.path

    async def switch(self, client: VllmClient, weights: WeightsRef, source: str) -> None:
        await client.reload_weights(source)

    def close(self) -> None:
        self._weights.close()


class LoraWeights(WeightLoading):
    """Adapters of one shape. Each has a copy in a folder of its own that stays while the server may know it:
    vLLM ends if it looks for one whose folder is gone."""

    def __init__(self, start_dir: str, policy: PolicyFolder) -> None:
        """`policy`: the folder that a server is started from, which gets the base."""
        self._start_dir = start_dir
        self._policy = policy
        self._versions = AdapterVersions(join(start_dir, "adapter"))
        self._base: HostWeights | None = None
        """The base, from when it is fetched until a server has read it."""
        self._is_started = False
        self._copies = scratch_folder()
        self._folders: dict[WeightsRef, str] = {}
        """Folders of the copies. It is used where weights are fetched, and nowhere else."""
        self._names: dict[WeightsRef, str] = {}
        """The server's names of those that it may know."""
        self._numbers = itertools.count()
        self._current: WeightsRef | None = None

    @property
    def rank(self) -> int:
        return self._versions.first.rank

    def fetch(self, weights: WeightsRef) -> str:
        if self._base is None and not self._is_started:
            self._base = HostWeights()
            self._policy.link_weights(self._base.fetch(WeightsRef(0, self._start_dir)))
        for other in [other for other in self._folders if other != weights and other not in self._names]:
            shutil.rmtree(self._folders.pop(other))
        if weights not in self._folders:
            self._folders[weights] = self._copy(weights.uri)
        return self._folders[weights]

    async def load(self, client: VllmClient, weights: WeightsRef, source: str) -> None:
        # those that others took the place of before they sampled
        await self.unload_others(client)
        # a name is never given again: of a load that was cancelled nobody knows whether it was done
        name = self._names[weights] = f"policy.{weights.version}.{next(self._numbers)}"
        try:
            await client.load_adapter(name, source)
        except ValueError:
            del self._names[weights]
            raise
        self._is_started = True
        if self._base is not None:
            self._base.close()
            self._base = None

    async def switch(self, client: VllmClient, weights: WeightsRef, source: str) -> None:
        self._current = weights
        self.model = self._names[weights]

    async def unload_others(self, client: VllmClient) -> None:
        for weights in [weights for weights in self._names if weights != self._current]:
            await client.unload_adapter(self._names[weights])
            del self._names[weights]

    def reset(self) -> None:
        self._names.clear()
        self._current = None
        self.model = None
        self._is_started = False

    def close(self) -> None:
        self._copies.cleanup()
        if self._base is not None:
            self._base.close()

    def _copy(self, uri: str) -> str:
        """A folder with a copy of the adapter. Raises ValueError as `AdapterVersions.read`."""
        content = self._versions.read(uri)
        folder = tempfile.mkdtemp(dir=self._copies.name)
        Path(folder, ADAPTER_NAME).write_bytes(content)
        Path(folder, ADAPTER_CONFIG).write_bytes(read_bytes(join(uri, ADAPTER_CONFIG)))
        return folder
