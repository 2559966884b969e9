"""Has gradients summed over ranks, micro-batches and stages in float32, or in the type of a parameter if that is wider,
and parameters of 16 bits stored in float32.

What ends in gradients alone, through calls that keep partial sums and make none (casts, views, sums of two, scaling),
is written in the wider type, from right behind the call that makes the partial sums. The rest of a step is left as it
is: partial sums of activations are taken in the type of the activations.

A master is a parameter that is stored in float32 and cast to the model's type where it is first read, at home: what is
gathered is the cast. Its gradient is left in float32, as it was summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from sbpc.errors import PlanError
from sbpc.graph.about import REDUCE, SENDS, about
from sbpc.graph.operands import named_arguments, operands, value_of, with_arguments
from sbpc.graph.ports import GRADIENT, PARAMETER, Port, outputs, placeholders, results
from sbpc.graph.rewrite import Writer, mode_of, rebuild
from sbpc.mesh.collectives import EIGHT_BITS
from sbpc.plans.options import AS_COMPUTED, Options
from sbpc.rules.sum_types import CAST, dtype_of, is_cast_gradient, narrower, narrows, sum_types

SCALED = torch.ops.aten._scaled_mm.default
HALF = torch.bfloat16, torch.float16
NO_MASTERS: Mapping[str, str] = MappingProxyType({})


def wide_sums(gm: GraphModule, reduce: str, masters: Mapping[str, str] = NO_MASTERS) -> GraphModule:
    """Returns the graph with its sums in wider types, `gm` itself where nothing is to be changed.

    Before: an annotated graph. After: one to be annotated anew, `meta["reduce"]` on the casts between which gradients
    are summed, and on all casts to narrower types. reduce: the option of that name. masters: see `Ports`.
    """
    nodes = [node for node in gm.graph.nodes if dtype_of(node) is not None]
    short = reduce != AS_COMPUTED and any(narrower(dtype_of(node), torch.float32) for node in nodes)
    if not (short or masters) or any(REDUCE in node.meta for node in nodes):
        return gm
    found = sum_types(gm) if short else {}
    wanted = {node: kind for node, kind in found.items() if is_short(node, found)}
    if not (wanted or masters or any(map(narrows, nodes))):
        return gm
    return SumWriter(gm, wanted, reduce, masters).run()


def masters_of(gm: GraphModule, options: Options) -> dict[str, str]:
    """Returns the parameters of a graph that are to have masters, see `Ports`: all that are trained in 16 bits, as
    `options.masters` says. Raises PlanError if they are asked for, and there are none."""
    known = gm.meta["ports"]
    if known.masters and options.masters is False:
        raise PlanError("this plan from a file has float32 masters\n  Plan the model anew with masters=False.")
    if known.masters or options.masters is False:
        return {}
    trained = {port.name for port, _ in outputs(gm, GRADIENT)}
    held = {
        port.name: str(dtype_of(node)).removeprefix("torch.")
        for port, node in placeholders(gm, PARAMETER).items()
        if dtype_of(node) in HALF and (port.name in trained if options.train else port.name not in known.frozen)
    }
    if options.masters and not held:
        what = "masters=True, and no parameter that is trained is held in bfloat16 or float16"
        raise PlanError(f"{what}\n  Leave it out: parameters in float32 are their own masters.")
    return held if options.masters or (options.train and options.optimizer is not None) else {}


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
    """The graph that is being written. wanted: by value the type of its sum; what stands for it here has that type.

    marks: of the casts. masters: by placeholder that becomes one, the type in which the model has it.
    """

    def __init__(
        self, gm: GraphModule, wanted: dict[Node, torch.dtype], reduce: str, masters: Mapping[str, str]
    ) -> None:
        super().__init__(mode_of(gm))
        self.gm, self.wanted, self.ports = gm, wanted, replace(gm.meta["ports"], masters=dict(masters))
        self.marks = {} if reduce == AS_COMPUTED else {REDUCE: reduce}
        stored = placeholders(gm, PARAMETER)
        self.masters = {stored[Port(PARAMETER, name)] for name in masters}

    def run(self) -> GraphModule:
        """Writes node by node. What is returned has the type that it had, but for gradients of masters."""
        end = self.gm.graph.output_node()
        for node in self.gm.graph.nodes:
            self.read_masters(node)
            if node is not end:
                self.turn_to(node)
                self[node] = self.written(node)
        ends: dict[tuple[Node, torch.dtype], Node] = {}
        left: list[Node | None] = []
        for port, node in zip(self.ports.outputs, results(self.gm)):
            if node is not None:
                kind = node.meta["val"].dtype
                if port.kind == GRADIENT and port.name in self.ports.masters:
                    kind = torch.float32
                self.turn_to(node)
                if (node, kind) not in ends:
                    ends[node, kind] = self.cast(self[node], kind)
            left.append(None if node is None else ends[node, kind])
        self.graph.output(tuple(left)).meta.update(end.meta)
        return self.module(self.gm, self.gm.meta | {"ports": self.ports})

    def read_masters(self, node: Node) -> None:
        """Writes the casts of masters that a node is the first to read."""
        for used in node.all_input_nodes:
            if used in self.masters and self[used].op == "placeholder":
                self.turn_to(node)
                self.about.meta = about(node)
                self[used] = self.cast(self[used], used.meta["val"].dtype)

    def written(self, node: Node) -> Node:
        """Writes what stands for a node."""
        kind, read = self.wanted.get(node), [used for used in operands(node) if used in self.wanted]
        if kind is None:
            copy = self.keep(node)
            copy.meta |= self.marks if narrows(node) else {}
            if node in self.masters:
                with self.mode:
                    copy.meta["val"] = node.meta["val"].detach().to(torch.float32)
            return copy
        if node.target is CAST and read:
            return self.cast(self[read[0]], kind)
        if not read or dtype_of(node) == kind:
            return self.widened(node, kind) or self.cast(self.keep(node), kind)
        args, kwargs = map_arg((node.args, dict(node.kwargs)), self.__getitem__)
        return self.cast(self.made(node.target, args, kwargs, node.name), kind)

    def widened(self, node: Node, kind: torch.dtype) -> Node | None:
        """Writes a float8 product that gives the wider type itself, unrounded; None for any other call, and for one
        with scales of rows or a bias: GPUs have no such kernel."""
        if node.target is not SCALED:
            return None
        named = named_arguments(SCALED, node.args, node.kwargs)
        if named["bias"] or any(named[name].meta["val"].numel() > 1 for name in ("scale_a", "scale_b")):
            return None
        args, kwargs = with_arguments(SCALED, node.args, dict(node.kwargs), {"out_dtype": kind})
        return self.made(SCALED, *map_arg((tuple(args), kwargs), self.__getitem__), node.name)

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        """Writes a marked cast, where one is needed."""
        if dtype_of(x) == dtype:
            return x
        made = self.made(CAST, (x,), {"dtype": dtype}, f"{x.name}_{str(dtype).removeprefix('torch.')}")
        made.meta |= self.marks
        return made
