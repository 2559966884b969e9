"""How NCCL runs collectives: for each algorithm, what a message takes by its hops and the bytes on each link.

Hops and bytes are those of NCCL's own model (NVIDIA/nccl, src/graph/tuning.cc). What a hop takes, and which part of
the bandwidth of a link is reached, stand in the files of clusters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
from sympy.core.relational import Relational

# p ranks in a group, each sending to its neighbour on the ring; n bytes of one block, the largest that the group has.
# The block of an all_reduce is what one rank holds; of the others, a chunk of it. Steps that are not here are local.
# What ends in the name of a type sends numbers of that one, see `block_bytes`.
WIRE: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "all_gather": lambda p, n: (p - 1, (p - 1) * n),
    "reduce_scatter": lambda p, n: (p - 1, (p - 1) * n),
    "all_to_all": lambda p, n: (p - 1, (p - 1) * n),
    "all_reduce": lambda p, n: (2 * (p - 1), 2 * (p - 1) * n / p),
    "dispatch": lambda p, n: (p - 1, (p - 1) * n / p),
}
DISPATCH = "dispatch"  # of rows to the ranks of their groups, or back; the block is all rows of a rank
COUNTS = "all_gather"  # before that, where each has sorted its own rows: of where the groups of each one's end
INT8, FLOAT8 = EIGHT_BITS = "int8", "float8"
# what sends for a step that is no collective of a library itself, and packs what it sends or adds up what it gets
PACKED = {"exchange": "all_to_all"}
PACKED |= {f"exchange_{kind}": "all_to_all" for kind in EIGHT_BITS}
PACKED |= {f"gather_{kind}": "all_gather" for kind in EIGHT_BITS}
WIRE |= {name: WIRE[carrier] for name, carrier in PACKED.items()}
CARRIERS = {**PACKED, DISPATCH: "all_to_all"}  # those, and what sends numbers as they are
WORKS = {*PACKED, DISPATCH}  # before or behind which kernels run that are priced with it
COUNTING = 24  # small kernels in which a rank tells how many rows it sends to whom, and waits for the numbers
MOST, FEWEST, SCALE = 256, 64, 4  # numbers of 8 bits that share a scale (see `rows_of`), and the bytes of one
# Bytes that the kernels which pack a number of float32 move, and those which unpack it: see `sbpc.boxing.eight_bits`.
PACK = {INT8: (4, 0, 0, 8, 8, 8, 12, 8, 5, 2), FLOAT8: (4, 0, 0, 8, 5, 2)}
UNPACK = {INT8: (5, 8, 12, 8), FLOAT8: (5, 8)}
GATHERS = "all_gather", "reduce_scatter"
REDUCES, FURTHEST = ("all_reduce", "reduce_scatter"), ("max", "min")
Line = tuple[float, float]  # seconds of a message of no bytes, and seconds more for each byte of its block
Lines = tuple[Line, ...]  # of which the cheapest counts: another one for each range of sizes


def ring(collective: str, p: Any, n: Any) -> tuple[Any, Any, Any, Any]:
    """Once around for each half of an all_reduce; a link out of a node carries what every other one does."""
    rounds, blocks = WIRE[collective](p, 1)
    across = (2 if collective == "all_reduce" else 1) * (n - 1)
    return rounds - across, across, blocks, blocks


def direct(p: Any, n: Any, parts: Any) -> tuple[Any, Any, Any, Any]:
    """To every other rank one of so many parts of the block."""
    return p / n - 1, p - p / n, (p / n - 1) / parts, p / n * (p - p / n) / parts


# By algorithm: for which collectives; then of p ranks on n nodes the hops of a message inside nodes and across, the
# blocks that a rank sends to others of its node, and those that the group sends from one of its nodes.
#
# A tree goes up and down: along a chain in each node, over a binary tree of nodes; its other half has another root, so
# that a node in the middle of one is a leaf of the other and sends two blocks in all. NVLink SHARP reduces in the
# switch: a rank sends its block once, and its part of the sum. PAT has a part for every rank besides its rounds.
# `direct` is what NCCL does for an all_to_all: each rank sends to every other, and all of a node share its links.
ALGORITHMS: dict[str, tuple[tuple[str, ...], Callable[[str, Any, Any], tuple[Any, Any, Any, Any]]]] = {
    "ring": ((*GATHERS, "all_reduce"), ring),
    "tree": (
        ("all_reduce",),
        lambda _, p, n: (2 * (p / n - 1), 2 * log2(n), smallest(2, p / n - 1), smallest(2, n - 1)),
    ),
    "nvls": (("all_reduce",), lambda _, p, n: (1, 0, 1 + 1 / p, 0)),
    "nvls_tree": (("all_reduce",), lambda _, p, n: (1, 2 * log2(n), 1 + n / p, smallest(2, n - 1))),
    "pat": (GATHERS, lambda _, p, n: (p, log2(n), 0, p - 1)),
    "direct": (("all_to_all",), lambda name, p, n: direct(p, n, p if name == DISPATCH else 1)),
}
INSIDE, ALONE, TOGETHER, ACROSS = PLACES = "inside", "alone", "together", "across"


@dataclass(frozen=True)
class Way:
    """One algorithm with one protocol: how a collective may run in the groups of a place.

    algorithm: one of ALGORITHMS. protocol: how messages are packed, as NCCL calls it. place: groups "inside" a node;
    "alone", with one rank on each of their nodes; "together", with several; "across", with one or several. base:
    seconds that it takes in any case. intra, inter: seconds of each hop inside a node and across nodes; of PAT, intra
    is what each rank adds. efficiency: bytes/s over the links of a rank in groups inside a node, else over those of a
    node, as a fraction of their bandwidth. most: bytes/s that a rank sends at most inside its node, in groups across
    nodes.
    """

    algorithm: str
    protocol: str
    place: str
    base: float = 0.0
    intra: float = 0.0
    inter: float = 0.0
    efficiency: float = 1.0
    most: float = math.inf

    def fits(self, collective: str, place: str) -> bool:
        """Returns whether NCCL may run a collective so in groups of a place other than "across"."""
        return CARRIERS.get(collective, collective) in ALGORITHMS[self.algorithm][0] and (
            self.place == place or (self.place == ACROSS and place != INSIDE)
        )

    def line(self, collective: str, ranks: Any, nodes: Any, bandwidth: Any) -> tuple[Any, Any]:
        """Returns seconds of a message of no bytes in groups of two ranks or more on so many nodes, and those for
        each byte of its block, as numbers or formulas.

        bandwidth: of one rank inside a node, or of that part of a node's links which one group has.
        """
        hops, hops_across, blocks, blocks_across = ALGORITHMS[self.algorithm][1](collective, ranks, nodes)
        start = self.base + hops * self.intra + hops_across * self.inter
        if self.place == INSIDE:
            return start, blocks / (bandwidth * self.efficiency)
        each = blocks_across / (bandwidth * self.efficiency)
        return start, each if self.most == math.inf else largest(each, blocks / self.most)


def eight_bits(collective: str) -> str | None:
    """Returns the type of 8 bits in which a collective sends its numbers; None for one that sends them as they are."""
    kind = collective.rpartition("_")[2]
    return kind if kind in EIGHT_BITS else None


def carried(collective: str, reduction: str | None, itemsize: int) -> int:
    """Returns the bytes in which a collective sends a number of so many: maxima and minima of 2 go as integers of 4,
    which have a place for NaN."""
    return 4 if itemsize == 2 and collective in REDUCES and reduction in FURTHEST else itemsize


def block_bytes(collective: str, block: Sequence[Any], itemsize: int) -> Any:
    """Returns the bytes that a block of these sizes takes on the wire; numbers, arrays or formulas.

    >>> block_bytes("all_gather", (10, 100), 4), block_bytes("gather_int8", (10, 100), 4)
    (4000, 1040)
    """
    if eight_bits(collective) is None:
        return itemsize * math.prod(block)
    rows, length = rows_of(block)
    groups, size = groups_of(length)
    return rows * groups * (size + SCALE)


def rows_of(block: Sequence[Any]) -> tuple[Any, Any]:
    """Returns how many rows of how many numbers a block has where it is packed: those along its last dim, or along so
    many of the last that a row has FEWEST numbers. Other rows of a matrix may be much larger, and share no scale."""
    rows, length = 1, block[-1]
    for size in block[-2::-1]:
        short = length < FEWEST
        rows, length = pick(short, rows, rows * size), pick(short, length * size, length)
    return rows, length


def pick(condition: Any, yes: Any, no: Any) -> Any:
    """Returns the first where a condition holds, else the second: of numbers, of arrays or of sympy expressions."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    if isinstance(condition, Relational):
        return sympy.Piecewise((yes, condition), (no, True))
    return yes if condition else no


