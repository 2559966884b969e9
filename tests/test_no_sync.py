"""Real processes: backwards within `no_sync` send nothing for gradients, and the next one outside brings the sum of all home."""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

import sbpc
from sbpc import Mesh
from sbpc._compat import TorchDispatchMode
from sbpc.errors import NanError, PlanError
from sbpc.graph.ports import GRADIENT, results
from sbpc.plans.timeline import sends
from sbpc.runtime.module import runner_of
from tests.processes import run_ranks

MESHES: dict[str, dict[str, int]] = {"2": {"d": 2}, "4": {"d": 4}, "2x2": {"d": 2, "t": 2}}


class Net(nn.Module):
    """Tied, frozen and unused parameters, and sizes that the ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.up, self.norm, self.down = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.table.weight
        self.fixed = nn.Parameter(torch.randn(6), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, tokens: Tensor, targets: Tensor, shift: Tensor) -> Tensor:
        x = self.table(tokens) + self.fixed + shift
        x = x + self.down(F.gelu(self.norm(self.up(x))))
        return F.cross_entropy(self.head(x), targets)


def model_of() -> Net:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return Net()


def batch(seed: int, rows: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, 10, (rows,), generator=draw) for _ in range(2))
    return tokens, targets, torch.randn(rows, 6, generator=draw).requires_grad_()


C10D = torch.ops._c10d_functional
SENDING = (
    C10D.all_reduce.default,
    C10D.reduce_scatter_tensor.default,
    C10D.all_gather_into_tensor.default,
    C10D.all_to_all_single.default,
)


class Sent(TorchDispatchMode):
    """Counts the collectives that start, by op and bytes of what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SENDING:
            self.calls[func._schema.name.split("::")[1], args[0].nbytes] += 1
        return func(*args, **(kwargs or {}))


def sent(run: Callable[[], Any]) -> Counter[tuple[str, int]]:
    """The collectives that a call starts."""
    with Sent() as seen:
        run()
    return seen.calls


def gradients(module: nn.Module) -> dict[str, Any]:
    """Whole gradients by name, copied."""
    return {
        name: None if p.grad is None else getattr(p.grad, "full_tensor", lambda g=p.grad: g)().clone()
        for name, p in module.named_parameters()
    }


def by_halves(module: Any, args: Any) -> Any:
    loss = module(*args)
    loss.backward()
    return loss


def by_step(module: Any, args: Any) -> Any:
    return module.step(*args)


