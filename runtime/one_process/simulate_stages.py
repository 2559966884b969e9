"""Simulate a step of a plan with stages: all stages and their ranks in this process, with the programs that real ranks run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sbpc.graph.ports import BUFFER, INPUT, PARAMETER, Port
from sbpc.graph.random_bits import wrap
from sbpc.plans.plan import Plan
from sbpc.plans.staged.schedules import Action, in_turn
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, Parts
from sbpc.runtime import bind
from sbpc.runtime.one_process.lockstep import lockstep, storages
from sbpc.runtime.staged.stage_run import Joined, StageRun, arrivals, before_loop, micro_batch


class PipelineSimulation:
    """All ranks of all stages during a step. `sent`: by stage, bytes by axis. `peak`: most bytes alive on a rank."""

    def __init__(self, plan: Plan, model: nn.Module, args: Sequence[Any], kwargs: Any, seed: int) -> None:
        assert plan.loop is not None
        self.plan, self.inner, self.loop = plan, plan.inner, plan.loop
        self.stored = {port: tensor.detach() for port, tensor in bind.stored(plan, model).items()}
        self.leaves = [leaf.detach() for leaf in bind.arguments(plan, args, kwargs)]
        for port, planned in plan.shapes.items():
            if port.kind == INPUT:
                bind.check(f"argument {port.name}", self.leaves[int(port.name)], planned)
        buffers = {port.name: tensor for port, tensor in self.stored.items() if port.kind == BUFFER}
        self.before = before_loop(self.loop, self.leaves, buffers, torch.device("cpu"))
        self.seed = torch.tensor(wrap(seed))
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
        fixed: dict[str, Any] = {}
        for port, name in programs.fixed.items():
            whole = self.stored.get(port, self.seed)
            fixed[name] = given[port].shards(whole, sizes)[rank].clone()
        return StageRun(chunk, programs, fixed, [torch.tensor([each]) for each in self.inner.coordinates(rank)])

    def step(self) -> dict[Port, Any]:
        """Runs the step, and returns its results and gradients, whole."""
        self.once(BEFORE)
        for _, action in in_turn(self.plan.actions, self.plan.needs):
            self.act(action)
        self.once(AFTER)
        gradients: dict[Port, Tensor] = {}
        for at in range(len(self.runs)):
            for port, shards in self.gradients(at).items():
                whole = self.plan.chunks[at].given[Port(PARAMETER, port.name)].whole(shards, self.inner.sizes)
                having = {self.plan.owners[other] for other in self.plan.shared.get(port.name, [])}
                others = len(having - {self.plan.owners[at]})
                self.send(at, others * max(shard.nbytes for shard in shards))
                gradients[port] = gradients[port] + whole if port in gradients else whole
        return self.joined.after(self.joined.results(range(len(self.loop.joins)))) | gradients

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
        for port in arrivals(self.plan.chunks[action.chunk], which):
            self.receive(action.chunk, port, action.micro_batch)
        self.run(which, action.chunk, action.micro_batch)

    def receive(self, at: int, port: Port, batch: int) -> None:
        """Puts an input of a micro-batch, or what another chunk sent, among the values of every rank."""
        chunk = self.plan.chunks[at]
        if port in chunk.receives:
            shards = self.crossing[chunk.receives[port], batch]
        else:
            whole = micro_batch(self.loop, chunk.arguments[port], batch, self.leaves, self.before)
            shards = [shard.clone() for shard in chunk.given[port].shards(whole, self.inner.sizes)]
        for run, shard in zip(self.runs[at], shards):
            run.batches.setdefault(batch, {})[run.programs.own[port]] = shard

    def run(self, which: Parts, at: int, batch: int) -> None:
        """Runs the program of parts of a chunk on all ranks in lockstep, and hands out what it sends and what the body leaves."""
        runs = self.runs[at]
        given = [run.given(which, batch) for run in runs]
        programs = self.plan.programs[at]
        graphs = [programs.local_at(which, run.adds(which), rank) for rank, run in enumerate(runs)]
        done = lockstep(graphs, given, self.groups)
        self.count(at, given, done.peak_memory)
        for name, sent in done.bytes_sent.items():
            self.sent[self.plan.owners[at]][name.split("::")[-1]] += sent
        results = [run.take(which, batch, out) for run, out in zip(runs, done.outputs)]
        for port, name in self.plan.programs[at].outputs.items():
            if name in results[0]:
                self.leave(at, port, batch, [each[name] for each in results])

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
                for values in (run.fixed, *run.batches.values(), run.added, run.homes):
                    held |= {storage.data_ptr(): storage.nbytes() for storage in storages(list(values.values()))}
            self.peak = max(self.peak, peak + sum(size for place, size in held.items() if place not in inside))


def simulate_stages(
    plan: Plan, model: nn.Module, args: Sequence[Any], kwargs: Any, seed: int
) -> tuple[dict[Port, Any], dict[str, float], int]:
    """Runs one step. Returns the results by port, whole; the bytes sent by axis; and the peak of live bytes of a rank."""
    simulation = PipelineSimulation(plan, model, args, kwargs, seed)
    results = simulation.step()
    axes = dict.fromkeys([*plan.mesh.axes, *(axis for sent in simulation.sent for axis in sent)])
    sent = {axis: max(each[axis] for each in simulation.sent) for axis in axes}
    return results, sent, simulation.peak


