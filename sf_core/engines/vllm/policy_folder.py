"""The model folder that vLLM reads: the policy's configuration and tokenizer, and links to the weights taken
last.

Reads headers of safetensors files only; imports no tensor library.
"""

from __future__ import annotations

import json
from dataclasses import replace
from os import SEEK_CUR
from pathlib import Path
from typing import Any, BinaryIO

from sf_core.models.cache_size import cache_bytes
from storage.files import exists, join, read_bytes
from storage.scratch import scratch_folder
from storage.tensors.tensor_bytes import Entry, Header, Shapes, find_difference, read_header
from storage.tensors.weights import FILE_NAME, INDEX_NAME

TOKENIZER = "tokenizer.json"
"""Read where an answer must follow a grammar, here and by the server (grammar_processor.py)."""

_HEAD, _HEAD_FILE = "lm_head.weight", "lm_head.safetensors"

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
"""Ends of the names that input embeddings have."""

_MOST_KV_BYTES = 4 * 2**30
"""vLLM's own default on the CPU. With less than all requests need it lets some wait."""

_KV_BLOCK = 128
"""vLLM's CPU build gives KV in blocks of this many tokens."""


class PolicyFolder:
    """A folder of this process. On the CPU vLLM packs the head when it starts, and a reload does not reach a
    head that is tied to the embedding; there it is a tensor of its own, and the configuration says so."""

    def __init__(self, start_dir: str, *, untied: bool) -> None:
        self._place = scratch_folder()
        self.path = self._place.name
        self.config: dict[str, Any] = json.loads(read_bytes(join(start_dir, "config.json")))
        self._untied = untied
        tokenizer = join(start_dir, TOKENIZER)
        if exists(tokenizer):
            Path(self.path, TOKENIZER).write_bytes(read_bytes(tokenizer))
        self._shapes: Shapes = {}
        """Shapes of the weights that were taken last, by name."""

    def read_tokenizer(self) -> bytes:
        """Raises FileNotFoundError if the policy has none."""
        return Path(self.path, TOKENIZER).read_bytes()

    @property
    def vocab_size(self) -> int:
        return int((self.config.get("text_config") or self.config)["vocab_size"])

    @property
    def has_head(self) -> bool:
        """Whether the weights taken last have a head of their own."""
        return _HEAD in self._shapes

    def kv_bytes(self, max_running: int, context_length: int) -> int:
        """Memory for the KV of so many requests."""
        rounded = -(-context_length // _KV_BLOCK) * _KV_BLOCK
        # one more: vLLM keeps a block for itself
        needed = cache_bytes(self.config, max_running + 1, rounded)
        return _MOST_KV_BYTES if needed is None else min(needed, _MOST_KV_BYTES)

    def take(self, folder: str) -> None:
        """Link to the weights of this folder, which must stay while a server reads them. Raises ValueError,
        and changes nothing, if they are not of the shapes of those that were taken before: vLLM would find
        out half-way."""
        path = join(folder, FILE_NAME)
        with open(path, "rb") as file:
            header = read_header(path, file)
            if self._shapes and (fault := find_difference(header.shapes, self._shapes)):
                raise ValueError(f"{path}: {fault}")
            config = self.config
            if self._untied and _HEAD not in header.entries:
                self._write_head(path, file, header.entries)
                config = config | {"tie_word_embeddings": False}
        link = Path(self.path, FILE_NAME)
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        Path(self.path, "config.json").write_text(json.dumps(config))
        self._shapes = header.shapes

    def _write_head(self, path: str, file: BinaryIO, entries: dict[str, Entry]) -> None:
        """Write the embedding as the head, into a file of its own, and an index of the two. The file is read
        from where its data starts."""
        name = next((name for name in entries if name.endswith(_EMBEDDINGS)), None)
        if name is None:
            raise ValueError(
                f"{path} has no {_HEAD}, and no embedding (*{', *'.join(_EMBEDDINGS)}) to take for it: the "
                "CPU build of vLLM would keep the first head through all updates"
            )
        begin, end = entries[name].data_offsets
        file.seek(begin, SEEK_CUR)
        head = Header({}, {_HEAD: replace(entries[name], data_offsets=(0, end - begin))})
        Path(self.path, _HEAD_FILE).write_bytes(head.encode() + file.read(end - begin))
        files = dict.fromkeys(entries, FILE_NAME) | {_HEAD: _HEAD_FILE}
        Path(self.path, INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": files}))
