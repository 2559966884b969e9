"""Rules: what they derive, how they bind and run on shards; a quick proof of each (see test_prove_rules)."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import sympy
import torch

from sbpc.errors import RuleError
from sbpc.rules import match, registry, rule
from sbpc.rules.proof.prove import Case, Inapplicable, check, prove
from sbpc.rules.registry import TABLE
from tests import coverage, pointwise_cases, proof_cases
from tests.duality import duals, missing
from tests.samples import case, x

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
ALL = [one for made in proof_cases.FAMILIES.values() for one in made()]


def signatures(op, *args, **kwargs) -> list[str]:
    return [str(signature) for signature in case(op, *args, **kwargs).match().signatures]


@pytest.mark.parametrize("family", proof_cases.FAMILIES)
def test_every_signature_is_right_and_its_mutants_are_not(family):
    for one in proof_cases.FAMILIES[family]():
        prove(one, pairs=())


def test_ranks_without_elements_run_what_others_run():
    for one in ALL:
        for signature in (m := one.match()).signatures:
            with contextlib.suppress(Inapplicable):
                check(one, m, [signature], (9,))


def test_what_stands_in_for_an_op_of_cuda_gives_its_shapes():
    for one in proof_cases.FAMILIES["cuda"]():
        found, expected = one.op(*on_meta(one.args)), one.run()
        assert shapes(found) == shapes(expected), one


def on_meta(value):
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return [on_meta(item) for item in value] if isinstance(value, (list, tuple)) else value


def shapes(outputs):
    return [tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in outputs]


def test_every_pointwise_signature_is_right_and_its_mutants_are_not():
    for one in pointwise_cases.cases():
        prove(one, ranks=(2,), pairs=())


def test_signatures_compose_on_two_axes():
    once = {str(one.op): one for one in ALL if "convolution" not in str(one.op)}
    for one in once.values():
        prove(one, ranks=(2, 3, 4), pairs=((3, 2),), mutants=False)


def test_every_rule_has_a_case():
    proved = {one.op for one in [*ALL, *pointwise_cases.cases()]}
    lacking = [str(op) for op in [*TABLE, *pointwise_cases.ops()] if op not in proved]
    assert not lacking


def test_every_op_of_the_graphs_of_real_models_has_a_rule():
    assert len(coverage.listed()) > 120
    assert not [name for name, op in coverage.listed().items() if registry.row(op) is None]


def test_every_backward_rule_covers_the_transpose_of_its_forward():
    for dual in duals():
        assert not missing(dual), f"{dual.backward} lacks the transpose of {missing(dual)[0]} of {dual.forward}"


def test_duality_finds_a_missing_input_channel_split(monkeypatch):
    dual = next(dual for dual in duals() if dual.backward.op == aten.convolution_backward.default)
    replace(
        monkeypatch,
        dual.backward.op,
        "n co *o, n ci *h, co ci *k, [co] -> n ci *h, co ci *k, co ; +n co ; fix ci h k o ; lin(0)",
    )
    assert [signature.factor for signature in missing(dual)][:1] == ["ci"]


def test_matches_of_the_last_calls_alone_are_kept(monkeypatch):
    monkeypatch.setattr(registry, "MATCHES", {})
    monkeypatch.setattr(registry, "KEPT", 2)
    for size in (2, 3, 4, 2):
        found = registry.match(aten.neg.default, (x(size),), {}, x(size))
        assert found is not None and set(found.sizes.values()) == {size}
    assert [key[1][-1][1] for key in registry.MATCHES] == [(4,), (2,)]


def replace(monkeypatch, op, text, **more) -> None:
    monkeypatch.setattr(registry, "MATCHES", {})
    monkeypatch.setitem(TABLE, op, TABLE.get(op))
    rule(op, text, replace=True, **more)


TARGET = torch.tensor([0, -100, 2, 1, -100])
WRONG = [
    (case(aten._softmax.default, x(3, 4), 1, False), "a d -> a d"),
    (case(aten.mul.Tensor, x(3, 4), x(3, 4)), "a b, a b -> a b ; lin(0,1)"),
    (case(aten.add.Tensor, x(3, 4), x(4)), "a b, b -> a b ; lin(0)"),
    (case(aten.add.Tensor, x(3, 4), 2.0), "a b, _ -> a b ; lin(0)"),
    (case(aten.addmm.default, x(5), x(3, 4), x(4, 5)), "n, m k, k n -> m n ; +k"),
    (case(aten.mean.default, x(4, 5)), "a b -> () ; +a b"),
    (case(aten.masked_fill.Scalar, x(3, 4), x(3, 4) > 0, 2.0), "a b, a b -> a b ; lin(0)"),
    (case(aten.squeeze.default, x(3, 1)), "a 1 -> a"),
    (case(aten.cumsum.default, x(3, 4), 1), "a b -> a b"),
    (case(aten.nll_loss_forward.default, x(5, 3), TARGET, None, 1, -100), "n c, n, _ -> (), () ; +n ; fix c"),
    (case(aten.arange.default, 5), "_ -> a"),
    (case(aten.expand.default, x(3, 1), [3, 4]), "a 1, _ -> a e ; lin(0)"),
    (case(aten.embedding.default, x(7, 3), torch.tensor([0, 6, 2])), "v d, *b -> *b d ; +v"),
]  # fmt: skip


def test_the_proof_refuses_a_wrong_rule(monkeypatch):
    for one, text in WRONG:
        replace(monkeypatch, one.op, text)
        with pytest.raises(RuleError, match=r"ranks|passes"):
            prove(one, ranks=(2, 3))


def test_a_product_allows_rows_columns_the_inner_dim_and_either_partial_operand():
    assert signatures(aten.mm.default, x(4, 6), x(6, 5)) == [
        "B, B -> B",
        "S(0), B -> S(0)    split m",
        "S(1), S(0) -> P    split k",
        "B, S(1) -> S(1)    split n",
        "P, B -> P",
        "B, P -> P",
    ]


def test_the_bias_of_a_product_split_over_the_inner_dim_is_partial():
    assert "P, S(1), S(0) -> P    split k" in signatures(aten.addmm.default, x(5), x(4, 6), x(6, 5))


def test_partial_plus_a_number_is_not_legal_and_partial_plus_partial_is():
    assert not any("P" in text for text in signatures(aten.add.Tensor, x(3), 1.0))
    assert signatures(aten.add.Tensor, x(3), x(3))[-1] == "P, P -> P"


def test_partial_times_partial_is_not_legal():
    assert [text for text in signatures(aten.mul.Tensor, x(3), x(3)) if "P" in text] == ["P, B -> P", "B, P -> P"]


def test_a_conversion_is_linear_between_floating_dtypes_only():
    for source, target, legal in [
        (torch.float64, torch.float32, True),
        (torch.float64, torch.int64, False),
        (torch.int64, torch.float32, False),
        (torch.bool, torch.float32, False),
    ]:
        assert ("P -> P" in signatures(aten._to_copy.default, x(3).to(source), dtype=target)) is legal


def test_masked_fill_is_linear_with_zero_only():
    for value, legal in [(0, True), (0.0, True), (False, True), (1, False), (-float("inf"), False)]:
        assert ("P, B -> P" in signatures(aten.masked_fill.Scalar, x(3), x(3) > 0, value)) is legal


def test_a_bool_is_never_partial():
    assert not any("P" in text for text in signatures(aten.logical_not.default, x(3) > 0))
    assert not any("P" in text for text in signatures(aten.clone.default, x(3) > 0))


def test_a_group_of_a_view_must_be_divided_by_the_axis_that_cuts_its_leader():
    m = case(aten.view.default, x(4, 6, 5), [24, 5]).match()
    assert m.divides == {"f0"}
    assert [str(s) for s in m.signatures] == [
        "B -> B",
        "S(0) -> S(0)    split f0",
        "S(2) -> S(1)    split f2",
        "P -> P",
    ]


def shapes_of(size: int, dims: int) -> list[tuple[int, ...]]:
    """All shapes of up to `dims` dims with `size` elements."""
    if dims == 1:
        return [(size,)]
    rest = [(d, *more) for d in range(1, size + 1) if size % d == 0 for more in shapes_of(size // d, dims - 1)]
    return list(dict.fromkeys([*shapes_of(size, dims - 1), *rest]))


def test_a_view_between_any_two_shapes_is_right():
    shapes = shapes_of(24, 3)
    for before, after in itertools.product(shapes, repeat=2):
        prove(case(aten.view.default, x(*before), list(after)), ranks=(2, 3), pairs=(), mutants=False)


def test_factors_of_one_element_give_no_signature():
    assert signatures(aten.mm.default, x(1, 6), x(6, 1)) == [
        "B, B -> B",
        "S(1), S(0) -> P    split k",
        "P, B -> P",
        "B, P -> P",
    ]


def test_an_op_without_a_rule_matches_none():
    assert match(aten.native_dropout.default, (x(3), 0.5, True), {}, (x(3), x(3) > 0)) is None
    assert (
        match(aten.embedding_dense_backward.default, (x(3, 5), torch.zeros(3).long(), 7, -1, True), {}, x(7, 5)) is None
    )


def test_meta_tensors_match_as_real_ones_do():
    real = case(aten.mm.default, x(4, 6), x(6, 5))
    meta = [value.to("meta") for value in real.args]
    assert match(real.op, meta, {}, aten.mm.default(*meta)).signatures == real.match().signatures


def test_flops_are_one_formula_for_numbers_arrays_and_symbols():
    m = case(aten.mm.default, x(4, 6), x(6, 5)).match()
    a = sympy.Symbol("a", positive=True)
    assert m.flops(m.sizes) == 2 * 4 * 6 * 5
    assert m.flops({"m": 4 / a, "k": 6, "n": 5}) == 240 / a
    assert m.flops({"m": np.array([4, 2]), "k": 6, "n": 5}).tolist() == [240, 120]


SAME = ([1, 1], [1, 1], [1, 1], False, [0, 0])
FLOPS = [
    (case(aten.view.default, x(4, 6), [24]), 0),
    (case(aten.relu.default, x(4, 6)), 24),
    (case(aten.sum.dim_IntList, x(4, 6), [1]), 24),
    (case(aten.full.default, [4, 6], 1.0), 0),
    (case(aten.cat.default, [x(4, 2), x(4, 3)], 1), 0),
    (case(aten.cumsum.default, x(4, 6), 1), 24),
    (case(aten.einsum.default, "bsk,kn->bsn", [x(2, 3, 4), x(4, 5)]), 2 * 2 * 3 * 4 * 5),
    (case(aten.convolution.default, x(3, 4, 5, 6), x(7, 4, 3, 3), None, *SAME, 1), 2 * 3 * 7 * 5 * 6 * 4 * 9),
    (case(aten.convolution.default, x(2, 24, 3, 4), x(12, 2, 3, 3), None, *SAME, 12), 2 * 2 * 12 * 3 * 4 * 2 * 9),
    (case(FLASH, x(2, 3, 5, 4), x(2, 3, 7, 4), x(2, 3, 7, 4)), 4 * 2 * 3 * 5 * 7 * 4),
]


def test_flops():
    for one, flops in FLOPS:
        m = one.match()
        assert m.flops(m.sizes) == flops


def test_a_local_kernel_emits_what_it_runs():
    m = case(aten.mean.dim, x(4, 6), [1], True).match()
    calls = []
    m.localize(
        lambda op, *args, **kwargs: calls.append((str(op), args, kwargs)) or "sum",
        ["x", [1], True],
        {},
        {"k0": 4, "r1": 3},
        {},
    )
    assert calls == [("aten.sum.dim_IntList", ("x", [1], True), {}), ("aten.div.Scalar", ("sum", 6), {})]


def test_a_factor_over_more_ranks_than_elements_leaves_empty_shards():
    one = case(aten.mm.default, x(2, 3), x(3, 5))
    for signature in one.match().signatures:
        check(one, one.match(), (signature,), (7,))


def test_an_op_can_be_given_one_rule():
    with pytest.raises(RuleError) as error:
        rule(aten.mm.default, "m k, k n -> m n ; +k")
    assert str(error.value) == (
        "aten.mm.default has a rule already\n  m k, k n -> m n ; +k ; lin(0) ; lin(1)\n"
        "  Pass replace=True to put another in its place."
    )


def test_a_rule_that_does_not_fit_its_call_is_an_error(monkeypatch):
    replace(monkeypatch, aten.mm.default, "m k, k n o -> m n o ; +k")
    with pytest.raises(RuleError) as error:
        case(aten.mm.default, x(4, 6), x(6, 5)).match()
    assert str(error.value) == (
        "aten.mm.default: the rule does not fit the call: an operand of 3 dims has the shape [6, 5]\n"
        "  m k, k n o -> m n o ; +k\n  Write one operand per argument, one name per dim."
    )
    replace(monkeypatch, aten.mm.default, "m k, m n -> m n ; +k")
    with pytest.raises(RuleError, match="m is 4 and 6"):
        Case(aten.mm.default, (x(4, 6), x(6, 5))).match()
    replace(monkeypatch, aten.mm.default, "m k -> m n ; +k")
    with pytest.raises(RuleError, match="no operand for the tensor argument 'mat2'"):
        Case(aten.mm.default, (x(4, 6), x(6, 5))).match()
