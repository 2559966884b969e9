"""parallelize: the user's module with DTensor parameters, whose forward and backward run a plan's programs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.fx import GraphModule, Interpreter

from sbpc._compat import StridedShard
from sbpc.errors import PlanError
from sbpc.layout import Layout, broadcast
from sbpc.mesh import Mesh
from sbpc.plan import Plan
from sbpc.ports import BUFFER, GRADIENT, INPUT, MUTATION, OUTPUT, PARAMETER, SEED, TANGENT
from sbpc.programs import Programs
from sbpc.random import seed_of_step, wrap
from sbpc.runtime import bind, groups
from sbpc.runtime.partition import on_device, partition
from sbpc.states import Split

EXECUTORS: dict[str, Callable[[GraphModule], Callable[..., Any]]] = {
    "code": lambda gm: gm.forward,
    "interpreter": lambda gm: Interpreter(gm).run,
}


def parallelize(model: nn.Module, plan: Plan | Programs, *, executor: str = "code", device: str | None = None) -> nn.Module:
    """`model` as each rank of `plan.mesh` runs it, under torchrun: same names, DTensor parameters, same forward.

    The result is a new module of a subclass of the model's class; the model itself is left as it was. Its parameters
    hold this rank's shards, of rank 0's values, in their home layouts. Arguments are whole on every rank, or this rank's
    shards where the plan was made with `inputs=`; results likewise. executor: "code" (generated) or "interpreter".
    Where random numbers are drawn, forward number n has the seed `sbpc.random.seed_of_step(base, n)`, on all ranks and on
    every mesh; the base is rank 0's `torch.initial_seed()`. `module.random_state()` gives {"seed": base, "step": n}, to be
    kept beside a checkpoint, and `module.set_random_state(state)` takes it; the module's state_dict does not hold it.

    Raises MeshError if there are not as many processes as ranks, PlanError if model and plan do not belong together.
    """
    if executor not in EXECUTORS:
        raise PlanError(f"no executor {executor!r} is known\n  Known are {', '.join(EXECUTORS)}.")
    where = groups.start(device)
    groups.check_ranks(plan.mesh)
    groups.bind(plan.mesh)
    tensors = bind.stored(plan, model)
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        raise PlanError(
            "the model is parallel already\n  Give the one-device model, then load_state_dict(parallel.state_dict())."
        )
    if any(tensor.is_meta for tensor in tensors.values()):
        raise PlanError(
            "the model is on the meta device: there is nothing to distribute\n  Give it weights: model.to_empty(device='cpu')."
        )
    result = skeleton(model)
    given = plan.given
    placed: dict[str, Any] = {}
    for port, tensor in tensors.items():
        if port.kind == PARAMETER:
            placed[port.name] = distribute(tensor, given[port], plan.mesh, where)
        elif port.kind == BUFFER:
            placed[port.name] = of_rank_zero(tensor, where)
    fill(result, model, placed, plan, where)
    runner = Runner(plan, result, EXECUTORS[executor], where)
    cls = type(model)
    result.__class__ = type(
        f"Parallel{cls.__name__}",
        (cls,),
        {
            "forward": lambda self, *a, **k: runner.step(a, k),
            "random_state": lambda self: dict(runner.random),
            "set_random_state": lambda self, state: runner.set_random(state),
            "__module__": cls.__module__,
        },
    )
    return result


def skeleton(module: nn.Module) -> nn.Module:
    """A copy of the tree of modules that shares no dict of parameters, buffers or submodules with it."""
    made: dict[int, nn.Module] = {}

    def copied(old: nn.Module) -> nn.Module:
        if id(old) not in made:
            new = made[id(old)] = copy.copy(old)
            for name in ("_parameters", "_buffers", "_modules"):
                new.__dict__[name] = dict(old.__dict__[name])
            for name, child in old._modules.items():
                new._modules[name] = None if child is None else copied(child)
        return made[id(old)]

    return copied(module)


def fill(result: nn.Module, model: nn.Module, placed: dict[str, Any], plan: Plan | Programs, where: torch.device) -> None:
    """Put the placed tensors under their names; parameters that no output needs are whole on every rank."""
    whole = broadcast(plan.mesh.axes)
    for name, old in model.named_parameters(remove_duplicate=False):
        first = plan.ports.tied.get(name, name)
        if first not in placed:
            placed[first] = distribute(old, whole, plan.mesh, where)
        parent, _, leaf = name.rpartition(".")
        result.get_submodule(parent)._parameters[leaf] = placed[first]
    for name, buffer in model.named_buffers(remove_duplicate=False):
        parent, _, leaf = name.rpartition(".")
        first = plan.ports.tied.get(name, name)
        if first not in placed:
            placed[first] = of_rank_zero(buffer, where)
        result.get_submodule(parent)._buffers[leaf] = placed[first]


def distribute(tensor: Tensor, layout: Layout, mesh: Mesh, where: torch.device) -> nn.Parameter:
    """A parameter of which this rank holds its shard of rank 0's values."""
    local = layout.shard(of_rank_zero(tensor, where), mesh.sizes, mesh.coordinates(dist.get_rank())).clone()
    stride = contiguous_stride(tensor.shape)
    held = DTensor.from_local(
        local.contiguous(),
        groups.device_mesh(mesh, where.type),
        placements(layout, mesh.sizes),
        shape=tensor.shape,
        stride=stride,
    )
    return nn.Parameter(held, requires_grad=tensor.requires_grad)


