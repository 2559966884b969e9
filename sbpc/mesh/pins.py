"""Pins: what the user asks of layouts, as text such as "S(0)@tensor", read and matched with names."""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sbpc.errors import PinError, SbpcError, closest, shown
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import Axes, B, Numbers, Partial, Ragged, Split, State, parse_state

T = TypeVar("T")
SPANS = re.compile(r"\{([0-9]{1,6}(?:-[0-9]{1,6})?(?:,[0-9]{1,6}(?:-[0-9]{1,6})?)*)\}")
SPELLED = 100_000  # patterns that one is spelled out to, at most
TRIES = 100  # smaller sets of pins that are tried for the message about a conflict


@dataclass(frozen=True)
class Wish:
    """What a layout must be like: states on some axes (by number), orders of cutting, and nowhere stored twice.

    order: tuples of axes that cut one dim, first cut first. spread: no axis of more than one rank may be B or P.
    reason: where the wish comes from, for messages.
    """

    states: tuple[tuple[int, State], ...] = ()
    order: tuple[Axes, ...] = ()
    spread: Axes = ()
    reason: str = ""

    def admits(self, layout: Layout) -> bool:
        """Whether the layout is as wished."""
        return (
            all(layout.states[axis] == state for axis, state in self.states)
            and all(isinstance(layout.states[axis], Split) for axis in self.spread)
            and all(self.ordered(layout, axes) for axes in self.order)
        )

    @staticmethod
    def ordered(layout: Layout, axes: Numbers) -> bool:
        """Whether the axes cut in this order, one after the other among those of their dim."""
        places = [layout.order.index(axis) for axis in axes if axis in layout.order]
        return len(places) == len(axes) and places == sorted(places)


def exactly(layout: Layout, reason: str) -> Wish:
    """The wish for one layout and no other."""
    return Wish(tuple(enumerate(layout.states)), tuple(layout.cuts.values()), reason=reason)


def parse_wish(text: str, mesh: Mesh, reason: str) -> Wish:
    """The wish that a text states: `S(0)@tensor`, `S(0)@tensor>data`, `B@data, S(1)@tensor`, `[B, S(1)]`, `S(0)`.

    >>> parse_wish("S(0)@tensor>data", Mesh(data=2, tensor=2), "a pin")
    Wish(states=((1, S(0)), (0, S(0))), order=((1, 0),), spread=(), reason='a pin')

    Raises PinError if it does not parse, names no axis of the mesh, or names one twice.
    """
    if not isinstance(text, str):
        raise PinError(f"{reason}: {shown(text)} is no layout\n  A layout is a text such as S(0)@{mesh.axes[-1]}.")
    try:
        if text.strip().startswith("["):
            return exactly(_cutting(Layout.parse(text, mesh.axes), mesh), reason)
        return _parse_states(text, mesh, reason)
    except PinError:
        raise
    except SbpcError as error:
        raise PinError(f"{reason}: {error}") from error


def _parse_states(text: str, mesh: Mesh, reason: str) -> Wish:
    """The wish that states by axis give: `B@data, S(1)@tensor`."""
    states: dict[int, State] = {}
    orders: list[Axes] = []
    for part in re.split(r",\s*", text.strip()):
        state_text, _, names = part.partition("@")
        state = parse_state(state_text)
        if not names and len(mesh.axes) > 1:
            raise PinError(f"{reason}: {text!r} names no axis\n  Say which: {state_text}@{mesh.axes[-1]}.")
        axes = tuple(mesh.axis(name.strip()) for name in (names or mesh.axes[0]).split(">"))
        for axis in axes:
            if axis in states:
                raise PinError(f"{reason}: {text!r} names axis {mesh.axes[axis]!r} twice\n  Give it one state.")
            states[axis] = state if mesh.sizes[axis] > 1 or isinstance(state, Partial) else B
        axes = tuple(axis for axis in axes if mesh.sizes[axis] > 1)
        orders += [axes] if len(axes) > 1 else []
    return Wish(tuple(states.items()), tuple(orders), reason=reason)


def parse_layout(text: str | Layout | None, mesh: Mesh, reason: str) -> Layout:
    """A whole layout from a text that may leave axes out: those are B. None: B everywhere. Never partial."""
    if isinstance(text, Layout):
        layout = _cutting(text, mesh)
    elif text is None:
        layout = Layout(mesh.axes, (B,) * len(mesh.axes))
    else:
        wish = parse_wish(text, mesh, reason)
        states = dict(wish.states)
        order = tuple(axis for axes in wish.order for axis in axes)
        rest = tuple(axis for axis in range(len(mesh.axes)) if axis not in order)
        layout = Layout(mesh.axes, tuple(states.get(axis, B) for axis in range(len(mesh.axes))), (*order, *rest))
    if layout.axes != mesh.axes or any(isinstance(state, Partial) for state in layout.states):
        raise PinError(f"{reason}: {layout} cannot be stored on {mesh}\n  Give splits and B over the axes of the mesh.")
    return layout


def _cutting(layout: Layout, mesh: Mesh) -> Layout:
    """The layout with B on axes of one rank, where a split cuts nothing."""
    pairs = enumerate(zip(layout.states, mesh.sizes))
    nothing: dict[int, State] = {
        axis: B for axis, (state, size) in pairs if size == 1 and isinstance(state, (Split, Ragged))
    }
    return layout.replace(nothing) if nothing else layout


def layout_of_rows(names: str, mesh: Mesh) -> Layout:
    """The layout of a batch whose rows the named axes share, the first one outermost.

    >>> layout_of_rows("data", Mesh(data=2, tensor=2))
    [S(0), B]

    Raises MeshError for a name of no axis, PinError for one that stands twice.
    """
    axes = [mesh.axis(name.strip()) for name in names.split(",")]
    return parse_layout("S(0)@" + ">".join(mesh.axes[axis] for axis in axes), mesh, f"inputs={names!r}")


