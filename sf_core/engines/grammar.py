"""Answers that follow a grammar: which tokens may come next, by llguidance.

Imports no tensor library and nothing of storage: vLLM's processes load it (vllm/grammar_processor.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from tokenizers import Tokenizer

from sf_core.models.token_bytes import control_tokens, token_bytes


class Vocabulary:
    """The tokens of a tokenizer.json as grammars see them. `stop_ids` end an answer."""

    def __init__(self, tokenizer_json: str, stop_ids: Sequence[int]) -> None:
        tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokens = LLTokenizer(
            TokenizerWrapper(_TokenizerAdapter(tokenizer, stop_ids[0])), eos_token=[*stop_ids]
        )
        self.num_tokens = self._tokens.vocab_size
        self._start_cached = functools.lru_cache(maxsize=64)(self._compile)

    def begin(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of an answer. Raises ValueError if the grammar cannot be followed."""
        # a copy takes 0.01 ms, to compile takes milliseconds
        return self._start_cached(grammar).deep_copy()

    def _compile(self, grammar: str) -> LLMatcher:
        if fault := LLMatcher.validate_grammar(grammar, self._tokens):
            raise ValueError(f"the grammar cannot be used: {fault.splitlines()[0]}")
        return LLMatcher(self._tokens, grammar, log_level=0)


class Vocabularies:
    """The vocabularies of one tokenizer by the stop tokens of requests, made when the first grammar comes."""

    def __init__(self, read_tokenizer: Callable[[], bytes]) -> None:
        """`read_tokenizer` returns a tokenizer.json or raises OSError."""
        self._read = read_tokenizer
        self._by_stop_ids: dict[tuple[int, ...], Vocabulary] = {}

    def of(self, stop_ids: Sequence[int]) -> Vocabulary:
        """Raises ValueError if no answer with these stop tokens can follow a grammar."""
        key = tuple(stop_ids)
        if key not in self._by_stop_ids:
            if not key:
                raise ValueError("a grammar needs a stop token, but none was given")
            try:
                self._by_stop_ids[key] = Vocabulary(self._read().decode(), key)
            except OSError as error:
                raise ValueError(f"a grammar was given, but the tokenizer cannot be read: {error}") from None
        return self._by_stop_ids[key]


class GrammarState:
    """How far a turn has come in its grammar. A grammar that becomes too complex ends the answer."""

    def __init__(self, vocabulary: Vocabulary, grammar: str, sampled: Sequence[int]) -> None:
        """`sampled` are the ids of the turn so far. Raises ValueError if the grammar cannot be followed."""
        self.num_tokens = vocabulary.num_tokens
        self.matcher = vocabulary.begin(grammar)
        self.advance(sampled)

    def advance(self, ids: Sequence[int]) -> None:
        """Advance by sampled tokens. The stop token that ends the answer need not be among them."""
        if not self.matcher.is_stopped():
            self.matcher.consume_tokens([*ids])


def find_forbidden(states: Sequence[GrammarState], num_ids: int) -> npt.NDArray[np.bool_]:
    """Whether each of `num_ids` tokens must not come next in each of these answers of one vocabulary,
    [len(states), num_ids]. Ids that the tokenizer does not know are forbidden."""
    num_tokens = states[0].num_tokens
    # one bit per token, in words of 32 bits
    words = allocate_token_bitmask(len(states), num_tokens)
    fill_next_token_bitmask_par(_executor(), [(state.matcher, i) for i, state in enumerate(states)], words)
    forbidden_bits = np.invert(words).view(np.uint8)
    forbidden = np.unpackbits(forbidden_bits, axis=1, count=num_ids, bitorder="little").view(np.bool_)
    forbidden[:, num_tokens:] = True
    return forbidden


_executor = functools.cache(LLExecutor)


class _TokenizerAdapter:
    """The protocol of llguidance's TokenizerWrapper."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, stop_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = stop_id
        self.tokens = token_bytes(tokenizer, range(tokenizer.get_vocab_size()))
        self.special_token_ids = [*control_tokens(tokenizer).values()]

    def __call__(self, text: bytes) -> list[int]:
        return list(self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False).ids)
