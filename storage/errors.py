"""Turns failures of a storage into one sentence. Knows the errors of the clients behind fsspec by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_CLIENTS = ("botocore", "aiobotocore", "aiohttp", "urllib3")


class StorageError(OSError):
    """A storage failed; the message names the file, the reason and what to check. `errno` is that of the
    cause, if the cause has one."""


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Turn failures of the storage into StorageError, except FileNotFoundError and FileExistsError, which
    callers expect."""
    try:
        yield
    except (StorageError, BrokenPipeError):  # of a pipe that a command writes into, whose reader has ended
        raise
    except (FileNotFoundError, FileExistsError) as error:
        # a missing bucket must not pass for a missing file: the run would start over
        if _code(error) == "NoSuchBucket":
            raise StorageError(
                f"{uri}: the bucket does not exist; create it or correct storage.root"
            ) from error
        raise
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__module__.split(".")[0] not in _CLIENTS:
            raise
        failure = StorageError(f"{uri}: {_reason(error)}")
        failure.errno = getattr(error, "errno", None)
        raise failure from error


def _reason(error: Exception) -> str:
    name = type(error).__name__
    text = " ".join(str(error).split())
    if isinstance(error, PermissionError) or name in ("NoCredentialsError", "PartialCredentialsError"):
        return f"access denied ({text}); check who may write there, for S3 the AWS_* variables"
    if isinstance(error, TimeoutError) or "Timeout" in name:
        return f"the storage did not answer in time ({text or name}), also after retries"
    if isinstance(error, ConnectionError) or name in ("EndpointConnectionError", "ClientConnectorError"):
        return f"the storage cannot be reached ({text}); for S3 check AWS_ENDPOINT_URL"
    return f"the storage failed ({text or name})"


def _code(error: BaseException) -> str | None:
    """The error code of an S3 server's answer."""
    code: str | None = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code")
    return code
