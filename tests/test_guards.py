"""What a forward reads besides tensors is a constant of its plan, wherever it stands: one that changes afterwards is found."""

from __future__ import annotations

import copy
import functools
import importlib
import math
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import PlanError
from sbpc.graph.guards import Guards, prefix_of
from sbpc.graph.values import text_of
from tests import random_models
from tests.guarded import METHODS, Config, Kind, Rope, Small, X


@dataclass(slots=True)
class Slots:
    width: int = 4


class Alias:
    """As configurations of transformers: an attribute under another name."""

    def __init__(self) -> None:
        self.n_embd = 4

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("n_embd" if name == "width" else name)


class Net(nn.Module):
    """A forward that reads numbers of all kinds from everywhere, and `idle`, which it does not read."""

    scale = 2.0  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.act = nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU()
        self.tail = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.1))
        self.beta, self.whole, self.kind, self.dtype, self.extra = 0.0, True, Kind.MEAN, torch.float32, None
        self.sizes, self.weights, self.table = (2, 4), [1.0, 2.0], {"a": 1.0, "b": [3.0]}
        self.config, self.slots, self.alias, self.record, self.arguments = (
            Config(),
            Slots(),
            Alias(),
            SimpleNamespace(n=1),
            Namespace(n=1),
        )
        self.share, self.limit, self.idle = np.float32(0.5), math.nan, 1
        self.drops, self.ropes = [nn.Dropout(0.5)], {"a": Rope(), 1: (Rope(),)}

    def forward(self, x: Tensor) -> Tensor:
        h = self.tail(self.act(self.layer(self.drops[0](self.drop(x))))).to(self.dtype)
        numbers = [
            self.beta,
            self.sizes[0],
            sum(self.weights),
            self.table["a"],
            self.config.width,
            self.config.rope.factor,
        ]
        numbers += [self.slots.width, self.alias.width, self.record.n, self.arguments.n, float(self.share), self.scale]
        numbers += [self.ropes["a"].factor, self.ropes[1][0].factor]  # type: ignore[index, attr-defined]
        numbers += [1.0 if self.whole else 0.0, 0.0 if self.extra is None else 1.0, getattr(self, "late", 0.0)]
        if math.isnan(self.limit) and self.kind is Kind.MEAN:
            h = h * 2
        return h.square().mean() * sum(numbers)


def change(path: str, value: Any) -> Callable[[Any], None]:
    """What sets an attribute at a path."""
    *owners, name = path.split(".")

    def run(model: Any) -> None:
        for owner in owners:
            model = getattr(model, owner)
        setattr(model, name, value)

    return run


CHANGES = {
    "beta": change("beta", 1.0),
    "beta, an int for a float": change("beta", 0),
    "whole": change("whole", 1),
    "kind": change("kind", Kind.SUM),
    "dtype": change("dtype", torch.float64),
    "extra": change("extra", 2.0),
    "sizes": change("sizes", (3, 4)),
    "weights": lambda m: m.weights.append(3.0),
    "table": lambda m: m.table.update(a=2.0),
    "table, inside": lambda m: m.table["b"].append(1.0),
    "config.width": change("config.width", 5),
    "config.rope.factor": change("config.rope.factor", 5.0),
    "config": lambda m: setattr(m, "config", Config(width=6)),
    "slots.width": change("slots.width", 5),
    "alias.width": change("alias.n_embd", 5),
    "record": change("record.n", 2),
    "arguments": change("arguments.n", 2),
    "share": change("share", np.float64(0.5)),
    "limit": change("limit", 0.0),
    "scale": change("scale", 3.0),
    "late": change("late", 1.0),
    "drop.p": change("drop.p", 0.0),
    "act": change("act", nn.GELU()),
    "tail.1.negative_slope": lambda m: setattr(m.tail[1], "negative_slope", 0.2),
    "drops.0.p": lambda m: setattr(m.drops[0], "p", 0.0),
    "ropes.a.factor": lambda m: setattr(m.ropes["a"], "factor", 3.0),
    "ropes.1.0.factor": lambda m: setattr(m.ropes[1][0], "factor", 3.0),
    "tail.1": lambda m: m.tail.__setitem__(1, nn.LeakyReLU(0.1)),
}


FINE: dict[str, Callable[[Any], None]] = {  # an equal value, and what the forward does not read
    "beta": change("beta", -0.0 + 0.0),
    "limit": change("limit", float("nan")),
    "weights": change("weights", [1.0, 2.0]),
    "config": lambda m: setattr(m, "config", Config()),
    "idle": change("idle", 7),
    "config.idle": change("config.idle", 7),
    "new": change("new", 7),
}


