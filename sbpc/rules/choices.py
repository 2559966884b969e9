"""A choice: how one node runs on the whole mesh, as a signature per axis and the order in which the axes cut."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sbpc.mesh.layout import Layout, chunk
from sbpc.mesh.routing import ANY, stretched
from sbpc.mesh.states import Axes, B, Names, Numbers, Shape, Split, State, chunk_sizes
from sbpc.rules import Match, Phases, Signature


@dataclass(frozen=True)
class Choice:
    """One signature per mesh axis, and all axes (by number) in the order in which they cut."""

    signatures: tuple[Signature, ...]
    order: Axes

    def cuts(self) -> dict[str, Axes]:
        """By factor: the numbers of the axes that split it, first cut first."""
        found: dict[str, Axes] = {}
        for axis in self.order:
            for factor in dict.fromkeys((self.signatures[axis].factor, self.signatures[axis].own)):
                if factor is not None:
                    found[factor] = (*found.get(factor, ()), axis)
        return found

    def busiest(self, factor: str, size: Any, sizes: Numbers, times: float) -> tuple[Any, Axes]:
        """A size, and the axes that cut it, of which the largest part is what the busiest rank has of a factor: where
        its rows are shared out by their groups `times` the mean."""
        axes = tuple(axis for axis, signature in enumerate(self.signatures) if signature.ragged == factor)
        cuts = self.cuts().get(factor, ())
        if not axes or times == ANY:
            return size, cuts
        return stretched(size, math.prod(sizes[axis] for axis in axes), times), (*cuts, *axes)

    @property
    def sharing(self) -> Axes:
        """The axes that share out rows by their groups."""
        return tuple(axis for axis, signature in enumerate(self.signatures) if signature.ragged is not None)

    @property
    def owning(self) -> Axes:
        """The axes on which each rank has rows of its own, first cut first."""
        return tuple(axis for axis in self.order if self.signatures[axis].own and not self.signatures[axis].ragged)

    @property
    def apart(self) -> bool:
        """Whether ranks share out rows of which each has sorted its own."""
        return any(signature.own and signature.ragged for signature in self.signatures)

    @property
    def shares_alone(self) -> bool:
        """Whether the axes that share out rows, if any do, are neighbours that cut in mesh order, and no other axis
        cuts what they cut; but for those on which each rank has rows of its own, which cut before them."""
        axes, owning = self.sharing, self.owning
        rest = {s.factor for axis, s in enumerate(self.signatures) if axis not in (*axes, *owning)} - {None}
        if rest & {f for axis in owning for f in (self.signatures[axis].factor, self.signatures[axis].own)}:
            return False
        if not axes:
            return True
        first = self.signatures[axes[0]]
        return (
            axes == tuple(range(axes[0], axes[-1] + 1))
            and [axis for axis in self.order if axis in axes] == list(axes)
            and all(self.signatures[axis] == first for axis in axes)
            and not rest & {first.factor, first.ragged}
            and self.cuts().get(first.factor or "", axes) in (axes, (*owning, *axes))
        )

    def part(
        self, sizes: Iterable[tuple[str, int]], mesh_sizes: Numbers, coordinates: Numbers
    ) -> dict[str, int] | None:
        """By factor the size of the part within which ranks share out rows, or have their own; None if none do."""
        if not self.sharing and not self.owning:
            return None
        cuts = {factor: [at for at in axes if at not in self.sharing] for factor, axes in self.cuts().items()}
        return {factor: chunk(size, cuts.get(factor, ()), mesh_sizes, coordinates)[1] for factor, size in sizes}

    def input(self, slot: int, axes: Names) -> Layout:
        """The layout in which the node reads its tensor operand number `slot`."""
        return layout_of(axes, tuple(s.inputs[slot] for s in self.signatures), self.order)

    def output(self, index: int, axes: Names) -> Layout:
        """The layout in which the node leaves its output number `index`."""
        return layout_of(axes, tuple(s.outputs[index] for s in self.signatures), self.order)

    def __str__(self) -> str:
        order = "" if self.order == tuple(sorted(self.order)) else " order " + ">".join(map(str, self.order))
        return " | ".join(s.text for s in self.signatures) + order


@functools.lru_cache(maxsize=1 << 18)
def layout_of(axes: Names, states: tuple[State, ...], order: Axes) -> Layout:
    """The Layout of these fields, made once."""
    return Layout(axes, states, order)


@dataclass(frozen=True)
class Candidates:
    """What a node may do on one axis, with the conditions under which its factors may be cut.

    sizes: the global size of each factor. divides: factors of which every cut must come out even. nonempty: factors of
    which no rank may be left an empty shard. mesh_order: a dim that does not come out even is cut in mesh order only
    (what DTensor can describe). phases: what the node is taken apart into where a choice splits one of their factors.
    """

    signatures: tuple[Signature, ...]
    sizes: tuple[tuple[str, int], ...] = ()
    divides: frozenset[str] = frozenset()
    nonempty: frozenset[str] = frozenset()
    mesh_order: bool = False
    phases: Phases | None = None

    def legal(self, choice: Choice, mesh_sizes: Numbers) -> bool:
        """Whether every cut of every factor keeps its condition, in the node and in all that it is taken apart into."""
        sizes = dict(self.sizes)
        if not choice.shares_alone:
            return False
        owning = {axis for axis, signature in enumerate(choice.signatures) if signature.own is not None}
        for factor, axes in choice.cuts().items():
            if not may_cut(sizes[factor], tuple(mesh_sizes[at] for at in axes if at in owning), True, True):
                return False
            even = factor in self.divides or (self.mesh_order and axes != tuple(sorted(axes)))
            if not may_cut(sizes[factor], tuple(mesh_sizes[at] for at in axes), even, factor in self.nonempty):
                return False
        return not self.apart(choice) or self.legal_apart(choice, mesh_sizes)

    def apart(self, choice: Choice) -> bool:
        """Whether the node is taken apart under this choice."""
        return self.phases is not None and self.phases.apart(choice.signatures)

    def legal_apart(self, choice: Choice, mesh_sizes: Numbers) -> bool:
        """Whether all axes go together in the small graph, and every cut of every part keeps its condition."""
        assert self.phases is not None
        if self.phases.along(choice.signatures) is None:
            return False
        strict = [at for at, part in enumerate(self.phases.parts) if part.match.divides or part.match.nonempty]
        return all(of_match(self.phases.parts[at].match).legal(self.part(at, choice), mesh_sizes) for at in strict)

    def part(self, at: int, choice: Choice) -> Choice:
        """The choice of part number `at` of a node that is taken apart."""
        assert self.phases is not None
        return Choice(tuple(self.phases.ways[s].signatures[at] for s in choice.signatures), choice.order)

    def read(self, number: int, choice: Choice, axes: Names) -> Layout:
        """The layout in which value `number` of the small graph is read."""
        assert self.phases is not None
        return layout_of(axes, tuple(self.phases.ways[s].states[number] for s in choice.signatures), choice.order)


@functools.lru_cache(maxsize=1 << 14)
def may_cut(size: int, ranks: Axes, divides: bool, nonempty: bool) -> bool:
    """Whether a factor of `size` may be cut by axes of `ranks` ranks, one after the other."""
    chunks = [size]
    for p in ranks:
        if divides and any(n % p for n in chunks):
            return False
        chunks = sorted({chunk for n in chunks for chunk in chunk_sizes(n, p)})
        if nonempty and size and chunks[0] == 0:
            return False
    return True


def local_sizes(
    sizes: Iterable[tuple[str, int]], choice: Choice, mesh_sizes: Numbers, coordinates: Numbers
) -> dict[str, int]:
    """The size of every factor on the rank at `coordinates`."""
    cuts = choice.cuts()
    return {factor: chunk(size, cuts.get(factor, ()), mesh_sizes, coordinates)[1] for factor, size in sizes}


def of_match(match: Match) -> Candidates:
    """The candidates of a matched op."""
    return Candidates(match.signatures, tuple(match.sizes.items()), match.divides, match.nonempty, phases=match.phases)


def of_replicated(inputs: int, outputs: int) -> Candidates:
    """The only candidate of an op without a rule: everything is whole on every rank."""
    return Candidates((Signature((B,) * inputs, (B,) * outputs, None),))


@functools.lru_cache(maxsize=1 << 12)
def of_stored(shape: Shape) -> Candidates:
    """The candidates of a stored tensor (a placeholder): whole, or split on any dim."""
    split = tuple(Signature((), (Split(dim),), str(dim)) for dim, size in enumerate(shape) if size > 1)
    sizes = {str(dim): size for dim, size in enumerate(shape)}
    signatures = (Signature((), (B,), None), *split)
    return Candidates(signatures, tuple(sizes.items()), nonempty=frozenset(sizes), mesh_order=True)
