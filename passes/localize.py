"""Localizes: makes the program of one rank, the boxed graph at local sizes with collectives in place of boxing
nodes."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from sbpc._compat import rename
from sbpc.boxing.buckets import COLLECTIVES, EXCHANGE, Bucket
from sbpc.boxing.lower import lower
from sbpc.boxing.steps import Step
from sbpc.graph.about import PLACE, about
from sbpc.graph.expert_rows import MESSAGE
from sbpc.graph.operands import is_sum, operands, value_of
from sbpc.graph.ports import results
from sbpc.graph.rewrite import Copies, called, put
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import chunk_sizes
from sbpc.plans.timeline import is_awaited
from sbpc.rules.choices import Choice, local_sizes
from sbpc.rules.match import Sharing

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default


def localize(gm: GraphModule, mesh: Mesh, coordinates: tuple[int, ...]) -> GraphModule:
    """Returns the program of all ranks that have the local shapes of the rank at `coordinates`.

    Before: a boxed graph at global shapes. After: plain ATen ops at local shapes and functional collectives over
    named groups (`Mesh.group_name`). Placeholders: those of the graph, then for every mesh axis the rank's position,
    int64 [1]. For every value that stands for one of the boxed graph, `meta["local_shape"]` is its shape on this
    rank, `meta["whole_shape"]` that of the whole. `gm.meta["pieces"]` has the first nodes of what is written for
    those that it had, see `Program`. On every call `meta["boxed"]` is the name of the node of the boxed
    graph for which it is written; for the calls from a wait on, that of the boxing.
    """
    return Localizer(gm, mesh, coordinates).run()


class Localizer(Copies):
    """Writes the local graph: by node of the boxed one, what stands for it; of an awaited boxing, the calls before
    its collective."""

    def __init__(self, gm: GraphModule, mesh: Mesh, coordinates: tuple[int, ...]) -> None:
        super().__init__()
        self.gm, self.mesh, self.coordinates = gm, mesh, coordinates
        self.positions: list[Node] = []
        self.offsets: dict[tuple[int, tuple[int, ...], str], Node] = {}
        self.known: dict[Any, Node] | None = None  # where ranks tell each other of their rows, calls that are made once
        self.told: dict[str, dict[Any, Node]] = {}  # those, by phase
        self.about: dict[str, Any] = {}
        self.buckets: dict[str, Bucket] = {}
        # starts, by bucket
        self.missing = Counter(node.meta["bucket"] for node in gm.graph.nodes if "bucket" in node.meta)

    def run(self) -> GraphModule:
        """Rewrites node by node."""
        nodes = list(self.gm.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self[node] = self.as_it_is(node)
        for axis in self.mesh.axes:
            value = torch.empty(1, dtype=torch.int64, device="meta")
            self.positions.append(self.given(f"position_{axis}", {"val": value, "local_shape": (1,)}))
        pieces, begins = self.gm.meta.get("pieces", {}), dict[int, int]()
        for node in nodes:
            if node.name in pieces:
                begins[len(self.graph.nodes)] = pieces[node.name]
            self.about = about(node) | {"boxed": operands(node)[0].name if "awaits" in node.meta else node.name}
            telling = node.target in MESSAGE and "choice" in node.meta and node.meta["choice"].apart
            self.known = self.told.setdefault(self.about.get("phase", "forward"), {}) if telling else None
            if "step" in node.meta:
                self[node] = self.start(node) if is_awaited(node) else self.boxing(node)
            elif "awaits" in node.meta:
                self[node] = self.end(node)
            elif node.op == "call_function" and not is_sum(node):
                self[node] = self.start(node) if is_awaited(node) else self.call_op(node)
            elif node.op in ("call_function", "get_attr"):
                self[node] = self.as_it_is(node)
        self.left(results(self.gm))
        made = self.module(self.gm)
        if pieces:
            names = [node.name for node in made.graph.nodes]
            made.meta["pieces"] = {names[at]: piece for at, piece in begins.items()}
        return made

    def as_it_is(self, node: Node, read: Callable[[Node], Any] | None = None) -> Node:
        """Copies a node as it is, with local inputs. read: see `Copies.keep`."""
        copy = self.keep(node, read)
        put(copy, "meta", {})
        return self.described(copy, node)

    def described(self, local: Node, node: Node) -> Node:
        """Gives a local node the name and the meta of the node that it stands for, and returns it."""
        if "sbp" in local.meta:  # no op was needed: this is an earlier value
            return local
        boxed = {key: value for key, value in {**self.about, **local.meta}.items() if key == "boxed"}
        put(local, "meta", about(node, (*PLACE, "sbp", "choice")) | boxed)
        rename(local, node.name)
        layout, value = node.meta.get("sbp"), node.meta.get("val")
        if isinstance(layout, Layout) and isinstance(value, torch.Tensor):
            shape = layout.local_shape(value.shape, self.mesh.sizes, self.coordinates)
            local.meta |= {"local_shape": shape, "whole_shape": tuple(value.shape)}
            local.meta["val"] = torch.empty(shape, dtype=value.dtype, device="meta")
        return local

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Writes one call."""
        if self.known is None:
            return called(self.graph, op, args, kwargs, meta=self.about)
        key = op, repr(map_arg((args, kwargs), lambda used: f"%{id(used)}"))
        if key not in self.known:
            self.known[key] = called(self.graph, op, args, kwargs, meta=self.about)
        return self.known[key]

    def call_op(self, node: Node) -> Any:
        """Writes one op at local sizes."""
        if node.target is operator.getitem:
            producer, index = value_of(node)
            parts = self[producer]
            return self.described(parts[index], node) if isinstance(parts, tuple) else self.as_it_is(node)
        if node.meta.get("match") is None:
            return self.replicated(node)
        made = self.by_rule(node, self.call)
        return self.described(made, node) if isinstance(made, Node) else tuple(made)

    def by_rule(self, node: Node, call: Callable[..., Any]) -> Any:
        """Writes the calls of an op at local sizes through `call`, and returns its result, or all of them."""
        match, choice = node.meta["match"], node.meta["choice"]
        local = local_sizes(match.sizes.items(), choice, self.mesh.sizes, self.coordinates)
        read = self.in_order if match.entry.source else self.__getitem__  # a kernel of the user's may read strides
        args, kwargs = map_arg((node.args, dict(node.kwargs)), read)
        shifted = {factor: axes for factor, axes in choice.cuts().items() if factor in match.shifts}
        offsets = {factor: self.offset(match.sizes[factor], axes) for factor, axes in shifted.items()}
        part = choice.part(match.sizes.items(), self.mesh.sizes, self.coordinates)
        return match.localize(call, args, kwargs, local, offsets, self.sharing(choice, node, call), part)

    def sharing(self, choice: Choice, node: Node, call: Callable[..., Any]) -> Sharing | None:
        """Returns the ranks that share out rows where a call is done so."""
        axes = choice.sharing
        if not axes:
            return None
        sizes, rank = tuple(self.mesh.sizes[axis] for axis in axes), self.positions[axes[0]]
        for axis in axes[1:]:
            rank = call(aten.mul.Scalar, rank, self.mesh.sizes[axis])
            rank = call(aten.add.Tensor, rank, self.positions[axis])
        where, rows = str(node.meta.get("module") or node.name), choice.signatures[axes[0]].ragged
        across = tuple((self.mesh.sizes[axis], self.mesh.group_name((axis,))) for axis in sorted(choice.owning))
        most, group = self.mesh.routing.most, self.mesh.group_name(axes)
        return Sharing(sizes, rank, group, rows, most, where, across, choice.apart)

    def replicated(self, node: Node) -> Node:
        """Writes an op without a rule. It may read strides."""
        dense = iter([self.in_order(operand) for operand in operands(node)])
        return self.as_it_is(node, lambda _: next(dense))

    def in_order(self, operand: Node) -> Node:
        """Writes a value with its dims in memory in the order in which they lay when captured, without gaps."""
        value, x = operand.meta["val"], self[operand]
        order = sorted(range(value.dim()), key=lambda dim: -value.stride(dim))
        if value.is_contiguous() or order == sorted(order):
            return self.call(aten.contiguous.default, x)
        moved = self.call(aten.contiguous.default, self.call(aten.permute.default, x, order))
        return self.call(aten.permute.default, moved, [order.index(dim) for dim in range(len(order))])

    def offset(self, size: int, axes: tuple[int, ...]) -> Node:
        """Returns a 0-dim int64: where this rank's part of a dim of `size`, cut by `axes`, begins."""
        key = (size, axes, self.about.get("phase", "forward"))
        if key not in self.offsets:
            total: Node | None = None
            for axis in axes:
                step = -(-size // self.mesh.sizes[axis])
                here = self.call(aten.mul.Scalar, self.positions[axis], step)
                total = here if total is None else self.call(aten.add.Tensor, total, here)
                size = chunk_sizes(size, self.mesh.sizes[axis])[self.coordinates[axis]]
            self.offsets[key] = self.call(aten.view.default, total, [])
        return self.offsets[key]

    def start(self, node: Node) -> list[Node]:
        """Writes one boxing step, or op that sends rows, as far as its collective, which the last of its bucket writes
        for all. Returns the calls that were written; `end` writes the others."""
        written: list[Node] = []
        name, waiting = node.meta.get("bucket"), False
        bucket = None if name is None else self.buckets.setdefault(name, Bucket(name))

        def call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node | None:
            nonlocal waiting
            if bucket and op in COLLECTIVES and not waiting:
                bucket.add(node.name, op, args[0], value_at(args[0]).shape, args[1:])
                waiting = True
            # a call that sends rows has waited before for the numbers of them
            waiting = waiting or (op is WAIT and ("step" in node.meta or args[0].target is EXCHANGE))
            if not waiting:
                written.append(self.call(op, *args, **kwargs))
            return None if waiting else written[-1]

        self.written(node, call)
        if bucket:
            self.missing[bucket.name] -= 1
            if not self.missing[bucket.name]:
                bucket.send(self.call_of(bucket))
        return written

    def call_of(self, bucket: Bucket) -> Callable[..., Node]:
        """Returns what writes calls that are those of a whole bucket: they have the name of its first member."""
        meta = self.about | {"boxed": bucket.name}
        return lambda op, *args: called(self.graph, op, args, {}, meta=meta)

    def end(self, node: Node) -> Any:
        """Writes the rest of a boxing step, from the wait for its collective on."""
        start = operands(node)[0]
        written, bucket = iter(self[start]), self.buckets.get(start.meta.get("bucket", ""))

        def call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node | None:
            if bucket and op in COLLECTIVES:
                return None
            if bucket and op is WAIT:
                bucket.wait(self.call_of(bucket))
                return bucket.take(start.name, self.call)
            return next(written, None) or self.call(op, *args, **kwargs)

        return self.described(self.written(start, call), node)

    def written(self, start: Node, call: Callable[..., Any]) -> Any:
        """Writes what begins at a node, through `call`."""
        return self.lowered(start, start.meta["step"], call) if "step" in start.meta else self.by_rule(start, call)

    def boxing(self, node: Node) -> Any:
        """Writes one boxing step as collectives and local ops."""
        return self.described(self.lowered(node, node.meta["step"], self.call), node)

    def lowered(self, node: Node, step: Step, call: Callable[..., Any]) -> Any:
        """Writes the calls of a boxing step through `call`, and returns the result of the last one."""
        value, x = node.meta["val"], self[operands(node)[0]]
        shape = tuple(value.shape)
        if value.is_complex():  # which not every collective takes
            x = call(aten.view_as_real.default, call(aten.resolve_conj.default, x))
            shape = (*shape, 2)
        place = self.mesh.sizes, self.coordinates, self.positions, self.mesh.group_name, value.dtype
        made = lower(step, x, call, shape, *place)
        return call(aten.view_as_complex.default, made) if value.is_complex() else made


def value_at(node: Node) -> torch.Tensor:
    """Returns a tensor of the shape of a node of a rank's program, without data; its call is tried where that is not
    known."""
    if "val" not in node.meta:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), value_at)
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
    value: torch.Tensor = node.meta["val"]
    return value