def accumulate(plan: sbpc.Plan) -> dict[str, Any]:
    """What a rank has after backwards within and outside of no_sync, of all kinds, and what it sends."""
    found: dict[str, Any] = {}
    module: Any = sbpc.parallelize(model_of(), plan)
    called = list[str]()
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: called.append("hook"))
        for p in module.parameters()
        if p.requires_grad
    ]
    with module.no_sync():
        by_step(module, batch(0))
    found["called"] = called
    for hook in hooks:
        hook.remove()
    for name, kinds in {
        "halves": [by_halves] * 3,
        "steps": [by_step] * 3,
        "mixed": [by_step, by_halves, by_step],
    }.items():
        module.zero_grad()
        for seed, run in enumerate(kinds):
            args = batch(seed)
            with module.no_sync() if seed < 2 else contextlib.nullcontext():
                run(module, args)
            assert seed == 2 or all(p.grad is None for p in module.parameters()), name
            found[name, "input", seed] = args[2].grad
        found[name] = gradients(module)
        by_halves(module, batch(3))  # which is added to `.grad`, as ever
        found[name, "and one"] = gradients(module)
    module.zero_grad()
    with module.no_sync():
        loss = module(*batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
        by_step(module, batch(1))
    module.zero_grad()  # drops them
    by_step(module, batch(2))
    found["dropped"] = gradients(module)
    return found | traffic(module)


def traffic(module: Any) -> dict[str, Any]:
    """The collectives of a step outside of no_sync, within, and of one that ends an accumulation."""
    module.zero_grad()
    found: dict[str, Any] = {"plain": sent(lambda: by_step(module, batch(0)))}
    with module.no_sync():
        found["first"] = sent(lambda: by_step(module, batch(1)))
        found["second"] = sent(lambda: by_step(module, batch(2)))
    found["last"] = sent(lambda: by_step(module, batch(3)))
    halves = {"plain halves": sent(lambda: by_halves(module, batch(0)))}
    with module.no_sync():
        halves["first halves"] = sent(lambda: by_halves(module, batch(1)))
    module.zero_grad()
    boxing = gradients_boxing(runner_of(module).plan)  # type: ignore[arg-type]
    return found | halves | {"boxing": boxing}


def on_rank(plans: list[sbpc.Plan]) -> Any:
    try:
        return list(map(accumulate, plans))
    except Exception:  # the test shows it
        return traceback.format_exc()


CASES = [("2", "solved"), ("2", "data"), ("2x2", "megatron"), ("2x2", "fsdp")]
LONG = [("2", "fsdp"), ("4", "data"), ("4", "fsdp"), ("2x2", "solved")]


def planned(mesh: str, expert: str) -> sbpc.Plan:
    given = model_of(), batch(0), Mesh(**MESHES[mesh])
    return sbpc.plan(*given) if expert == "solved" else sbpc.baseline(expert, *given)


@pytest.fixture(
    scope="module",
    params=[(2, CASES), (4, CASES), *(pytest.param((ranks, LONG), marks=pytest.mark.prove) for ranks in (2, 4))],
    ids=["2", "4", "2 long", "4 long"],
)
def ranks(request: pytest.FixtureRequest) -> list[Any]:
    """What all ranks have in all cases of so many ranks."""
    count, cases = request.param
    plans = [planned(*case) for case in cases if Mesh(**MESHES[case[0]]).ranks == count]
    found = run_ranks(on_rank, count, plans)
    assert all(isinstance(each, list) for each in found), found[0]
    return [case for each in found for case in each]


def test_gradients_are_the_sum_of_those_of_all_backwards(ranks: list[Any]) -> None:
    model = model_of()
    inputs = {}
    for seed in range(3):
        args = batch(seed)
        model(*args).backward()
        inputs[seed] = args[2].grad
    three = gradients(model)
    model(*batch(3)).backward()
    four = gradients(model)
    model.zero_grad()
    model(*batch(2)).backward()
    for found in ranks:
        for name in ("halves", "steps", "mixed"):
            same(found[name], three)
            same(found[name, "and one"], four)
            for seed, grad in inputs.items():
                torch.testing.assert_close(found[name, "input", seed], grad, rtol=1e-12, atol=1e-12)
        same(found["dropped"], gradients(model))
        assert not found["called"]


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(
                found[name], value, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


OPS = {
    "all_gather": "all_gather_into_tensor",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all_single",
    "reduce_scatter": "reduce_scatter_tensor",
}
# sums of a tied parameter's gradients
LINEAR = torch.ops.aten.add.Tensor, torch.ops.aten.reshape.default, torch.ops.aten.view.default


def gradients_boxing(plan: sbpc.Plan) -> Counter[str]:
    """How many collectives of each kind are between what the backward computes of parameters' gradients and these."""
    ends = [
        node
        for port, node in zip(plan.ports.outputs, results(plan.boxed))
        if port.kind == GRADIENT and node is not None
    ]
    found, seen = Counter[str](), set[Node]()
    while ends:
        node = ends.pop()
        if node not in seen and ({"step", "awaits"} & node.meta.keys() or node.target in LINEAR):
            seen.add(node)
            ends += node.all_input_nodes
            found.update([OPS[node.meta["step"].collective]] if sends(node, plan.mesh) else [])
    return found


def test_nothing_is_sent_for_gradients_but_once(ranks: list[Any]) -> None:
    for found in ranks:
        plain, first, second, last = (found[name] for name in ("plain", "first", "second", "last"))
        assert first == second and first <= plain and last == plain
        assert found["plain halves"] == plain and found["first halves"] == first
        left_out: Counter[str] = Counter()
        for (op, _), count in (plain - first).items():
            left_out[op] += count
        assert left_out == found["boxing"] and left_out


def test_what_is_kept_is_not_lost_in_silence(tmp_path: Path) -> None:
    for found in run_ranks(misuse, 2, str(tmp_path)):
        assert found == ["would be lost", "saved", "float32 torch.float32"], found


class Dropping(nn.Module):
    """A layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(6, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x)).square().sum()


def misuse(folder: str) -> list[str]:
    """What is said of a checkpoint and a copy amid an accumulation; in what sums of 16 bits are held."""
    torch.manual_seed(0)
    model, x, mesh = Dropping(), torch.randn(8, 6), Mesh(d=2)
    plan = sbpc.plan(model, (x,), mesh, pin={"*": "B"})
    module: Any = sbpc.parallelize(model, plan)
    checkpoints = sbpc.Checkpoints(folder)
    with module.no_sync():
        module.step(x)
    said = []
    with pytest.raises(PlanError, match="gradients of backwards within no_sync, which would be lost"):
        checkpoints.save(1, module)
    with pytest.raises(PlanError, match="gradients of backwards within no_sync, which would be lost"):
        copy.deepcopy(module)
    said.append("would be lost")
    module.step(x)
    checkpoints.save(1, module)
    checkpoints.wait()
    said.append("saved")
    low: Any = sbpc.parallelize(
        model, sbpc.plan(model, (x,), mesh, pin={"*": "B"}, inputs=["S(0)"], dtype=torch.bfloat16)
    )
    with low.no_sync():
        low.step(x.chunk(2)[torch.distributed.get_rank()])
    held = vars(low)["_sbpc_weights"].sums.held
    return [*said, f"float32 {', '.join({str(each.dtype) for each in held})}"]


def failed_amid(plan: sbpc.Plan) -> Any:
    """What a rank has after a step within no_sync that failed, and one more; what is said; and what it has once all is run again."""
    module: Any = sbpc.parallelize(model_of(), plan, executor="nans")
    bad = batch(2)
    bad[2].data[-1] = torch.nan  # in the last micro-batch, of the last stage
    with module.no_sync():
        module.step(*batch(0))
        with pytest.raises(NanError):
            module.step(*bad)
    said = ""
    try:
        module.step(*batch(1))
    except PlanError as error:
        said = str(error)
        module.zero_grad()
        with module.no_sync():
            module.step(*batch(0))
        module.step(*batch(1))
    return said, gradients(module)


def test_a_step_that_failed_leaves_no_half_of_a_sum() -> None:
    model = model_of()
    for seed in range(2):
        model(*batch(seed)).backward()
    for options in ({}, {"microbatches": 5}):
        for said, found in run_ranks(failed_amid, 2, sbpc.plan(model_of(), batch(0), Mesh(d=2), **options)):
            assert said.startswith("a step failed amid adding") == bool(options), said
            same(found, gradients(model))
