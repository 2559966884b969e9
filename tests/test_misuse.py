"""What a script may do to a parallel module out of turn: right as on one device, or refused with what to do instead."""

from __future__ import annotations

import copy
import functools
import io
import math
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import sbpc
from sbpc import Mesh
from sbpc.errors import CheckpointError, PlanError, SbpcError
from sbpc.runtime.executors import executor_of
from sbpc.runtime.module import log
from sbpc.runtime.start import process_groups
from tests.processes import run_ranks


class Net(nn.Module):
    """Two layers; the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


class Normed(Net):
    """The same with parametrized weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = parametrizations.weight_norm(self.up), parametrizations.spectral_norm(self.down)


def made(kind: type[nn.Module] = Net, asks: bool = False) -> tuple[nn.Module, nn.Module, Tensor]:
    """A module on this rank, the same on one device, an argument."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 6, requires_grad=asks)
    return sbpc.parallelize(copy.deepcopy(model), planned(kind, asks)), model, x


@functools.cache
def planned(kind: type[nn.Module], asks: bool) -> sbpc.Plan:
    return sbpc.plan(kind(), (torch.randn(4, 6, requires_grad=asks),), Mesh(x=2))


def error(function: Callable[[], Any]) -> str:
    """The message of the error that a function raises."""
    with pytest.raises((PlanError, CheckpointError)) as caught:
        function()
    return str(caught.value)


def differences(module: nn.Module, model: nn.Module) -> float:
    """The largest difference of gradients and parameters from those on one device."""
    pairs = [(one, two) for one, two in zip(module.parameters(), model.parameters(), strict=True)]
    pairs += [(one.grad, two.grad) for one, two in pairs]
    return max(float((one.full_tensor() - two).detach().abs().max()) for one, two in pairs)  # type: ignore[union-attr]


def penalty() -> str:
    """A gradient penalty added to the loss: without the refusal it would count in the loss and give no gradient."""
    module, _, x = made(asks=True)
    loss = module(x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return error((loss + slope.square().sum()).backward)


def create_graph_alone() -> float:
    """Gradients that keep a graph which nobody asks for."""
    module, model, x = made(asks=True)
    for each in (module, model):
        each(x).backward(create_graph=True)
        each(x).backward()
    return differences(module, model)


def written(step: Callable[[nn.Module], None]) -> str:
    """Parameters that are written between a forward and its backward."""
    module, _, x = made()
    module(x).backward()
    loss = module(x)
    step(module)
    return error(loss.backward)


def by_hand(module: Any) -> None:
    with torch.no_grad():
        module.down.weight.add_(1)


def by(**options: Any) -> Callable[[nn.Module], None]:
    return lambda module: torch.optim.AdamW(module.parameters(), **options).step()


def written_but_not_read() -> float:
    """A bias, which no backward reads, may be written; the memory that is read may be written after it."""
    module, model, x = made()
    for each in (module, model):
        loss: Any = each(x)
        with torch.no_grad():
            each.down.bias.add_(1)  # type: ignore[operator]
        loss.backward(retain_graph=True)
        loss.backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    return differences(module, model)


def fused(kind: Any, **options: Any) -> float:
    """Fused steps for which torch has none for DTensors."""
    module, model, x = made()
    for each in (module, model):
        optimizer = kind(each.parameters(), lr=0.1, fused=True, **options)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            each(x).backward()
            optimizer.step()
    return differences(module, model)


def parametrized() -> float:
    """Modules of torch.nn.utils.parametrizations, which copy.copy does not copy."""
    module, model, x = made(Normed)
    for each in (module, model):
        each(x).backward()
    assert list(module.state_dict()) == list(model.state_dict())
    return differences(module, model)


class Dropping(Net):
    """The same with dropout between."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x) * x, 0.5).sum()


def computed_again() -> float:
    """A module around which torch.utils.checkpoint stands."""
    found = []
    for way in (True, False):
        module, model, x = made(asks=True)
        for each in (module, model):
            checkpoint(each, x, use_reentrant=way).backward()  # type: ignore[union-attr]
        found.append(differences(module, model))
    return max(found)


def drawn_again() -> list[str]:
    """The same of a model that draws random numbers: without the refusal gradients would be those of another loss."""
    module, _, x = made(Dropping, asks=True)
    return [error(checkpoint(module, x, use_reentrant=way).backward) for way in (True, False)]  # type: ignore[union-attr]


