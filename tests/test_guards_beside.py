"""Numbers that a step reads beside its module are constants of a plan, too: those of a loss, of hooks, and of functions that are kept."""

from __future__ import annotations

import copy
import functools
import pickle
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import sbpc
from sbpc import Mesh
from sbpc.errors import CaptureError, PlanError
from sbpc.graph.guards import Guards
from tests.compare import compare, eager
from tests.processes import run_ranks

X, Y = torch.linspace(-1, 1, 32).view(4, 8), torch.tensor([0, 1, 2, 3])


class Knob:
    """An object of somebody's own, with methods of all kinds that read its number."""

    share = 0.5

    def __init__(self) -> None:
        self.beta, self.calls, self.last = 0.5, 0, None
        self.record, self.part = SimpleNamespace(beta=0.5), nn.Sequential(nn.CrossEntropyLoss(label_smoothing=0.1))

    def times(self, x: Any) -> Any:
        return x * self.beta

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out, target) * self.beta

    def loss_of_record(self, out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out, target) * self.record.beta

    def loss_of_part(self, out: Tensor, target: Tensor) -> Tensor:
        found: Tensor = self.part[0](out, target)
        return found

    def __call__(self, *args: Any) -> Any:
        return self.loss(*args) if len(args) == 2 else args[-1] * self.beta

    @classmethod
    def of_class(cls, x: Any) -> Any:
        return x * cls.share

    def counts(self, *_: Any) -> None:
        self.calls += 1

    def keeps(self, *args: Any) -> None:
        self.last = args[-1]


def times_of(knob: Knob) -> Callable[[Any], Any]:
    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: function(*args) * knob.beta

    return decorated


DECORATOR = Knob()


class Net(nn.Module):
    """does: gives a number in the forward."""

    def __init__(self, does: Callable[[Any], Any] | None = None, **kept: Any) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(8, 8), does
        vars(self).update(kept)

    @times_of(DECORATOR)
    def decorated(self) -> float:
        return 1.0

    @staticmethod
    def static(knob: Knob = DECORATOR) -> float:
        return knob.beta

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h if self.does is None else (h * self.does(self)).square().mean()


def turn(owner: Any, name: str = "beta", value: Any = 2.0) -> Callable[[], Any]:
    return lambda: setattr(owner, name, value)


KNOB, OTHER, DEFAULT = Knob(), Knob(), Knob()
METHOD, PARTIAL = KNOB.times, functools.partial(OTHER.times, 1.0)
LOADED = ModuleType("not_imported")
exec("BETA = 0.5\ndef beta(m):\n    return BETA", vars(LOADED))


def with_attribute(x: float) -> float:
    return x * with_attribute.beta  # type: ignore[attr-defined, no-any-return]


with_attribute.beta = 0.5  # type: ignore[attr-defined]


def with_keyword(x: float, *, beta: float = 0.5) -> float:
    return x * beta


def with_object(x: float, knob: Knob = DEFAULT) -> float:
    return x * knob.beta


def weighted(out: Tensor, target: Tensor, beta: float = 0.5) -> Tensor:
    return F.cross_entropy(out, target) * beta


Case = tuple[nn.Module, Any, Callable[[], Any], str]  # model, loss, what changes a number, and how the error begins


def of_loss(loss: Any, change: Callable[[], Any], path: str) -> Case:
    return Net(), loss, change, f"the loss{path}"


def by_hook(kind: str, hook: Any, change: Callable[[], Any], path: str) -> Case:
    model = Net(lambda m: 1.0)
    getattr(model.layer, f"register_{kind}")(hook)
    return model, None, change, f"hook 0 of layer{path}"


def of_forward(does: Callable[[Any], Any], change: Callable[[], Any], path: str, **kept: Any) -> Case:
    return Net(does, **kept), None, change, path


def mask_of(function: Any) -> flex.BlockMask:
    return flex.create_block_mask(function, None, None, 4, 4, "cpu")


def attended(model: Any) -> Tensor:
    """The mean over what is not hidden, summed over queries."""
    q, v = torch.zeros(1, 1, 4, 4), torch.arange(16.0).view(1, 1, 4, 4)
    found: Any = flex.flex_attention(q, q, v, block_mask=model.mask)
    return found.sum()


