"""HiGHS without its banner: what sbpc writes to standard output is for programs to read. And with Ctrl-C: an exception that
comes up while HiGHS runs is lost in it, and all that is seen is a program without a solution."""

from __future__ import annotations

import signal
import threading
from typing import Any

import highspy


class Quiet(highspy.Highs):
    """A model that prints nothing and runs on one thread. `stopped`: whether SIGINT has come while it runs; callbacks that look
    at it can end the run, after which the signal is handled as ever."""

    def __init__(self) -> None:
        super().__init__()
        self.setOptionValue("output_flag", False)
        self.setOptionValue("threads", 1)
        self.stopped = False

    def enableCallbacks(self) -> None:
        """What HiGHS does first when a model is made; from version 1.16 on it prints its banner there."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()

    def run(self) -> highspy.HighsStatus:
        """Solve. Raises what the handler of SIGINT raises."""
        self.stopped = False  # a handler may have let the last run go on
        main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGINT) if main else None
        if not callable(handler):
            return super().run()
        signal.signal(signal.SIGINT, self.stop)
        try:
            status = super().run()
        finally:
            signal.signal(signal.SIGINT, handler)
        if self.stopped:
            handler(signal.SIGINT, None)
        return status

    def stop(self, *_: Any) -> None:
        """Note the signal: the handler while HiGHS runs."""
        self.stopped = True
