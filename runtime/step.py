"""One step of a plan on this rank: the user's tensors in, the programs run, results and gradients out."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.utils.hooks import RemovableHandle

from sbpc._compat import HOOKS, keeps_graph, local_of, slots, storage_of, with_local, writes_of
from sbpc.errors import PlanError
from sbpc.graph.ports import (
    BUFFER,
    GRADIENT,
    HOMES,
    INPUT,
    INPUT_GRADIENT,
    MUTATION,
    OUTPUT,
    PARAMETER,
    SEED_PORT,
    TANGENT,
    Port,
)
from sbpc.graph.random_bits import seed_of_step
from sbpc.plans.plan import Plan
from sbpc.plans.rank_programs import Programs
from sbpc.runtime import bind
from sbpc.runtime.device_kernels import placed
from sbpc.runtime.executors import Run
from sbpc.runtime.partition import Partition, partition
from sbpc.runtime.start import process_groups as groups
from sbpc.runtime.state.dtensors import placements


class Runner:
    """Runs a plan's programs on this rank. It holds no weights: they come from the module that it steps."""

    def __init__(self, plan: Plan | Programs, executor: Callable[[GraphModule], Run], where: torch.device) -> None:
        self.plan, self.executor, self.where = plan, executor, where
        rank, ports = dist.get_rank(), plan.ports
        self.coordinates = plan.mesh.coordinates(rank)
        self.positions = [torch.tensor([at], device=where) for at in self.coordinates]
        self.layouts, self.shapes = plan.given, plan.shapes
        self.takes = [port for port in ports.inputs if port.kind != TANGENT]
        tangents = [port.name for port in ports.inputs if port.kind == TANGENT]
        self.results = [port for port in ports.outputs if port.kind in (OUTPUT, MUTATION)]
        self.differentiable = [
            at for at, port in enumerate(self.results) if port.kind == OUTPUT and port.name in tangents
        ]
        self.gradients = {
            Port(HOMES[port.kind], port.name): port.kind == GRADIENT
            for port in ports.outputs
            if port.kind in (GRADIENT, INPUT_GRADIENT)
        }  # in the order of the outputs: what gets a gradient, and whether it is a parameter
        self.trains = bool(plan.options["train"] and self.differentiable and self.gradients)
        self.parameters = [port for port in self.takes if port.kind == PARAMETER]
        self.read_again: list[int] | None = None

    @functools.cached_property
    def halves(self) -> Partition:
        """The programs of this rank."""
        return partition(placed(self.plan.local_at(dist.get_rank()), self.where))

    @functools.cached_property
    def forward(self) -> Run:
        """The forward, with what it saves for the backward."""
        return self.executor(self.halves.forward)

    @functools.cached_property
    def backward(self) -> Run:
        """The backward."""
        return self.executor(self.halves.backward)

    @functools.cached_property
    def inference(self) -> Run:
        """The forward alone, which saves nothing."""
        return self.executor(self.halves.inference)

    @functools.cached_property
    def modes(self) -> frozenset[str]:
        """The submodules that were in eval mode when the model was planned."""
        return frozenset(self.plan.options.get("eval", ()))

    def step(
        self, module: nn.Module, held: Held, random: dict[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The forward of the module; its backward is recorded with autograd. `random` counts the steps that draw."""
        train = self.trains and torch.is_grad_enabled()
        given = held.weights(self, train)
        for port, leaf in zip(self.inputs, bind.arguments(self.plan, args, kwargs)):
            given[port] = self.taken(port, leaf, train)
        return self.run(given, random, train)

    def run(self, given: dict[Port, Any], random: dict[str, int], train: bool) -> Any:
        """The results, in the model's structure, from parameters, buffers and arguments; buffers get their new values."""
        if SEED_PORT in self.shapes:
            given[SEED_PORT] = torch.tensor(seed_of_step(**random), device=self.where)
            random["step"] += 1
        values = [local_of(given[port]) if port.kind == PARAMETER else given[port] for port in self.takes]
        values += self.positions
        self.check_autocast()
        with no_autocast(self.where):
            if train:
                others: list[Tensor] = []
                held = [given[port] for port in self.parameters]
                found = Step.apply(self, values, others, held, *(given[port] for port in self.gradients))
                results = merge(found, others, self.differentiable)
            else:
                with torch.no_grad():
                    results = list(self.inference(values))
        named = dict(zip(self.results, results))
        with torch.no_grad():
            for port, value in named.items():
                if port.kind == MUTATION:
                    given[Port(BUFFER, port.name)].copy_(value)
        return bind.outputs(self.plan, named)

    def writes(self, held: list[Any], saved: Sequence[Tensor]) -> list[tuple[str, Any, int]]:
        """The parameters whose memory the backward reads, each with how often it has been written.

        Which these are is the same at every step. What is saved is a DTensor's part, and only of the whole does autograd
        count writes.
        """
        if self.read_again is None:
            memory = {storage_of(tensor) for tensor in saved}
            self.read_again = [at for at, each in enumerate(held) if storage_of(local_of(each)) in memory]
        return [(self.parameters[at].name, held[at], writes_of(held[at])) for at in self.read_again]

    def check_autocast(self) -> None:
        """Raise PlanError under an autocast other than the planned one."""
        planned = self.plan.options.get("dtype")
        if torch.is_autocast_enabled(self.where.type):
            wanted = str(torch.get_autocast_dtype(self.where.type)).removeprefix("torch.")
            if planned != wanted:
                raise PlanError(
                    f"the step runs under autocast to {wanted}, and was planned with dtype={planned}\n"
                    f"  Plan with dtype=torch.{wanted}, or call the module outside of autocast."
                )

    @functools.cached_property
    def inputs(self) -> list[Port]:
        """The ports of the arguments, in the order of their leaves."""
        return [Port(INPUT, str(at)) for at in range(sum(port.kind == INPUT for port in self.takes))]

    @functools.cached_property
    def local_shapes(self) -> dict[Port, tuple[int, ...]]:
        """What this rank holds of every parameter, buffer and argument."""
        sizes = self.plan.mesh.sizes
        return {
            port: self.layouts[port].local_shape(self.shapes[port].shape, sizes, self.coordinates)
            for port in self.takes
        }

    def taken(self, port: Port, given: Tensor, train: bool) -> Tensor:
        """This rank's part of an argument. A DTensor says itself how it is laid out, and is laid out as planned."""
        planned = self.shapes[port]
        if train and given.requires_grad and port not in self.gradients:
            raise PlanError(
                f"argument {port.name} asks for a gradient, and asked for none when planned\n"
                "  Plan with an argument that has requires_grad=True, or detach this one."
            )
        if isinstance(given, DTensor):
            bind.check(f"argument {port.name}", given, planned)
            mesh = groups.device_mesh(self.plan.mesh, self.where.type)
            there = placements(self.layouts[port], self.plan.mesh.sizes)
            if given.device_mesh != mesh:
                raise PlanError(
                    f"argument {port.name} is a DTensor on {given.device_mesh}, the plan is for {self.plan.mesh}\n"
                    "  Make it on mesh.device_mesh(), or give this rank's shard as a plain tensor."
                )
            return given.redistribute(mesh, there).to_local(grad_placements=there)
        bind.check(f"argument {port.name}", given, planned, self.local_shapes[port])
        if given.device.type != self.where.type and (given.is_meta or given.dim()):
            raise PlanError(
                f"argument {port.name} is on {given.device}, this rank computes on {self.where}\n"
                f"  Move it there: .to('{self.where}')."
            )
        return given


def merge(found: Sequence[Tensor], others: list[Tensor], places: list[int]) -> list[Tensor]:
    """The results in order: those with a gradient at `places`, the others around them."""
    rest, firsts = iter(others), dict(zip(places, found))
    return [firsts[at] if at in firsts else next(rest) for at in range(len(found) + len(others))]


def no_autocast(where: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Without autocast: programs hold the casts that were planned."""
    on = torch.is_autocast_enabled(where.type)
    return torch.autocast(where.type, enabled=False) if on else contextlib.nullcontext()


class Step(Function):
    """One step of a plan as an autograd function of what gets gradients: DTensor parameters, and arguments."""

    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(
        ctx: Any, runner: Runner, values: list[Tensor], others: list[Tensor], held: list[Tensor], *leaves: Tensor
    ) -> Any:
        """Run the forward program on `values`; keep what the backward program reads.

        others: results without gradient. held: the parameters.
        """
        found = runner.forward(values)
        count = len(runner.results)
        ctx.save_for_backward(*found[count:])
        ctx.runner, ctx.leaves, ctx.kept, ctx.writes = runner, leaves, None, runner.writes(held, found[count:])
        others += [value for at, value in enumerate(found[:count]) if at not in runner.differentiable]
        return tuple(found[at] for at in runner.differentiable)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Run the backward program; values saved for it die at their last use, unless the graph is retained."""
        with torch.no_grad():
            found = Step.gradients(ctx, [grad.detach() for grad in grads])
        return (None, None, None, None, *(Once.apply(*(each.requires_grad_() for each in found)) if torch.is_grad_enabled() else found))

    @staticmethod
    def gradients(ctx: Any, grads: list[Tensor]) -> list[Tensor]:
        """What the backward program computes, in the order of the leaves."""
        runner: Runner = ctx.runner
        for name, held, writes in ctx.writes:
            if writes_of(held) != writes:
                raise PlanError(
                    f"parameter {name} was written between a forward and its backward, which reads it\n"
                    "  Call backward before optimizer.step(), or run the forward again."
                )
        values = list(ctx.saved_tensors) if ctx.kept is None else ctx.kept
        ctx.kept = values.copy() if keeps_graph() else None
        values += [grad.contiguous() for grad in grads]
        with no_autocast(runner.where):
            found = runner.backward(values)
        triples = zip(runner.gradients.values(), ctx.leaves, found)
        return [with_local(leaf, value) if held else value for held, leaf, value in triples]


class Once(Function):
    """Gradients that were asked for with create_graph=True: no program computes theirs, and none is taken for zero."""

    @staticmethod
    def forward(ctx: Any, *gradients: Tensor) -> Any:
        """The same, as results that ask for a gradient."""
        return tuple(gradient.detach() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Raise PlanError."""
        raise PlanError(
            "a gradient of a gradient is asked for, and a plan has a forward and a backward alone\n"
            "  Leave out create_graph=True, or compute such a term, as a gradient penalty, by a model on one device."
        )


@dataclass
class Held:
    """Where a parallel module keeps its weights, looked up once: by port, a table and the key in it.

    accepted: what was found right last. modes, runner: the modes of the submodules last, and the runner for these.
    """

    places: dict[Port, tuple[dict[str, Any], str]]
    tied: list[tuple[str, tuple[dict[str, Any], str], Port]]
    parts: dict[str, nn.Module]
    accepted: Sequence[Any] = ()
    modes: Sequence[bool] = ()
    runner: Runner | None = None

    @classmethod
    def of(cls, module: nn.Module, plan: Plan | Programs) -> Held:
        """The places in a module. Raises PlanError if a parameter of the plan is not there."""
        named = {name: (table, key) for name, table, key in slots(module)}
        ports = [port for port in plan.ports.inputs if port.kind in (PARAMETER, BUFFER)]
        lost = [port.name for port in ports if port.name not in named]
        if lost:
            raise PlanError(f"the module no longer has {lost[0]!r}\n  Plan and parallelize the model as it is now.")
        places = {port: named[port.name] for port in ports}
        kinds = {port.name: port for port in ports}
        tied = [(name, named[name], kinds[first]) for name, first in plan.ports.tied.items() if name in named]
        return cls(places, tied, dict(module.named_modules()))

    def runner_of(self, runners: list[Runner]) -> Runner:
        """The runner whose plan was made with every submodule in the mode in which it is now. Raises PlanError."""
        modes = [part.training for part in self.parts.values()]
        if self.runner is None or modes != self.modes:
            self.runner, self.modes = self.in_mode(runners), modes
        return self.runner

    def in_mode(self, runners: list[Runner]) -> Runner:
        """As `runner_of`, by the names of the submodules that are in eval mode."""
        modes = frozenset(name for name, part in self.parts.items() if not part.training)
        for runner in runners:
            if modes == runner.modes & self.parts.keys():
                return runner
        planned = runners[0].modes & self.parts.keys()
        name = min(modes ^ planned)
        mode = {True: "eval", False: "train"}
        raise PlanError(
            f"the module is in another mode (train or eval) than when it was planned:"
            f" {name or 'the model itself'} is in {mode[name in modes]}, was in {mode[name in planned]}\n"
            "  For evaluation plan model.eval() too, with train=False and pin=plan.parameters,"
            " and give it as parallelize(..., evaluate=)."
        )

    def weights(self, runner: Runner, train: bool) -> dict[Port, Any]:
        """The parameters and buffers by port. Raises PlanError where they are no longer what was planned.

        That takes as long as a small model's step, so it is looked at again only when something is another object.
        """
        found = [table[key] for table, key in self.places.values()]
        tied = (table[key] for _, (table, key), _ in self.tied)
        asked = (getattr(value, "requires_grad", None) for value in found)  # a parameter may have become None
        now = [runner, train, RemovableHandle.next_id, *found, *map(local_of, found), *asked, *tied]
        given = dict(zip(self.places, found))
        if len(now) != len(self.accepted) or not all(map(operator.is_, now, self.accepted)):
            self.check(runner, train, given)
            self.accepted = now
        return given

    def check(self, runner: Runner, train: bool, given: dict[Port, Any]) -> None:
        """Raise PlanError for what is no longer as it was planned."""
        for name, (table, key), port in self.tied:
            if table[key] is not given[port]:
                raise PlanError(
                    f"{name} was tied to {port.name}, and is not any more\n  Tie them again: both names, one tensor."
                )
        for port, value in given.items():
            fits = isinstance(value, DTensor if port.kind == PARAMETER else Tensor)
            local, planned = local_of(value), runner.shapes[port]
            if fits and local.device.type != runner.where.type:
                raise PlanError(
                    f"{port.kind} {port.name} is on {local.device}, this rank computes on {runner.where}\n"
                    "  Leave the parallel module where it is."
                )
            if not fits or local.dtype != planned.dtype or local.shape != runner.local_shapes[port]:
                is_now = f"{value.dtype} {tuple(value.shape)}" if fits else f"a {type(value).__name__}"
                home = runner.layouts[port]
                raise PlanError(
                    f"{port.kind} {port.name} is {is_now}, the plan is for {planned.dtype} {tuple(planned.shape)} in {home}\n"
                    "  Plan and parallelize the model as it is to be trained."
                )
            if train and port.kind == PARAMETER and value.requires_grad != (port in runner.gradients):
                self.refuse_flip(runner, port, value)
        self.refuse_hooks()

    def refuse_flip(self, runner: Runner, port: Port, value: Tensor) -> None:
        """Raise PlanError for a parameter that is trained, or frozen, only now; one without influence may be either."""
        if port.name in runner.plan.ports.unused:
            return
        now = "asks" if value.requires_grad else "does not ask"
        raise PlanError(
            f"parameter {port.name} {now} for a gradient, unlike when it was planned\n"
            "  Call requires_grad_ before sbpc.plan; to leave it as it is for a while, give the optimizer other parameters."
        )

    def refuse_hooks(self) -> None:
        """Raise PlanError for a hook on a submodule: nothing would call it."""
        for name, part in self.parts.items():
            for kind in HOOKS if name else ():
                if getattr(part, kind, None):
                    raise PlanError(
                        f"{name!r} has a hook of the forward or backward, which nothing calls: the plan runs the model as a whole\n"
                        "  Register it before sbpc.plan, so that its tensor ops are planned, or on the whole module."
                    )