def shared_parameters() -> list[str]:
    """Which parameter is said to be trained apart, of a module made parallel twice, and of one that shares it."""
    one, two, x = nn.Linear(6, 6), nn.Linear(6, 6), torch.randn(4, 6)
    two.weight = one.weight
    plan, kept, said = sbpc.plan(one, (x,), Mesh(x=2)), list[nn.Module](), list[str]()
    for model in (one, one, two):
        with mock.patch.object(log, "warning") as warning:
            kept.append(sbpc.parallelize(model, plan))
        said.append("".join(str(call.args[1]) for call in warning.call_args_list))
    return said


def elsewhere() -> list[str]:
    """A module and an argument on another device."""
    module, _, x = made()
    found = [error(lambda: module(x.to("meta")))]
    module.to("meta")
    return [*found, error(lambda: module(x))]


def changing_floats() -> float:
    """torch.compile: Python numbers that change between calls are planned anew."""
    weight, x = torch.randn(6, 6, requires_grad=True), torch.randn(4, 6)
    function = lambda x, by: ((x @ weight).sum() * by, torch.arange(3) * by)  # noqa: E731
    compiled = torch.compile(function, backend="sbpc", options={"mesh": Mesh(x=2)})
    pairs = [(compiled(x, by), function(x, by)) for by in (1, 2, 2.5, 3.5, 4.5)]
    assert all(one.dtype == two.dtype for found, wanted in pairs for one, two in zip(found, wanted))
    return max(float((one - two).detach().abs().max()) for found, wanted in pairs for one, two in zip(found, wanted))


def deep() -> tuple[nn.Module, Tensor, Any]:
    """A model of two stages that both have parameters, an argument and the plan."""
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))), torch.randn(4, 6)
    return model, x, sbpc.plan(model, (x,), Mesh(x=2), stages="x", loss=torch.sum)


def total_norms() -> list[str]:
    """Norms over the parameters of one stage, by which torch would clip; each number alone is right."""
    torch.manual_seed(0)
    model, x, plan = deep()
    module: Any = sbpc.parallelize(model, plan)
    module.step(x)
    model(x).sum().backward()
    grads = {name: each.grad for name, each in module.named_parameters()}
    for name, grad in grads.items():
        torch.testing.assert_close(grad.norm().item(), model.get_parameter(name).grad.norm().item())  # type: ignore[union-attr]
    clips = [
        lambda each=each: nn.utils.clip_grad_norm_(module.parameters(), 0.01, foreach=each)
        for each in (None, False, True)
    ]
    by_hand = [
        lambda: nn.utils.get_total_norm(grads.values()),
        lambda: torch.stack([each.norm() for each in grads.values()]).norm(),
    ]
    return [error(each) for each in (*clips, *by_hand)]


def saved(*values: Any) -> list[str]:
    """What is said of each value that is pickled by torch.save."""
    said = []
    for value in values:
        try:
            torch.save(value, io.BytesIO())
            said.append("saved")
        except SbpcError as problem:
            said.append(f"{type(problem).__name__}: {problem}".partition(" with a ")[0])
    return said


def pickles() -> list[str]:
    """Parts of tensors, and what holds none."""
    model, x = Net(), torch.randn(4, 6)
    module = sbpc.parallelize(model, sbpc.plan(model, (x,), Mesh(x=2), pin={"up.weight": "S(0)", "down.bias": "B"}))
    optimizer = torch.optim.AdamW(module.parameters())
    module(x).backward()
    optimizer.step()
    whole = sbpc.full_state_dict(module)
    parts = {name: each.full_tensor() for name, each in module.named_parameters()}  # type: ignore[attr-defined]
    assert dist.get_rank() or all(whole[name].equal(each) for name, each in parts.items())
    for value in (module.state_dict(), optimizer.state_dict()):
        copy.deepcopy(value)
    tower, _, stages = deep()
    staged = sbpc.parallelize(tower, stages)
    grad = module.get_parameter("up.weight").grad
    (of_stage,) = saved(staged.state_dict())
    said = saved(module.state_dict(), optimizer.state_dict(), grad, module.down.bias, whole)
    by_safetensors = error(lambda: safetensors.torch.save(module.state_dict()))
    return [*said, of_stage.partition("(")[0], by_safetensors]


def kept_elsewhere() -> float:
    """What torch.distributed.checkpoint keeps, now or in a thread, is there again on all ranks."""
    (folder,) = process_groups.from_all_ranks(tempfile.mkdtemp())[:1]
    module, found = made()[0], 0.0
    for save in (dcp.save, lambda state, **where: dcp.async_save(state, **where).result()):
        before = copy.deepcopy(module.state_dict())
        save(module.state_dict(), checkpoint_id=folder)
        with torch.no_grad():
            for each in module.parameters():
                each.add_(1)
        dcp.load(module.state_dict(), checkpoint_id=folder)
        found += max(
            float((each - before[name]).full_tensor().abs().max()) for name, each in module.state_dict().items()
        )
    return found


