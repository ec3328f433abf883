"""Work beside the train step, in a thread of its own: one piece after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context


class Background:
    def __init__(self) -> None:
        self._last: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Begin work, in the context of this call, when the work before is done; raises its error."""
        self.wait()
        self._last = done = Future[None]()
        context = copy_context()

        def run() -> None:
            try:
                context.run(work)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        # a process that is to end does not wait for it
        threading.Thread(target=run, name="background", daemon=True).start()

    def wait(self) -> None:
        """Return when nothing is going on; raises the error of what was, once."""
        last = self._last
        self._last = None
        if last is not None:
            last.result()
