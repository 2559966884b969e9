"""Simulate a step: run all ranks of a plan in this process, and count the bytes that they send and hold."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sbpc.errors import PlanError, check_kinds
from sbpc.graph.ports import BUFFER, INPUT, INPUT_GRADIENT, MUTATION, PARAMETER, SEED, Port
from sbpc.graph.random_bits import wrap
from sbpc.plans.plan import Plan
from sbpc.plans.rank_programs import Programs
from sbpc.plans.staged.schedules import Action, in_turn, piece_of
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, Parts
from sbpc.runtime import bind
from sbpc.runtime.one_process.lockstep import lockstep, storages
from sbpc.runtime.staged.stage_run import Joined, StageRun, before_loop, micro_batch


@dataclass
class Simulation:
    """What one step gave, as whole tensors. Unpacks as `outputs, gradients`.

    outputs: in the model's own structure. gradients: by name as in `named_parameters()`; a tied one has its first
    name, a frozen one is absent, an unused one None. buffers: new values by name. bytes_sent: by axis, busiest rank;
    counted, not predicted. peak_memory: bytes, busiest rank, everything that was alive. input_gradients: by number
    among the tensor arguments.
    """

    outputs: Any
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    bytes_sent: dict[str, float]
    peak_memory: int
    input_gradients: dict[int, Tensor] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.outputs, self.gradients))


def simulate(
    plan: Plan | Programs,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    tangents: Any = None,
    seed: int = 0,
) -> Simulation:
    """Runs one step of `plan` on all its ranks in this process, without GPUs: the programs that torchrun runs, only
    collectives swapped.

    args are whole, on one device; so is what comes back. Where the plan has a `loss`, they are `(*args, *targets)`.
    tangents: the gradients of the outputs, ones if not given; a loop takes none. seed: of all random numbers; one
    seed gives the same numbers on every mesh. plan may also be what `sbpc.load_programs` returns. The model is left
    unchanged.

    >>> import sbpc, torch
    >>> model, x = torch.nn.Linear(4, 2), torch.ones(6, 4)
    >>> outputs, gradients = sbpc.simulate(sbpc.plan(model, (x,), sbpc.Mesh(data=2)), model, (x,))
    >>> torch.allclose(outputs, model(x)), gradients["bias"].tolist()
    (True, [6.0, 6.0])

    Raises PlanError if model or arguments are not like those planned.
    """
    bind.check_plan(plan)
    check_kinds(PlanError, seed=(seed, "an integer"))
    bind.check_guards(model, plan)
    bind.check_modes(model, plan)
    given = whole_inputs(plan, model, args, kwargs, tangents, seed)
    if plan.loop is not None:
        return told(plan, model, *LoopSimulation(plan, given).step())
    mesh, inputs = plan.mesh, shards_of(plan, given)
    groups = {mesh.group_name(axes): mesh.groups(axes) for axes in mesh.runs()}
    run = lockstep([plan.local_at(rank) for rank in range(mesh.ranks)], inputs, groups, mesh.cluster.has_gpus)
    results = {
        port: None if layout is None else layout.whole([out[at] for out in run.outputs], mesh.sizes)
        for at, (port, layout) in enumerate(plan.left.items())
    }
    sent = {alias.split("::")[-1]: sent for alias, sent in run.bytes_sent.items()}
    return told(plan, model, results, sent, run.peak_memory)


def told(
    plan: bind.AnyPlan, model: nn.Module, results: Mapping[Port, Any], sent: dict[str, float], peak: int
) -> Simulation:
    """Returns what a step gave as a user sees it. results: by port, whole."""
    there = [(port, value) for port, value in results.items() if value is not None]
    return Simulation(
        bind.outputs(plan, results),
        bind.gradients(plan, results, [name for name, _ in model.named_parameters()]),
        {port.name: value for port, value in there if port.kind == MUTATION},
        sent,
        peak,
        {int(port.name): value for port, value in there if port.kind == INPUT_GRADIENT},
    )


def shards_of(plan: Plan | Programs, given: Mapping[Port, Tensor]) -> list[list[Tensor]]:
    """Returns by rank the inputs of its program: its shards of the placeholders, then its coordinates."""
    mesh, layouts = plan.mesh, plan.given
    by_port = [layouts[port].shards(given[port], mesh.sizes) for port in plan.ports.inputs]
    return [
        [*(own(shards[rank]) for shards in by_port), *(torch.tensor([at]) for at in mesh.coordinates(rank))]
        for rank in range(mesh.ranks)
    ]


def whole_inputs(
    plan: Plan | Programs, model: nn.Module, args: Sequence[Any], kwargs: Any, tangents: Any, seed: int
) -> dict[Port, Tensor]:
    """Returns the whole tensor of every placeholder, checked against the plan."""
    given = {port: tensor.detach().to(plan.shapes[port].dtype) for port, tensor in bind.stored(plan, model).items()}
    leaves = bind.arguments(plan, args, kwargs)
    free = iter(bind.default_tangents(plan, tangents))
    for port, planned in plan.shapes.items():
        if port.kind == INPUT:
            bind.check(f"argument {port.name}", leaves[int(port.name)], planned)
            given[port] = leaves[int(port.name)].detach()
        elif port.kind == SEED:
            given[port] = torch.tensor(wrap(seed))
        elif port not in given:
            given[port] = next(free)
    if any(tensor.is_meta for port, tensor in given.items() if port.kind == PARAMETER):
        raise PlanError(
            "the model is on the meta device: there is nothing to simulate with\n  Give it weights: "
            "model.to_empty(device='cpu')."
        )
    return given


def own(shard: Tensor) -> Tensor:
    """Returns the shard in memory of its own, as a rank holds it: a view would keep the whole tensor alive, and be
    strided."""
    whole = shard.untyped_storage().nbytes() > shard.nbytes
    return shard.clone(memory_format=torch.contiguous_format) if whole else shard


class LoopSimulation:
    """All ranks of all stages during a step in a loop.

    given: whole tensors by port. sent: by stage, bytes by axis. peak: most bytes alive on a rank.
    """

    def __init__(self, plan: Plan, given: Mapping[Port, Tensor]) -> None:
        assert plan.loop is not None
        self.plan, self.inner, self.loop, self.stored = plan, plan.inner, plan.loop, given
        self.leaves = [given[Port(INPUT, str(at))] for at in range(sum(port.kind == INPUT for port in given))]
        buffers = {port.name: tensor for port, tensor in given.items() if port.kind == BUFFER}
        self.before = before_loop(self.loop, self.leaves, buffers, torch.device("cpu"))
        self.groups = {self.inner.group_name(axes): self.inner.groups(axes) for axes in self.inner.runs()}
        self.joined = Joined(self.loop)
        self.sent: list[dict[str, float]] = [defaultdict(float) for _ in range(plan.stages)]
        self.peak = 0
        self.crossing: dict[tuple[str, int], list[Tensor]] = {}
        self.runs = [[self.stage_run(at, rank) for rank in range(self.inner.ranks)] for at in range(len(plan.chunks))]

    def stage_run(self, at: int, rank: int) -> StageRun:
        """Returns a chunk on one rank, with its shards of what is stored."""
        chunk, programs = self.plan.chunks[at], self.plan.programs[at]
        given, sizes = chunk.given, self.inner.sizes
        fixed: dict[str, Any] = {
            name: given[port].shards(self.stored[port], sizes)[rank].clone() for port, name in programs.fixed.items()
        }
        return StageRun(chunk, programs, fixed, [torch.tensor([each]) for each in self.inner.coordinates(rank)])

    def step(self) -> tuple[dict[Port, Any], dict[str, float], int]:
        """Runs the step. Returns its results and gradients, whole; the bytes sent by axis; and the peak of live
        bytes of a rank."""
        self.once(BEFORE)
        orders = [iter(order) for order in self.plan.orders]
        for stage, action in in_turn(self.plan.actions, self.plan.needs):
            for which, each in orders[stage]:
                if piece_of(which)[1]:
                    self.piece(which, each.chunk)
                if each == action:
                    break
            self.act(action)
        for which, each in itertools.chain(*orders):
            if piece_of(which)[1]:
                self.piece(which, each.chunk)
        self.once(AFTER)
        gradients: dict[Port, Tensor] = {}
        for at in range(len(self.runs)):
            for port, shards in self.gradients(at).items():
                whole = self.plan.chunks[at].given[Port(PARAMETER, port.name)].whole(shards, self.inner.sizes)
                having = {self.plan.owners[other] for other in self.plan.shared.get(port.name, [])}
                others = len(having - {self.plan.owners[at]})
                self.send(at, others * max(shard.nbytes for shard in shards))
                gradients[port] = gradients[port] + whole if port in gradients else whole
        gradients = {port: each.to(self.stored[Port(PARAMETER, port.name)].dtype) for port, each in gradients.items()}
        axes = dict.fromkeys([*self.plan.mesh.axes, *(axis for sent in self.sent for axis in sent)])
        results = self.joined.after(self.joined.results(range(len(self.loop.joins)))) | gradients
        return results, {axis: max(each[axis] for each in self.sent) for axis in axes}, self.peak

    def once(self, part: str) -> None:
        """Runs what chunks do once and with no action."""
        for each, at in sorted(self.plan.apart):
            if each == part:
                self.run((part,), at, 0)

    def gradients(self, at: int) -> dict[Port, list[Tensor]]:
        """Returns the shards of a chunk's gradients by rank."""
        by_rank = [run.gradients() for run in self.runs[at]]
        return {port: [each[port] for each in by_rank] for port in by_rank[0]}

    def act(self, action: Action) -> None:
        """Runs one action on all ranks of its stage."""
        which = self.plan.runs(action)
        for port in self.plan.chunks[action.chunk].arriving(which):
            self.receive(action.chunk, port, action.micro_batch)
        self.run(which, action.chunk, action.micro_batch)

    def receive(self, at: int, port: Port, batch: int) -> None:
        """Puts an input of a micro-batch, or what another chunk sent, among the values of every rank."""
        chunk = self.plan.chunks[at]
        if port in chunk.receives:
            shards = self.crossing[chunk.receives[port], batch]
        else:
            whole = micro_batch(chunk.arguments[port], batch, self.leaves, self.before, self.joined)
            shards = [shard.clone() for shard in chunk.given[port].shards(whole, self.inner.sizes)]
        for run, shard in zip(self.runs[at], shards):
            run.batches.setdefault(batch, {})[run.programs.own[port]] = shard

    def run(self, which: Parts, at: int, batch: int) -> None:
        """Runs the program of parts of a chunk on all ranks in lockstep, and hands out what it sends and what the
        body leaves."""
        runs = self.runs[at]
        given = [run.given(which, batch) for run in runs]
        programs = self.plan.programs[at]
        graphs = [programs.pieces_at(which, run.adds(which), rank)[0] for rank, run in enumerate(runs)]
        results = [run.take(which, batch, out) for run, out in zip(runs, self.lockstep(at, graphs, given))]
        for port, name in self.plan.programs[at].outputs.items():
            if name in results[0]:
                self.leave(at, port, batch, [each[name] for each in results])

    def piece(self, which: Parts, at: int) -> None:
        """Runs what comes early, or a piece of what comes late, of the program of some parts of a chunk."""
        runs, (parts, piece), programs = self.runs[at], piece_of(which), self.plan.programs[at]
        graphs = [programs.pieces_at(parts, run.adds(which), rank)[piece] for rank, run in enumerate(runs)]
        given = [run.given(which, 0) for run in runs]
        for run, out in zip(runs, self.lockstep(at, graphs, given)):
            run.take_piece(which, out)

    def lockstep(self, at: int, graphs: Sequence[Any], given: list[list[Any]]) -> list[Any]:
        """Runs a program of a chunk on all ranks, and counts what it sends and what is alive."""
        done = lockstep(graphs, given, self.groups, self.inner.cluster.has_gpus)
        self.count(at, given, done.peak_memory)
        for name, sent in done.bytes_sent.items():
            self.sent[self.plan.owners[at]][name.split("::")[-1]] += sent
        return done.outputs

    def leave(self, at: int, port: Port, batch: int, shards: list[Tensor]) -> None:
        """Hands on an output of a chunk."""
        chunk = self.plan.chunks[at]
        if port in chunk.results:
            layout = chunk.left[port]
            assert layout is not None
            self.joined.take(chunk.results[port], batch, layout.whole(shards, self.inner.sizes))
            return
        name = chunk.sends[port]
        self.crossing[name, batch] = [shard.clone() for shard in shards]
        readers = {self.plan.owners[to] for to, other in enumerate(self.plan.chunks) if name in other.receives.values()}
        self.send(at, len(readers - {self.plan.owners[at]}) * max(s.nbytes for s in shards))

    def send(self, at: int, size: int) -> None:
        """Counts bytes that a chunk sends to other stages."""
        if self.plan.axis is not None:
            self.sent[self.plan.owners[at]][self.plan.axis] += size

    def count(self, at: int, given: list[list[Any]], peak: int) -> None:
        """Notes what is alive on the ranks of a stage while a program runs."""
        mine = [chunk for chunk, owner in enumerate(self.plan.owners) if owner == self.plan.owners[at]]
        for rank, inputs in enumerate(given):
            inside = {storage.data_ptr() for storage in storages(inputs)}
            held: dict[int, int] = {}
            for chunk in mine:
                run = self.runs[chunk][rank]
                parted = {str(which): values for which, (_, values) in run.parted.items()}
                for values in (run.fixed, *run.batches.values(), run.added, run.homes, parted):
                    held |= {storage.data_ptr(): storage.nbytes() for storage in storages(list(values.values()))}
            self.peak = max(self.peak, peak + sum(size for place, size in held.items() if place not in inside))
