"""Decoding of images from strangers in separate processes: a file of 100 kB can take a minute or a GiB.

This file is also the program of such a process. It reads from the connection that is its standard input: for
each image the limit of CPU time and the image processor, as JSON, and then the file. It answers with the
size of the fitted image, or with the reason why there is none, as JSON, and then with the fitted file.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import threading
import warnings
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from PIL import Image

from sf_core.models.images.preprocess import PreprocessedImage, preprocess_image
from sf_core.models.images.processor_config import ImageProcessorConfig, UnusableImageError
from sf_core.process.import_path import module_environment, python_module

MAX_MEMORY = 2**30
"""Most bytes of memory of a process. Within the limit of pixels only WebP takes more, with 16 bytes for each
pixel. JPEG takes 12 at most, and must, because its decoder does not say that it lacks memory."""

ANSWER_S = 600.0
"""Timeout of an answer: the limit of CPU time never ends a process that gets no CPU."""

_RETURNING_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Environment in which glibc returns all memory of large images to the system."""

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)

_of_thread = threading.local()


class SlowImageError(Exception):
    """The image needs more CPU time than it may take."""


class DecoderError(Exception):
    """A decoder cannot be started, or ended, through no fault of an image."""


def preprocess_isolated(
    data: bytes, image_processor: ImageProcessorConfig, cpu_s: float
) -> PreprocessedImage:
    """As `preprocess_image`, with limits: `cpu_s` seconds of CPU time, and MAX_MEMORY. Each thread has a
    decoder of its own. Raises SlowImageError and DecoderError, too."""
    if not hasattr(_of_thread, "decoder"):
        _of_thread.decoder = _Decoder()
    decoder: _Decoder = _of_thread.decoder
    return decoder.fit(data, image_processor, cpu_s)


class _Decoder:
    """A process, which is started when it is needed, and which ends with ours."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def fit(self, data: bytes, image_processor: ImageProcessorConfig, cpu_s: float) -> PreprocessedImage:
        connection = self._connect()
        try:
            connection.send_bytes(json.dumps([cpu_s, asdict(image_processor)]).encode())
            connection.send_bytes(data)
            if not connection.poll(ANSWER_S):
                raise TimeoutError
            facts = json.loads(connection.recv_bytes())
            png = connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._explain_end(error, cpu_s) from None
        if "refusal" in facts:
            raise UnusableImageError(facts["refusal"])
        return PreprocessedImage(png, **facts)

    def _connect(self) -> Connection:
        if self._process is None or self._connection is None or self._process.poll() is not None:
            try:
                self._connection, child_end = Pipe()
                with child_end:
                    # a group of its own, because the terminal interrupts ours
                    self._process = subprocess.Popen(
                        python_module(__name__),
                        env=module_environment() | _RETURNING_MEMORY,
                        stdin=child_end.fileno(),
                        process_group=0,
                    )
            except OSError as error:
                raise DecoderError(f"no decoder can be started: {error.strerror}") from None
        return self._connection

    def _explain_end(self, error: Exception, cpu_s: float) -> Exception:
        """Why there is no answer. The process has ended afterwards."""
        process = self._process
        self._process = None
        assert process is not None and self._connection is not None
        self._connection.close()
        if isinstance(error, TimeoutError):
            process.kill()
        status = -process.wait()
        if status == signal.SIGPROF:
            return SlowImageError(
                f"the image takes more than {cpu_s:g} s of CPU time to decode, which is the limit"
            )
        if status in _CRASHES:
            return UnusableImageError(
                f"the image cannot be decoded: {signal.Signals(status).name} in its decoder"
            )
        return DecoderError(f"a decoder has ended with status {-status}")


def _answer(call: bytes, data: bytes) -> tuple[dict[str, int | str], bytes]:
    cpu_s, image_processor = json.loads(call)
    # the signal of the timer, which nothing handles, ends this process
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        preprocessed = preprocess_image(data, ImageProcessorConfig(**image_processor))
    except UnusableImageError as error:
        return {"refusal": str(error)}, b""
    except MemoryError:
        most = f"{MAX_MEMORY // 2**20} MiB"
        return {"refusal": f"the image takes more than {most} of memory to decode, which is the limit"}, b""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"height": preprocessed.height, "width": preprocessed.width}, preprocessed.png


def _serve(connection: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # fit_picture refuses such images itself
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    # the parent has ended
    with suppress(EOFError, OSError):
        while True:
            facts, png = _answer(connection.recv_bytes(), connection.recv_bytes())
            connection.send_bytes(json.dumps(facts).encode())
            connection.send_bytes(png)


if __name__ == "__main__":
    _serve(Connection(0))