def cases() -> dict[str, Case]:
    k, smooth, part = (
        Knob(),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        functools.partial(F.cross_entropy, label_smoothing=0.1),
    )
    rate = 0.5

    def change_rate() -> None:
        nonlocal rate
        rate = 2.0

    class Local:
        beta = 0.5

    remembered, parsed = functools.lru_cache(lambda: k.beta), Namespace(alpha=1.0)
    here = "global tests.test_guards_beside:"
    return {
        "a method as loss": of_loss(k.loss, turn(k), ".__self__.beta"),
        "a record of a method as loss": of_loss(k.loss_of_record, turn(k.record), ".__self__.record"),
        "a module in a method as loss": of_loss(
            k.loss_of_part, turn(k.part[0], "label_smoothing", 0.5), ".__self__.part.0.label_smoothing"
        ),
        "an object as loss": of_loss(k, turn(k), ".beta"),
        "a module as loss": of_loss(smooth, turn(smooth, "label_smoothing", 0.5), ".label_smoothing"),
        "a partial function as loss": of_loss(part, lambda: part.keywords.update(label_smoothing=0.5), " is partial"),
        "a partial method as loss": of_loss(functools.partial(k.loss), turn(k), ".func.__self__.beta"),
        "an object in a lambda as loss": of_loss(lambda o, y: k.loss(o, y), turn(k), ".k.beta"),
        "a free variable of a loss": of_loss(lambda o, y: F.cross_entropy(o, y) * rate, change_rate, " is <lambda>"),
        "a default of a loss": of_loss(weighted, turn(weighted, "__defaults__", (2.0,)), " is weighted"),
        "an object as hook": by_hook("forward_hook", k, turn(k), ".beta"),
        "a method as hook": by_hook("forward_hook", lambda m, a, out: k.times(out), turn(k), ".k.beta"),
        "a method before": by_hook("forward_pre_hook", lambda m, a: (k.times(a[0]),), turn(k), ".k.beta"),
        "a hook of the backward": by_hook("full_backward_pre_hook", lambda m, g: (k.times(g[0]),), turn(k), ".k.beta"),
        "a method that is kept": of_forward(lambda m: m.act(1.0), turn(k), "act.__self__.beta", act=k.times),
        "a method in a list": of_forward(lambda m: m.acts[0](1.0), turn(k), "acts.0.__self__.beta", acts=[k.times]),
        "a method of a class": of_forward(
            lambda m: m.act(1.0), turn(Knob, "share", 2.0), "act.__self__.share", act=Knob.of_class
        ),
        "a method of an object": of_forward(lambda m: m.knob.times(1.0), turn(k), "knob.beta", knob=k),
        "a global method": of_forward(lambda m: METHOD(1.0), turn(KNOB), f"{here}METHOD.__self__.beta"),
        "a global partial function": of_forward(lambda m: PARTIAL(), turn(OTHER), f"{here}PARTIAL.func.__self__.beta"),
        "an attribute of a function": of_forward(
            lambda m: with_attribute(1.0), turn(with_attribute), f"{here}with_attribute is"
        ),
        "a keyword's default": of_forward(
            lambda m: with_keyword(1.0), turn(with_keyword, "__kwdefaults__", {"beta": 2.0}), here
        ),
        "an object as default": of_forward(
            lambda m: with_object(1.0), turn(DEFAULT), f"{here}with_object.__defaults__.0.beta"
        ),
        "an object in a decorator": of_forward(lambda m: m.decorated(), turn(DECORATOR), "decorated.knob.beta"),
        "an object as default of a static method": of_forward(
            lambda m: m.static(), turn(DECORATOR), "static.__defaults__.0.beta"
        ),
        "in a function that remembers": of_forward(
            lambda m: m.memo(), lambda: (turn(k)(), remembered.cache_clear()), "memo.__wr", memo=remembered
        ),
        "what is not among parsed arguments": of_forward(
            lambda m: 1.0 + ("beta" in m.args), turn(parsed), "args.__dict__ is", args=parsed
        ),
        "an object in a mask of FlexAttention": of_forward(
            attended, turn(k), "mask.mask_mod.k.beta", mask=mask_of(lambda b, h, q, kv: q - kv <= k.beta)
        ),
        "a free variable in a mask of FlexAttention": of_forward(
            attended, change_rate, "mask is BlockMask(<lambda>", mask=mask_of(lambda b, h, q, kv: q - kv <= rate)
        ),
        "a class in a free variable": of_forward(lambda m: Local.beta, turn(Local), "does.Local.beta"),
        "a module that is not imported": of_forward(LOADED.beta, turn(LOADED, "BETA"), "global not_imported:BETA"),
        "by a module that is not imported": of_forward(
            lambda m: LOADED.BETA, turn(LOADED, "BETA"), "global not_imported:BETA"
        ),
    }


