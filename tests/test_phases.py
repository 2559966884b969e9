"""Two-phase splits: an op taken apart where a reduced dim is split gives what the op gives, for small collectives."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.boxing.steps import WIRE
from sbpc.errors import RuleError
from sbpc.inspect.graph_text import graph_text
from sbpc.passes.assign.space import Space
from sbpc.passes.pipeline import Stages, make_plan
from sbpc.plans.options import Options
from sbpc.rules.choices import Choice, of_match
from sbpc.rules.match import Entry
from sbpc.rules.proof.prove import Case
from sbpc.rules.registry import MATCHES, TABLE
from sbpc.rules.two_phase import decomposition
from sbpc.solver.problem import star, targets
from tests import layer_cases, models, proof_cases
from tests.compare import largest_error, relative_error
from tests.random_plans import random_plan

aten = torch.ops.aten


class Head(nn.Module):
    """Logits and their cross-entropy."""

    def __init__(self, width: int = 32, vocab: int = 480) -> None:
        super().__init__()
        self.weight = nn.Linear(width, vocab, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.weight(x), targets)


def test_an_op_of_one_result_is_taken_apart_though_its_parts_know_more() -> None:
    class Spread(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.scale = name, nn.Parameter(torch.randn(8, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return getattr(x * self.scale, self.name)(1)

    for name in ("var", "std"):
        model, args = Spread(name), (torch.randn(6, 8, dtype=torch.float64),)
        plan = sbpc.plan(model, args, Mesh(x=2), inputs=["S(1)"], objective="serial")
        random = [random_plan(plan, seed) for seed in range(4)]
        assert max(largest_error(found, model, args) for found in (plan, *random)) <= 1e-12


def moved(plan: sbpc.Plan) -> Counter[tuple[str, tuple[int, ...]]]:
    """How many collectives of each kind and (global) shape a plan has."""
    steps = [
        (node.meta["step"].collective, tuple(node.meta["val"].shape))
        for node in plan.boxed.graph.nodes
        if "step" in node.meta
    ]
    return Counter(step for step in steps if step[0] in WIRE)


def test_cross_entropy_over_a_split_vocabulary_moves_three_numbers_for_each_token() -> None:
    args = torch.randn(12, 32), torch.tensor([479, 0, 240, -100, 1, -100, -100, 239, 7, 8, 9, 300])
    plan = sbpc.plan(Head(), args, Mesh(tensor=2), pin={"weight.weight": "S(0)"}, objective="serial")
    assert_expected_inline(
        graph_text(plan.boxed, plan.mesh),
        """\