CUT = {"up.weight": "S(0)", "up.bias": "B", "down.weight": "S(1)", "down.bias": "B"}


def cut() -> tuple[nn.Module, nn.Module]:
    """A module whose first weight is split along its rows, and the same on one device, both with gradients."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 6)
    module = sbpc.parallelize(copy.deepcopy(model), planned_cut())
    for each in (module, model):
        each(x).backward()
    return module, model


@functools.cache
def planned_cut() -> sbpc.Plan:
    return sbpc.plan(Net(), (torch.randn(4, 6),), Mesh(x=2), pin=CUT)


def halves_and_restores(module: Any) -> None:
    """As averages of weights are put in place for an evaluation, and the weights back."""
    kept = [p.data for p in module.parameters()]
    for p in module.parameters():
        p.data = p.data / 2
    module.halved = sum(p.square().sum().item() for p in module.parameters())
    for p, data in zip(module.parameters(), kept):
        p.data = data


def whole_vector(module: Any) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector * 2, module.parameters())


DATA: dict[str, Callable[[Any], Any]] = {
    "times": lambda m: setattr(m.up.weight, "data", m.up.weight.data * 3),
    "whole": lambda m: setattr(m.up.weight, "data", torch.arange(48.0).view(8, 6)),
    "of another layout": lambda m: setattr(m.up.weight, "data", m.down.weight.data.sum() + m.up.weight.data.flip(0)),
    "gradient": lambda m: setattr(m.up.weight.grad, "data", m.up.weight.grad.data * 5),
    "in place": lambda m: setattr(m.up.weight, "data", m.up.weight.data.__iadd__(1)),
    "back": halves_and_restores,
    "vector": whole_vector,
}


def data_of_parameters() -> float:
    """`parameter.data = x`, which torch ignores for DTensors; then a step that adds to the gradients."""
    found = []
    for write in DATA.values():
        module, model = cut()
        x = torch.randn(4, 6)
        for each in (module, model):
            write(each)
            each(x).backward()
        assert getattr(module, "halved", 0.0) == pytest.approx(getattr(model, "halved", 0.0))
        found.append(differences(module, model))
    return max(found)


def data_between() -> float:
    """Gradients at the signs of weights, which are what they were again before the backward; whether the forward has
    saved the part at home or a copy of it."""
    found = []
    for pin in (CUT, {"down.weight": "B", "up.weight": "B"}):
        model, x = Net(), torch.randn(4, 6)
        module = sbpc.parallelize(copy.deepcopy(model), sbpc.plan(Net(), (x,), Mesh(x=2), pin=pin))
        for each in (module, model):
            kept = [parameter.data for parameter in each.parameters()]
            for parameter in each.parameters():
                parameter.data = parameter.data.sign()
            result = each(x)
            for parameter, before in zip(each.parameters(), kept):
                parameter.data = before
            result.backward()
        found.append(differences(module, model))
    return max(found)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda w: w[3].zero_(),
    "rows": lambda w: w[1:5].mul_(2),
    "assigned rows": lambda w: w.__setitem__(slice(1, 3), w[5:7]),
    "number": lambda w: w.__setitem__(3, 0.0),
    "chunk": lambda w: w.chunk(2)[0].fill_(1),
    "several": lambda w: torch._foreach_zero_([w[3], w[4]]),
    "out": lambda w: torch.mul(w[4], 2.0, out=w[3]),
    "column": lambda w: w[:, 1].zero_(),  # from here on those that torch makes of a rank's part
    "assigned column": lambda w: w.__setitem__((slice(None), 2), 0.0),
    "turned": lambda w: w.t().mul_(2),
}


def parts_written() -> list[Any]:
    """What is written into a part of a weight and of its gradient is there, or refused: torch may write into a copy."""
    found = []
    for write in WRITES.values():
        for of in (lambda each: each.up.weight.data, lambda each: each.up.weight.grad):
            module, model = cut()
            write(of(model))
            try:
                write(of(module))
                found.append(differences(module, model) < 1e-12)
            except PlanError as problem:
                found.append(str(problem).partition("part (")[2].partition(") ")[2])
    return found


def numbers_of_parameters_in_a_loss() -> float:
    """A penalty on weights, which makes of the loss a DTensor."""
    module, model = cut()
    x = torch.randn(4, 6)
    for each in (module, model):
        penalty = sum(p.square().sum() + p.abs().mean() for p in each.parameters())
        (each(x) * 2 + 0.1 * penalty).backward()
    return differences(module, model)


CASES: dict[str, Callable[[], Any]] = {
    "data": data_of_parameters,
    "data between": data_between,
    "parts written": parts_written,
    "numbers of parameters in a loss": numbers_of_parameters_in_a_loss,
    "computed again": computed_again,
    "drawn again": drawn_again,
    "shared parameters": shared_parameters,
    "penalty": penalty,
    "create_graph alone": create_graph_alone,
    "written by hand": lambda: written(by_hand),
    "written by foreach": lambda: written(by(foreach=True)),
    "written by fused": lambda: written(by(fused=True)),
    "written by a loop": lambda: written(by(foreach=False)),
    "written but not read": written_but_not_read,
    "fused SGD": lambda: fused(torch.optim.SGD, momentum=0.9, nesterov=True),
    "fused Adagrad": lambda: fused(torch.optim.Adagrad),
    "parametrized": parametrized,
    "elsewhere": elsewhere,
    "changing floats": changing_floats,
    "total norms": total_norms,
    "pickles": pickles,
    "kept elsewhere": kept_elsewhere,
}
TWICE = (
    "a gradient of a gradient is asked for, and a plan has a forward and a backward alone\n"
    "  Leave out create_graph=True, or compute such a term, as a gradient penalty, by a model on one device."
)
DRAWN = (
    "a forward that draws random numbers is computed again in a backward, and would draw others\n"
    "  Leave out torch.utils.checkpoint around the parallel module: sbpc.plan(..., recompute=...) keeps less, too."
)
WRITTEN = (
    "parameter down.weight was written between a forward and its backward, which reads it\n"
    "  Call backward before optimizer.step(), or run the forward again."
)
ONE_STAGE = (
    "numbers of the parameters of one pipeline stage are put together, as torch.nn.utils.clip_grad_norm_ does with norms of gradients:"
    " those of the other stages are missing\n"
    "  Call module.clip_grad_norm_(max_norm), which knows all stages; to look at one stage, take each number's .item()."
)
PART = "CheckpointError: this rank's part (4, 6) of a tensor (8, 6) is pickled, as torch.save does"
LOST = (
    "of a tensor that is split over ranks, which is a copy of it: the write would be lost\n"
    "  Write into a whole copy and give that back: x = p.full_tensor(), then x[3] = 0, then p.data = x."
)
REFUSED: dict[str, Any] = {
    "parts written": [LOST] * 14 + [True] * 6,
    "total norms": [ONE_STAGE] * 5,
    "drawn again": [DRAWN] * 2,
    "shared parameters": ["", "", "weight"],
    "pickles": [
        *[PART] * 3,
        "saved",
        "saved",
        "CheckpointError: this rank's part ",
        "this rank's part (4, 6) of a tensor (8, 6) is asked for its storage, as safetensors and Accelerator.save_state do: the file "
        "would lack what other ranks hold\n"
        "  Have all ranks call sbpc.full_state_dict(module), and save what it returns on rank 0; to train on from it on any mesh, "
        "save by sbpc.Checkpoints.",
    ],
    "penalty": TWICE,
    **{name: WRITTEN for name in CASES if name.startswith("written by")},
    "elsewhere": [
        "argument 0 is on meta, this rank computes on cpu\n  Move it there: .to('cpu').",
        "parameter up.weight is on meta, this rank computes on cpu\n  Leave the parallel module where it is.",
    ],
}


def on_ranks() -> dict[str, Any]:
    """What each case gives on this rank, or how it fails."""
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            found[name] = case()
        except BaseException as problem:  # the test of that name fails with it
            found[name] = repr(problem)
    process_groups.stop()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_ranks, 2, seconds=240)


def test_a_parallel_module_is_right_or_refuses(ranks: list[dict[str, Any]]) -> None:
    for name in CASES:
        for found in ranks:
            if name in REFUSED:
                assert found[name] == REFUSED[name], found[name]
            else:
                assert isinstance(found[name], float) and found[name] < 1e-10, found[name]


class Unprintable:
    """What has no text."""

    def __repr__(self) -> str:
        raise ValueError("no text")


ODD = {
    "None": None, "0": 0, "-1": -1, "nan": math.nan, "inf": math.inf, "huge": 10**400, "text": "zz", "empty": "", "dict": {}, "list": [],
    "true": True, "numpy": np.int64(2), "array": np.ones(2), "tensor": torch.tensor(2), "meta": torch.ones(2, device="meta"), "bytes": b"a",
    "type": int, "set": {1}, "unprintable": Unprintable(), "nul": "a\0b", "folder": "/", "complex": 1j, "surrogate": "\ud800",
}  # fmt: skip


@functools.cache
def staged() -> Any:
    return sbpc.plan(Net(), (torch.randn(4, 6),), Mesh(p=2), stages="p", microbatches=2)


def odd_calls(value: Any, model: nn.Module, x: Tensor, plan: sbpc.Plan, stages: Any) -> dict[str, Callable[[], Any]]:
    """Calls of what is public with a value that fits nowhere, or nearly nowhere."""
    names = "kwargs loss targets train optimizer dtype memory pin inputs outputs spread objective dynamic microbatches panels stages recompute"
    mesh = plan.mesh
    calls: dict[str, Callable[[], Any]] = {
        f"plan {name}": functools.partial(sbpc.plan, model, (x,), mesh, **{name: value})
        for name in f"{names} schedule capture".split()
    }
    calls |= {
        "plan model": lambda: sbpc.plan(value, (x,), mesh),
        "plan args": lambda: sbpc.plan(model, value, mesh),
        "plan mesh": lambda: sbpc.plan(model, (x,), value),
        "plan dump": lambda: sbpc.plan(model, (x,), mesh, dump=value) if isinstance(value, str) and "\0" in value else None,
        "a pin": lambda: sbpc.plan(model, (x,), mesh, pin={"up.weight": value}),
        "an input": lambda: sbpc.plan(model, (x,), mesh, inputs=[value]),
        "a dim": lambda: sbpc.plan(model, (x,), mesh, dynamic={"up.weight": ("h", value)}),
        "baseline": lambda: sbpc.baseline(value, model, (x,), mesh),
        "sweep model": lambda: sbpc.sweep(value, (x,), devices=2, stages=True),
        "sweep devices": lambda: sbpc.sweep(model, (x,), devices=value) if value is not True else None,
        "sweep seconds": lambda: sbpc.sweep(model, (x,), devices=1, seconds=value),
        "mesh": lambda: Mesh(a=value),
        "cluster": lambda: Mesh(a=2, cluster=value),
        "device mesh": lambda: Mesh.from_device_mesh(value),
        "axis": lambda: mesh.axis(value),
        "layout": lambda: sbpc.Layout.parse(value, mesh.axes),
        "load": lambda: sbpc.load(value),
        "module": lambda: sbpc.load_module(value),
        "rules": lambda: sbpc.load_rules(value),
        "Cluster.load": lambda: sbpc.Cluster.load(value),
        "checkpoints": lambda: sbpc.Checkpoints(value) if not isinstance(value, str) or value in ("", "a\0b") else None,
        "rule": lambda: sbpc.rule(value, "a -> a", examples=[(x,)]),
        "rule's text": lambda: sbpc.rule("aten::sinc", value, examples=[(x,)]),
        "rule's examples": lambda: sbpc.rule("aten::sinc", "*a -> *a", examples=[value]),
        "probe": lambda: sbpc.probe(value, x),
        "local_at": lambda: plan.local_at(value),
        "check_bound": lambda: plan.check_bound(value),
        "subs": lambda: plan.cost.subs(value),
        "start": lambda: sbpc.start(timeout=value),
        "executor": lambda: executor_of(value),
        "device": lambda: sbpc.start(device=value),
    }  # fmt: skip
    for name, each in (("plan", plan), ("stages", stages)):
        calls |= {
            f"{name} simulate": lambda: sbpc.simulate(value, model, (x,)),
            f"{name} model": functools.partial(sbpc.simulate, each, value, (x,)),
            f"{name} args": functools.partial(sbpc.simulate, each, model, value),
            f"{name} kwargs": functools.partial(sbpc.simulate, each, model, (x,), value),
            f"{name} tangents": functools.partial(sbpc.simulate, each, model, (x,), tangents=value),
            f"{name} seed": functools.partial(sbpc.simulate, each, model, (x,), seed=value),
            f"{name} layout": functools.partial(each.layout, value),
            f"{name} explain": functools.partial(each.explain, value),
            f"{name} diff": functools.partial(each.diff, value),
            f"{name} save": functools.partial(each.save, value),
            f"{name} page": functools.partial(each.save_page, value),
            f"{name} trace": functools.partial(each.save_trace, value),
            f"{name} parallelize": functools.partial(sbpc.parallelize, value, each),
        }
    return calls


@pytest.mark.parametrize("name", ODD)
def test_what_fits_nowhere_is_refused_by_an_error_of_ours(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 6)
    for call, function in odd_calls(ODD[name], model, x, planned(Net, False), staged()).items():
        try:
            function()
        except sbpc.SbpcError as problem:
            assert "\n  " in str(problem), call  # what to do
        except Exception as problem:
            raise AssertionError(call) from problem