@pytest.mark.parametrize("name", cases())
def test_a_number_beside_the_module_that_changes_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, attribute, value in (
        (KNOB, "beta", 0.5),
        (OTHER, "beta", 0.5),
        (DEFAULT, "beta", 0.5),
        (DECORATOR, "beta", 0.5),
        (Knob, "share", 0.5),
    ):
        monkeypatch.setattr(owner, attribute, value)
    for each, attribute in (
        (weighted, "__defaults__"),
        (with_keyword, "__kwdefaults__"),
        (with_attribute, "beta"),
        (LOADED, "BETA"),
    ):
        monkeypatch.setattr(each, attribute, getattr(each, attribute))
    model, loss, change, path = cases()[name]
    targets = () if loss is None else (Y,)
    plan = sbpc.plan(model, (X,), Mesh(p=2), loss=loss, targets=targets)
    before = sbpc.simulate(plan, model, (X, *targets))
    kept, other = Guards(model, plan.options.guards), Guards(model, copy.deepcopy(plan.options).guards)
    assert kept.broken() is None and other.broken() is None and kept.broken() is None
    change()
    for error in (kept.broken(), other.broken(), kept.broken()):
        assert str(error).startswith(path), error
    with pytest.raises(PlanError):
        sbpc.simulate(plan, model, (X, *targets))
    again = sbpc.simulate(sbpc.plan(model, (X,), Mesh(p=2), loss=loss, targets=targets), model, (X, *targets))
    # it made a difference
    assert any(not torch.allclose(one, before.gradients[key]) for key, one in again.gradients.items())


def hooked(hook: Any, kind: str = "forward_hook") -> Net:
    model = Net(lambda m: 1.0)
    getattr(model.layer, f"register_{kind}")(hook)
    return model


def drawing(does: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    return lambda: Net(does, rng=random.Random(0), generator=np.random.default_rng(0), draw=random.Random(0).random)


def watched(does: str) -> Callable[[], nn.Module]:
    return lambda: hooked(getattr(Knob(), does))


def with_hook_on_weight() -> nn.Module:
    model = Net(lambda m: 1.0)
    model.layer.weight.register_hook(lambda g: g * 2)
    return model


RNG, ONE = random.Random(0), {Knob()}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a hook that counts": (watched("counts"), "changes 'hook 0 of layer.__self__.calls' from 0 to 1"),
    "a hook that keeps": (watched("keeps"), "keeps a tensor [4, 8] as 'hook 0 of layer.__self__.last'"),
    "a hook on a weight": (with_hook_on_weight, "the parameter 'layer.weight' has a hook"),
    "objects in a set": (
        lambda: Net(lambda m: sum(each.beta for each in m.knobs), knobs={Knob()}),
        "reads 'knobs', a set of objects",
    ),
    "objects in a global set": (
        lambda: Net(lambda m: sum(each.beta for each in ONE)),
        "test_guards_beside:ONE', a set of objects",
    ),
    "a generator": (
        drawing(lambda m: RNG.random()),
        "random numbers by 'global tests.test_guards_beside:RNG', a Random",
    ),
    "a generator that is kept": (drawing(lambda m: m.rng.uniform(1, 2)), "random numbers by 'rng', a Random"),
    "a generator of numpy": (
        drawing(lambda m: float(m.generator.random())),
        "random numbers by 'generator', a Generator",
    ),
    "a method of a generator": (drawing(lambda m: m.draw()), "random numbers by 'draw', a Random"),
    "a new generator": (drawing(lambda m: random.Random().random()), "random numbers without a seed"),
    "a new generator of numpy": (
        drawing(lambda m: float(np.random.default_rng().random())),
        "random numbers without a seed",
    ),
    "a generator of the system": (drawing(lambda m: random.SystemRandom().random()), "random numbers without a seed"),
}