weight.weight                       f32[480, 32]    S(0)    parameter
x                                   f32[12, 32]     B       input
targets                             i64[12]         B       input
tangent_0                           f32[]           B       input
permute                             f32[32, 480]    S(1)    aten.permute(weight.weight, [1, 0])
mm                                  f32[12, 480]    S(1)    aten.mm(x, permute)
_log_softmax_amax                   f32[12, 1]      P(max)  aten.amax(mm, [1], True)
box__log_softmax_amax               f32[12, 1]      B       all_reduce(_log_softmax_amax)                                                        # P(max) -> B over tensor, 48 bytes
_log_softmax_sub                    f32[12, 480]    S(1)    aten.sub.Tensor(mm, box__log_softmax_amax)
_log_softmax_exp                    f32[12, 480]    S(1)    aten.exp(_log_softmax_sub)
_log_softmax_sum                    f32[12, 1]      P       aten.sum.dim_IntList(_log_softmax_exp, [1], True)
box__log_softmax_sum                f32[12, 1]      B       all_reduce(_log_softmax_sum)                                                         # P -> B over tensor, 48 bytes
_log_softmax_log                    f32[12, 1]      B       aten.log(box__log_softmax_sum)
_log_softmax                        f32[12, 480]    S(1)    aten.sub.Tensor(_log_softmax_sub, _log_softmax_log)
nll_loss_forward                    (f32[], f32[])  (P, P)  aten.nll_loss_forward(_log_softmax, targets, None, 2, -100)
box_targets                         i64[12]         S(0)    slice(targets)                                                                       # B -> S(0) over tensor, 0 bytes
ne                                  bool[12]        S(0)    aten.ne.Scalar(box_targets, -100)
sum_1                               i64[]           P       aten.sum(ne)
box_sum_1                           i64[]           B       all_reduce(sum_1)                                                                    # P -> B over tensor, 8 bytes
_to_copy                            f32[]           B       aten._to_copy(box_sum_1, dtype=float32)
getitem                             f32[]           P       nll_loss_forward[0]
box_getitem                         f32[]           B       all_reduce(getitem)                                                                  # P -> B over tensor, 4 bytes
div                                 f32[]           B       aten.div.Tensor(box_getitem, _to_copy)
div_1                               f32[]           B       aten.div.Tensor(tangent_0, _to_copy)
nll_loss_backward                   f32[12, 480]    S(1)    aten.nll_loss_backward(div_1, _log_softmax, targets, None, 2, -100, _to_copy)
_log_softmax_backward_data_exp      f32[12, 480]    S(1)    aten.exp(_log_softmax)
_log_softmax_backward_data_sum      f32[12, 1]      P       aten.sum.dim_IntList(nll_loss_backward, [1], True)
box__log_softmax_backward_data_sum  f32[12, 1]      B       all_reduce(_log_softmax_backward_data_sum)                                           # P -> B over tensor, 48 bytes
_log_softmax_backward_data_mul      f32[12, 480]    S(1)    aten.mul.Tensor(_log_softmax_backward_data_exp, box__log_softmax_backward_data_sum)
_log_softmax_backward_data          f32[12, 480]    S(1)    aten.sub.Tensor(nll_loss_backward, _log_softmax_backward_data_mul)
permute_1                           f32[480, 12]    S(0)    aten.permute(_log_softmax_backward_data, [1, 0])
mm_1                                f32[480, 32]    S(0)    aten.mm(permute_1, x)
output                                                      output(div, mm_1)
""",
    )
    assert moved(plan) == {("all_reduce", (12, 1)): 3, ("all_reduce", ()): 2}


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.prove), 3, pytest.param(4, marks=pytest.mark.prove)]
)
def test_a_split_vocabulary_gives_the_loss_of_one_device(ranks: int) -> None:
    torch.manual_seed(0)
    model = Head(vocab=30).double()
    args = torch.randn(7, 32).double() * 10, torch.tensor([29, 0, 14, -100, 15, -100, 3])
    plan = sbpc.plan(
        model, args, Mesh(tensor=ranks), pin={"weight.weight": "S(0)", "_log_softmax": "S(1)"}, objective="serial"
    )
    assert largest_error(plan, model, args) <= 1e-12


class Normed(nn.Module):
    """Linear layers with a norm of the hidden dim between them."""

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(width, hidden, bias=False), nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


NORMED = {"up.weight": "S(0)", "native_layer_norm": "S(1)", "down.weight": "S(1)"}


def test_a_norm_over_a_split_dim_moves_the_mean_and_the_variance() -> None:
    plan = sbpc.plan(Normed(), (torch.randn(6, 8),), Mesh(tensor=2), pin=NORMED, train=False, objective="serial")
    assert_expected_inline(
        graph_text(plan.boxed, plan.mesh),
        """\
