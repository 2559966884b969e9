"""Random models with random options have the numbers, bytes and memory of one device and of the prediction, wherever they are planned."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Sequence

import pytest
import torch

from sbpc.rules import registry, rule
from sbpc.rules.registry import TABLE
from tests.compare import relative_error
from tests.random_models import HELD, Case, digest, draw_case, elsewhere, expected, outcome, shrunk
from tests.random_nets import Layer, Net, built, source

CHUNK, FEW, LONG = 10, 200, 250
# 3 to 19 CPU seconds each: `make prove`
SLOW = (0, 14, 34, 60, 68, 75, 110, 119, 131, 145, 154, 155, 160, 162, 169, 174, 186, 187)
QUICK = [seed for seed in range(FEW + len(SLOW)) if seed not in SLOW]
COS = torch.ops.aten.cos.default
MANY = int(os.environ.get("SBPC_NETS", "20000"))


def check(seeds: Sequence[int]) -> collections.Counter[str]:
    """Checks the models of these numbers; returns how many were refused, by reason."""
    counts: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        kind, text = outcome(draw_case(seed))
        assert kind in HELD, f"python -m tests.random_models {seed}: {text}"
        counts[f"{kind} {text}".strip()] += 1
    return counts


@pytest.mark.parametrize("first", range(0, FEW, CHUNK))
def test_random_models_have_the_numbers_of_one_device(first: int) -> None:
    counts = check(QUICK[first : first + CHUNK])
    assert counts[""] >= CHUNK / 2, counts


def test_models_that_once_were_not_planned_are() -> None:
    check([568])  # products whose results lie in memory so that no view reads them


def test_memory_that_once_was_told_otherwise_is_as_counted() -> None:
    check([1011])  # a gradient of a weight that lies in other strides, which is sent without a copy


def test_what_rounding_alone_moves_as_far_is_no_wrong_number() -> None:
    """As the norm of a single number, and what goes on from it; a sound net is moved by next to nothing."""
    check([832, 1693])
    sizes = {"B": 3, "T": 5, "C": 4, "W": 7, "H": 2}
    layers = Layer("attention", 0), Layer("linear", 0)
    case = Case(Net(0, sizes, layers, Layer("square", 0), "x", "torch.randn(B, T, C)", ()), {"a": 2})
    made = built(source(case.net))
    values, *others = (expected(case, made, way).by_name() for way in (None, 0, 1))
    for other in others:
        moved = [relative_error(other[name], value) for name, value in values.items() if value is not None]
        assert 0 < max(moved) < 1e-12, moved


def test_plans_of_random_models_are_the_same_in_another_process() -> None:
    seeds = QUICK[:: FEW // 5]
    assert elsewhere(seeds) == [digest(seed) for seed in seeds]


def test_a_wrong_kernel_is_found_and_its_case_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MATCHES", {})
    monkeypatch.setitem(TABLE, COS, TABLE.get(COS))
    rule(COS, "*a -> *a", local=lambda shard: shard.call(torch.ops.aten.sin.default, *shard.args), replace=True)
    layers = tuple(Layer(kind, 0) for kind in ("pool", "cell", "rotary"))
    net = Net(
        0,
        {"B": 2, "T": 2, "C": 2, "W": 2, "H": 1},
        layers,
        Layer("square", 0),
        "x",
        "torch.randn(B, T, C)",
        ("unused",),
    )
    case = Case(net, {"a": 2}, {"objective": "serial", "panels": 1, "microbatches": 1})
    kind, _ = outcome(case)
    assert kind == "numbers of the plan"
    small = shrunk(case, kind)
    assert [layer.kind for layer in small.net.layers] == ["rotary"] and not small.net.done and not small.options
    assert "Rotary0" in small.text() and compile(small.text(), "small.py", "exec")


@pytest.mark.prove
@pytest.mark.parametrize(
    "seeds", [SLOW, *(range(first, first + LONG) for first in range(FEW, FEW + MANY, LONG))], ids=str
)
def test_thousands_of_random_models_have_the_numbers_of_one_device(
    seeds: Sequence[int], record_property: Callable[[str, object], None]
) -> None:
    """Prints what was refused, and how often. 1.3 CPU seconds a model: seven CPU hours for all."""
    counts = check(seeds)
    assert counts[""] >= 0.75 * len(seeds), counts
    for reason, number in counts.most_common():
        record_property("figure", f"{seeds[0]:6} {number:4} {reason or 'hold'}")
    assert elsewhere(seeds[::25]) == [digest(seed) for seed in seeds[::25]]
