"""Show on the terminal what planning is doing, in one line that disappears at the end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status

STEPS = logging.getLogger("sbpc.progress")


class StatusHandler(logging.Handler):
    """Shows the last message in the line."""

    def __init__(self, status: Status) -> None:
        super().__init__()
        self.status = status

    def emit(self, record: logging.LogRecord) -> None:
        """Shows a message instead of the one before."""
        self.status.update(record.getMessage())


@contextlib.contextmanager
def progress(console: Console | None = None) -> Iterator[None]:
    """Shows the passes and the search in a line on standard error while this lasts, if that is a terminal."""
    console = Console(stderr=True) if console is None else console
    if not console.is_terminal:
        yield
        return
    with console.status("capture") as status:
        handler, level, propagate = StatusHandler(status), STEPS.level, STEPS.propagate
        STEPS.addHandler(handler)
        STEPS.setLevel(logging.DEBUG)
        STEPS.propagate = False
        try:
            yield
        finally:
            STEPS.removeHandler(handler)
            STEPS.setLevel(level)
            STEPS.propagate = propagate