def test_every_kind_of_number_that_a_forward_reads_is_guarded() -> None:
    for method in METHODS:
        guards = sbpc.plan(Net(), (X,), Mesh(p=2), capture=method).options.guards
        for name, run in CHANGES.items():
            model = Net()
            kept = Guards(model, guards)
            assert kept.broken() is None and kept.broken() is None
            run(model)
            error = kept.broken()
            assert error is not None and str(error).startswith(name.partition(",")[0]), (method, name, error)
            assert kept.broken() is not None
        for name, run in FINE.items():
            model = Net()
            kept = Guards(model, guards)
            assert kept.broken() is None
            run(model)
            assert kept.broken() is None, (method, name)
            change("beta", 1.0)(model)
            assert kept.broken() is not None


def test_a_number_that_is_set_back_is_fine_again() -> None:
    model = Net()
    kept = Guards(model, sbpc.plan(model, (X,), Mesh(p=2)).options.guards)
    for beta, fine in ((0.0, True), (1.0, False), (1.0, False), (0.0, True)):
        model.beta = beta
        assert (kept.broken() is None) == fine
    model.config.width, model.config.rope = 5, Rope()
    assert kept.broken() is not None
    model.config.width = 4
    assert kept.broken() is None
    model.config.rope.factor = 5.0  # of the one that came later
    assert kept.broken() is not None


def test_texts_tell_values_apart_that_compare_equal_and_not_those_that_are_one() -> None:
    different = [
        1,
        1.0,
        True,
        "1",
        np.float64(1),
        np.int64(1),
        (1,),
        [1],
        {1},
        {1: 1},
        None,
        "None",
        -0.0,
        0.0,
        2**5000,
        2**5000 + 1,
    ]
    different += [
        list(range(500)),
        [*range(499), 7],
        Kind.MEAN,
        "mean",
        torch.float32,
        torch.relu,
        torch.sigmoid,
        nn.ReLU(),
        nn.GELU(),
    ]
    assert len(set(map(text_of, different))) == len(different)
    for one in (*different, math.nan, {"a", "b", "c"}, SimpleNamespace(a=1)):
        assert text_of(copy.deepcopy(one)) == text_of(one) and len(text_of(one)) < 200


