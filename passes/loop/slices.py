"""Slices: the head of a model, its loss and their backward run on one part of the rows after the other.

The logits of a language model, what the loss makes of them and their gradient are often the largest values of a step,
and each is read once. In slices only those of one part are alive. A part has all samples and some of the positions, so
that a batch that is cut over ranks stays where it is. As for micro-batches, the parts are the ranks of a mesh of one
axis that run one after the other, and the rules say what is cut, whole or added up; here all but the head is whole.

Losses flatten samples and positions into one dim. A part of the positions is no block of that dim, so no rule offers
it; but as long as nothing joins or cuts a flattened value, which rows are in a part does not matter to ops that treat
rows alike. So within the head views may carry a cut of positions into the flattened dim and out of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from sbpc.errors import PlanError, at_node
from sbpc.graph.about import SLICE
from sbpc.graph.operands import ancestors, depending_on, is_late, operands, reached, value_of
from sbpc.graph.rewrite import Copies, called, drop_unused, rebuild
from sbpc.mesh.cluster import CLUSTERS
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import Wish
from sbpc.mesh.states import B, Split
from sbpc.passes.annotate import annotate, set_candidates
from sbpc.passes.loop.micro_batches import ADD, AXIS, Unroller, boxed_for, one_by_one, without_joins
from sbpc.passes.loop.recompute import PRODUCTS, name_of
from sbpc.plans.options import Options
from sbpc.rules.binding import Signature

VIEWS = "_unsafe_view", "reshape", "view"
LEAVE = "Leave slices= out."
BLOCKS, POSITIONS = "blocks", "positions"  # how a dim is cut: in blocks, or as flattened rows by their positions
# where nobody says how many: the share of the memory, the number of slices, the bytes of the logits of one on a rank
SHARE, MOST, LEAST = 1 / 16, 16, 1 << 24


def in_slices(gm: GraphModule, count: int) -> GraphModule:
    """Returns the annotated graph of the same step with its head in `count` slices of the positions.

    Raises PlanError if the model has no head that ends in a loss, or its positions cannot be cut so.
    """
    logits = logits_of(gm)
    positions = int(logits.meta["val"].shape[-2])
    if positions % count:
        what = f"{positions} positions in {count} slices"
        raise PlanError(at_node(what, logits, "Give a number that divides them."))
    own, head, cuts = with_own_views(gm, logits)
    wishes = {name: Wish(((0, Split(dim)),), reason="slices=") for name, dim in cuts.items()}
    for node in own.graph.nodes:
        if node.name in head and name_of(node) in VIEWS:
            carry(node, positions)
        elif node.name not in head and "candidates" in node.meta:
            wishes[node.name] = Wish(((0, B),), reason="slices=, outside of the head")
    mesh = Mesh(cluster=without_joins(CLUSTERS["ideal"], ("all_to_all",)), **{AXIS: count})
    boxed = boxed_for(own, mesh, Options(), wishes, PlanError)
    check_rows(boxed)
    unroller = Unroller(own, boxed, count)
    copies = unroller.run()
    for node in copies.graph.nodes:
        parts = [used.meta.get(SLICE, -1) for used in node.all_input_nodes]
        added = max(parts, default=-1) if node.target is ADD["sum"] else -1  # to what is there of the parts before
        if (at := unroller.copy_of.get(node.name, added)) >= 0:
            node.meta[SLICE] = at
    return annotate(one_by_one(copies, unroller.copy_of, in_place=True))


def logits_of(gm: GraphModule) -> Node:
    """Returns the last product of the forward."""
    calls = (node for node in reversed(gm.graph.nodes) if node.op == "call_function" and not is_late(node))
    found = next((node for node in calls if name_of(node) in PRODUCTS), None)
    if found is None or found.meta["val"].dim() < 3:
        what = "slices= is for a model whose last product has samples, positions and classes"
        raise PlanError(f"{what}\n  {LEAVE}" if found is None else at_node(what, found, LEAVE))
    return found


def head_of(gm: GraphModule, logits: Node) -> tuple[set[Node], dict[str, int]]:
    """Returns the calls that read values with a class for each row, what is between them, and the views that give
    what they make of flattened rows its samples and positions; and by name of such a value its dim of rows."""
    rank, head = logits.meta["val"].dim(), {logits}
    known = {logits: (rank - 2, rank - 1)}  # by value that has a class for each row, its dims of positions and classes
    for node in gm.graph.nodes:
        reads = [(at, used) for at, used in enumerate(operands(node)) if used in known]
        if not reads:
            continue
        match = node.meta.get("match")
        if match is None:
            what = (
                "slices=, and the model returns" if node.op == "output" else "slices=, and an op without a rule reads"
            )
            raise PlanError(at_node(f"{what} all the logits", logits, LEAVE))
        head.add(node)
        factors = [
            {factor for at, used in reads for factor in match.bound.inputs[at].dims[known[used][side]].factors[-1:]}
            for side in (0, 1)
        ]
        for made in [node] if isinstance(node.meta["val"], Tensor) else node.users:
            dims = match.bound.outputs[value_of(made)[1]].dims or ()
            places = [next((at for at, dim in enumerate(dims) if each & set(dim.factors)), None) for each in factors]
            if places[0] is not None and places[1] is not None:
                known[made] = places[0], places[1]
    head |= depending_on([logits]) & ancestors(head)
    head = reached(head, lambda node: node.users if is_flat(node, logits) else ())
    return head, {node.name: row for node, (row, _) in known.items() if "candidates" in node.meta}


def usual_slices(gm: GraphModule, ranks: int, memory: float | None) -> int:
    """Returns how many slices leave the logits SHARE of `memory` at most, as float32 and with what the loss makes of
    them and their gradient, if `ranks` share them; 1 without a limit, or where there is no head that can be cut so."""
    if memory is None:
        return 1
    try:
        value = logits_of(gm).meta["val"]
    except PlanError:
        return 1
    size = 4 * value.numel() / ranks
    most = 3 * size / (SHARE * memory)
    counts = [1, *(n for n in range(2, MOST + 1) if value.shape[-2] % n == 0 and size >= n * LEAST)]
    return next((count for count in counts if count >= most), counts[-1])


def is_flat(node: Node, logits: Node) -> bool:
    """Returns whether samples and positions are one dim of a value."""
    shape = logits.meta["val"].shape
    rows, value = logits.meta["val"].numel() // shape[-1], node.meta.get("val")
    return rows != shape[-2] and isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def is_made_anew(node: Node, logits: Node) -> bool:
    """Returns whether the head makes a value by itself that it reads: of flattened rows, or as large as the logits."""
    value = node.meta.get("val")
    large = isinstance(value, Tensor) and value.numel() >= logits.meta["val"].numel()
    return node.op == "call_function" and (large or is_flat(node, logits))


def with_own_views(gm: GraphModule, logits: Node) -> tuple[GraphModule, set[str], dict[str, int]]:
    """Returns the annotated graph in which the head makes such values by itself, as others may read all of them; the
    names of the nodes of the head; and its cuts, as `head_of` gives them."""
    head, cuts = head_of(gm, logits)

    def apart(node: Node) -> list[Node]:
        return [used for used in node.all_input_nodes if used not in head and is_made_anew(used, logits)]

    again = reached((used for node in head for used in apart(node)), apart)
    own = dict[Node, Node]()

    def write(copies: Copies, node: Node) -> Node | None:
        if node in again:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda used: own.get(used, copies[used]))
            own[node] = called(copies.graph, node.target, args, kwargs, f"{node.name}_of_head", node.meta)
        return copies.keep(node, lambda used: own.get(used, copies[used])) if node in head else None

    written = rebuild(gm, write)
    drop_unused(written.graph)
    return annotate(written), {node.name for node in head} | {node.name for node in own.values()}, cuts


def carry(node: Node, positions: int) -> None:
    """Leaves a view of the head the cut of positions as the last of what a dim is made of, where they are so."""
    match, candidates = node.meta["match"], node.meta["candidates"]
    before, after = match.bound.inputs[0].dims, match.bound.outputs[0].dims
    places = [
        (
            factor,
            [
                next((at for at, dim in enumerate(dims) if dim.factors[-1:] == (factor,)), None)
                for dims in (before, after)
            ],
        )
        for factor, size in match.sizes.items()
        if size == positions
    ]
    cuts = [
        Signature((Split(source),), (Split(made),), factor)
        for factor, (source, made) in places
        if source is not None and made is not None
    ]
    if cuts:
        divides = candidates.divides | {each.factor for each in cuts if each.factor}
        set_candidates(node, replace(candidates, signatures=tuple(cuts), divides=divides))


def check_rows(boxed: GraphModule) -> None:
    """Raises PlanError where flattened rows that are cut by positions are read as if they were blocks: joined or cut
    anew, beside a value in blocks, by a view into other dims, or by an op to which the place of a row matters."""
    # by value, how it is cut; empty where it is not, or where all its rows are equal
    kinds = dict[tuple[Node, int], frozenset[str]]()
    for node in boxed.graph.nodes:
        if "step" in node.meta:
            if POSITIONS in kinds[value_of(operands(node)[0])]:
                raise flattened(node)
            (after,) = node.meta["step"].after.states
            kinds[node, 0] = frozenset({BLOCKS} if isinstance(after, Split) else ())
        elif (choice := node.meta.get("choice")) is not None:
            match, (signature,) = node.meta.get("match"), choice.signatures
            cut = frozenset() if match is None else cut_of(node, signature, kinds)
            for at, state in enumerate(signature.outputs):
                made = frozenset({BLOCKS}) if match is None else cut
                if isinstance(state, Split) and match is not None:
                    factors = match.bound.outputs[at].dims[state.dim].factors
                    made = through(node, cut, factors, signature.factor, (BLOCKS, POSITIONS))
                kinds[node, at] = made if isinstance(state, Split) else frozenset()


def cut_of(node: Node, signature: Signature, kinds: Mapping[tuple[Node, int], frozenset[str]]) -> frozenset[str]:
    """Returns how the factor is cut that a call splits."""
    match, found = node.meta["match"], frozenset[str]()
    for state, used, value in zip(signature.inputs, operands(node), match.bound.inputs):
        if isinstance(state, Split):
            factors = value.dims[state.dim].factors
            found |= through(node, kinds[value_of(used)], factors, signature.factor, (POSITIONS, BLOCKS))
    if signature.factor in match.shifts:
        found |= {BLOCKS}
    if len(found) > 1:
        raise flattened(node)
    return found


def through(
    node: Node, kind: frozenset[str], factors: Sequence[str], factor: str | None, last: tuple[str, str]
) -> frozenset[str]:
    """Returns how a factor is cut whose dim is cut so, or the other way round. last: of a factor that is the last one
    of several of a dim, how the one is cut, and how the other one then is."""
    if len(factors) == 1 or not kind:
        return kind
    is_last = factors[-1] == factor
    if kind != {last[0] if is_last else BLOCKS}:
        raise flattened(node)
    return frozenset({last[1]}) if is_last else kind


def flattened(node: Node) -> PlanError:
    """Returns the error about a call that needs flattened rows in their order."""
    todo = f"Give the loss logits and targets whose dims are samples and positions. {LEAVE}"
    return PlanError(at_node("slices=, and this value is needed with its rows flattened", node, todo))
