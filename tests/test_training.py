"""Real processes: plans trained over gloo by a stock optimizer, step by step equal to one process."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sbpc
from sbpc import Mesh
from sbpc.errors import LostRankError
from tests import models
from tests.processes import run_ranks

NETS: dict[str, dict[str, Any]] = {
    "mlp": {"batch": 12},
    "gpt2": {"batch": 4, "tied": True, "layers": 1},
    "vgg": {"batch": 4},
    "resnet": {"batch": 4},
    "lora": {"batch": 12},
}


def losses_and_weights(model: nn.Module, args: Any, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some Adam steps, and the parameters after them, whole."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*args)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    return losses, {name: tensor.detach().clone() for name, tensor in state.items()}


def train(paths: dict[str, str], sizes: dict[str, int]) -> dict[str, Any]:
    """Every net, planned by the parent, trained on this rank."""
    torch.set_default_dtype(torch.float64)
    assert Mesh.from_device_mesh(Mesh(**sizes).device_mesh("cpu")) == Mesh(**sizes)
    found = {}
    for name, path in paths.items():
        torch.manual_seed(0)
        model, args = getattr(models, name)(**NETS[name])
        plan = sbpc.load(path)
        assert plan.mesh == Mesh(**sizes)
        for parameter in model.parameters() if dist.get_rank() else ():
            parameter.data += 1.0  # rank 0's values count
        parallel = sbpc.parallelize(model, plan)
        assert isinstance(parallel, type(model))
        assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in model.named_parameters()]
        shards = {n: tuple(p.to_local().shape) for n, p in parallel.named_parameters()}
        found[name] = (*losses_and_weights(parallel, args), shards)
    return found


@pytest.mark.parametrize(
    "sizes", [pytest.param({"tensor": 2}, marks=pytest.mark.prove), {"data": 2, "tensor": 2}], ids=str
)
def test_three_adam_steps_on_gloo_ranks_equal_one_process(tmp_path: Path, sizes: dict[str, int]) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = Mesh(**sizes)
    paths, expected, plans = {}, {}, {}
    for name, options in NETS.items():
        torch.manual_seed(0)
        model, args = getattr(models, name)(**options)
        plans[name] = sbpc.plan(model, args, mesh)
        paths[name] = str(tmp_path / f"{name}.sbpc")
        plans[name].save(paths[name])
        expected[name] = losses_and_weights(model, args)
    for rank, result in enumerate(run_ranks(train, mesh.ranks, paths, sizes)):
        assert isinstance(result, dict), result
        for name, (losses, weights) in expected.items():
            assert result[name][0] == pytest.approx(losses, rel=1e-10), (name, rank)
            for parameter, tensor in weights.items():
                error = float((result[name][1][parameter] - tensor).abs().max())
                assert error <= 1e-8 * float(tensor.abs().max()), (name, parameter, error)
                layout = plans[name].layout(parameter)
                assert result[name][2][parameter] == layout.local_shape(
                    tensor.shape, mesh.sizes, mesh.coordinates(rank)
                )


def errors_of_parallelize(path: str) -> list[str]:
    """The messages of what cannot be parallelized, on a rank of two."""
    torch.manual_seed(0)
    found = []
    plan = sbpc.load(path)
    good, args = models.mlp(batch=12)
    wide, _ = models.mlp(batch=12, hidden=96)
    parallel = sbpc.parallelize(good, plan)

    def note(call: Any) -> None:
        try:
            call()
        except sbpc.SbpcError as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("no error")

    note(lambda: sbpc.parallelize(wide, plan))
    note(lambda: sbpc.parallelize(models.gpt2()[0], plan))
    note(lambda: parallel(*models.mlp(batch=24)[1]))
    note(lambda: parallel.eval()(*args))
    note(lambda: sbpc.parallelize(parallel, plan))
    note(lambda: sbpc.parallelize(good, sbpc.plan(good, args, Mesh(data=2, tensor=2))))
    parallel.train()
    note(lambda: pickle.dumps(parallel))
    note(lambda: sbpc.parallelize(models.MLP, plan))  # type: ignore[arg-type]
    note(lambda: sbpc.parallelize(good, path))  # type: ignore[arg-type]
    other = sbpc.plan(good.eval(), args, plan.mesh, train=False, pin={"ups.0.weight": "B"})
    note(lambda: sbpc.parallelize(good.train(), plan, evaluate=other))
    note(lambda: parallel(args[0].clone().requires_grad_()))
    with torch.autocast("cpu", torch.bfloat16):
        note(lambda: parallel(*args))
    parallel.ups[0].weight.requires_grad_(False)  # type: ignore[index]
    note(lambda: parallel(*args))
    with torch.no_grad():
        note(lambda: parallel(*args))
    parallel.ups[0].weight.requires_grad_(True)  # type: ignore[index]
    handle = parallel.ups[0].register_forward_hook(lambda *given: None)  # type: ignore[index]
    note(lambda: parallel(*args))
    handle.remove()
    note(lambda: parallel(*args))
    parallel.double()
    note(lambda: parallel(*args))
    parallel.float().ups[0].bias = None  # type: ignore[index]
    note(lambda: parallel(*args))
    return found


def test_what_does_not_fit_the_plan_is_refused_on_every_rank(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    model, args = models.mlp(batch=12)
    path = tmp_path / "plan.sbpc"
    sbpc.plan(model, args, Mesh(tensor=2), pin={"ups.0.*": "S(0)"}).save(path)
    for result in run_ranks(errors_of_parallelize, 2, str(path)):
        assert result[0].startswith(
            "PlanError: parameter ups.0.weight is torch.float32 (96, 24), the plan is for torch.float32 (48, 24)"
        )
        assert result[1].startswith("PlanError: the model is not the one that was planned: it lacks ['ups.0.weight'")
        assert result[2].startswith(
            "PlanError: argument 0 is torch.float32 (24, 24), the plan is for torch.float32 (12, 24)"
        )
        assert result[3] == (
            "Unplanned: the module is in another mode (train or eval) than when it was planned: the model itself is in eval, was in train\n"
            "  Give also='auto' to sbpc.parallelize, which plans evaluation when it comes; or plan model.eval() too, with train=False and pin=plan.parameters, and give it as parallelize(..., evaluate=)."
        )
        assert result[4].startswith("PlanError: the model is parallel already")
        assert result[5].startswith("MeshError: Mesh(data=2, tensor=2) needs 4 ranks, there are 2")
        assert [line.splitlines()[0] for line in result[6:]] == [
            "PlanError: a parallel MLP cannot be pickled: it is one rank's part of a running program",
            "PlanError: the model is <class 'tests.models.MLP'>",
            f"PlanError: the plan is {str(path)!r}"[: 23 + 80],
            "PlanError: ups.0.weight is stored in [S(0)] by one plan, in [B] by the other",
            "PlanError: argument 0 asks for a gradient, and asked for none when planned",
            "PlanError: the step runs under autocast to bfloat16, and was planned with dtype=None",
            "PlanError: parameter ups.0.weight does not ask for a gradient, unlike when it was planned",
            "no error",
            "PlanError: 'ups.0' has a hook of the forward or backward, which nothing calls: the plan runs the model as a whole",
            "no error",
            "PlanError: parameter ups.0.weight is torch.float64 (48, 24), the plan is for torch.float32 (48, 24) in [S(0)]",
            "PlanError: parameter ups.0.bias is a NoneType, the plan is for torch.float32 (48,) in [S(0)]",
        ]


def die_or_wait(path: str) -> str:
    """Rank 1 kills itself before the second step; what the others are told."""
    torch.manual_seed(0)
    model, args = models.mlp(batch=12)
    parallel = sbpc.parallelize(model, sbpc.load(path))
    parallel(*args).backward()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        parallel(*args).backward()
    except LostRankError as error:
        return f"lost {error.ranks}"
    return "nothing"


def test_a_rank_that_dies_ends_the_others_with_an_error(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    model, args = models.mlp(batch=12)
    path = tmp_path / "plan.sbpc"
    sbpc.plan(model, args, Mesh(data=2), pin={"ups.0.weight": "S(0)"}).save(path)
    assert run_ranks(die_or_wait, 2, str(path)) == ["lost [1]", None]
