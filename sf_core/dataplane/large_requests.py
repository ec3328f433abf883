"""Threads for the work on large requests. The event loop serves all runs, so it must never wait for one
request.

Small requests are handled on the loop, which is faster. The work of a thread may take any time; the loop gets
the interpreter back after SWITCH_S (http_protocol.py), or after one call into a library. No such call may
take longer than a few hundredths of a second (docs/decisions/059).
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from sf_core.dataplane.chat.json_text import count_marks

SMALL_CHARACTERS = 2**14
"""Most characters that are tokenized on the loop, in some 10 ms."""

SMALL_BYTES = 2**18
"""Largest body that is read on the loop, in bytes."""

SMALL_VALUES = 2**12
"""Most values of a body that is read on the loop, in some 20 ms."""

VAST_BYTES = 2**20
"""Smallest size of a request after which freed memory is given back to the system, in bytes."""

TRIM_S = 2.0
"""Seconds from the end of such a request until then."""

_threads = ThreadPoolExecutor(2, thread_name_prefix="large-requests")
"""Few, because tokenizing one request may take 200 MB."""

_trims: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.TimerHandle] = WeakKeyDictionary()

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread_if(is_large: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do the work, in a thread if the request is large, and return its result."""
    if not is_large:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads, lambda: work(*args, **kwargs))


def is_large_body(data: bytes) -> bool:
    """Whether reading a body takes long, because of its size or of the number of its values."""
    if len(data) <= 2 * SMALL_VALUES:
        return False  # too short to hold so many values
    return len(data) > SMALL_BYTES or count_marks(data) > SMALL_VALUES


def trim_memory_after(num_bytes: int) -> None:
    """Give freed memory back to the system soon, if a request of this size is over and was very large."""
    loop = asyncio.get_running_loop()
    if num_bytes >= VAST_BYTES and loop not in _trims:
        _trims[loop] = loop.call_later(TRIM_S, _trim, loop)


def _trim(loop: asyncio.AbstractEventLoop) -> None:
    del _trims[loop]
    with suppress(AttributeError):  # another C library
        _threads.submit(ctypes.CDLL(None).malloc_trim, 0)
