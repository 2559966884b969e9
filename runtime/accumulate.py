"""Add up the gradients of several backwards on each rank, and communicate their sum once: `with module.no_sync():`.

The last calls on a gradient's way home, from the first collective on, are linear. So the sum may be taken before
them, of what they read, and they run once for all backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from sbpc.errors import PlanError

NO_SYNC = """Within `with module.no_sync():` a backward sends no gradients of parameters, and leaves `.grad` as it is.

Each rank adds up what it has computed of them. The first backward outside adds that to its own, sends the sum on its
way home, and leaves it in `.grad`, as if every backward had done so:

    for batch in batches[:-1]:
        with module.no_sync():
            module.step(*batch)
    module.step(*batches[-1])
    optimizer.step()

Where `backward` is called counts, not where the forward ran. The sums are held in the layouts in which gradients are
computed, in float32 where these are in 16 bits, in a loop in the dtype in which its micro-batches add up: that is
memory besides what the plan predicts. A stock optimizer does not know them. So end with a backward outside before
`optimizer.step()`, as the sums are else missing there and go into the next backward outside; and drop them by
`module.zero_grad()`, as `optimizer.zero_grad()` does not. `sbpc.Checkpoints` refuses to save while there are any, and a
deep copy is refused. `module.step` calls no hook of a parameter within; a backward of autograd calls them with None."""
ZERO_GRAD = "Drops the gradients of parameters, and what `no_sync` keeps of them."
T = TypeVar("T")
WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # in which sums are held


class Sums:
    """What backwards within `no_sync` have computed of gradients: what their ways home begin with, in order.

    collects: whether `no_sync` is on. held: by place, in a loop by chunk and name; None for nothing. owner: what ran
    these backwards.
    """

    def __init__(self) -> None:
        self.held: Any = None
        self.owner: object = None
        self.collects = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Collects while this lasts."""
        before, self.collects = self.collects, True
        try:
            yield
        finally:
            self.collects = before

    @property
    def on(self) -> bool:
        """Whether the next backward collects, or ends a collection."""
        return self.collects or self.held is not None

    def drop(self) -> None:
        """Forgets what has been collected."""
        self.held = None

    def keep(self, owner: object, held: Any) -> None:
        """Keeps what has been collected, None for nothing. owner: None while a step writes into it."""
        self.owner, self.held = owner, held

    def taken_by(self, owner: object) -> Any:
        """Returns what has been collected, None for nothing. Raises PlanError if it is of another plan, or of a step
        that failed."""
        if self.held is not None and self.owner is None:
            raise PlanError(
                "a step failed amid adding to the gradients that no_sync keeps, which are half of a sum now\n"
                "  Call module.zero_grad(), and run the steps since the last optimizer.step() again."
            )
        if self.held is not None and self.owner is not owner:
            raise PlanError(
                "no_sync has kept gradients of one plan, and now another one runs: the module is in another mode "
                "(train or eval), or its arguments have other shapes\n"
                "  Call backward outside of no_sync before that, or module.zero_grad()."
            )
        return self.held

    def gradients(
        self, owner: object, bring_home: Callable[[Sequence[Tensor]], T], computed: Sequence[Tensor]
    ) -> T | None:
        """Takes what a backward has computed. Returns what `bring_home` makes of the sums, None while it collects.

        Raises PlanError if what has been collected is of another plan.
        """
        before = self.taken_by(owner)
        self.keep(None, before)
        if before is not None:
            sums = [held.add_(each) for held, each in zip(before, computed)]
        else:
            # which may be expanded
            sums = [each.to(WIDE.get(each.dtype, each.dtype)).contiguous() for each in computed]
        found = None if self.collects else bring_home([total.to(each.dtype) for total, each in zip(sums, computed)])
        self.keep(owner, sums if self.collects else None)
        return found


def within(sums: Sums | None) -> str:
    """Returns what tells a step within `no_sync` from others."""
    return " within no_sync" if sums is not None and sums.collects else ""
