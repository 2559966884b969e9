"""What torch's own DTensor can do and the rules cannot is listed, each signature with its reason."""

from __future__ import annotations

import pytest
import torch

from sbpc.mesh.states import B, P, S
from sbpc.rules.binding import Signature
from tests.completeness import FAMILIES, explained
from tests.coverage import listed
from tests.cross_check import EXPLAINED, fault, has, of_families
from tests.dtensor_rules import fake_mesh, signatures
from tests.samples import case, x, y

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="DTensor is asked as torch 2.13 has it"
)

SILENT = (  # of the listed ops those that DTensor has nothing for, factories among them, which it makes whole
    "_assert_tensor_metadata", "_scaled_dot_product_flash_attention_for_cpu_backward", "arange",
    "arange.start_step", "copy", "empty_permuted", "fill.Tensor", "full", "lift_fresh_copy", "scalar_tensor",
    "zeros",
)  # fmt: skip


@pytest.mark.prove
def test_rules_have_every_signature_of_dtensor_but_those_listed_with_a_reason(record_property):
    found, known = of_families(list(FAMILIES)), explained(EXPLAINED)
    figure = f"{found.calls} calls: {found.offered.total()} signatures of DTensor, {len(found.lines)} that no rule has"
    record_property("figure", f"{figure}, each with a reason")
    new, old = [line for line in found.lines if line not in known], [line for line in known if line not in found.lines]
    silent = [name for name in listed() if found.offered[name] == 0]
    assert tuple(name.removeprefix("aten.").removesuffix(".default") for name in silent) == SILENT
    assert not new, "DTensor has, no rule has, and tests/dtensor.txt does not explain:\n" + "\n".join(new)
    assert not old, "no longer lacking:\n" + "\n".join(old)


def test_every_listed_op_is_asked_for_and_every_reason_is_a_sentence():
    tried = {str(one.op) for made in FAMILIES.values() for one in made()}
    assert not [name for name in listed() if name not in tried]
    assert all(reason.endswith(".") for reason in explained(EXPLAINED).values())


def test_dtensor_tells_the_signatures_of_a_product():
    one = case(aten.mm.default, x(4, 6), x(6, 5))
    with fake_mesh() as mesh:
        found = signatures(one, mesh)
    assert {Signature((S(0), B), (S(0),)), Signature((S(1), S(0)), (P,)), Signature((B, S(1)), (S(1),))} <= set(found)
    assert all(has(one, signature) for signature in found)
    assert not has(one, Signature((S(0), S(0)), (P,)))


def test_a_signature_that_does_not_hold_shows_a_wrong_number():
    one = case(aten.gather.default, x(4, 7), 1, y(7, 2, 5))
    assert fault(one, Signature((S(0), S(0)), (S(0),))) == "-2 for 4"
    assert fault(one, Signature((P, B), (P,))) == ""
