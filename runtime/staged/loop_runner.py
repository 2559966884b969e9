"""Run a step in a loop over micro-batches on a rank: the chunks of its stage, and the messages between stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from sbpc.graph.ports import BUFFER, GRADIENT, INPUT, INPUT_GRADIENT, PARAMETER, SEED, TANGENT, Port
from sbpc.mesh.layout import Layout, broadcast
from sbpc.plans.plan import Plan
from sbpc.plans.staged.schedules import Action, piece_of
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, Parts
from sbpc.runtime.accumulate import Sums
from sbpc.runtime.device_kernels import placed
from sbpc.runtime.executors import BoxedFunction, Executor, auto, graph
from sbpc.runtime.own_rows import Rows
from sbpc.runtime.recorded import recordable, recorded_step
from sbpc.runtime.staged.stage_run import Joined, StageRun, before_loop, micro_batch
from sbpc.runtime.start.mail import Mail
from sbpc.runtime.start.same_calls import SameCalls
from sbpc.runtime.step import Runner

AHEAD = 2  # actions: gloo sends nothing before the receiver asks for it


class LoopRunner(Runner):
    """Runs the chunks of a rank. It holds no weights: they come with every step, and the whole batch."""

    plan: Plan

    def __init__(self, plan: Plan, executor: Executor, where: torch.device) -> None:
        assert plan.loop is not None
        before, after = (placed(gm, where) for gm in (plan.loop.before, plan.loop.after))
        self.loop, self.stage = replace(plan.loop, before=before, after=after), plan.stage_of(dist.get_rank())
        self.mail: Callable[[torch.device], Mail] = Mail  # makes the messages of a step
        self.place = plan.ranks_of(self.stage).index(dist.get_rank())
        self.mine = plan.chunks_on(self.stage)
        # by stage, whom this rank talks to
        self.peers = [plan.ranks_of(stage)[self.place] for stage in range(plan.stages)]
        # in its stage's order
        self.places = {action: place for mine in plan.actions for place, action in enumerate(mine)}
        self.numbers = {name: at for at, name in enumerate(plan.sources)}
        # by the stage that has the first chunk
        counted = {name: plan.owners[chunks[0]] for name, chunks in plan.shared.items()}
        self.elsewhere = frozenset(name for name, stage in counted.items() if stage != self.stage)
        super().__init__(plan, executor, where)

    def held(self) -> tuple[Mapping[Port, Layout], tuple[int, ...]]:
        whole = broadcast(self.plan.inner.axes)
        layouts = {port: whole for port in self.plan.ports.inputs if port.kind in (INPUT, BUFFER, SEED)}
        chunks = [self.plan.chunks[at] for at in self.mine]
        layouts |= {port: each for chunk in chunks for port, each in chunk.given.items() if port.kind == PARAMETER}
        return layouts, self.plan.inner.coordinates(self.place)

    def comparison(self) -> SameCalls:
        whole = [broadcast(self.plan.mesh.axes)] * len(self.inputs)
        part = f"stage {self.stage}" if self.plan.stages > 1 else ""
        return SameCalls(self.plan.mesh, whole, self.names, self.axis_of_rows, part)

    def names(self) -> list[str]:
        ports = [port for port in self.loop.ports.inputs if port.kind in (INPUT, BUFFER)]
        named = dict(zip(ports, self.loop.before.graph.find_nodes(op="placeholder")))
        return [named[port].name for port in self.inputs]

    def shard_of(self, port: Port, given: Tensor, train: bool, rows: Rows | None = None) -> Tensor:
        return super().shard_of(port, given.full_tensor() if isinstance(given, DTensor) else given, train, rows)

    exchanges = True  # stages wait for each other

    def infer(self, values: list[Tensor]) -> list[Tensor]:
        results, _ = Step(self, dict(zip(self.takes, values)), Sums()).run()
        return [results[port] for port in self.results]

    def chunk_function(self, at: int, which: Parts, adding: bool) -> BoxedFunction:
        """Returns the compiled program of some parts of a chunk, or of a piece of it."""
        if (at, which, adding) not in self.functions:
            parts, piece = piece_of(which)
            program = placed(self.plan.programs[at].pieces_at(parts, adding, self.place)[piece], self.where)
            self.functions[at, which, adding] = self.executor(program)
            if self.records and not recordable(program, self.where, strict=self.executor is graph, inside=True):
                vars(self)["replayed"] = None
        return self.functions[at, which, adding]

    @property
    def records(self) -> bool:
        """Whether steps may be recorded; not those whose parts are timed."""
        return self.executor in (auto, graph)

    @functools.cached_property
    def replayed(self) -> BoxedFunction | None:
        """What replays a whole step, None where it is not recorded."""
        return recorded_step(
            self, lambda values: sum(map(tuple, self.run_joint(values, Sums())), ()), self.executor is graph
        )

    def joint(self, values: list[Tensor], sums: Sums) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        """Runs a step, recorded where it may be: not amid a sum of several. Returns results, and gradients by port."""
        if not self.records or sums.on or self.replayed is None:
            return self.run_joint(values, sums)
        outputs, first = self.replayed(values), len(self.results)
        return list(outputs[:first]), outputs[first:]

    def run_joint(self, values: list[Tensor], sums: Sums) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        """Runs a step. Returns results, and gradients by port."""
        given = dict(zip(self.takes, values))
        results, gradients = Step(self, given, sums).run()
        asked = [
            gradients.get(port.name)
            if is_parameter
            else results[Port(INPUT_GRADIENT, port.name)].to(given[port].device)
            for port, is_parameter in self.gradients.items()
        ]
        return [results[port] for port in self.results], asked


class Step:
    """One step on this rank."""

    def __init__(self, runner: LoopRunner, given: dict[Port, Tensor], sums: Sums) -> None:
        self.runner, self.plan, self.loop, self.sums = runner, runner.plan, runner.loop, sums
        self.leaves = [given[port] for port in runner.inputs]
        # by chunk, what steps within `no_sync` have added up of gradients, by name
        self.held = sums.taken_by(runner) or {}
        self.mail = runner.mail(runner.where)
        buffers = {port.name: value for port, value in given.items() if port.kind == BUFFER}
        self.before = before_loop(self.loop, self.leaves, buffers, runner.where)
        self.joined = Joined(self.loop)
        self.runs = {at: self.stage_run(at, given) for at in runner.mine}

    def stage_run(self, at: int, values: dict[Port, Tensor]) -> StageRun:
        """Returns a chunk with the values that all micro-batches read."""
        programs, chunk = self.plan.programs[at], self.plan.chunks[at]
        fixed: dict[str, Any] = {name: values[port] for port, name in programs.fixed.items()}
        run = StageRun(chunk, programs, fixed, self.runner.positions)
        run.added = self.held.get(at, {})
        return run

    def run(self) -> tuple[dict[Port, Any], dict[str, Tensor]]:
        """Runs all actions of this rank, then what is done once."""
        self.sums.keep(None, self.sums.held)  # programs add to it in place: whose it is shows when all have
        actions = self.plan.actions[self.runner.stage]
        for which, action in self.plan.orders[self.runner.stage]:
            if action.kind == BEFORE:
                self.part(action.chunk, which, 0)
            elif (piece := piece_of(which)[1]) < 0 or (piece and not self.sums.collects):
                self.piece(action.chunk, which)
            if action not in self.runner.places:
                continue
            place = self.runner.places[action]
            for ahead in actions[place : place + 1 + AHEAD]:  # what later actions need may come while this one computes
                self.expect(ahead)
            self.arrive(action, which)
            if self.sums.collects:  # the sums go home in a later step
                which = tuple(part for part in which if part != AFTER)
            self.part(action.chunk, which, action.micro_batch)
        gradients = {} if self.sums.collects else self.gradients()
        results = self.results()
        self.mail.finish()
        self.sums.keep(self.runner, {at: run.added for at, run in self.runs.items()} if self.sums.collects else None)
        return results, gradients

    def gradients(self) -> dict[str, Tensor]:
        """Brings the sums of gradients home, and returns them by name of the parameter."""
        mine = set(self.runner.mine)
        gradients: dict[str, dict[int, Tensor]] = {
            name: {} for name, chunks in self.plan.shared.items() if mine & set(chunks)
        }
        for at in self.runner.mine:
            if (AFTER, at) in self.plan.apart:
                self.part(at, (AFTER,), 0)
            for port, value in self.runs[at].gradients().items():
                gradients.setdefault(port.name, {})[at] = value
        kinds = {port.name: each.dtype for port, each in self.plan.shapes.items() if port.kind == PARAMETER}
        names = [name for name, terms in gradients.items() if self.plan.summands.get(name, terms)]
        return {name: self.added(name, gradients.pop(name)).to(kinds[name]) for name in names}

    def expect(self, action: Action) -> None:
        """Begins to receive what an action reads of other stages."""
        chunk = self.plan.chunks[action.chunk]
        for port in chunk.arriving(self.plan.runs(action)):
            source, sent = self.plan.sources[chunk.receives[port]] if port in chunk.receives else (action.chunk, None)
            if sent is not None and self.plan.owners[source] != self.runner.stage:
                name, value = chunk.receives[port], chunk.shapes[port]
                shape = chunk.given[port].local_shape(value.shape, self.plan.inner.sizes, self.runner.coordinates)
                peer = self.runner.peers[self.plan.owners[source]]
                times = sum(name in self.plan.chunks[at].receives.values() for at in self.runner.mine)
                self.mail.expect(self.key(name, action), peer, shape, value.dtype, times)

    def key(self, name: str, action: Action) -> int:
        """Returns the number of a message, the same on both ends."""
        return self.runner.numbers[name] * self.loop.count + action.micro_batch

    def arrive(self, action: Action, which: Parts) -> None:
        """Puts what the program of some parts reads among the values of the micro-batch."""
        chunk, run, batch = self.plan.chunks[action.chunk], self.runs[action.chunk], action.micro_batch
        for port in chunk.arriving(which):
            if port in chunk.receives:
                value = self.mail.receive(self.key(chunk.receives[port], action))
                self.arrived(*self.plan.sources[chunk.receives[port]], batch)
            else:
                whole = micro_batch(
                    chunk.arguments[port], batch, self.leaves, self.before, self.joined, self.runner.where
                )
                value = chunk.given[port].shard(
                    whole.to(self.runner.where), self.plan.inner.sizes, self.runner.coordinates
                )
            run.batches.setdefault(batch, {})[run.programs.own[port]] = value

    def arrived(self, source: int, port: Port, batch: int) -> None:
        """Lets go what another stage has received: by the time at which its chunk `source` sent this, it had done
        what came before."""
        stage = self.plan.owners[source]
        if stage != self.runner.stage:
            action = self.plan.acting(port in self.plan.chunks[source].sends_late, source, batch)
            self.mail.arrived(self.runner.peers[stage], self.runner.places[action])

    def part(self, at: int, which: Parts, batch: int) -> None:
        """Runs the program of some parts of a chunk, and sends off what it sends."""
        run = self.runs[at]
        out = self.runner.chunk_function(at, which, run.adds(which))(run.given(which, batch))
        named = run.take(which, batch, out)
        for port, name in run.programs.outputs.items():
            if name in named:
                self.leave(at, port, batch, named[name])

    def piece(self, at: int, which: Parts) -> None:
        """Runs what comes early, or a piece of what comes late, of the program of some parts of a chunk."""
        run = self.runs[at]
        run.take_piece(which, self.runner.chunk_function(at, which, run.adds(which))(run.given(which, 0)))

    def leave(self, at: int, port: Port, batch: int, value: Tensor) -> None:
        """Hands on an output of a chunk: to other stages, to this one, or to the results."""
        chunk, owners = self.plan.chunks[at], self.plan.owners
        if port in chunk.results:
            self.joined.take(chunk.results[port], batch, value)
            return
        name, value = chunk.sends[port], value.contiguous()
        key = self.key(name, Action("", at, batch))
        readers = [to for to, other in enumerate(self.plan.chunks) if name in other.receives.values()]
        for stage in dict.fromkeys(owners[to] for to in readers):
            times = sum(owners[to] == stage for to in readers)
            if stage == self.runner.stage:
                self.mail.keep(key, value, times)
            else:
                reading = [
                    self.plan.acting(self.comes_late(to, name), to, batch) for to in readers if owners[to] == stage
                ]
                self.mail.send(
                    key, self.runner.peers[stage], value, min(self.runner.places[action] for action in reading)
                )

    def comes_late(self, at: int, name: str) -> bool:
        """Returns whether a chunk reads a value in its backward."""
        return any(port.kind == TANGENT for port, each in self.plan.chunks[at].receives.items() if each == name)

    def added(self, name: str, known: dict[int, Tensor]) -> Tensor:
        """Returns the gradient of a parameter: with the terms of other stages, too, added up in the order of chunks.

        known: the terms of this stage's chunks. Every stage that has the parameter gets all terms.
        """
        having = self.plan.shared.get(name, list(known))
        chunks = self.plan.summands.get(name, list(known))
        port, chunk = Port(GRADIENT, name), self.plan.chunks[chunks[0]]
        value, home = chunk.value(port), self.plan.parameters[name]
        shape = home.local_shape(value.shape, self.plan.inner.sizes, self.runner.coordinates)
        first = len(self.plan.sources) * self.loop.count
        keys = {pair: first + at for at, pair in enumerate(self.pairs)}
        others = {self.plan.owners[at] for at in having} - {self.runner.stage}
        for at in chunks:
            if at in known:
                for stage in sorted(others):
                    self.mail.send(keys[name, at], self.runner.peers[stage], known[at].contiguous())
            else:
                self.mail.expect(keys[name, at], self.runner.peers[self.plan.owners[at]], shape, value.dtype)
        values = [known[at] if at in known else self.mail.receive(keys[name, at]) for at in chunks]
        return functools.reduce(torch.add, values)

    @property
    def pairs(self) -> list[tuple[str, int]]:
        """The parameters that several chunks have, each with each of them."""
        return [(name, at) for name, chunks in self.plan.shared.items() for at in chunks]

    @property
    def first_free(self) -> int:
        """The first number of a message that neither values that cross nor gradients have."""
        return len(self.plan.sources) * self.loop.count + len(self.pairs)

    def results(self) -> dict[Port, Any]:
        """Returns the results of the step on every rank: the stage that has an output of the body sends it to the
        others."""
        joined = []
        for number, (owner, like) in enumerate(self.ends()):
            value = self.joined.results([number])[0] if owner == self.runner.stage else like.to(self.runner.where)
            peers = self.runner.peers
            joined.append(self.mail.from_one(self.first_free + number, value, peers[owner], peers))
        return self.joined.after(joined)

    def ends(self) -> list[tuple[int, Tensor]]:
        """Returns by output of the body the stage that has it, and a tensor of its shape, joined."""
        loop, found = self.loop, dict[int, tuple[int, Tensor]]()
        for at, chunk in enumerate(self.plan.chunks):
            for port, number in chunk.results.items():
                found[number] = self.plan.owners[at], chunk.joined(port, loop.count, loop.joins[number])
        return [found[number] for number in range(len(loop.joins))]
