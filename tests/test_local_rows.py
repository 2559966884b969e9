"""Rows of experts of which each rank sorts its own: the states L and P(own), every signature on real values, plans."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

import sbpc
from sbpc import Mesh
from sbpc.errors import LayoutError, SbpcError
from sbpc.graph.operands import operands, outputs_of, value_of
from sbpc.graph.ports import INPUT, PARAMETER
from sbpc.graph.rewrite import called
from sbpc.mesh.layout import chunk
from sbpc.mesh.states import OWN, Local, Ragged, State, own_places, parse_state, shards, whole
from sbpc.plans import rank_programs
from sbpc.plans.plan_file import decode
from sbpc.rules import Signature
from sbpc.rules.binding import flat_outputs
from sbpc.rules.choices import Choice, local_sizes
from sbpc.rules.match import Sharing
from sbpc.runtime.one_process.lockstep import lockstep
from tests.compare import largest_error, relative_error
from tests.routed import ROUTINGS, Routed, batch, product
from tests.test_shared_rows import PRODUCT, one_by_one

L = Local


def test_ranks_hold_the_rows_that_come_from_their_chunk() -> None:
    ids = torch.tensor([2, 0, 1, 1, 0, 0, 2, 1])
    places, source = torch.arange(8), torch.sort(ids, stable=True)[1]
    parts = shards(places, L(0), 2, source=source)
    for part, mine in zip(parts, ids.chunk(2)):
        assert torch.equal(torch.sort(ids)[0][part], torch.sort(mine)[0])
    assert torch.equal(whole(parts, L(0), source), places)
    ends = shards(torch.tensor([3, 6, 8]), OWN, 2, source=source)
    assert [each.tolist() for each in ends] == [[1, 3, 4], [2, 3, 4]] and whole(ends, OWN).tolist() == [3, 6, 8]
    assert [parse_state(str(state)) for state in (L(0), L(1), OWN)] == [L(0), L(1), OWN]
    with pytest.raises(LayoutError, match="Give source="):
        shards(places, L(0), 2)


class Biased(Routed):
    """Experts with biases, whose two parts alternate, and a norm of what they give."""

    def __init__(self) -> None:
        super().__init__(hidden=6)
        del self.first
        self.experts["bias"] = torch.randn(5, 12)
        self.experts["up"] = torch.randn(5, 12, 8)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, favour: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = torch.softmax(self.router(rows) + favour, -1).topk(self.chosen)
        sorted_ids, order = torch.sort(ids.flatten(), stable=True)
        ends = torch.cumsum(torch.histc(sorted_ids.float(), len(favour), 0, len(favour) - 1), 0, dtype=torch.int32)
        both = product(rows[order // self.chosen], self.experts["up"].mT, ends) + self.experts["bias"][sorted_ids]
        made = product(F.silu(both[..., ::2]) * both[..., 1::2], self.experts["down"].mT, ends)
        made = made * torch.rsqrt(made.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        mixed = torch.zeros_like(rows).index_add_(0, order // self.chosen, made * weights.flatten()[order, None])
        return (rows + mixed).square().sum()


class Values(Interpreter):
    """Runs a captured step, products of groups one by one."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return one_by_one(*args) if target is PRODUCT else super().call_function(target, args, kwargs)


def values_of_step(gm: GraphModule, model: nn.Module, args: Sequence[Tensor]) -> dict[Node, Any]:
    """By node its value in a step."""
    given, run = iter(args), Values(gm, garbage_collect_values=False)
    parameters = dict(model.named_parameters())
    inputs = [
        parameters[port.name] if port.kind == PARAMETER else next(given) if port.kind == INPUT else torch.ones(())
        for port in gm.meta["ports"].inputs
    ]
    with torch.no_grad():
        run.run(*(x.double() if x.is_floating_point() else x for x in inputs))
    return run.env


