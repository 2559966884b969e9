"""Pins that cannot be met together: the error names no more of them than it takes."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import sbpc
from sbpc import Mesh
from sbpc.api.task import prepare
from sbpc.errors import PinError
from sbpc.mesh.pins import both
from sbpc.passes.assign.space import Space
from sbpc.passes.assign.wishes import pin_wishes, placeholder_wishes
from sbpc.plans.options import Options

MESH = Mesh(x=2, y=2, z=2)


def refused(pins: dict[str, str]) -> str:
    """The message about two layers of 4 and 64 features."""
    model = nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 64))
    with pytest.raises(PinError) as error:
        sbpc.plan(model, (torch.randn(64, 64),), MESH, pin=pins)
    return str(error.value)


def test_of_many_pins_those_in_conflict_are_named() -> None:
    pins = {
        "*.bias": "B@x",
        "0.*": "S(0)@x",
        "0.weight": "S(0)@y",
        "*.weight": "S(0)@z",
        "1.*": "S(0)@y",
        "[0-9].weight": "S(0)@x",
    }
    assert_expected_inline(
        refused(pins),
        """\
two pins of %_0_bias disagree on axis 'x': B and S(0)
  pin '*.bias': 'B@x'
  pin '0.*': 'S(0)@x'
  Remove one of them.""",
    )


def test_names_as_reports_write_them_are_patterns() -> None:
    options = Options(pin={"blocks.{0-1,12}.up": "S(0)@x", "0.weight": "B", "{9}.{a}.*": "B"})
    assert options.pin == {
        **{f"blocks.{number}.up": "S(0)@x" for number in (0, 1, 12)},
        "0.weight": "B",
        "9.{a}.*": "B",
    }
    with pytest.raises(PinError, match=r"'b.2' is pinned to 'S\(0\)' and to 'B'\n  Remove one of the pins"):
        Options(pin={"b.{0-2}": "S(0)", "b.{2-3}": "B"})


@pytest.mark.parametrize("numbers", ["{3-1}", "{0,3-1}", "{0-999999}", "{0-999}{0-999}", "{" + "9" * 5_000 + "}"])
def test_runs_of_no_numbers_or_of_too_many_are_refused_as_names_of_nothing(numbers: str) -> None:
    pattern = f"{numbers}.weight"
    assert Options(pin={pattern: "S(0)@x"}).pin == {pattern: "S(0)@x"}
    assert refused({pattern: "S(0)@x"}).startswith(f"pin '{pattern}' matches no parameter and no value\n")


def test_two_pins_that_disagree_are_named_with_the_axis() -> None:
    pins = {"1.weight": "S(0)@x", "0.weight": "S(0)@y", "0.w*": "S(1)@y", "*.bias": "B@z"}
    assert_expected_inline(
        refused(pins),
        """\
two pins of %_0_weight disagree on axis 'y': S(0) and S(1)
  pin '0.weight': 'S(0)@y'
  pin '0.w*': 'S(1)@y'
  Remove one of them.""",
    )


def test_of_several_conflicts_the_one_of_the_fewest_pins_is_named() -> None:
    pins = {"0.bias": "P@y", "0.weight": "S(0)@y", "*.weight": "S(0)@z", "[0-9].weight": "S(0)@x"}
    assert refused(pins).startswith("pin '0.bias': 'P@y' cannot be met\n")
    assert refused(dict(reversed(pins.items()))).startswith("pin '0.bias': 'P@y' cannot be met\n")


def test_the_pins_that_are_named_conflict_and_no_part_of_them_does() -> None:
    named = {"0.weight": "S(0)@y", "*.weight": "S(0)@z", "[0-9].weight": "S(0)@x"}
    assert all(f"pin {pattern!r}" in refused(named | {"*.bias": "B@x"}) for pattern in named)
    gm = prepare(nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 64)), (torch.randn(64, 64),)).gm
    stored = placeholder_wishes(gm, MESH, None, None, False)
    for pattern in named:
        fewer = {other: text for other, text in named.items() if other != pattern}
        wishes = both(stored, pin_wishes(gm, MESH, fewer, stored), MESH)
        assert all(map(len, Space(gm, MESH, wishes, {}).tables))  # every node is left a choice


def test_a_single_pin_that_cannot_be_met_is_named_alone() -> None:
    pins = {"1.weight": "S(0)@x", "0.bias": "P@y", "0.weight": "S(0)@x"}
    assert_expected_inline(
        refused(pins),
        """\
pin '0.bias': 'P@y' cannot be met
  %_0_bias : f32[4] = placeholder
  It can be left in [B, B, B], [B, B, S(0)], [B, S(0), B], [B, S(0), S(0)], [B, S(0), S(0)] S(0)@z>y, [S(0), B, B], [S(0), B, S(0)], [S(0), B, S(0)] S(0)@z>x and 2 more.""",
    )


def test_a_pin_may_conflict_with_what_is_asked_otherwise() -> None:
    with pytest.raises(PinError) as error:
        sbpc.plan(nn.Linear(64, 4, bias=False), (torch.randn(64, 64),), MESH, pin={"weight": "B@x"}, spread=True)
    assert_expected_inline(
        str(error.value),
        """\
parameter weight stored once (spread=True); pin 'weight': 'B@x' cannot be met
  %weight : f32[4, 64] = placeholder
  It can be left in [B, B, B], [B, B, S(0)], [B, B, S(1)], [B, S(0), B], [B, S(0), S(0)], [B, S(0), S(0)] S(0)@z>y, [B, S(0), S(1)], [B, S(1), B] and 35 more.""",
    )