def leaves_with_rows(shapes: Sequence[Sequence[int]]) -> list[bool]:
    """Which tensors have the rows of the batch: those whose dim 0 is as long as that of the first one that has dims.

    >>> leaves_with_rows([(), (8, 5), (3,), (8,)])
    [False, True, False, True]
    """
    rows = next((shape[0] for shape in shapes if len(shape)), None)
    return [len(shape) > 0 and shape[0] == rows for shape in shapes]


def spelled_out(pattern: str) -> list[str]:
    """Returns a pattern once for each of the numbers in braces, as reports write names; as it is, which matches
    nothing, where one of the runs of numbers is empty or there are more than SPELLED.

    >>> spelled_out("blocks.{0-1,5}.*.weight")
    ['blocks.0.*.weight', 'blocks.1.*.weight', 'blocks.5.*.weight']
    >>> spelled_out("blocks.{3-1}")
    ['blocks.{3-1}']
    """
    texts = SPANS.split(pattern)
    ends = [[run.split("-") for run in span.split(",")] for span in texts[1::2]]
    groups = [[range(int(run[0]), int(run[-1]) + 1) for run in runs] for runs in ends]
    count = math.prod(sum(map(len, runs)) for runs in groups)
    if count > SPELLED or not all(run for runs in groups for run in runs):
        return [pattern]
    numbers = itertools.product(*(itertools.chain.from_iterable(runs) for runs in groups))
    return ["".join(f"{text}{number}" for text, number in zip(texts[::2], each)) + texts[-1] for each in numbers]


def spelled_out_pins(pins: Mapping[str, str]) -> dict[str, str]:
    """Returns pins by patterns that are spelled out. Raises PinError if two of them ask for different layouts."""
    found: dict[str, str] = {}
    for each, layout in pins.items():
        for pattern in spelled_out(each):
            if found.setdefault(pattern, layout) != layout:
                raise PinError(
                    f"{pattern!r} is pinned to {found[pattern]!r} and to {layout!r}\n  Remove one of the pins."
                )
    return found


def resolve_pins(pins: Mapping[str, str], names: Mapping[str, Iterable[str]], mesh: Mesh) -> dict[str, Wish]:
    """Pins by pattern -> wishes by node.

    names: node -> the names that a pattern may match (a tied parameter has several).
    Raises PinError for a pattern that matches nothing and for two pins that contradict each other on one tensor.
    """
    found: dict[str, Wish] = {}
    for pattern, text in pins.items():
        wish = parse_wish(text, mesh, f"pin {pattern!r}: {text!r}")
        hits = matching(pattern, names, PinError(f"pin {pattern!r} matches no parameter and no value"))
        found = both(found, dict.fromkeys(hits, wish), mesh)
    return found


def matching(pattern: str, names: Mapping[T, Iterable[str]], error: SbpcError) -> list[T]:
    """What has a name that a pattern matches. names: those of each. Raises `error`, with the closest names, if nothing
    has."""
    hits = [each for each, known in names.items() if any(fnmatch.fnmatchcase(name, pattern) for name in known)]
    if not hits:
        near = ", ".join(closest(pattern, list(itertools.chain(*names.values()))))
        raise type(error)(f"{error}\n  The closest names are {near}.")
    return hits


def merge(first: Wish, second: Wish, node: str, mesh: Mesh) -> Wish:
    """Both wishes at once. Raises PinError if they contradict each other."""
    states = dict(first.states)
    for axis, state in second.states:
        if states.setdefault(axis, state) != state:
            raise PinError(
                f"two pins of %{node} disagree on axis {mesh.axes[axis]!r}: {states[axis]} and {state}\n"
                f"  {first.reason}\n  {second.reason}\n  Remove one of them."
            )
    reason = f"{first.reason}; {second.reason}"
    return Wish(tuple(states.items()), (*first.order, *second.order), first.spread or second.spread, reason)


def both(first: Mapping[str, Wish], second: Mapping[str, Wish], mesh: Mesh) -> dict[str, Wish]:
    """Two sets of wishes at once. Raises PinError if they contradict each other."""
    found = dict(first)
    for node, wish in second.items():
        found[node] = merge(found[node], wish, node, mesh) if node in found else wish
    return found


def conflict(pins: Mapping[str, str], refusal: Callable[[Mapping[str, str]], SbpcError | None]) -> SbpcError:
    """The error about pins that cannot be met, with the fewest of them that conflict.

    Each pin is left out in turn, and stays out if the others still conflict: what is left conflicts without any of
    its parts doing so. Then smaller sets are tried, the smallest first, TRIES in all. refusal: the error that some
    pins give.
    """
    needed = dict(pins)
    for pattern in pins:
        fewer = {other: text for other, text in needed.items() if other != pattern}
        if refusal(fewer) is not None:
            needed = fewer
    smaller = itertools.chain.from_iterable(itertools.combinations(pins, size) for size in range(1, len(needed)))
    for patterns in itertools.islice(smaller, TRIES):
        chosen = {pattern: pins[pattern] for pattern in patterns}
        if refusal(chosen) is not None:
            needed = chosen
            break
    error = refusal(needed)
    assert error is not None
    if all(f"pin {pattern!r}" in str(error) for pattern in needed):
        return error
    listed = "\n".join(f"  pin {pattern!r}: {text!r}" for pattern, text in needed.items())
    return PinError(f"these pins cannot be met together\n{listed}\n{error}")
