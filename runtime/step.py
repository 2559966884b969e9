"""Run one step of a plan on this rank: from the user's tensors to results and gradients."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Container, Mapping, Sequence
from itertools import repeat
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from sbpc._compat import local_of, storage_of, with_local, writes_of
from sbpc.errors import PlanError
from sbpc.graph.loss import number_of_loss
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
    results,
)
from sbpc.graph.pytree import same_structure
from sbpc.graph.random_bits import next_seed
from sbpc.mesh.layout import Layout, broadcast
from sbpc.plans.plan import Plan
from sbpc.plans.rank_programs import Programs
from sbpc.plans.step_programs import ENDING, FORWARD, JOINT, UNSENT_JOINT, StepPrograms
from sbpc.runtime import bind
from sbpc.runtime.accumulate import Sums, within
from sbpc.runtime.executors import BoxedFunction, Executor
from sbpc.runtime.own_rows import Rows, inputs_with_rows
from sbpc.runtime.prepared import prepared
from sbpc.runtime.recorded import Saved, described
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.same_calls import SameCalls
from sbpc.runtime.state.dtensors import placements

INFERENCE = "inference"


class Way(Protocol):
    """How a step runs that trains."""

    how: str

    def run(
        self, runner: Any, sums: Sums, values: list[Tensor], parameters: list[Tensor], leaves: list[Tensor]
    ) -> list[Tensor]:
        """Returns the results for the values that a program takes. leaves: what gets gradients."""


class Runner:
    """Runs a plan's programs on this rank. It holds no weights: they come with every step."""

    stage = 0
    elsewhere: Container[str] = ()  # parameters that this rank has, and that another stage counts

    def __init__(self, plan: Plan | Programs, executor: Executor, where: torch.device) -> None:
        # `certify` may put other layouts into the plan itself, and the weights stay in these
        self.plan = copy.copy(plan)
        self.executor, self.where = executor, where
        self.layouts, self.coordinates = self.held()
        ports, self.shapes = plan.ports, plan.shapes
        self.positions = [torch.tensor([at], device=where) for at in self.coordinates]
        self.takes = [port for port in ports.inputs if port.kind != TANGENT and port in self.layouts]
        tangents = [port.name for port in ports.inputs if port.kind == TANGENT]
        self.results = [port for port in ports.outputs if port.kind in (OUTPUT, MUTATION)]
        self.differentiable = [
            at for at, port in enumerate(self.results) if port.kind == OUTPUT and port.name in tangents
        ]
        self.gradients = {
            Port(HOMES[port.kind], port.name): port.kind == GRADIENT
            for port in ports.outputs
            if Port(HOMES.get(port.kind, ""), port.name) in self.layouts and port.kind in (GRADIENT, INPUT_GRADIENT)
        }  # in the order of the outputs: what gets a gradient on this rank, and whether it is a parameter
        kinds = {port.kind for port in ports.outputs}
        self.trains = bool(plan.options.train and kinds & {GRADIENT, INPUT_GRADIENT})
        self.parameters = [port for port in self.takes if port.kind == PARAMETER]
        self.tangents = [at for at, port in enumerate(ports.inputs) if port.kind == TANGENT]
        self.functions: dict[Any, BoxedFunction] = {}
        self.saved = Saved()
        self.read_again: list[int] | None = None
        self.same = self.comparison()
        self.masters: dict[Port, Tensor] = {}  # that the plan, which is for no training, reads in the model's types

    def held(self) -> tuple[Mapping[Port, Layout], tuple[int, ...]]:
        """Returns the layouts of what this rank takes in, by port, and its place on their mesh."""
        return self.plan.given, self.plan.mesh.coordinates(dist.get_rank())

    def read_masters(self, masters: Container[str]) -> None:
        """Has the parameters of these names, which are stored in float32, cast where the plan does not do it."""
        own = self.plan.ports.masters
        found = [port for port in self.parameters if port.name in masters and port.name not in own]
        self.masters = {port: self.shapes[port].to(torch.float32) for port in found}

    def comparison(self) -> SameCalls:
        """Returns what compares the calls of all ranks."""
        return SameCalls(self.plan.mesh, [self.layouts[port] for port in self.inputs], self.names, self.axis_of_rows)

    @property
    def axis_of_rows(self) -> str | None:
        """An axis along which ranks could give their own rows, and do not."""
        axes = [axis for axis in self.plan.mesh.axes if axis != self.plan.axis]
        return axes[0] if axes and self.plan.options.own_rows is None else None

    @functools.cached_property
    def programs(self) -> Programs | StepPrograms:
        """The programs by name."""
        return self.plan if isinstance(self.plan, Programs) else StepPrograms(self.plan)

    def function(self, name: str) -> BoxedFunction:
        """Returns a compiled program of `StepPrograms`, or the forward that saves nothing."""
        if name not in self.functions:
            self.functions[name] = self.executor(described(self, name, self.program(name)))
        return self.functions[name]

    def program(self, name: str) -> GraphModule:
        """Returns a program of this rank on its device."""
        gm = self.programs.program(FORWARD if name == INFERENCE else name, dist.get_rank())
        early = len(self.results) if name in (JOINT, FORWARD, INFERENCE, UNSENT_JOINT) else 0
        late = len(results(gm)) - early if name not in (FORWARD, INFERENCE) else 0
        return prepared(gm, self.where, self.plan.options.overlaps, early, late, early if name == INFERENCE else None)

    @functools.cached_property
    def exchanges(self) -> bool:
        """Returns whether ranks send each other anything in the forward alone."""
        return any("c10d" in str(node.target) for node in self.program(INFERENCE).graph.nodes)

    @functools.cached_property
    def modes(self) -> frozenset[str]:
        """Returns the submodules that were in eval mode when the model was planned."""
        return frozenset(self.plan.options.eval)

    def fits(self, leaves: Sequence[Tensor], structure: Any, shapes: Sequence[Sequence[int]]) -> bool:
        """Returns whether the plan is for arguments of these shapes, types and structure. shapes: with the rows of all
        ranks where each gives its own."""
        return same_structure(structure, self.plan.ports.arguments) and all(
            leaf.dtype == self.shapes[port].dtype and shape == self.planned_shape(at, isinstance(leaf, DTensor))
            for at, (port, leaf, shape) in enumerate(zip(self.inputs, leaves, shapes))
        )

    @functools.cached_property
    def has_rows(self) -> list[bool]:
        """Returns which arguments each rank gives its own rows of."""
        return inputs_with_rows(self.plan)

    def planned_shape(self, at: int, whole: bool = False) -> tuple[int, ...]:
        """Returns the shape of an argument that all ranks give together, or each. whole: of a DTensor."""
        port = self.inputs[at]
        return tuple(self.shapes[port].shape) if whole or self.has_rows[at] else self.local_shapes[port]

    def unlike(self, leaves: Sequence[Tensor], weights: Mapping[Port, Tensor]) -> tuple[int, ...]:
        """Returns how unlike a call the plan is: in that it trains, in how many gradients that it lacks, or has of
        parameters that are frozen, and in how many of arguments that nobody asks for."""
        if not torch.is_grad_enabled():
            return int(self.trains), 0, 0
        values = [*weights.items(), *zip(self.inputs, leaves)]
        unused = {Port(PARAMETER, name) for name in self.plan.ports.unused}
        asked = {port for port, value in values if getattr(value, "requires_grad", False)} - unused
        less, more = asked - self.gradients.keys(), self.gradients.keys() - asked
        frozen = sum(port.kind == PARAMETER for port in more)
        return int(not self.trains), len(less) + frozen, len(more) - frozen

    def run(
        self,
        given: dict[Port, Any],
        random: dict[str, int],
        train: bool,
        way: Way,
        sums: Sums | None = None,
        rows: Rows | None = None,
    ) -> Any:
        """Returns the results, in the model's structure, for parameters, buffers and arguments; it writes the buffers.

        random: counts the steps that draw. way: what runs the programs of a step that trains. rows: each rank gets
        its own of these. Raises PlanError if the ranks do not make the same call, see `SameCalls`.
        """
        how = way.how + within(sums) if train else "without gradients"
        arguments = [given[port] for port in self.inputs]
        with self.same.call(how, random, arguments, self.where, train or self.exchanges):
            del arguments
            if SEED_PORT in self.shapes:
                given[SEED_PORT] = torch.tensor(next_seed(random), device=self.where)
            values = [local_of(given[port]) if port.kind == PARAMETER else given[port] for port in self.takes]
            if self.masters:
                values = [
                    value.to(self.shapes[port].dtype) if port in self.masters else value
                    for port, value in zip(self.takes, values)
                ]
            values += self.positions
            check_autocast(self.plan.options.dtype, self.where)
            with no_autocast(self.where):
                if train:
                    parameters, leaves = (
                        [given[port] for port in ports] for ports in (self.parameters, self.gradients)
                    )
                    results = way.run(self, sums or Sums(), values, parameters, leaves)
                else:
                    with torch.no_grad():
                        results = self.infer(values)
            named = dict(zip(self.results, results))
            with torch.no_grad():
                for port, value in named.items():
                    if port.kind == MUTATION:
                        given[Port(BUFFER, port.name)].copy_(value)
            return bind.outputs(self.plan, named if rows is None else self.own_results(named, rows))

    def own_results(self, named: Mapping[Port, Any], rows: Rows) -> dict[Port, Any]:
        """Returns results with this rank's own rows of those that have the rows of the batch."""
        if self.plan.options.outputs not in (None, self.plan.options.own_rows):
            return dict(named)
        whole = broadcast(self.plan.mesh.axes)
        left = {} if self.plan.loop is not None else self.plan.left
        ports = [port for port in named if port.kind == OUTPUT]
        layouts = [left.get(port) or whole for port in ports]
        own = rows.left([named[port] for port in ports], layouts, self.plan.ports.results)
        return {**named, **dict(zip(ports, own))}

    def infer(self, values: list[Tensor]) -> list[Tensor]:
        """Runs the forward alone, of which nothing is saved."""
        return list(self.function(INFERENCE)(values))

    def joint(self, values: list[Tensor], sums: Sums) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        """Runs forward and backward as one program, for a loss with a gradient of 1. Returns results, and gradients
        by port."""
        for at, gradient in zip(self.tangents, self.gradients_of_results):
            values.insert(at, gradient)
        outputs, first = self.function(UNSENT_JOINT if sums.on else JOINT)(values), len(self.results)
        computed = outputs[first:]
        return list(outputs[:first]), self.gradients_of(sums, computed) if sums.on else computed

    @property
    def gradients_of_results(self) -> list[Tensor]:
        """This rank's part of the gradient of every result that has one: 1 for the loss, 0 for the others."""
        loss, found = str(number_of_loss(self.plan.ports, self.shapes)), []
        for port, value in self.shapes.items():
            if port.kind == TANGENT:
                shape = self.layouts[port].local_shape(value.shape, self.plan.mesh.sizes, self.coordinates)
                found.append(torch.full(shape, float(port.name == loss), dtype=value.dtype, device=self.where))
        return found

    def gradients_of(self, sums: Sums, computed: Sequence[Tensor]) -> list[Tensor | None]:
        """Returns the gradients by port of what UNSENT, or the end of UNSENT_JOINT, gives: None for those that
        `sums` keeps."""
        first = list(self.gradients.values()).count(False)
        others, homes = iter(computed[:first]), sums.gradients(self, computed[first:])
        whole = repeat(None) if homes is None else iter(homes)
        return [next(whole) if is_parameter else next(others) for is_parameter in self.gradients.values()]

    @functools.cached_property
    def trained(self) -> list[str]:
        """Returns the names of the parameters that get gradients, in the order of these."""
        return [port.name for port, is_parameter in self.gradients.items() if is_parameter]

    def bring_home(self, sums: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the gradients of parameters from sums of what their ways home begin with."""
        return self.function(ENDING)([*sums, *self.positions])

    def for_leaves(self, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns gradients as those of the leaves: a parameter's as a DTensor. None stays None."""
        triples = zip(self.gradients.values(), leaves, gradients)
        return [
            with_local(leaf, value) if is_parameter and value is not None else value
            for is_parameter, leaf, value in triples
        ]

    def writes(self, parameters: list[Any], saved: Sequence[Tensor]) -> list[tuple[str, Any, int]]:
        """Returns the parameters whose memory the backward reads, each with how often autograd has seen it written.

        Which these are is the same at every step. `saved` holds shards, and autograd counts writes of the DTensor
        alone, so parameters are found by their storage.
        """
        if self.read_again is None:
            memory = {storage_of(tensor) for tensor in saved}
            self.read_again = [at for at, each in enumerate(parameters) if storage_of(local_of(each)) in memory]
        return [(self.parameters[at].name, parameters[at], writes_of(parameters[at])) for at in self.read_again]

    @functools.cached_property
    def inputs(self) -> list[Port]:
        """Returns the ports of the arguments, in the order of their leaves."""
        return [Port(INPUT, str(at)) for at in range(sum(port.kind == INPUT for port in self.takes))]

    def names(self) -> list[str]:
        """Returns the names of the arguments, in the order of their leaves."""
        forward = self.programs.program(FORWARD, dist.get_rank())
        named = dict(zip(self.takes, forward.graph.find_nodes(op="placeholder")))
        return [named[port].name for port in self.inputs]

    @functools.cached_property
    def local_shapes(self) -> dict[Port, tuple[int, ...]]:
        """Returns the shape of this rank's shard of every parameter, buffer and argument."""
        sizes = self.plan.inner.sizes
        return {
            port: self.layouts[port].local_shape(self.shapes[port].shape, sizes, self.coordinates)
            for port in self.takes
        }

    def shard_of(self, port: Port, given: Tensor, train: bool, rows: Rows | None = None) -> Tensor:
        """Returns this rank's shard of an argument. A DTensor is brought to the planned layout, and so are each
        rank's own rows; others are in it already."""
        planned = self.shapes[port]
        if train and given.requires_grad and port not in self.gradients:
            raise PlanError(
                f"argument {port.name} asks for a gradient, and asked for none when planned\n"
                "  Plan with an argument that has requires_grad=True, which parallelize(..., also=[plan]) takes beside "
                "one without; or detach this one."
            )
        if isinstance(given, DTensor):
            bind.check(f"argument {port.name}", given, planned)
            mesh = process_groups.device_mesh(self.plan.mesh, self.where.type)
            home = placements(self.layouts[port], self.plan.mesh.sizes)
            if given.device_mesh != mesh:
                raise PlanError(
                    f"argument {port.name} is a DTensor on {given.device_mesh}, the plan is for {self.plan.mesh}\n"
                    "  Make it on mesh.device_mesh(), or give this rank's shard as a plain tensor."
                )
            return given.redistribute(mesh, home).to_local(grad_placements=home)
        if rows is not None and self.has_rows[int(port.name)]:
            together = given.new_empty((rows.total, *given.shape[1:]), device="meta")
            bind.check(f"argument {port.name} of all ranks together", together, planned)
            given = rows.given(given, self.layouts[port])
        bind.check(f"argument {port.name}", given, planned, self.local_shapes[port])
        moves = self.plan.loop is not None and not given.is_meta  # each micro-batch comes to the device when it runs
        if given.device.type != self.where.type and not moves and (given.is_meta or given.dim()):
            raise PlanError(
                f"argument {port.name} is on {given.device}, this rank computes on {self.where}\n"
                f"  Move it there: .to('{self.where}')."
            )
        return given

    def check_weight(self, port: Port, value: Any, train: bool) -> None:
        """Raises PlanError for a parameter or buffer that is no longer as it was planned."""
        planned = self.masters.get(port, self.shapes[port])
        check_stored(port, value, planned, self.local_shapes[port], self.layouts[port], self.where)
        # one without influence may be trained or frozen
        if train and port.kind == PARAMETER and port.name not in self.plan.ports.unused:
            check_trained(port, value, port in self.gradients)


def check_stored(
    port: Port, value: Any, planned: Tensor, shape: Sequence[int], layout: Layout, where: torch.device
) -> None:
    """Raises PlanError for a parameter or buffer that is no longer as it was planned. shape: that of this rank's
    part."""
    fits = isinstance(value, DTensor if port.kind == PARAMETER else Tensor)
    local = local_of(value)
    if fits and local.device.type != where.type:
        raise PlanError(
            f"{port.kind} {port.name} is on {local.device}, this rank computes on {where}\n  Leave the parallel "
            "module where it is."
        )
    if not fits or local.dtype != planned.dtype or local.shape != shape:
        is_now = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise PlanError(
            f"{port.kind} {port.name} is {is_now}, the plan is for {planned.dtype} {tuple(planned.shape)} in {layout}\n"
            "  Plan and parallelize the model as it is to be trained."
        )


def check_trained(port: Port, value: Tensor, trained: bool) -> None:
    """Raises PlanError for a parameter that asks for a gradient, unlike when it was planned, or does not."""
    if value.requires_grad != trained:
        now = "asks" if value.requires_grad else "does not ask"
        raise PlanError(
            f"parameter {port.name} {now} for a gradient, unlike when it was planned\n"
            "  Call requires_grad_ before sbpc.plan; to freeze it for a while, plan it frozen, too, for "
            "parallelize(..., also=[plan])."
        )


def check_autocast(planned: str | None, where: torch.device) -> None:
    """Raises PlanError under an autocast other than the planned one."""
    if torch.is_autocast_enabled(where.type):
        wanted = str(torch.get_autocast_dtype(where.type)).removeprefix("torch.")
        if planned != wanted:
            raise PlanError(
                f"the step runs under autocast to {wanted}, and was planned with dtype={planned}\n"
                f"  Plan with dtype=torch.{wanted}, or call the module outside of autocast."
            )


def no_autocast(where: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Turns autocast off while this lasts: programs hold the casts that were planned."""
    on = torch.is_autocast_enabled(where.type)
    return torch.autocast(where.type, enabled=False) if on else contextlib.nullcontext()
