"""Sweeps as machine code (sweeps.c), if that was built at install time: the same messages in a tenth of the time.

The machine code reads tables of addresses and works on the arrays of `Messages` themselves, so these are only
changed in place.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from sbpc.solver.messages.network import Edge, Node, NodePort
from sbpc.solver.messages.stars import Star


def row(names: str) -> np.dtype:
    """Returns the row type of a table as sweeps.c declares it: integers and addresses; with a point, real numbers."""
    return np.dtype([(name.rstrip("."), np.float64 if name.endswith(".") else np.int64) for name in names.split()])


NODE = row("costs inbox gather labels star links earlier later")
LINK = row("seconds inbox part. here there by_row star branch")
STAR = row("seconds price equal made branch sources aliases layouts branches")
BRANCH = row("shares over direct sent columns source place layouts straight late")


def built() -> ModuleType | None:
    """Returns the machine code; None if it was not built, or was built from other tables."""
    try:
        module = importlib.import_module("sbpc.solver.messages._sweeps")
    except ImportError:
        return None
    return module if module.rows == tuple(each.itemsize for each in (NODE, LINK, STAR, BRANCH)) else None


machine = built()


class Tables:
    """A row per node in their order, a row per end of an edge (a node's earlier ones first), a row per star.

    Of a link, `here` and `there` count the layouts at this end and at the other, whose messages `inbox` holds.
    by_row: seconds are stored [here, there]. sizes: the most labels or pairs of a node, the most layouts, the most
    layouts of all branches.
    """

    def __init__(self, nodes: Sequence[Node], real: type[np.floating]):
        self.single = real is np.float32
        self.arrays: list[np.ndarray] = []  # kept alive: the tables hold their addresses
        self.sizes = np.ones(3, np.int64)
        stars = [node.star for node in nodes if node.star is not None]
        self.number = {id(star): at for at, star in enumerate(stars)}
        self.stars = np.array([self.star(star) for star in stars], STAR)
        nodes_, links = list[tuple](), list[tuple]()
        for node in nodes:
            addresses = [self.address(array) for array in (node.costs, node.inbox, node.gather)]
            star = self.number.get(id(node.star), -1)
            nodes_.append((*addresses, len(node.costs), star, len(links), len(node.earlier), len(node.later)))
            links += [self.link(edge, edge.last, edge.first) for edge in node.earlier]
            links += [self.link(edge, edge.first, edge.last) for edge in node.later]
            self.grow(len(node.costs), len(node.inbox))
        self.nodes, self.links = np.array(nodes_, NODE), np.array(links, LINK)
        self.set_parts(nodes)

    def set_parts(self, nodes: Sequence[Node]) -> None:
        """Takes over how nodes divide their beliefs."""
        self.links["part"] = [part for node in nodes for part in node.parts]

    def run(self, back: bool, balance: int = 0) -> float:
        """Sends messages one way; returns the bound of a backward sweep. balance: see `Messages.balance_from`."""
        assert machine is not None
        return machine.sweep(self.nodes, self.links, self.stars, self.sizes, self.single, back, balance)

    def address(self, array: np.ndarray) -> int:
        """Returns where the numbers of an array lie."""
        assert array.flags.c_contiguous
        self.arrays.append(array)
        return array.ctypes.data

    def __reduce__(self) -> str:
        raise TypeError("tables hold addresses of arrays: make them from the arrays again")

    def grow(self, *sizes: int) -> None:
        """Notes how much room is needed."""
        self.sizes[: len(sizes)] = np.maximum(self.sizes[: len(sizes)], sizes)

    def link(self, edge: Edge, here: NodePort, there: NodePort) -> tuple:
        """Returns the row of an edge seen from one of its ends."""
        counts = len(here.layouts), len(there.layouts)
        if edge.star is not None:
            return 0, self.address(there.inbox), 0.0, *counts, 0, self.number[id(edge.star)], edge.branch
        by_row = edge.seconds if here is edge.first else edge.seconds.T  # [here, there]
        stored = by_row if by_row.flags.c_contiguous else by_row.T
        return self.address(stored), self.address(there.inbox), 0.0, *counts, stored is by_row, -1, 0

    def star(self, star: Star) -> tuple:
        """Returns the row of a star; notes those of its branches."""
        rows, layouts = list[tuple](), star.price.shape[1]
        for at, (source, place) in enumerate(star.straight):
            arrays = star.shares[at], star.over[at], star.direct[at], star.sent[at], star.columns[at], source, place
            rows.append((*map(self.address, arrays), len(star.columns[at]), len(source), star.late[at]))
        self.grow(star.seconds.size, max(*star.seconds.shape, layouts), len(rows) * layouts)
        whole = star.seconds, star.price, star.equal, star.made, np.array(rows, BRANCH)
        return *map(self.address, whole), *star.seconds.shape, layouts, len(rows)