def parts_of(x: Tensor, states: Sequence[State], sizes: Sequence[int], source: Tensor, ends: Tensor) -> list[Tensor]:
    """What each rank of two axes holds: rows are first the rank's own, then shared out by the ends of these, or its
    own again."""
    own = shards(ends, OWN, sizes[0], source=source)
    places = own_places(source, sizes[0])
    if states[0] == OWN:
        first = [
            each if torch.equal(x, ends) else torch.diff(each, prepend=each[:0].new_zeros(1)).to(x) for each in own
        ]
    else:
        first = shards(x, states[0], sizes[0], torch.Generator().manual_seed(0), source=source)
    found, step = list[Tensor](), -(-len(source) // sizes[0])
    for at, (part, end, rows) in enumerate(zip(first, own, places)):
        inner = source[rows] - at * step
        if states == (OWN, OWN) and not torch.equal(x, ends):  # counts
            cut = shards(end, OWN, sizes[1], source=inner)
            found += [torch.diff(each, prepend=each[:0].new_zeros(1)).to(x) for each in cut]
        else:
            found += shards(part, states[1], sizes[1], ends=end, source=inner)
    return found


@pytest.mark.parametrize(
    ("routing", "sizes"),
    [
        ("one idle", (2, 2)),
        *(
            pytest.param(routing, sizes, marks=pytest.mark.prove)
            for routing in ROUTINGS for sizes in ((2, 1), (3, 1), (2, 2), (2, 3), (1, 3))
        ),
    ],
    ids=str,
)  # fmt: skip
def test_every_signature_of_own_rows_does_to_them_what_the_op_does_among_all(
    routing: str, sizes: tuple[int, int]
) -> None:
    """On one axis each rank has its own rows, on the other one they are shared out by their groups, or all have them."""
    torch.manual_seed(0)
    seen = set[str]()
    for model in (Routed().double(), Biased().double()):
        gm = sbpc.plan(model, batch(), Mesh(a=sizes[0])).graph
        values = values_of_step(gm, model, batch(routing))
        (sort,) = (node for node in gm.graph.nodes if "sort" in str(node.target))
        source = values[sort][1]
        ends = values[next(node for node in gm.graph.nodes if node.target is PRODUCT).args[2]]
        for node in gm.graph.nodes:
            signatures = node.meta.get("signatures", ())
            for own in (s for s in signatures if (s.own is not None or OWN in s.inputs) and s.ragged is None):
                for other in (s for s in signatures if s.ragged is not None or s is signatures[0]):
                    proved(node, (own, other), sizes, values, source, ends)
                    seen.add(f"{node.target} {own.text} {other.text}")
    assert len(seen) > 40 or 1 in sizes
    for apart in ("S(0), L(0), P(own) -> R(0)", "R(0), L(0), P(own) -> S(0)"):
        assert any(text.endswith(apart) for text in seen)


def proved(
    node: Node, pair: tuple[Signature, Signature], sizes: tuple[int, int], values: Any, source: Tensor, ends: Tensor
) -> None:
    """Each rank makes, of what it holds of the operands, what it holds of the results."""
    choice, matched = Choice(pair, (0, 1)), node.meta["match"]
    given = [values_at(operand, values) for operand in operands(node)]
    places = list(itertools.product(*map(range, sizes)))
    programs, inputs = [], list[list[Tensor]]()
    held = [parts_of(x, [s.inputs[at] for s in pair], sizes, source, ends) for at, x in enumerate(given)]
    for rank, at in enumerate(places):
        cuts = {factor: axes for factor, axes in choice.cuts().items() if factor in matched.shifts}
        programs.append(program(node, choice, sizes, at, sorted(cuts)))
        firsts = [torch.tensor(chunk(matched.sizes[f], cuts[f], sizes, at)[0]) for f in sorted(cuts)]
        inputs.append([*(each[rank] for each in held), torch.tensor([at[1]]), *firsts])
    groups = {"g": [[rank for rank, at in enumerate(places) if at[0] == first] for first in range(sizes[0])]}
    outputs = lockstep(programs, inputs, groups).outputs
    for at, expected in enumerate(flat_outputs(values[node])):
        states = [s.outputs[at] for s in pair]
        found = [each[at] for each in outputs]
        if states[0] == OWN or isinstance(states[0], (Local, Ragged)) or any(isinstance(s, Ragged) for s in states):
            wanted = parts_of(expected, states, sizes, source, ends)
        else:
            rows = [found[i : i + sizes[1]] for i in range(0, len(found), sizes[1])]
            found, wanted = [whole([whole(row, states[1]) for row in rows], states[0])], [expected]
        for mine, other in zip(found, wanted):
            assert relative_error(mine, other) <= 1e-12, (node, pair)


def values_at(node: Node, values: Any) -> Tensor:
    """The value that a node stands for."""
    producer, index = value_of(node)
    value = values[producer]
    return value[index] if outputs_of(producer) > 1 else value


def program(node: Node, choice: Choice, sizes: tuple[int, int], at: tuple[int, ...], shifted: list[str]) -> GraphModule:
    """What the rank at these coordinates runs for a call: its operands come first, then its place, then offsets."""
    graph, matched = Graph(), node.meta["match"]
    names = {operand: graph.placeholder(f"x{number}") for number, operand in enumerate(dict.fromkeys(operands(node)))}
    if len(names) < len(operands(node)):  # one that stands twice
        again = iter([*names.values()])
        names = {operand: next(again) for operand in names}
    rank = graph.placeholder("rank")
    offsets = {factor: graph.placeholder(f"first_{number}") for number, factor in enumerate(shifted)}
    args, kwargs = map_aggregate((node.args, dict(node.kwargs)), lambda x: names[x] if isinstance(x, Node) else x)
    local = local_sizes(matched.sizes.items(), choice, sizes, at)
    part = choice.part(matched.sizes.items(), sizes, at)
    rows = choice.signatures[1].ragged
    sharing = Sharing(sizes[1:], rank, "g", rows, apart=choice.apart) if choice.sharing else None
    made = matched.localize(lambda op, *a, **k: called(graph, op, a, k), args, kwargs, local, offsets, sharing, part)
    graph.output(tuple(made) if isinstance(made, tuple) else (made,))
    return GraphModule(nn.Module(), graph)


def test_plans_of_own_rows_beside_rows_that_are_shared_out_equal_one_device_whatever_the_routing(
    tmp_path: Path,
) -> None:
    """Rows go to experts among the ranks of one axis alone, for tokens of each of the others."""
    torch.manual_seed(0)
    model = Biased().double()
    plan = sbpc.plan(model, batch(), Mesh(data=2, expert=2), pin={"_grouped_mm": "[L(0), R(0)]"})
    assert plan.verify() > 1000 and any("P(own)" in str(layout) for layout in plan.layouts.values())
    plan.save(tmp_path / "plan.sbpc")
    plan.save_page(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "by each rank for itself" in page and "where groups of each rank&#39;s own rows end" in page
    plan.export(tmp_path / "programs.sbpc")
    exported = rank_programs.decode(decode(tmp_path / "programs.sbpc"))
    for routing in ROUTINGS:
        assert largest_error(plan, model, batch(routing)) <= 1e-10, routing
    expected = sbpc.simulate(plan, model, batch())
    for each in (exported, sbpc.load(tmp_path / "plan.sbpc")):
        found = sbpc.simulate(each, model, batch())
        assert all(torch.equal(found.gradients[name], expected.gradients[name]) for name in expected.gradients)


@pytest.mark.prove
@pytest.mark.parametrize(
    "pin",
    [
        "[R(0), L(0)]", "[L(0), L(0)]", "[L(0), B]", "[L(0), S(1)]", "[L(0), L(0), R(0)]", "[L(0), R(0), R(0)]",
        "[R(0), L(0), L(0)]", "[L(0), R(0), L(0)]", "[L(0), R(0), S(1)]", "[R(0), S(1)]", "[S(1), R(0)]",
        "[S(1), L(0), R(0)]", "[R(0), R(0), S(1)]",
    ],
)  # fmt: skip
def test_own_rows_stand_beside_all_other_states(pin: str) -> None:
    torch.manual_seed(0)
    for model in (Routed().double(), Biased().double()):
        mesh = Mesh(**dict.fromkeys("abc"[: pin.count(",") + 1], 2))
        plan = sbpc.plan(model, batch(), mesh, pin={"_grouped_mm": pin})
        assert plan.verify() > 1000
        for routing in ROUTINGS:
            assert largest_error(plan, model, batch(routing)) <= 1e-10, routing


def test_where_links_between_hosts_are_slow_rows_stay_with_their_tokens_hosts() -> None:
    """Nothing is pinned: rows go to experts within a host, and gradients of experts between hosts."""
    with torch.device("meta"):
        model = Routed(2048, 1024, 32).bfloat16()
        args = torch.empty(64, 4096, 2048, dtype=torch.bfloat16), torch.empty(32, dtype=torch.bfloat16)
    mesh = Mesh(data=8, expert=8, cluster="h100")
    plan = sbpc.plan(model, args, mesh)
    made = {str(node.meta["sbp"]) for node in plan.graph.graph.nodes if node.target is PRODUCT}
    assert made == {"[L(0), R(0)]", "[P, S(0)]"}
    shared = sbpc.plan(model, args, mesh, pin={"_grouped_mm": "[R(0), R(0)]"})
    assert 1.5 * plan.cost.seconds < shared.cost.seconds


def test_rows_that_stay_with_their_hosts_are_tried_where_what_they_send_hides_behind_computing() -> None:
    """Where nothing overlaps another plan is best, and proved to be."""
    with torch.device("meta"):
        model = Routed(2048, 1024, 16).bfloat16()
        args = torch.empty(64, 4096, 2048, dtype=torch.bfloat16), torch.empty(16, dtype=torch.bfloat16)
    mesh, pin = Mesh(data=8, expert=8, cluster="h100"), {"_grouped_mm": "[L(0), R(0)]"}
    free, pinned = (sbpc.plan(model, args, mesh, pin=each) for each in (None, pin))
    assert free.cost.seconds <= pinned.cost.seconds * (1 + 1e-9)
    free, pinned = (sbpc.plan(model, args, mesh, pin=each, objective="serial") for each in (None, pin))
    for each in (free, pinned):  # the solver prices rows as the plan does
        assert each.lower_bound == pytest.approx(each.cost.seconds, rel=1e-9)
    assert free.cost.seconds < pinned.cost.seconds


class Router(nn.Module):
    """Experts whose router, sort, counts or way back are another one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.gate = kind, nn.Linear(8, 5)
        self.up, self.down = nn.Parameter(torch.randn(5, 8, 6)), nn.Parameter(torch.randn(5, 6, 8))

    def forward(self, x: Tensor, favour: Tensor) -> Tensor:
        kind, rows = self.kind, x.flatten(0, 1)
        scores = torch.softmax(self.gate(rows) + favour, -1)
        weights, ids = scores.topk(2)
        flat, other = ids.flatten(), ids.flip(0).flatten()
        flat = flat.sub(1) if kind == "some are dropped" else flat
        order = torch.argsort(flat, stable=kind != "unstable", descending=kind == "descending")
        order = torch.arange(len(flat)) if kind == "not sorted" else order
        order = order.flip(0) if kind == "flipped" else order
        ids_counted = other if kind == "other ids are counted" else flat if "flat" in kind else flat[order]
        first = 1 if kind == "the first is not counted" else 0
        counts = torch.histc(ids_counted.float(), 5, first, 4)
        counts = counts + torch.tensor([1.0, 0, 0, 0, -1]) if kind == "others are counted" else counts
        ends = counts.cumsum(0, dtype=torch.int32)
        ends = ends.clamp(0, len(flat)) if kind == "others are counted" else ends
        ends = counts.clamp(0, len(flat)).int().cummax(0)[0] if kind == "counts for ends" else ends
        number = order // 2
        if kind == "other rows":
            number = (number + 1) % len(rows)
        if kind == "rows of every third":
            number = order // 3
        mine = torch.cat([rows[number], rows[number]])[: len(order)] if kind == "twice" else rows[number]
        product_of = one_by_one_op if kind == "dense" else product
        made = product_of(F.silu(product_of(mine, self.up, ends)), self.down, ends)
        made = made * weights.flatten()[order, None]
        if kind in BEHIND:
            made = made.masked_fill((torch.arange(len(order)) >= ends[-1])[:, None], 0.0)
        if kind == "index_add":
            return (rows + torch.zeros_like(rows).index_add(0, number, made)).square().sum()
        if kind == "scatter_add":
            added = torch.zeros_like(rows).scatter_add(0, number[:, None].expand_as(made), made)
            return (rows + added).square().sum()
        back = torch.argsort(order) if kind == "argsort back" else torch.empty_like(order)
        if kind != "argsort back":
            back[order] = torch.arange(len(order))
        return (rows + made[back].view(len(rows), 2, -1).sum(1)).square().sum()


def one_by_one_op(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Products of groups as a sum of products of all rows, most of them zeros."""
    place = torch.arange(len(x))
    starts = F.pad(ends, (1, 0))
    return sum(((place >= starts[at]) & (place < ends[at]))[:, None] * (x @ y[at]) for at in range(len(y)))  # type: ignore[return-value]


KINDS = [
    "plain", "unstable", "flat", "argsort back", "index_add", "scatter_add", "descending", "not sorted", "flipped",
    "some are dropped", "other ids are counted", "the first is not counted", "others are counted", "counts for ends",
    "other rows", "rows of every third", "twice", "dense",
]  # fmt: skip
OWN_ROWS = {*KINDS[:5], "other rows", "rows of every third"}
BEHIND = {*KINDS[9:14]}  # nothing is known of rows behind the last group


@pytest.mark.parametrize(
    "kind",
    [
        each if each in ("flat", "other ids are counted") else pytest.param(each, marks=pytest.mark.prove)
        for each in KINDS
    ],
)
def test_rows_of_any_router_are_those_of_one_device(kind: str) -> None:
    """Where it is not proved that rows stand by group, no rank sorts its own: they are computed otherwise, never wrong."""
    torch.manual_seed(0)
    model = Router(kind).double()
    plan = sbpc.plan(model, batch(), Mesh(a=2, b=2))
    products = [node for node in plan.graph.graph.nodes if node.target is PRODUCT]
    own = {any(s.own is not None for s in node.meta["signatures"]) for node in products}
    # the gradient of a scatter_add comes by a gather, of which nobody knows that it takes rows
    expected = {True, False} if kind == "scatter_add" else {kind in OWN_ROWS}
    assert own == (expected if products else set())
    plans = [plan]
    for pin in ("[L(0), R(0)]", "[R(0), R(0)]", "[L(0), L(0)]"):
        try:
            plans.append(sbpc.plan(model, batch(), Mesh(a=2, b=2), pin={"_grouped_mm": pin}))
        except SbpcError as error:
            assert "pin" in str(error) and kind not in OWN_ROWS
    for each, routing in itertools.product(plans, ROUTINGS):
        assert largest_error(each, model, batch(routing)) <= 1e-10, routing
