"""Completeness of rules: brute force over all states finds no valid signature that is neither offered nor explained."""

from __future__ import annotations

import pytest
import torch

from sbpc.mesh.states import B, P, S
from sbpc.rules.binding import Signature
from tests import own_ops
from tests.completeness import FAMILIES, explained, lacking, of_family, valid
from tests.samples import case, x

QUICK = ("embedding", "index", "matmul", "views")
aten = torch.ops.aten


def check_family(family: str, record_property) -> None:
    count, missing = of_family(family)
    known = explained()
    new = [line for line in missing if line not in known]
    record_property(
        "figure",
        f"{family:12} {count} signatures valid on 2 ranks, {len(missing)} that no rule offers, {len(new)} not explained",
    )
    record_property("lacking", len(missing))
    assert count
    assert not new, "no rule offers, and tests/lacking.txt does not explain:\n" + "\n".join(new)


@pytest.mark.parametrize("family", QUICK)
def test_rules_offer_every_valid_signature(family, record_property):
    check_family(family, record_property)


@pytest.mark.prove
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in QUICK])
def test_every_valid_signature_is_offered_or_explained(family, record_property):
    check_family(family, record_property)


def test_every_reason_is_a_sentence():
    assert all(reason.endswith(".") for reason in explained().values())


def test_brute_force_finds_the_signatures_of_a_product():
    one = case(aten.mm.default, x(4, 6), x(6, 5))
    found = valid(one)
    pairs = [(s.inputs, s.outputs) for s in found]
    assert all((s.inputs, s.outputs) in pairs for s in one.match().signatures)
    assert lacking(found, one.match().signatures) == []
    without = [s for s in one.match().signatures if s.factor != "k"]
    assert lacking(found, without) == [Signature((S(1), S(0)), (P,))]


def test_what_free_boxings_give_is_not_lacking():
    whole, split = Signature((B, B), (B,)), Signature((B, B), (S(0),))
    assert lacking([split, Signature((S(0), B), (P,))], [whole]) == [Signature((S(0), B), (P,))]
    assert lacking([Signature((S(0),), (P,))], [Signature((S(0),), (S(0),))]) == []


def test_an_op_that_crashes_on_shapes_that_do_not_fit_is_tried_on_those_that_do():
    one = case(torch.ops.own.pair.default, x(6, 5), x(6, 5, seed=1))
    assert own_ops.pair(x(6, 5), x(6, 5)).shape == (6, 5)
    found = [(s.inputs, s.outputs) for s in valid(one)]
    assert ((S(0), S(0)), (S(0),)) in found and ((S(1), S(1)), (S(1),)) in found and ((P, B), (P,)) in found
