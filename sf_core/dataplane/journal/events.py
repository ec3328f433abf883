"""The encoding of events in a journal, as MessagePack: the tag of the event, then its fields in order.

Token ids and log-probs are the bytes of their arrays. Keys are in plain text: no other user may read a
journal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
from pydantic import BaseModel, SecretStr, ValidationError

from storage.json_files import first_fault


class Event(msgspec.Struct, array_like=True):
    """An event of a run, with all facts that are needed to repeat its effect.

    Each kind names the tag that journals hold, so that a class may be renamed.
    """


def make_decoder(kind: Any) -> Callable[[bytes], Any]:
    """A function that decodes a value of this type, or union of types. It raises ValueError for other
    values."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_field).decode


def _decode_field(kind: Any, data: Any) -> Any:
    # compared by origin: an alias of numpy 2.5 on Python 3.12 does not equal the type that msgspec passes
    if get_origin(kind) is np.ndarray:
        _shape, dtype = get_args(kind)
        return np.frombuffer(data, *get_args(dtype))
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None


def _encode_field(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    raise TypeError(f"{value!r} cannot be recorded")


encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=_encode_field).encode