up.weight                   f32[16, 8]  S(0)  parameter
norm.weight                 f32[16]     S(0)  parameter
norm.bias                   f32[16]     S(0)  parameter
down.weight                 f32[8, 16]  S(1)  parameter
x                           f32[6, 8]   B     input
permute                     f32[8, 16]  S(1)  aten.permute(up.weight, [1, 0])
mm                          f32[6, 16]  S(1)  aten.mm(x, permute)
native_layer_norm           f32[6, 1]   P     aten.mean.dim(mm, [-1], True)
box_native_layer_norm       f32[6, 1]   B     all_reduce(native_layer_norm)                                # P -> B over tensor, 24 bytes
native_layer_norm_sub       f32[6, 16]  S(1)  aten.sub.Tensor(mm, box_native_layer_norm)
native_layer_norm_pow       f32[6, 16]  S(1)  aten.pow.Tensor_Scalar(native_layer_norm_sub, 2)
native_layer_norm_mean      f32[6, 1]   P     aten.mean.dim(native_layer_norm_pow, [-1], True)
box_native_layer_norm_mean  f32[6, 1]   B     all_reduce(native_layer_norm_mean)                           # P -> B over tensor, 24 bytes
native_layer_norm_add       f32[6, 1]   B     aten.add.Tensor(box_native_layer_norm_mean, 1e-05)
native_layer_norm_1         f32[6, 1]   B     aten.rsqrt(native_layer_norm_add)
native_layer_norm_mul       f32[6, 16]  S(1)  aten.mul.Tensor(native_layer_norm_sub, native_layer_norm_1)
native_layer_norm_mul_1     f32[6, 16]  S(1)  aten.mul.Tensor(native_layer_norm_mul, norm.weight)
getitem                     f32[6, 16]  S(1)  aten.add.Tensor(native_layer_norm_mul_1, norm.bias)
permute_1                   f32[16, 8]  S(0)  aten.permute(down.weight, [1, 0])
mm_1                        f32[6, 8]   P     aten.mm(getitem, permute_1)
box_mm_1                    f32[6, 8]   B     all_reduce(mm_1)                                             # P -> B over tensor, 192 bytes
output                                        output(box_mm_1)
""",
    )


@pytest.mark.parametrize("hidden", [16, 3, pytest.param(5, marks=pytest.mark.prove)])
def test_a_norm_over_a_split_dim_that_does_not_divide_equals_one_device(hidden: int) -> None:
    """Of 3 or 5 numbers over 4 ranks some are left without any."""
    torch.manual_seed(0)
    model = Normed(hidden=hidden).double()
    args = (100 + torch.randn(6, 8).double(),)
    pins = {name: layout for name, layout in NORMED.items() if hidden == 16 or "weight" not in name}
    plan = sbpc.plan(model, args, Mesh(tensor=4), pin=pins, objective="serial")
    assert any(
        node.meta["candidates"].apart(plan.assignment.choices[node.name]) for node in calls(plan, "native_layer_norm")
    )
    assert largest_error(plan, model, args) <= 1e-12


def calls(plan: sbpc.Plan, name: str) -> list[Any]:
    """The calls of an op in the plan's graph."""
    return [node for node in plan.graph.graph.nodes if node.op == "call_function" and name in str(node.target)]


def test_a_softmax_refuses_a_split_that_leaves_a_rank_no_number() -> None:
    """There is no maximum of nothing."""
    found = of_match(Case(aten._softmax.default, (torch.randn(4, 5), 1, False)).match())
    assert {str(s).split("    ")[0] for s in found.signatures} == {"B -> B", "S(0) -> S(0)", "S(1) -> S(1)"}
    for ranks, split in ((2, {"B -> B", "S(0) -> S(0)", "S(1) -> S(1)"}), (4, {"B -> B", "S(0) -> S(0)"})):
        assert {str(c) for s in found.signatures if found.legal(c := Choice((s,), (0,)), (ranks,))} == split