def groups_of(length: Any) -> tuple[Any, Any]:
    """Returns how many groups of how many numbers a row is cut into, of MOST numbers at most, and in fours."""
    groups = ceil_div(length, MOST)
    some = np.maximum(groups, 1) if isinstance(groups, np.ndarray) else groups or 1
    return groups, 4 * ceil_div(length, 4 * some)


def packing(collective: str, ranks: Any, count: Any) -> tuple[list[Any], list[Any]]:
    """Returns the bytes that each kernel moves by which a rank packs what it sends in one of PACKED, and by which it
    unpacks and adds up what it gets. count: of the numbers of its block. What is exchanged as it is has 16 bits: one
    kernel writes the sum in float32, another one rounds that."""
    kind = eight_bits(collective)
    if collective == DISPATCH:
        return [0.0] * COUNTING, []
    if kind is None:
        return [], [(2 * ranks + 4) * count, 6 * count]
    sums, every = collective.startswith("exchange"), ranks * count
    sent = every if sums else count
    return [each * sent for each in PACK[kind]], [each * every for each in (*UNPACK[kind], *((4,) if sums else ()))]


def envelope(lines: Iterable[tuple[Any, Any]]) -> Lines:
    """Returns those lines that are the cheapest for messages of some size, from the smallest on."""
    found: list[Line] = []
    for line in sorted((float(start), float(each)) for start, each in lines):
        if found and line[1] >= found[-1][1]:
            continue
        while len(found) > 1 and crossing(found[-2], line) <= crossing(found[-2], found[-1]):
            found.pop()
        found.append(line)
    return tuple(found)


