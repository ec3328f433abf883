"""The exception that every route turns into an error answer, by default in the shape of OpenAI's API."""

from __future__ import annotations

import errno
from typing import Any

MAX_HEAD = 400
MAX_TAIL = 100
"""Characters kept from the beginning and from the end of a longer message."""

MOST_READ = 20 * (MAX_HEAD + MAX_TAIL)
"""Characters of a message that are read: its middle is not shown."""

RETRY_AFTER_S = 5
"""Seconds after which a client that was refused for now may retry."""

_OPEN_FILES_ERRORS = {errno.EMFILE, errno.ENFILE}
_TEMPORARY = _OPEN_FILES_ERRORS | {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS}


class ApiError(Exception):
    """A request that is refused or fails; `message` is one sentence for the caller."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ):
        # messages quote what the caller sent, which may be megabytes
        if len(message) > MOST_READ:
            message = f"{message[: MOST_READ // 2]} ... {message[-MOST_READ // 2 :]}"
        message = " ".join(message.split())
        if len(message) > MAX_HEAD + MAX_TAIL:
            message = f"{message[:MAX_HEAD]} ... {message[-MAX_TAIL:]}"
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        """Seconds of the Retry-After header; None: no such header."""

    @classmethod
    def superseded(cls, run_id: str, attempt: int) -> ApiError:
        return cls(409, f"Attempt {attempt} of run {run_id} was superseded by a later attempt.")

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "requests" if self.status == 429 else kind
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }


class EngineFailed(ApiError):
    """A request that engines cannot serve. `is_poison`: engines ended because of it, so it must not be
    retried."""

    def __init__(self, reason: str, *, is_poison: bool = False) -> None:
        message = f"No engine gave a valid answer to this request: {reason}."
        super().__init__(502, message, code="engine_failed")
        self.is_poison = is_poison


class WrongField(ApiError):
    """A wrong field of a request; `param` is the name of the field, or its path in the body."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(400, message, param=param)


class ContextOverflow(ApiError):
    """A prompt that leaves no room for an answer. Each dialect words the error as its provider does."""

    def __init__(self, num_tokens: int, context_length: int) -> None:
        sentence = f"The prompt has {num_tokens} tokens, and the context window holds {context_length}."
        super().__init__(400, sentence, code="context_length_exceeded")
        self.num_tokens = num_tokens
        self.context_length = context_length

    def reword(self, sentence: str, param: str) -> ApiError:
        """This error in other words; see `Dialect.overflow`."""
        most = self.context_length - 1
        message = sentence.format(tokens=self.num_tokens, window=self.context_length, most=most, param=param)
        return ApiError(self.status, message, code=self.code, param=param)


def is_temporary(error: OSError) -> bool:
    """Whether the same request may succeed once there is room again: on the disk, or for open files."""
    return error.errno in _TEMPORARY


def remedy(error: OSError, usual: str = "Free space there or repair the disk") -> str:
    """The remedy for a file that cannot be used, as a clause without a full stop."""
    if error.errno in _OPEN_FILES_ERRORS:
        return "Raise the limit on open files (`ulimit -n`) or lower --max-connections"
    return usual


def unwritable(what: str, error: OSError) -> ApiError:
    """The error of a request for which a file cannot be written."""
    failure = f"{what} cannot be written: {error}"
    if not is_temporary(error):
        return ApiError(500, f"{failure}.")
    message = f"{failure}. {remedy(error)}, then send the request again."
    return ApiError(503, message, code="storage_unwritable", retry_after_s=RETRY_AFTER_S)