@pytest.mark.parametrize("mesh", [pytest.param({"x": 2}, marks=pytest.mark.prove), {"x": 2, "y": 2}, {"x": 4}], ids=str)
def test_batch_norm_over_a_split_batch_has_the_statistics_of_one_device(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, args = models.batch_norm(batch=10)
    model, args = model.double(), (args[0].double() * 3 + 50, args[1])
    wanted = "S(0)" if len(mesh) == 1 else "[S(0), S(0)]"
    plan = sbpc.plan(model, args, Mesh(**mesh), pin={"convolution": wanted, "relu": wanted}, objective="serial")
    for name in ("_native_batch_norm_legit_functional", "native_batch_norm_backward"):
        (node,) = calls(plan, name)
        assert node.meta["candidates"].apart(plan.assignment.choices[node.name]), name
    assert largest_error(plan, model, args) <= 1e-9
    updated = [
        sbpc.simulate(each, model, args).buffers for each in (plan, *(random_plan(plan, seed) for seed in range(3)))
    ]
    model(*args)
    for found, (name, buffer) in itertools.product(updated, model.named_buffers()):
        assert relative_error(found[name], buffer) <= 1e-12, name


# --- the functions themselves -----------------------------------------------------------------------------------------
def taken_apart(case: Case) -> list[Any]:
    """The outputs of the small graph of a call on whole tensors."""
    phases = case.match().phases
    assert phases is not None
    values: dict[int, Any] = dict(enumerate(case.operands))
    for part in phases.parts:
        args, kwargs = part.arguments(values)
        values[part.number] = part.match.op(*args, **kwargs)
    return [None if number is None else values[number] for number in phases.outputs]


def cases() -> list[Case]:
    """The cases of ops that are taken apart."""
    every = [*layer_cases.attention(), *layer_cases.norm(), *proof_cases.reductions()]
    return [case for case in every if case.match().phases is not None]


def narrowed(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return dtype if value is torch.float64 else value


def test_what_is_taken_apart_has_the_dtypes_and_the_digits_of_the_fused_op() -> None:
    for dtype in [torch.float32, torch.bfloat16]:
        bound = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}[dtype]
        for case in cases():
            args = [narrowed(v, dtype) for v in case.args]
            if case.op == aten._weight_norm_interface_backward.default:
                args[3] = case.args[3].float()  # norms are saved in float32
            made = Case(case.op, tuple(args), case.kwargs)
            whole = made.run()
            for found, expected in zip(taken_apart(made), whole if isinstance(whole, tuple) else (whole,)):
                if found is not None:
                    assert found.dtype == expected.dtype, made
                    assert relative_error(found.double(), expected.double(), 1.0) <= bound, made


def test_statistics_far_from_zero_keep_their_digits() -> None:
    """A mean of squares less the square of the mean would lose all digits here."""
    x = (torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).double() + 4096).float()
    for op, args in (
        (aten.native_layer_norm.default, ([64], None, None, 1e-5)),
        (aten.var.correction, ([1],)),
        (aten._log_softmax.default, (1, False)),
        (aten._softmax.default, (1, False)),
        (aten.logsumexp.default, ([1],)),
    ):
        found, fused, exact = taken_apart(Case(op, (x, *args)))[0], op(x, *args), op(x.double(), *args)
        fused, exact = (value[0] if isinstance(value, tuple) else value for value in (fused, exact))
        lost = relative_error(fused.double(), exact, 1.0)
        assert relative_error(found.double(), exact, 1.0) <= 2 * lost + 1e-6, op


def test_rows_of_infinities_are_as_in_the_fused_op() -> None:
    x = torch.tensor([[-torch.inf, 1.0, 2.0], [-torch.inf] * 3, [torch.inf, 0.0, 1.0]], dtype=torch.float64)
    for op, args in (
        (aten._softmax.default, (1, False)),
        (aten._safe_softmax.default, (1,)),
        (aten._log_softmax.default, (1, False)),
        (aten.logsumexp.default, ([1],)),
    ):
        assert torch.allclose(taken_apart(Case(op, (x, *args)))[0], op(x, *args), equal_nan=True), op


@decomposition
def repeated_maximum(x: Tensor, dim: int, *_: Any) -> Tensor:
    return x.amax(dim, True).expand(x.shape)


@decomposition
def bare_maximum(x: Tensor, dim: int, *_: Any) -> Tensor:
    return x.amax(dim)


