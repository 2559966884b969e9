"""A line on the terminal that says what planning is at, and goes when it is done."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status

STEPS = logging.getLogger("sbpc.progress")


class Line(logging.Handler):
    """Shows the last message."""

    def __init__(self, status: Status) -> None:
        super().__init__()
        self.status = status

    def emit(self, record: logging.LogRecord) -> None:
        """Show it instead of the one before."""
        self.status.update(record.getMessage())


@contextlib.contextmanager
def progress(console: Console | None = None) -> Iterator[None]:
    """While this lasts a line on standard error follows the passes and the search, where that is a terminal."""
    console = Console(stderr=True) if console is None else console
    if not console.is_terminal:
        yield
        return
    with console.status("capture") as status:
        line, level, propagate = Line(status), STEPS.level, STEPS.propagate
        STEPS.addHandler(line)
        STEPS.setLevel(logging.DEBUG)
        STEPS.propagate = False
        try:
            yield
        finally:
            STEPS.removeHandler(line)
            STEPS.setLevel(level)
            STEPS.propagate = propagate
