"""Structures: what flatten takes apart, unflatten puts together; nothing is imported from a file."""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sbpc.errors import CaptureError, PlanError
from sbpc.graph.pytree import flatten, paths, unflatten

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    loss: Tensor | None = None
    logits: Any = None


@dataclass
class ModelOutput(OrderedDict):
    """As in HuggingFace transformers: a dataclass that is also a dict of its fields that are not None."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


CONSTANTS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4))
CONSTANTS = st.one_of(CONSTANTS, st.sampled_from([torch.float32, torch.bool, torch.device("cpu"), torch.strided]))
VALUES = st.recursive(
    st.one_of(CONSTANTS, st.builds(lambda: torch.ones(2))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(), st.none()), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Output, inner, inner),
    ),
    max_leaves=12,
)


@given(VALUES)
def test_unflatten_is_the_inverse_of_flatten_through_json(value):
    leaves, structure = flatten(value)
    read = json.loads(json.dumps(structure, allow_nan=False))
    assert read == structure
    again, same = flatten(unflatten(read, leaves))
    assert same == structure
    assert [id(leaf) for leaf in again] == [id(leaf) for leaf in leaves]
    assert len(paths(structure)) == len(leaves)


def test_infinite_numbers_stay_numbers():
    for number in [math.inf, -math.inf]:
        assert unflatten(json.loads(json.dumps(flatten(number)[1], allow_nan=False)), []) == number
        assert math.isnan(unflatten(flatten(math.nan)[1], []))


def test_true_one_and_one_point_zero_stay_what_they_are():
    value = unflatten(json.loads(json.dumps(flatten([True, 1, 1.0])[1])), [])
    assert [type(item) for item in value] == [bool, int, float]


def test_a_model_output_comes_back_as_the_same_class_with_its_entries():
    leaves, structure = flatten(ModelOutput(logits=torch.ones(3)))
    found = unflatten(structure, leaves)
    assert type(found) is ModelOutput and found.loss is None
    assert found.logits is leaves[0] and found["logits"] is leaves[0] and list(found) == ["logits"]


def test_what_torch_returns_comes_back_as_the_same_class():
    found = unflatten(flatten(torch.ones(2, 2).max(dim=0))[1], ["values", "indices"])
    assert type(found) is torch.return_types.max and found.indices == "indices"


def test_slices_sizes_and_formats_are_constants():
    value = [slice(1, None), torch.Size([2, 3]), torch.channels_last]
    assert unflatten(flatten(value)[1], []) == value


def test_a_tensor_that_stands_twice_is_two_leaves():
    x = torch.ones(1)
    assert len(flatten([x, x])[0]) == 2


def test_anything_else_is_refused_with_its_path():
    for value, message in [
        ({"a": [1, {2}]}, "value['a'][1] is a builtins.set"),
        (Pair(1, object()), "value.right is a builtins.object"),
        (Output(logits=lambda: 0), "value.logits is a builtins.function"),
        ({(1, 2): 3}, "value has the key (1, 2)"),
    ]:
        with pytest.raises(CaptureError) as caught:
            flatten(value)
        assert str(caught.value).startswith(message)


def test_a_class_that_no_module_holds_is_refused_at_once():
    @dataclass
    class Local:
        x: int

    with pytest.raises(CaptureError, match="Define the class at the top level of a module"):
        flatten(Local(1))


def test_a_foreign_structure_is_refused_and_imports_nothing():
    for structure in [
        ["dataclass", "antigravity:Output", []],
        ["dataclass", f"{__name__}:json.JSONDecoder", []],
        ["named tuple", f"{__name__}:Output", []],
        ["named tuple", "os:system", ["true"]],
        ["return type", "system", []],
        ["dtype", "load"],
        ["tensor", 1],
        ["tensor", True],
        ["call", "os.system"],
        {"tensor": 0},
    ]:
        with pytest.raises(PlanError):
            unflatten(structure, [torch.ones(1)])
        assert "antigravity" not in sys.modules