@pytest.mark.parametrize("method", ("light", "aot"))
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_guard_can_hold_is_refused_with_the_place(name: str, method: str) -> None:
    model, message = REFUSED[name]
    with pytest.raises(CaptureError) as caught:
        sbpc.plan(model(), (X,), Mesh(p=2), capture=method)
    assert message in str(caught.value), caught.value
    assert "seed" in vars(random.Random) and vars(random)["_urandom"].__module__ in ("posix", "nt")


class Frozen(Knob):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and other.beta == self.beta

    def __hash__(self) -> int:
        return hash(self.beta)


def test_what_makes_no_difference_is_planned_and_runs() -> None:
    fine: dict[str, Net] = {
        "a generator with a seed": Net(lambda m: random.Random(3).random()),
        "a generator that is not drawn from": Net(lambda m: 2.0 if m.rng is None else 1.0, rng=random.Random(0)),
        "a set of numbers, functions and types": Net(lambda m: float(len(m.some)), some={1, "a", torch.relu, Knob}),
        "a set of what is equal by value": Net(lambda m: float(len(m.some)), some={Frozen()}),
        "a set of layers that it has": Net(lambda m: float(len(m.some))),
        "a method of itself": Net(lambda m: m.own()),
        "a method of an object": Net(lambda m: m.act(1.0), act=Knob().times),
        "a method of torch": Net(lambda m: float(m.name()), name="3".strip),
    }
    vars(fine["a set of layers that it has"])["some"] = {fine["a set of layers that it has"].layer}
    vars(fine["a method of itself"])["own"] = fine["a method of itself"].extra_repr.__class__(
        lambda m: 2.0, fine["a method of itself"]
    )
    for name, model in fine.items():
        plan = sbpc.plan(model, (X,), Mesh(p=2))
        kept = Guards(model, plan.options.guards, hooks=True)
        assert kept.broken() is None and kept.broken() is None, name
        compare(plan, model, (X,), *eager(model, (X,)))
        assert kept.broken() is None, name
        assert Guards(model, pickle.loads(pickle.dumps(plan.options.guards)), hooks=True).broken() is None, name


def scaled_by(factor: float) -> Callable[..., Any]:
    return lambda m, a, out: out * factor


def test_the_hooks_of_a_model_are_those_of_its_plan(tmp_path: Path) -> None:
    def model(*factors: float) -> Net:
        net = Net(lambda m: 1.0)
        for factor in factors:
            net.layer.register_forward_hook(scaled_by(factor))
        return net

    sbpc.plan(model(2.0), (X,), Mesh(p=2)).save(tmp_path / "plan")
    plan = sbpc.load(tmp_path / "plan")
    sbpc.simulate(plan, model(2.0), (X,))
    for factors, message in (
        ((), "hook 0 of layer is not there"),
        ((3.0,), "'factor': 3.0"),
        ((2.0, 2.0), "hook 1 of layer is <lambda> .*was not"),
    ):
        with pytest.raises(PlanError, match=message):
            sbpc.simulate(plan, model(*factors), (X,))
    later = model(2.0)
    later.layer.weight.register_hook(lambda g: g)
    with pytest.raises(PlanError, match=r"the parameter 'layer\.weight' has a hook"):
        sbpc.simulate(plan, later, (X,))


def test_a_hook_of_every_module_is_guarded_and_not_taken_for_another() -> None:
    knob, model = Knob(), Net(lambda m: 1.0)
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, a, out: knob.times(out) if isinstance(m, nn.Linear) else None
    )
    try:
        plan = sbpc.plan(model, (X,), Mesh(p=2))
        compare(plan, model, (X,), *eager(model, (X,)))
        knob.beta = 1.0
        with pytest.raises(PlanError, match=r"hook 0 of every module\.knob\.beta is 1\.0"):
            sbpc.simulate(plan, model, (X,))
    finally:
        handle.remove()


