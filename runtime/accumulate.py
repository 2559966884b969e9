"""Add up the gradients of several backwards on each rank, and communicate their sum once: `with module.no_sync():`.

The last calls on a gradient's way home, from the first collective on, are linear. So the sum may be taken before
them, of what they read, and they run once for all backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

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

Where `backward` is called counts, not where the forward ran. Batches of other shapes have sums of their own plan: those
of the plan before go home when the plan changes. The sums are held in the layouts in which gradients are
computed, in float32 where these are in 16 bits, in a loop in the dtype in which its micro-batches add up: that is
memory besides what the plan predicts. A stock optimizer does not know them. So end with a backward outside before
`optimizer.step()`, as the sums are else missing there and go into the next backward outside; and drop them by
`module.zero_grad()`, as `optimizer.zero_grad()` does not. `sbpc.Checkpoints` refuses to save while there are any, and a
deep copy is refused. `module.step` calls no hook of a parameter within; a backward of autograd calls them with None."""
ZERO_GRAD = "Drops the gradients of parameters, and what `no_sync` keeps of them."
WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # in which sums are held


class Owner(Protocol):
    """What runs backwards whose sums lie by place: brings them home, and names the parameters that they are of."""

    @property
    def trained(self) -> Sequence[str]: ...

    def bring_home(self, sums: Sequence[Tensor]) -> Sequence[Tensor]: ...


class Sums:
    """What backwards within `no_sync` have computed of gradients: what their ways home begin with, in order.

    collects: whether `no_sync` is on. held: by place, in a loop by chunk and name; None for nothing. owner: what ran
    these backwards. home: by parameter, sums of plans that ran before that one. dtypes: of what was computed.
    """

    def __init__(self) -> None:
        self.held: Any = None
        self.owner: Any = None
        self.home: dict[str, Tensor] = {}
        self.dtypes: Sequence[torch.dtype] = ()
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
        return self.collects or self.unfinished

    @property
    def unfinished(self) -> bool:
        """Whether something is collected."""
        return self.held is not None or bool(self.home)

    def drop(self) -> None:
        """Forgets what has been collected."""
        self.held, self.home = None, {}

    def keep(self, owner: object, held: Any) -> None:
        """Keeps what has been collected, None for nothing. owner: None while a step writes into it."""
        self.owner, self.held = owner, held

    def taken_by(self, owner: object) -> Any:
        """Returns what has been collected, None for nothing. Raises PlanError if it is of a step that failed, and
        where a loop ran or is to run, if it is of another plan."""
        if self.held is not None and self.owner is None:
            raise PlanError(
                "a step failed amid adding to the gradients that no_sync keeps, which are half of a sum now\n"
                "  Call module.zero_grad(), and run the steps since the last optimizer.step() again."
            )
        if self.unfinished and self.owner is not owner:
            raise PlanError(
                "no_sync has kept gradients of one plan, and now another one runs, of which one is a loop over "
                "micro-batches\n"
                "  Call backward outside of no_sync before that, or module.zero_grad()."
            )
        return self.held

    def gradients(self, owner: Owner, computed: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Takes what a backward has computed. Returns the sums at home, None while it collects. Raises PlanError if
        a parameter's sum would be lost."""
        if isinstance(self.held, list) and self.owner not in (None, owner):
            self.go_home()
        before = self.held if self.held is None else self.taken_by(owner)
        self.keep(None, before)
        if before is not None:
            sums = [held.add_(each) for held, each in zip(before, computed)]
        else:
            # which may be expanded
            sums = [each.to(WIDE.get(each.dtype, each.dtype)).contiguous() for each in computed]
        self.dtypes = [each.dtype for each in computed]
        self.keep(owner, sums)
        if self.collects:
            return None
        self.go_home()
        found, self.home = self.home, {}
        lost = [name for name in found if name not in owner.trained]
        if lost:
            raise PlanError(
                f"no_sync has kept a gradient of {lost[0]}, and the plan that ends the collection gives it none\n"
                "  Call backward outside of no_sync before batches on which other parameters have no influence."
            )
        return [found[name] for name in owner.trained]

    def go_home(self) -> None:
        """Brings home what has been collected, and adds it up there."""
        sums = [total.to(dtype) for total, dtype in zip(self.held, self.dtypes)]
        for name, gradient in zip(self.owner.trained, self.owner.bring_home(sums)):
            self.home[name] = gradient if name not in self.home else self.home[name] + gradient
        self.held = None


def within(sums: Sums | None) -> str:
    """Returns what tells a step within `no_sync` from others."""
    return " within no_sync" if sums is not None and sums.collects else ""
