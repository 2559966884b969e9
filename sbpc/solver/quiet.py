"""HiGHS without its banner: what sbpc writes to standard output is for programs to read."""

from __future__ import annotations

import highspy


class Quiet(highspy.Highs):
    """A model that prints nothing and runs on one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.setOptionValue("output_flag", False)
        self.setOptionValue("threads", 1)

    def enableCallbacks(self) -> None:
        """What HiGHS does first when a model is made; from version 1.16 on it prints its banner there."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()
