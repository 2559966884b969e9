"""Pins that cannot be met together: the error names no more of them than it takes."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import sbpc
from sbpc import Mesh
from sbpc.errors import PinError

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
    assert_expected_inline(refused(pins), """\
pin '0.weight': 'S(0)@y'; pin '*.weight': 'S(0)@z'; pin '[0-9].weight': 'S(0)@x' cannot be met
  %_0_weight : f32[4, 64] = placeholder
  It can be left in [B, B, B], [B, B, S(0)], [B, B, S(1)], [B, S(0), B], [B, S(0), S(0)], [B, S(0), S(0)] S(0)@z>y, [B, S(0), S(1)], [B, S(1), B], ....""")


def test_two_pins_that_disagree_are_named_with_the_axis() -> None:
    pins = {"1.weight": "S(0)@x", "0.weight": "S(0)@y", "0.w*": "S(1)@y", "*.bias": "B@z"}
    assert_expected_inline(refused(pins), """\
two pins of %_0_weight disagree on axis 'y': S(0) and S(1)
  pin '0.weight': 'S(0)@y'
  pin '0.w*': 'S(1)@y'
  Remove one of them.""")


def test_a_single_pin_that_cannot_be_met_is_named_alone() -> None:
    pins = {"1.weight": "S(0)@x", "0.bias": "P@y", "0.weight": "S(0)@x"}
    assert_expected_inline(refused(pins), """\
pin '0.bias': 'P@y' cannot be met
  %_0_bias : f32[4] = placeholder
  It can be left in [B, B, B], [B, B, S(0)], [B, S(0), B], [B, S(0), S(0)], [B, S(0), S(0)] S(0)@z>y, [S(0), B, B], [S(0), B, S(0)], [S(0), B, S(0)] S(0)@z>x, ....""")


def test_a_pin_may_conflict_with_what_is_asked_otherwise() -> None:
    with pytest.raises(PinError) as error:
        sbpc.plan(nn.Linear(64, 4, bias=False), (torch.randn(64, 64),), MESH, pin={"weight": "B@x"}, spread=True)
    assert_expected_inline(str(error.value), """\
parameter weight stored once (spread=True); pin 'weight': 'B@x' cannot be met
  %weight : f32[4, 64] = placeholder
  It can be left in [B, B, B], [B, B, S(0)], [B, B, S(1)], [B, S(0), B], [B, S(0), S(0)], [B, S(0), S(0)] S(0)@z>y, [B, S(0), S(1)], [B, S(1), B], ....""")
