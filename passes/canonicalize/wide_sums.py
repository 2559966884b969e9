"""Has gradients summed over ranks, micro-batches and stages in float32, or in the type of a parameter if that is wider.

What ends in gradients alone, through calls that keep partial sums and make none (casts, views, sums of two, scaling),
is written in the wider type, from right behind the call that makes the partial sums. The rest of a step is left as it
is: partial sums of activations are taken in the type of the activations.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from sbpc.errors import PlanError
from sbpc.graph.about import REDUCE, SENDS
from sbpc.graph.operands import operands, value_of
from sbpc.graph.ports import GRADIENT, PARAMETER, outputs, placeholders
from sbpc.graph.rewrite import Writer, mode_of, rebuild
from sbpc.mesh.collectives import EIGHT_BITS
from sbpc.plans.options import AS_COMPUTED, Options
from sbpc.rules.sum_types import CAST, dtype_of, is_cast_gradient, narrower, narrows, sum_types


def wide_sums(gm: GraphModule, reduce: str) -> GraphModule:
    """Returns the graph with its sums in wider types, `gm` itself where nothing is to be changed.

    Before: an annotated graph. After: one to be annotated anew, `meta["reduce"]` on the casts between which gradients
    are summed, and on all casts to narrower types. reduce: the option of that name.
    """
    nodes = [node for node in gm.graph.nodes if dtype_of(node) is not None]
    short = any(narrower(dtype_of(node), torch.float32) for node in nodes)
    if reduce == AS_COMPUTED or not short or any(REDUCE in node.meta for node in nodes):
        return gm
    found = sum_types(gm)
    wanted = {node: kind for node, kind in found.items() if is_short(node, found)}
    return SumWriter(gm, wanted, reduce).run() if wanted or any(map(narrows, nodes)) else gm


def in_eight_bits(gm: GraphModule, options: Options) -> GraphModule:
    """Returns an annotated graph whose gradients and parameters may be sent in types of 8 bits, as options say: what
    makes them has the type as `meta["sends"]`. Raises PlanError if no gradient that is to be is summed in float32."""
    sums, made, kind = sum_types(gm), rebuild(gm), options.reduce
    ends = [operands(node)[0] if is_cast_gradient(node) else node for _, node in outputs(gm, GRADIENT)]
    if kind in EIGHT_BITS and ends and torch.float32 not in map(sums.get, ends):
        what = f"reduce={kind!r} packs numbers of float32, and gradients here are summed in {dtype_of(ends[0])}"
        raise PlanError(f"{what}\n  Leave it out, or hold the parameters in float32 or fewer bits.")
    marked = {each.name for node in ends if sums.get(node) == torch.float32 for each in (node, value_of(node)[0])}
    marks = dict.fromkeys(marked, kind) | {node.name: options.gather for node in placeholders(gm, PARAMETER).values()}
    for node in made.graph.nodes:
        if marks.get(node.name) in EIGHT_BITS:
            node.meta[SENDS] = marks[node.name]
    return made


def is_short(node: Node, found: dict[Node, torch.dtype]) -> bool:
    """Returns whether a value is narrower than its sum, or is made of one that is."""
    return any(narrower(dtype_of(each), found[node]) for each in (node, *operands(node)) if each in found)


class SumWriter(Writer):
    """The graph that is being written. wanted: by value the type of its sum; what stands for it here has that type."""

    def __init__(self, gm: GraphModule, wanted: dict[Node, torch.dtype], reduce: str) -> None:
        super().__init__(mode_of(gm))
        self.gm, self.wanted, self.reduce = gm, wanted, reduce

    def run(self) -> GraphModule:
        """Writes node by node. What is returned has the type that it had."""
        end = self.gm.graph.output_node()
        for node in self.gm.graph.nodes:
            if node is not end:
                self.turn_to(node)
                self[node] = self.written(node)
        ends: dict[Node, Node] = {}
        for node in end.all_input_nodes:
            self.turn_to(node)
            ends[node] = self.cast(self[node], node.meta["val"].dtype) if node in self.wanted else self[node]
        self.graph.output(map_arg(end.args[0], ends.__getitem__)).meta.update(end.meta)
        return self.module(self.gm)

    def written(self, node: Node) -> Node:
        """Writes what stands for a node."""
        kind, read = self.wanted.get(node), [used for used in operands(node) if used in self.wanted]
        if kind is None:
            copy = self.keep(node)
            copy.meta |= {REDUCE: self.reduce} if narrows(node) else {}
            return copy
        if node.target is CAST and read:
            return self.cast(self[read[0]], kind)
        if not read or dtype_of(node) == kind:
            return self.cast(self.keep(node), kind)
        args, kwargs = map_arg((node.args, dict(node.kwargs)), self.__getitem__)
        return self.cast(self.made(node.target, args, kwargs, node.name), kind)

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        """Writes a marked cast, where one is needed."""
        if dtype_of(x) == dtype:
            return x
        made = self.made(CAST, (x,), {"dtype": dtype}, f"{x.name}_{str(dtype).removeprefix('torch.')}")
        made.meta[REDUCE] = self.reduce
        return made