def of_rank_zero(tensor: Tensor, where: torch.device) -> Tensor:
    """A copy of rank 0's tensor: ranks that drew other weights would train a model that is neither's."""
    found = tensor.detach().to(where, copy=True).contiguous()
    dist.broadcast(found, 0)
    return found


def agreed_seed(where: torch.device) -> int:
    """The seed that rank 0's torch was started with."""
    seed = torch.tensor(wrap(torch.initial_seed()), device=where)
    dist.broadcast(seed, 0)
    return int(seed)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense row-major tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def placements(layout: Layout, sizes: Sequence[int]) -> list[Placement]:
    """The layout in DTensor's words; an axis that cuts after inner ones have is a strided shard."""
    found: list[Placement] = []
    for axis, state in enumerate(layout.states):
        if not isinstance(state, Split):
            found.append(Replicate())
            continue
        cuts = layout.cuts[state.dim]
        before = [sizes[other] for other in cuts[: cuts.index(axis)] if other > axis]
        found.append(StridedShard(state.dim, split_factor=math.prod(before)) if before else Shard(state.dim))
    return found


class Runner:
    """Runs a plan's programs on this rank's shards; made once per module."""

    def __init__(
        self, plan: Plan | Programs, module: nn.Module, executor: Callable[[GraphModule], Callable[..., Any]], where: torch.device
    ) -> None:
        self.plan, self.module, self.training = plan, [module], module.training
        rank = dist.get_rank()
        self.coordinates = plan.mesh.coordinates(rank)
        halves = partition(on_device(plan.local_at(rank), where))
        self.forward, self.backward = executor(halves.forward), executor(halves.backward)
        self.positions = [torch.tensor([at], device=where) for at in self.coordinates]
        self.layouts, self.shapes = plan.given, plan.shapes
        self.random = {"seed": agreed_seed(where), "step": 0}
        self.results = [(at, port) for at, port in enumerate(plan.ports.outputs) if port.kind in (OUTPUT, MUTATION)]
        tangents = {port.name for port in plan.ports.inputs if port.kind == TANGENT}
        self.differentiable = [
            at for at, (_, port) in enumerate(self.results) if port.kind == OUTPUT and port.name in tangents
        ]

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of the module; its backward is recorded with autograd."""
        if self.module[0].training != self.training:
            raise PlanError(
                "the module is in another mode (train or eval) than when it was planned\n  Plan it once for each mode."
            )
        tensors = [*self.inputs(args, kwargs), *self.positions]
        if torch.is_grad_enabled() and self.plan.options["train"]:
            found = Step.apply(self, *tensors)
        else:
            with torch.no_grad():
                found = self.forward(*tensors)[: len(self.results)]
        named = {port: value for (_, port), value in zip(self.results, found)}
        for port, value in named.items():
            if port.kind == MUTATION:
                self.module[0].get_buffer(port.name).copy_(value)
        return bind.outputs(self.plan, named)

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """This rank's tensor for every placeholder but tangents and positions."""
        leaves = bind.arguments(self.plan, args, kwargs)
        found = []
        for port, planned in self.shapes.items():
            if port.kind == PARAMETER:
                held: Any = self.module[0].get_parameter(port.name)
                found.append(held.to_local())
            elif port.kind == BUFFER:
                found.append(self.module[0].get_buffer(port.name))
            elif port.kind == INPUT:
                given = leaves[int(port.name)]
                local = self.layouts[port].local_shape(planned.shape, self.plan.mesh.sizes, self.coordinates)
                bind.check(f"argument {port.name}", given, planned, local)
                found.append(given)
            elif port.kind == SEED:
                found.append(torch.tensor(seed_of_step(**self.random), device=self.positions[0].device))
                self.random["step"] += 1
        return found

    def set_random(self, state: dict[str, int]) -> None:
        """Draw on as the module did whose `random_state` this is. Raises PlanError if it is none."""
        known = isinstance(state, dict) and list(state) == ["seed", "step"]
        if not known or not all(type(number) is int for number in state.values()):
            raise PlanError(f"{state!r} is no random state\n  Give what module.random_state() gave.")
        self.random = dict(state)


class Step(Function):
    """One step of a plan as an autograd function on local shards."""

    @staticmethod
    def forward(ctx: Any, runner: Runner, *tensors: Tensor) -> Any:
        """Run the forward program; keep what the backward program reads."""
        found = runner.forward(*tensors)
        count = len(runner.results)
        ctx.save_for_backward(*found[count:])
        ctx.runner, ctx.inputs = runner, len(tensors)
        given = {id(tensor) for tensor in tensors}
        results = tuple(value.view_as(value) if id(value) in given else value for value in found[:count])
        ctx.mark_non_differentiable(*(value for at, value in enumerate(results) if at not in runner.differentiable))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Run the backward program."""
        runner: Runner = ctx.runner
        tangents = [grads[at].contiguous() for at in runner.differentiable]
        found = runner.backward(*ctx.saved_tensors, *tangents)
        ports = [port for port in runner.plan.ports.outputs if port.kind not in (OUTPUT, MUTATION)]
        by_name = {
            (PARAMETER if port.kind == GRADIENT else INPUT, port.name): value for port, value in zip(ports, found)
        }
        order = [port for port in runner.shapes if port.kind != TANGENT]
        gradients = [by_name.get((port.kind, port.name)) for port in order]
        return (None, *gradients, *(None for _ in runner.positions))