def test_a_function_that_does_not_give_what_the_op_gives_is_refused(monkeypatch: Any) -> None:
    for name, message in [
        ("repeated_maximum", "repeated_maximum gives B for S(0) in S(0) -> S(0)    split a\n  Mend the rule or it."),
        ("bare_maximum", "bare_maximum gives [] for [5]\n  Return what the op does."),
        ("nothing", "no decomposition is called 'nothing'\n  There are "),
    ]:
        monkeypatch.setitem(TABLE, aten._softmax.default, Entry(aten._softmax.default, f"a -> a ; via a = {name}"))
        MATCHES.clear()
        with pytest.raises(RuleError) as error:
            Case(aten._softmax.default, (torch.randn(5), 0, False)).match()
        assert str(error.value).startswith(message)
        MATCHES.clear()


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("gpt2", "h100"),
        ("batch_norm", None),
        *(pytest.param(*case, marks=pytest.mark.prove) for case in (("gpt2", None), ("batch_norm", "h100"))),
    ],
)
def test_what_the_solver_adds_up_is_what_the_boxed_graph_costs(name: str, cluster: str | None) -> None:
    model, args = models.MODELS[name](**({"layers": 1, "batch": 4} if name == "gpt2" else {}))
    mesh = Mesh(x=2, y=2, cluster=cluster)
    space = Space(sbpc.plan(model, args, Mesh(x=1), objective="serial").graph, mesh, {}, {})
    generator, apart = torch.Generator().manual_seed(0), 0
    for _ in range(12):
        labels = [int(torch.randint(len(table), (), generator=generator)) for table in space.tables]
        apart += sum(table.candidates.apart(table.choice(label)) for table, label in zip(space.tables, labels))
        expected = sum(float(variable.costs[label]) for variable, label in zip(space.variables, labels))
        for value in space.values:
            source = int(value.out[labels[value.producer]])
            alias, _ = star(value, labels)
            wanted = {*targets(value, labels)} - {alias, source}  # what is made in a layout is there already
            expected += value.closure[source, alias] + sum(value.closure[alias, target] for target in wanted)
        found = make_plan(
            space.gm, mesh, space.assignment(labels), 0.0, Options(objective="serial"), Stages()
        ).cost.seconds
        assert found == pytest.approx(expected, rel=1e-9)
    assert apart >= 12


@decomposition
def by_maximum(x: Tensor) -> Tensor:
    return x / x.amax(-1, True)


@decomposition
def by_sum(x: Tensor) -> Tensor:
    return x / x.sum(-1, True)


def test_an_op_of_ones_own_is_split_through_a_function_of_ones_own_or_refused() -> None:
    library = torch.library.Library("sbpc_phases", "DEF")
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", by_maximum, "CompositeExplicitAutograd")
    examples = [(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).double(),)]
    with sbpc.rule("sbpc_phases::scaled", "b d -> b d ; via d = by_maximum", examples=examples):
        found = Case(torch.ops.sbpc_phases.scaled.default, examples[0]).match()
        assert [str(signature) for signature in found.signatures] == [
            "B -> B",
            "S(0) -> S(0)    split b",
            "S(1) -> S(1)    split d",
        ]
    with pytest.raises(
        RuleError, match=r"the rule is refuted: S\(1\) -> S\(1\), split d, on 2 ranks: output 0 has other values"
    ):
        sbpc.rule("sbpc_phases::scaled", "b d -> b d ; via d = by_sum", examples=examples)


@pytest.mark.parametrize("cluster", [pytest.param(None, marks=pytest.mark.prove), "h100"])
def test_formulas_of_what_is_taken_apart_hold_at_other_sizes(cluster: str | None) -> None:
    def planned(tokens: int, vocab: int, **options: Any) -> sbpc.Plan:
        args = torch.randn(tokens, 32), torch.randint(0, vocab, (tokens,))
        pins = {"weight.weight": "S(0)", "_log_softmax": "S(1)", "_log_softmax_backward_data": "S(1)"}
        return sbpc.plan(
            Head(vocab=vocab), args, Mesh(tensor=2, cluster=cluster), pin=pins, **options, objective="serial"
        )

    names = {"x": ("t", "h"), "targets": ("t",), "weight.weight": ("v", "h")}
    cost = planned(12, 480, dynamic=names).cost
    assert cost.subs() == pytest.approx(cost.seconds, rel=1e-12)
    for tokens, vocab in ((12, 960), (36, 480), (24, 1200)):
        assert cost.subs(t=tokens, v=vocab) == pytest.approx(planned(tokens, vocab).cost.seconds, rel=1e-12)
