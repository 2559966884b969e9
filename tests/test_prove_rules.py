"""The whole proof of all rules: every signature, mutant and ordered pair of signatures; prints what it counted."""

from __future__ import annotations

from collections import Counter

import pytest

from sbpc.rules.proof.prove import prove
from tests import pointwise_cases, proof_cases

FAMILIES = {**proof_cases.FAMILIES, "pointwise": pointwise_cases.cases}


@pytest.mark.prove
@pytest.mark.parametrize("family", FAMILIES)
def test_every_signature_and_every_pair_is_proved(family, record_property):
    cases = FAMILIES[family]()
    count = sum((prove(one) for one in cases), Counter())
    record_property("signatures", count["signatures"])
    record_property("mutants", count["mutants"])
    record_property("pairs", count["pairs"])
    found = (
        f"{count['signatures']} signatures proved, {count['mutants']} mutants rejected, {count['pairs']} pairs proved"
    )
    record_property("figure", f"{family:12} {len(cases)} cases, {found}")
    assert count["signatures"] and count["mutants"] and count["pairs"]