class Shaped(nn.Module):
    """Keeps the sizes of its argument, and a moment, and reads them after that alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.b, self.n, self.began = nn.Linear(8, 8), 0, 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.b, self.n = x.shape
        self.began = time.time()
        return self.layer(x).reshape(self.b * self.n).square().mean() + 0 * self.began


@pytest.mark.parametrize("method", ["light", "aot"])
def test_a_number_that_is_written_before_it_is_read_belongs_to_no_plan(method: str) -> None:
    model = Shaped()
    model(X[:2])
    plan = sbpc.plan(model, (X,), Mesh(p=2), capture=method)
    assert not {"b", "n", "began"} & plan.options.guards.keys()
    assert torch.allclose(sbpc.simulate(plan, model, (X,)).outputs, model(X))


class OfClass(nn.Module):
    beta = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act, self.heads = nn.Linear(8, 8), functools.partial(F.leaky_relu, negative_slope=0.1), 4

    @functools.cached_property
    def scale(self) -> float:
        return self.heads**-0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x) * self.scale).square().mean() * self.beta


def test_attributes_of_a_class_partial_functions_and_cached_properties_are_guarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = sbpc.plan(OfClass(), (X,), Mesh(p=2)).options.guards
    model = OfClass()
    guards = Guards(model, planned)
    assert guards.broken() is None and model.scale == 0.5 and guards.broken() is None
    with monkeypatch.context() as patch:
        patch.setattr(OfClass, "beta", 5.0)
        assert "beta is 5.0, and was 2.0" in str(guards.broken())
    assert guards.broken() is None
    model.act = functools.partial(F.leaky_relu, negative_slope=0.3)
    assert "'negative_slope': 0.3" in str(guards.broken())


class Knobs:
    """A class that is used as a configuration, with one inside."""

    beta, idle = 0.5, 1

    class Rope:
        factor = 2.0


@dataclass(eq=False)
class Watched:
    beta: float = 0.5
    idle: int = 1


BETA, LIST, TABLE, RECORD, CONFIG = 0.5, [0.5], {"beta": 0.5}, SimpleNamespace(beta=0.5), Watched()
ARRAY, LOSS = np.ones(2), nn.HuberLoss(delta=0.5)


def beta_of() -> float:
    return BETA


def doubled(x: Any) -> Any:
    return x * 2


def made(beta: float) -> Callable[[Any], Any]:
    return lambda x: x * beta


def deep(model: Any) -> Any:
    return (lambda: sum(BETA for _ in range(1)))()


def tripled(x: Any) -> Any:
    return x * 3


class Kept(nn.Module):
    """Reads numbers from places of all kinds by a function that is given by name."""

    beta = 0.5

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer, self.reads, self.cfg, self.module = nn.Linear(8, 8), PLACES[name][0], Knobs, random_models
        self.act, self.made, self.part, self.t = (lambda x: x * 2), made(0.5), functools.partial(made(0.5)), 0.5
        self.array, self.scalar, self.queue, self.window = np.ones(3), np.bool_(True), deque([1.0]), slice(0, 4)
        self.args = Namespace(beta=0.5, idle=1)
        self.long, self.keys = [0.0] * 5000, {Kind.MEAN: Rope(), (1, 2): Rope(), "a.b": Rope(), True: Rope()}

    def own(self) -> float:
        return BETA

    @classmethod
    def of_class(cls) -> float:
        return cls.beta

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean() * self.reads(self)


def patched(name: str, value: Any) -> Callable[[Any, pytest.MonkeyPatch], Any]:
    return lambda m, patch: patch.setitem(globals(), name, value)


# the read, the change after which it is another number, and what is said of it
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, pytest.MonkeyPatch], Any], str]] = {
    "a global": (lambda m: BETA, patched("BETA", 1.0), "HERE:BETA is 1.0, and was 0.5"),
    "a global of a function that is called": (lambda m: beta_of(), patched("BETA", 1), "HERE:BETA is 1,"),
    "a global of a function inside": (deep, patched("BETA", 1.0), "HERE:BETA is 1.0"),
    "a global of a method": (lambda m: m.own(), patched("BETA", 1.0), "HERE:BETA is 1.0"),
    "a list": (lambda m: LIST[0], lambda m, p: p.setattr(sys.modules[__name__], "LIST", [1.0]), "HERE:LIST is [1.0]"),
    "a dict": (lambda m: TABLE["beta"], lambda m, p: p.setitem(TABLE, "beta", 1.0), "HERE:TABLE is {'beta': 1.0}"),
    "a namespace": (lambda m: RECORD.beta, lambda m, p: p.setattr(RECORD, "beta", 1.0), "HERE:RECORD.beta is 1.0"),
    "a whole namespace": (
        lambda m: (getattr(RECORD, "be" + "ta"), RECORD.beta)[0],
        lambda m, p: p.setattr(RECORD, "beta", 1.0),
        "HERE:RECORD is SimpleNamespace('beta': 1.0)",
    ),
    "parsed arguments": (lambda m: m.args.beta, lambda m, p: p.setattr(m.args, "beta", 1.0), "args.beta is 1.0"),
    "an object": (lambda m: CONFIG.beta, lambda m, p: p.setattr(CONFIG, "beta", 1.0), "HERE:CONFIG.beta is 1.0"),
    "an object by its name": (
        lambda m: getattr(CONFIG, "be" + "ta"),
        lambda m, p: p.setattr(CONFIG, "beta", 1.0),
        "HERE:CONFIG.beta is 1.0",
    ),
    "an array": (lambda m: float(ARRAY[0]), lambda m, p: ARRAY.__setitem__(0, 2.0), "HERE:ARRAY is ndarray([2.0, 1.0]"),
    "a module": (
        lambda m: F.huber_loss(torch.ones(()), torch.zeros(())) * LOSS.delta,
        lambda m, p: p.setattr(LOSS, "delta", 1.0),
        "HERE:LOSS.delta is 1.0",
    ),
    "a class": (lambda m: Knobs.beta, lambda m, p: p.setattr(Knobs, "beta", 1.0), "HERE:Knobs.beta is 1.0"),
    "a class by its name": (
        lambda m: getattr(Knobs, "be" + "ta"),
        lambda m, p: p.setattr(Knobs, "beta", 1.0),
        "HERE:Knobs.beta is 1.0",
    ),
    "a class in a class": (
        lambda m: Knobs.Rope.factor,
        lambda m, p: p.setattr(Knobs.Rope, "factor", 1.0),
        "HERE:Knobs.Rope.factor is 1.0",
    ),
    "a function": (lambda m: doubled(1.0), patched("doubled", tripled), "HERE:doubled is tripled"),
    "of a module": (
        lambda m: random_models.BETA,  # type: ignore[attr-defined]
        lambda m, p: p.setattr(random_models, "BETA", 1.0),
        "global tests.random_models:BETA is 1.0",
    ),
    "of a module that is kept": (
        lambda m: m.module.BETA,
        lambda m, p: p.setattr(random_models, "BETA", 1.0),
        "module.BETA is 1.0",
    ),
    "a class that is kept": (lambda m: m.cfg.beta, lambda m, p: p.setattr(Knobs, "beta", 1.0), "cfg.beta is 1.0"),
    "of the class": (lambda m: type(m).beta, lambda m, p: p.setattr(Kept, "beta", 1.0), "__class__.beta is 1.0"),
    "of the class by a method": (
        lambda m: m.of_class(),
        lambda m, p: p.setattr(Kept, "beta", 1.0),
        "__class__.beta is 1.0",
    ),
    "a lambda": (lambda m: m.act(1.0), lambda m, p: setattr(m, "act", lambda x: x * 3), "act is "),
    "a free variable": (lambda m: m.made(1.0), lambda m, p: setattr(m, "made", made(1.0)), "made is <lambda> (code "),
    "a free variable of a partial function": (
        lambda m: m.part(1.0),
        lambda m, p: setattr(m, "part", functools.partial(made(1.0))),
        "part is partial",
    ),
    "an array that is kept": (
        lambda m: float(m.array[0]),
        lambda m, p: m.array.__setitem__(2, 3.0),
        "array is ndarray([1.0, 1.0, 3.0], (3,), float64), and was",
    ),
    "a number of numpy": (lambda m: float(m.scalar), lambda m, p: setattr(m, "scalar", np.bool_(False)), "scalar is "),
    "a deque": (lambda m: m.queue[0], lambda m, p: m.queue.append(1.0), "queue is deque(1.0, 1.0), and was"),
    "a slice": (
        lambda m: float(m.window.stop),
        lambda m, p: setattr(m, "window", slice(0, 5)),
        "window is slice(0, 5, None)",
    ),
    "a long list": (lambda m: m.long[4000] + 1, lambda m, p: m.long.__setitem__(4000, 1.0), "long is [0.0"),
    "by an enum": (
        lambda m: m.keys[Kind.MEAN].factor,
        lambda m, p: setattr(m.keys[Kind.MEAN], "factor", 1.0),
        "keys.[0].factor is 1.0",
    ),
    "by a tuple": (
        lambda m: m.keys[1, 2].factor,
        lambda m, p: setattr(m.keys[1, 2], "factor", 1.0),
        "keys.[1].factor is 1.0",
    ),
    "by a text with a dot": (
        lambda m: m.keys["a.b"].factor,
        lambda m, p: setattr(m.keys["a.b"], "factor", 1.0),
        "keys.[2].factor is 1.0",
    ),
    "by vars": (lambda m: vars(m)["t"], lambda m, p: setattr(m, "t", 1.0), "t is 1.0"),
    "by __dict__": (lambda m: m.__dict__["t"], lambda m, p: setattr(m, "t", 1.0), "t is 1.0"),
    "a forward": (
        lambda m: m.layer.in_features,
        lambda m, p: setattr(m.layer, "forward", torch.relu),
        "layer.forward is ",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_what_a_forward_reads_outside_of_its_attributes_is_guarded(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(random_models, "BETA", 0.5, raising=False)
    monkeypatch.setitem(globals(), "ARRAY", np.ones(2))
    _, change, message = PLACES[name]
    message = message.replace("HERE", f"global {__name__}")
    plan = sbpc.plan(Kept(name), (X,), Mesh(p=2))
    plan.save(tmp_path / "plan")
    assert sbpc.load(tmp_path / "plan").options.guards == plan.options.guards
    model, before = Kept(name), Kept(name)
    kept = Guards(model, plan.options.guards)
    assert kept.broken() is None and kept.broken() is None
    monkeypatch.setattr(Knobs, "idle", 2)  # nothing reads these
    monkeypatch.setattr(CONFIG, "idle", 2)
    model.args.idle = 2
    assert kept.broken() is None
    change(model, monkeypatch)
    assert str(kept.broken()).startswith(message), kept.broken()
    change(before, monkeypatch)  # before it is bound
    assert str(Guards(before, plan.options.guards).broken()).startswith(message)


def test_a_file_has_one_name_whether_it_is_run_or_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [
        {"__name__": name, "__file__": "/somewhere/train_it.py", "BETA": 1.0}
        for name in ("__main__", "train_it", "target_train_it")
    ]
    spec = SimpleNamespace(name="package.train")
    tables += [
        {"__name__": "__main__", "__file__": "/somewhere/package/train.py", "__spec__": spec},
        {"__name__": "__main__"},
    ]
    assert [prefix_of(table)[len("global ") :] for table in tables] == ["train_it:"] * 3 + [
        "package.train:",
        "__main__:",
    ]
    guards = {"global train_it:BETA": ["0.5"], "layer": ["a Linear"]}
    assert Guards(Small(), guards).broken() is None  # no such file has been run here
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(**tables[0]))  # type: ignore[arg-type]
    assert "train_it:BETA is 1.0, and was 0.5" in str(Guards(Small(), guards).broken())


def test_functions_that_another_python_compiled_are_not_compared() -> None:
    def text(function: Callable[..., Any]) -> str:
        return text_of(function)

    assert text(lambda x: x + 1) == text(lambda x: x + 1) != text(lambda x: x + 2)
    assert text(lambda x, a=1: x) != text(lambda x, a=2: x)
    model = Kept("a lambda")
    old = {"act": [text(lambda x: x + 1).replace(sys.implementation.cache_tag, "cpython-27")]}
    assert Guards(model, old).broken() is None and Guards(model, {"act": [text(lambda x: x + 1)]}).broken() is not None


def test_a_forward_in_a_function_is_guarded_for_the_variables_of_that_and_one_that_comes_later_is_refused() -> None:
    beta = 0.5

    class Inside(Small):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * beta

    model = Inside()
    plan = sbpc.plan(model, (X,), Mesh(p=2))
    kept = Guards(model, plan.options.guards)
    assert kept.broken() is None
    beta = 1.0
    assert "with {'beta': 1.0}, and was" in str(kept.broken())
    beta = 0.5
    assert kept.broken() is None
    model.layer.forward = model.act.forward  # type: ignore[method-assign]
    assert str(kept.broken()).startswith("layer.forward is another function than before")
    assert "layer.forward is forward, and was that of its class" in str(Guards(model, plan.options.guards).broken())


WEIGHT = 0.5


def weighted(out: Tensor, target: Tensor) -> Tensor:
    return WEIGHT * F.mse_loss(out, target)


def test_what_a_loss_reads_of_globals_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 8)
    plan = sbpc.plan(model, (X,), Mesh(p=2), loss=weighted, targets=(X,))
    sbpc.simulate(plan, model, (X, X))
    monkeypatch.setitem(globals(), "WEIGHT", 0.25)
    with pytest.raises(PlanError, match="WEIGHT"):
        sbpc.simulate(plan, model, (X, X))


class Chained(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return chain.f0(x)  # type: ignore[name-defined]  # noqa: F821


def test_a_long_chain_of_functions_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"def f{at}(x):\n    return f{at + 1}(x) if x is None else x\n" for at in range(2000)]
    (tmp_path / "chain_of_functions.py").write_text(
        "\n".join([*lines, "LAST = 2.0", "def f2000(x):\n    return x * LAST\n"])
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(globals(), "chain", importlib.import_module("chain_of_functions"))
    guards = sbpc.plan(Chained(), (X,), Mesh(p=2), train=False).options.guards
    assert any(path.endswith("chain_of_functions:LAST") for path in guards)


def test_another_forward_of_the_class_is_refused(tmp_path: Path) -> None:
    text = "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        return self.scaled(x)\n\n    def scaled(self, x):\n        return {} * x\n"
    nets = []
    for number, times in enumerate((2, 2, 100)):
        (tmp_path / f"net{number}.py").write_text(text.format(times) + "# a comment\n" * number)
        names: dict[str, Any] = {"__name__": "net"}
        exec(compile((tmp_path / f"net{number}.py").read_text(), "net.py", "exec"), names)
        nets.append(names["Net"]())
    sbpc.plan(nets[0], (X,), Mesh(p=2), train=False).save(tmp_path / "plan")
    plan = sbpc.load(tmp_path / "plan")
    sbpc.simulate(plan, nets[1], (X,))
    with pytest.raises(PlanError, match=r"scaled is scaled \(code .*was scaled \(code"):
        sbpc.simulate(plan, nets[2], (X,))
    type(nets[0]).forward = lambda self, x: x
    with pytest.raises(PlanError, match=r"forward is <lambda> "):
        sbpc.simulate(plan, nets[0], (X,))