def crossing(first: Line, second: Line) -> float:
    """Returns the bytes from which on the second line is the cheaper one."""
    return (second[0] - first[0]) / (first[1] - second[1])


def seconds_on(lines: Lines, size: float) -> float:
    """Returns the seconds of a message with a block of so many bytes."""
    return min(start + each * size for start, each in lines)


def ceil_div(x: Any, y: Any) -> Any:
    """The least integer from x / y on, for a number or a sympy expression."""
    return sympy.ceiling(x / y) if isinstance(x, sympy.Basic) else -(-x // y)


def log2(x: Any) -> Any:
    """The logarithm to base 2 of a number or of a sympy expression."""
    return sympy.log(x, 2) if isinstance(x, sympy.Basic) else math.log2(x)


def largest(x: Any, y: Any) -> Any:
    """The larger of two numbers or sympy expressions."""
    return Max(x, y) if isinstance(x, sympy.Basic) or isinstance(y, sympy.Basic) else max(x, y)


def smallest(x: Any, y: Any) -> Any:
    """The smaller of two numbers or sympy expressions."""
    return Min(x, y) if isinstance(x, sympy.Basic) or isinstance(y, sympy.Basic) else min(x, y)


class Max(sympy.Max):  # type: ignore[misc]
    """A maximum whose terms are not compared before they are numbers, which takes sympy long."""

    def __new__(cls, *terms: Any) -> Any:
        """Makes it, or gives the number."""
        if all(sympy.sympify(term).is_number for term in terms):
            return sympy.Max(*terms)
        return super().__new__(cls, *terms, evaluate=False)


class Min(sympy.Min):  # type: ignore[misc]
    """Likewise a minimum."""

    def __new__(cls, *terms: Any) -> Any:
        """Makes it, or gives the number."""
        if all(sympy.sympify(term).is_number for term in terms):
            return sympy.Min(*terms)
        return super().__new__(cls, *terms, evaluate=False)