def test_a_plan_from_a_file_leaves_the_numbers_of_its_loss(tmp_path: Path) -> None:
    model, loss = Net(), nn.CrossEntropyLoss(label_smoothing=0.1)
    plan = sbpc.plan(model, (X,), Mesh(p=2), loss=loss, targets=(Y,))
    assert plan.options.guards["the loss.label_smoothing"] == ["0.1"]
    plan.save(tmp_path / "plan")
    loss.label_smoothing = 0.5
    sbpc.simulate(sbpc.load(tmp_path / "plan"), model, (X, Y))
    with pytest.raises(PlanError, match=r"the loss\.label_smoothing is 0\.5, and was 0\.1"):
        sbpc.simulate(plan, model, (X, Y))


class Trainer(nn.Module):
    """Has the model, and a loss of its own, as those of Lightning do."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.beta, self.step = Net(), 0.5, 0
        self.model.layer.register_forward_hook(self.scale)

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out, target) * self.beta

    def scale(self, _: Any, __: Any, out: Tensor) -> Tensor:
        return out * self.beta


def trained(**options: Any) -> list[str]:
    trainer = Trainer()
    plan = sbpc.plan(trainer.model, (X,), Mesh(p=1), loss=trainer.loss, targets=(Y,), **options)
    module: Any = sbpc.parallelize(trainer.model, plan)
    found = []
    for trainer.step, trainer.beta in enumerate((0.5, 0.5, 1.0, 0.5)):
        try:
            module.step(X, Y)
            found.append("")
        except PlanError as error:
            found.append(str(error).partition(",")[0])
    return found


def test_a_parallel_module_looks_at_the_loss_and_the_hooks_of_its_plan() -> None:
    ways = [run_ranks(functools.partial(trained, **options), 1)[0] for options in ({}, {"microbatches": 2})]
    assert ways == [["", "", "hook 0 of layer.__self__.beta is 1.0", ""]] * 2


class ByMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return (h if torch.is_grad_enabled() else 3 * h).square().mean()


@pytest.mark.parametrize("train", [True, False])
def test_a_forward_that_asks_whether_gradients_are_on_runs_as_it_was_planned_or_not_at_all(train: bool) -> None:
    model = ByMode()
    plan = sbpc.plan(model, (X,), Mesh(p=2), train=train)
    with torch.set_grad_enabled(train):
        assert torch.allclose(sbpc.simulate(plan, model, (X,)).outputs, model(X))
    with (
        torch.set_grad_enabled(not train),
        pytest.raises(PlanError, match=rf"is_grad_enabled\(\) is {not train}, and was {train}"),
    ):
        sbpc.simulate(plan, model, (X,))


class Alias(nn.Module):
    """Looks attributes up itself: by torch, or past it."""

    def __init__(self, by_torch: bool) -> None:
        super().__init__()
        self.layer, self.beta, self.by_torch = nn.Linear(8, 8), 0.5, by_torch

    def __getattribute__(self, name: str) -> Any:
        if name == "twice":
            return 2 * self.beta
        table = object.__getattribute__(self, "__dict__")
        return (
            object.__getattribute__(self, name)
            if name in table and not table.get("by_torch", True)
            else super().__getattribute__(name)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x).square().mean() * self.twice
        return found


@pytest.mark.parametrize("by_torch", [True, False])
def test_a_module_that_looks_attributes_up_itself_is_planned_and_guarded(by_torch: bool) -> None:
    model = Alias(by_torch)
    plan = sbpc.plan(model, (X,), Mesh(p=2), microbatches=np.int64(1))
    compare(plan, model, (X,), *eager(model, (X,)))
    model.beta = 1.0
    with pytest.raises(PlanError, match=r"beta is 1\.0, and was 0\.5"):
        sbpc.simulate(plan, model, (X,))
    assert "__getattribute__" not in vars(nn.Module) and vars(Alias)["__getattribute__"].__qualname__.startswith(
        "Alias"
    )
