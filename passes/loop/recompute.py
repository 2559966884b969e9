"""Recompute: what the backward of a block reads of its forward is computed again in front of it, so that less is
kept in between.

A block is a module that is one of a list, such as `blocks.3`: its path up to the first number. In a model whose
numbered modules are single layers, it is a child of the model. What is computed again follows from its form:

- "full": everything. Values from outside the block are kept, such as its input.
- "selective" (Korthikanti et al. 2022): where products of activations are written out, as in softmax(q k^T) v, the
  values between two of them: they grow with the square of the sequence, and are made of q, k and v. In any other
  block of what is cheap, which is no product, convolution or attention kernel, and nothing that has fewer elements
  than it is made of, those values with which fewest bytes are kept and moved: a minimum cut, as torch's partitioner
  makes one (Chen et al. 2016, Jia et al. 2019), where a byte that is moved to compute a value again counts, too.

What is kept in any case is read where it is: what a later block reads, results, what is made of parameters alone. So
are the values of ops of the user's own, which may do more than they return, and of what reads a buffer that the step
writes. So is what the forward decides, as a router does to which experts tokens go: a second decision, on numbers that
are rounded otherwise, could be another one. Random numbers are drawn again from the same stream.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import networkx
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from sbpc._compat import OpOverload
from sbpc.graph.about import RECOMPUTES
from sbpc.graph.operands import is_late, made_of, operands, outputs_of, reached, shape_of, value_of
from sbpc.graph.ports import BUFFER, MUTATION, PARAMETER, placeholders
from sbpc.graph.rewrite import Copies, called, rebuild
from sbpc.passes.annotate import annotate
from sbpc.plans.options import FULL, NONE, SELECTIVE
from sbpc.plans.storages import is_view

aten = torch.ops.aten
PRODUCTS = frozenset(("_grouped_mm", "_scaled_mm", "addmm", "baddbmm", "bmm", "dot", "einsum", "linear", "mm", "mv"))
COSTLY = PRODUCTS | {"convolution"}
ATTENTION = "_scaled_dot_product_"  # how the names of attention kernels begin
NORM, NORM_OF_BATCH = aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats
MOVED = 1 / 8  # what a byte counts that is moved to compute a value again, where one that is kept counts 1
FORWARD, BACKWARD = "forward", "backward"  # the ends of the flow in `worth`
OURS = "aten", "prims", "sbpc"  # namespaces of ops that do no more than they return


def recompute(gm: GraphModule, forms: Mapping[str, str]) -> GraphModule:
    """Returns the annotated graph of the same step in which blocks compute values again.

    gm: an annotated graph of forward and backward. forms: by block (see `blocks_of`) "none", "selective" or "full".
    A call that computes a value again has `meta["recomputes"]`, the name of the one whose value that is, and the
    phase "backward". It stands in front of the first call of the backward that needs it; `sbpc.graph.about` keeps it
    there when calls are reordered.
    """
    blocks = blocks_of(gm)
    again = values_again(gm, blocks, forms)
    place = {node: at for at, node in enumerate(gm.graph.nodes)}
    second = dict[Node, Node]()

    def write(first: Copies, node: Node) -> Node:
        own = again.get(blocks.get(node, ""), set()) if is_late(node) else set[Node]()

        def read(used: Node) -> Node:
            return second[used] if used in own else first[used]

        for needed in sorted(closure(node.all_input_nodes, own - second.keys()), key=place.__getitem__):
            second[needed] = called_again(first.graph, needed, read)
        return first.keep(node, read)

    return annotate(rebuild(gm, write))


def called_again(graph: Graph, node: Node, read: Callable[[Node], Node]) -> Node:
    """Writes the call that computes a value again. A batch norm does not make its running statistics again."""
    about = {**node.meta, "phase": "backward", RECOMPUTES: node.name}
    args, kwargs = map_arg((node.args, dict(node.kwargs)), read)
    target: Any = node.target
    if target is NORM:
        target, args, about["val"] = NORM_OF_BATCH, (*args[:3], *args[5:]), about["val"][:3]
    return called(graph, target, args, kwargs, f"{node.name}_again", about)


def blocks_of(gm: GraphModule) -> dict[Node, str]:
    """Returns, by call of forward and backward, the block in which it is. Calls outside of all blocks are absent.

    Empty if no block's backward reads what it could compute again.
    """
    found = []
    for of_module in (block_of, child):
        blocks = {}
        for node in gm.graph.nodes:
            block = of_module(node.meta.get("module") or "") if node.op == "call_function" else ""
            if block:
                blocks[node] = block
        again = set[Node]().union(*values_again(gm, blocks, dict.fromkeys(blocks.values(), FULL)).values())
        if any(is_costly(node) for node in again):  # else these are single layers
            return blocks
        found += [blocks] if again else []
    return found[0] if found else {}


def block_of(path: str) -> str:
    """Returns the outermost module of a list that a module is in, "" for none.

    >>> block_of("model.layers.3.mlp.up"), block_of("model.norm")
    ('model.layers.3', '')
    """
    parts = path.split(".")
    return next((".".join(parts[: at + 1]) for at, part in enumerate(parts) if part.isdigit()), "")


def child(path: str) -> str:
    """Returns the child of the model in which a module is."""
    return path.partition(".")[0]


def values_again(gm: GraphModule, blocks: Mapping[Node, str], forms: Mapping[str, str]) -> dict[str, set[Node]]:
    """Returns, by block, the calls of its forward that its backward computes again."""
    forward: dict[str, list[Node]] = {}
    backward: dict[str, list[Node]] = {}
    for node, block in blocks.items():
        (backward if is_late(node) else forward).setdefault(block, []).append(node)
    # Whether what is made of parameters alone is kept is a matter of layouts, as it is for parameters.
    fixed = made_of(gm, placeholders(gm, PARAMETER).values())
    allowed = repeatable(gm, fixed)
    again: dict[str, set[Node]] = {}
    # what a later block computes again may read values of an earlier one
    for block, nodes in reversed(forward.items()):
        form, able = forms.get(block, NONE), allowed.intersection(nodes)
        if form == NONE:
            continue
        between = between_products(nodes, cheap_ones(able, fixed), fixed) if form == SELECTIVE else set[Node]()
        able = between or (cheap_ones(able, fixed) if form == SELECTIVE else able)
        kept = {memory_of(node) for node in nodes if any(keeps(user, block, blocks, again) for user in node.users)}
        able = {node for node in able if memory_of(node) not in kept}
        read = [used for node in backward.get(block, ()) for used in node.all_input_nodes]
        found = closure(read, able)
        again[block] = found if form == FULL or between else worth(found, read, kept)
    return again


def keeps(user: Node, block: str, blocks: Mapping[Node, str], again: Mapping[str, set[Node]]) -> bool:
    """Returns whether a value of a block is alive in the backward because of this reader, whatever the block
    computes again."""
    other = blocks.get(user, "")
    return user.op == "output" or (other != block and (is_late(user) or user in again.get(other, ())))


def closure(nodes: Iterable[Node], able: Collection[Node]) -> set[Node]:
    """Returns those nodes that are in `able`, and what of `able` they are made of by calls of `able`."""
    return reached(
        (node for node in nodes if node in able), lambda node: [used for used in node.all_input_nodes if used in able]
    )


def repeatable(gm: GraphModule, fixed: Collection[Node]) -> set[Node]:
    """Returns the calls of the forward that may be computed again: they do nothing else, and give the same in the
    backward.

    fixed: what is made of parameters alone.
    """
    written = {port.name for port in gm.meta["ports"].outputs if port.kind == MUTATION}
    changing = {node for port, node in placeholders(gm, BUFFER).items() if port.name in written}
    decided = decisions(gm)
    found = set[Node]()
    for node in gm.graph.nodes:
        if node.op != "call_function" or is_late(node) or node in fixed or node in decided:
            continue
        if node.target is operator.getitem:
            able = value_of(node)[0] in found
        else:
            trains = node.target is NORM and node.args[5] is True  # by the statistics of the batch
            able = isinstance(node.target, OpOverload) and node.target.namespace in OURS
            able = able and (trains or not any(used in changing for used in node.all_input_nodes))
        if able:
            found.add(node)
    return found


def decisions(gm: GraphModule) -> set[Node]:
    """Returns the calls of the forward that make whole numbers of others, which the forward reads, as the largest of
    scores; and those that make no more elements, of nothing but these numbers: how they are sorted, and counted."""
    sizes: dict[Node, int] = {}  # their elements
    for node in gm.graph.nodes:
        if node.op != "call_function" or is_late(node):
            continue
        read = [used for used in node.all_input_nodes if used.op != "call_function" or used.all_input_nodes]
        if node.target is operator.getitem:
            size, decided = elements(*value_of(node)), is_whole_numbers(node) and value_of(node)[0] in sizes
        else:
            size = max(elements(node, at) for at in range(outputs_of(node)))
            decided = decides(node) or (bool(read) and all(size <= sizes.get(used, -1) for used in read))
        if decided:
            sizes[node] = size
    return {*sizes}


def decides(node: Node) -> bool:
    """Returns whether a call makes whole numbers, which the forward reads, of others."""
    if not any(used.meta["val"].is_floating_point() for used in operands(node)):
        return False
    results = [user for user in node.users if user.target is operator.getitem] or [node]
    return any(is_whole_numbers(each) and not all(map(is_late, each.users)) for each in results)


def is_whole_numbers(node: Node) -> bool:
    """Returns whether a value is one of whole numbers."""
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int16, torch.int32, torch.int64)


def memory_of(node: Node) -> Node:
    """Returns the value in whose memory a value lies."""
    while is_view(value_of(node)[0]):
        node = operands(value_of(node)[0])[0]
    return node


# --- the selective form -----------------------------------------------------------------------------------------------


def cheap_ones(able: Collection[Node], fixed: Collection[Node]) -> set[Node]:
    """Returns the calls, of some that may be computed again, that are cheap."""
    return {node for node in able if is_cheap(value_of(node)[0], fixed)}


def worth(able: Collection[Node], read: Collection[Node], kept: Collection[Node]) -> set[Node]:
    """Returns the calls of a block to compute again, with which the bytes that it keeps and a part MOVED of those that
    are moved to compute again are fewest.

    able: calls that may be computed again, and that the backward reads, or what is made of them. read: by the
    backward. kept: values that are kept in any case. A call computed again has all that it reads on the side of the
    backward, where a value is kept, or computed again as well.
    """
    flow, kept = networkx.DiGraph(), {*kept, *(memory_of(node) for node in read if node not in able)}
    flow.add_nodes_from((FORWARD, BACKWARD))
    for node in sorted({*able, *(used for each in able for used in each.all_input_nodes)}):
        memory = node if node in able else memory_of(node)
        held = 0.0 if memory in kept or memory.op != "call_function" else float(bytes_of(memory))
        shared = node in able and (is_view(value_of(node)[0]) or isinstance(node.meta["val"], (tuple, list)))
        if not shared or node.target is operator.getitem:
            flow.add_edge((memory, "made"), (memory, "there"), capacity=held)
        else:
            flow.add_edge((memory, "made"), (memory, "there"))
        if node not in able:
            flow.add_edge(FORWARD, (memory, "made"))
            continue
        flow.add_edge(FORWARD, (node, "made"), capacity=MOVED * moved_bytes(node))
        for used in node.all_input_nodes:
            flow.add_edge((used if used in able else memory_of(used), "there"), (node, "made"))
    for node in read:
        if node in able:
            flow.add_edge((node, "there"), BACKWARD)
    _, (_, late) = networkx.minimum_cut(flow, FORWARD, BACKWARD)
    return {node for node in able if (node, "made") in late}


def bytes_of(node: Node) -> int:
    """Returns the bytes of the outputs of a node."""
    places = [value_of(node)] if node.target is operator.getitem else [(node, at) for at in range(outputs_of(node))]
    shapes = (shape_of(*place) for place in places)
    return sum(torch.Size(shape).numel() * itemsize for shape, itemsize in shapes)


def moved_bytes(node: Node) -> int:
    """Returns the bytes that a kernel reads and writes; of a view, and of one of several results, none."""
    if is_view(node) or node.target is operator.getitem:
        return 0
    return bytes_of(node) + sum(bytes_of(used) for used in operands(node))


def is_cheap(node: Node, fixed: Collection[Node]) -> bool:
    """Returns whether a call is no product, convolution or attention kernel, and makes as many elements as it reads."""
    if is_costly(node):
        return False
    read = [elements(*value_of(used)) for used in operands(node) if used not in fixed]
    return is_view(node) or max(elements(node, at) for at in range(outputs_of(node))) >= max(read, default=0)


def is_costly(node: Node) -> bool:
    """Returns whether a call is a product, a convolution or an attention kernel."""
    return name_of(node) in COSTLY or name_of(node).startswith(ATTENTION)


def between_products(nodes: Sequence[Node], cheap: Collection[Node], fixed: Collection[Node]) -> set[Node]:
    """Returns the calls of a block from a product of activations to the next one that cheap calls lead to, without
    the latter.

    With them go cheap ones that nothing else reads, such as the mask of a dropout.
    """
    made = set[Node]()  # products of activations, and what is made of one by cheap calls
    ends = set[Node]()  # of these, what another product reads
    for node in nodes:
        read = [used for used in node.all_input_nodes if used in made]
        if is_product_of_activations(node, fixed):
            ends.update(read)
            made.add(node)
        elif read and node in cheap:
            made.add(node)
    found = set[Node]()
    for node in reversed(nodes):
        readers = [user for user in node.users if not is_late(user)]
        leads = node in made and (node in ends or any(user in found for user in readers))
        if leads or (node in cheap and readers and all(user in found for user in readers)):
            found.add(node)
    return found


def is_product_of_activations(node: Node, fixed: Collection[Node]) -> bool:
    """Returns whether a call is a product of two values of which none is made of parameters alone."""
    return name_of(node) in PRODUCTS and sum(used not in fixed for used in operands(node)) >= 2


def name_of(node: Node) -> str:
    """Returns the name of an op without its namespace."""
    return str(node.target._schema.name).split("::")[1] if isinstance(node.target, OpOverload) else ""


def elements(node: Node, index: int) -> int:
    """Returns the elements of an output of a node."""
    return torch.Size(shape_of(node, index)[0]).numel()
