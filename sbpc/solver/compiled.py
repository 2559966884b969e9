"""Sweeps of messages as machine code, where it was built when sbpc was installed: the same passes in a tenth of the time.

The code is in sweeps.c, and in the .h files beside the .py files that say the same. It reads tables of addresses and works on
the arrays of `Messages` themselves, which are therefore changed in place only. Without it those .py files run as they stand.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType

import numpy as np

from sbpc.solver.network import Edge, Node, Port
from sbpc.solver.share import FAINT, LEAST, RARE, STEP, Star, shares


def columns(names: str) -> np.dtype:
    """The row of a table as sweeps.c declares it: addresses and counts, and with a point numbers that are not whole."""
    return np.dtype([(name.rstrip("."), np.float64 if name.endswith(".") else np.int64) for name in names.split()])


FORWARD, BACKWARD, HEAR, FILL = range(4)  # what a pass does
NODE = columns("costs inbox gather weight. labels star links earlier later")
LINK = columns("seconds inbox part. here there by_row star branch")
STAR = columns("seconds price parts made branch sources aliases layouts branches step. rare. least. faint.")
BRANCH = columns("charges over direct sent columns at to count straight late")


def built() -> ModuleType | None:
    """The machine code; None where there was no C compiler, or where it was built of tables whose rows are of other sizes."""
    try:
        found = importlib.import_module("sbpc.solver._sweeps")
    except ImportError:
        return None
    return found if found.rows == tuple(row.itemsize for row in (NODE, LINK, STAR, BRANCH)) else None


machine = built()


class Tables:
    """The tables of messages: a row per node in their order, its links to other nodes (the earlier ones first), a row per star.

    A link is an edge seen from one of its ends: `here` and `there` count the layouts at that end and at the other, of which
    `inbox` is; by_row: seconds are stored [here, there]. What goes to a star goes into `sent` of its branch.
    """

    def __init__(self, nodes: Mapping[int, Node], stars: Mapping[int, Star], real: type[np.floating]):
        self.single = real is np.float32
        self.kept: list[np.ndarray] = []  # what addresses are of
        self.sizes = np.zeros(4, np.int64)  # most labels or pairs of a node, layouts of a port, of all branches, aliases of those
        number = {id(star): at for at, star in enumerate(stars.values())}
        self.stars = np.array([self.star(star) for star in stars.values()], STAR)
        rows, links = list[tuple](), list[tuple]()
        for at, node in nodes.items():
            arrays = [self.address(found) for found in (node.costs, node.inbox, node.gather)]
            star = number.get(id(stars.get(at)), -1)
            sides = len(node.earlier.edges), len(node.later.edges)
            rows.append((*arrays, node.weight, len(node.costs), star, len(links), *sides))
            for edge, part in zip(node.earlier.edges, node.earlier.parts):
                links.append(self.link(edge, edge.last, edge.first, part, number.get(id(edge.star), -1)))
            for edge, part in zip(node.later.edges, node.later.parts):
                links.append(self.link(edge, edge.first, edge.last, part, number.get(id(edge.star), -1)))
            self.most(len(node.costs), len(node.inbox))
        self.nodes, self.links = np.array(rows, NODE), np.array(links, LINK)

    def pass_on(self, kind: int, heat: float = 0.0, balance: int = 0) -> float:
        """`Messages.forward`, `.backward` or `.hear`. balance: charges of stars, 1 from the first consumer on, 2 from the last."""
        assert machine is not None
        return machine.pass_on(self.nodes, self.links, self.stars, self.sizes, self.single, kind, heat, balance)

    def split(self, nodes: Mapping[int, Node]) -> None:
        """Divide what nodes say as they do now."""
        self.links["part"] = [part for node in nodes.values() for side in (node.earlier, node.later) for part in side.parts]

    def address(self, found: np.ndarray) -> int:
        """Where the numbers of an array lie, one after the other."""
        assert found.flags.c_contiguous
        self.kept.append(found)
        return found.ctypes.data

    def __reduce__(self) -> str:
        raise TypeError("tables hold addresses of arrays: make them of the arrays again")

    def most(self, *sizes: int) -> None:
        """There is room for so much."""
        self.sizes[: len(sizes)] = np.maximum(self.sizes[: len(sizes)], sizes)

    def link(self, edge: Edge, here: Port, there: Port, part: float, star: int) -> tuple:
        """The row of an edge as one end sees it; star: its number, -1 if there is none. The port of a star has no labels."""
        inbox, counts = self.address(there.inbox), [len(port.layouts) if len(port.at) else 0 for port in (here, there)]
        if edge.star is not None:
            return 0, inbox, part, *counts, 0, star, edge.branch
        by_row = edge.seconds if here is edge.first else edge.seconds.T  # [here, there]
        stored = by_row if by_row.flags.c_contiguous else by_row.T
        return self.address(stored), inbox, part, *counts, stored is by_row, -1, 0

    def star(self, star: Star) -> tuple:
        """The row of a star, and those of its branches."""
        layouts, share = star.share.price.shape[1], star.share
        parts = shares(share.columns, layouts).astype(share.price.dtype)
        branches = list[tuple]()
        for at, to in star.straight:
            number = len(branches)
            arrays = share.charges[number], star.over[number], star.direct[number], star.sent[number]
            places = np.arange(layouts)[share.columns[number]]
            addresses = [self.address(found) for found in (*arrays, places, at, to)]
            branches.append((*addresses, len(places), len(at), star.late[number]))
        sizes = star.seconds.shape
        self.most(star.seconds.size, max(*sizes, layouts), len(branches) * layouts, len(branches) * sizes[1])
        whole = star.seconds, share.price, parts, star.made, np.array(branches, BRANCH)
        found = [self.address(array) for array in whole]
        return *found, *sizes, layouts, len(branches), STEP, RARE, LEAST, FAINT
