"""Make of the user's module one that holds this rank's stages of a pipeline, and whose `step` runs them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sbpc._compat import local_of, slots, with_local
from sbpc.errors import PlanError
from sbpc.graph.guards import Guards
from sbpc.graph.ports import BUFFER, GRADIENT, INPUT, INPUT_GRADIENT, MUTATION, PARAMETER, SEED_PORT, TANGENT, Port
from sbpc.graph.random_bits import seed_of_step
from sbpc.mesh.layout import Layout, broadcast
from sbpc.plans.plan import Plan
from sbpc.plans.staged.schedules import Action
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, Parts
from sbpc.runtime import bind
from sbpc.runtime.accumulate import NO_SYNC, ZERO_GRAD, Collector, within
from sbpc.runtime.device_kernels import placed
from sbpc.runtime.executors import BoxedFunction, Executor
from sbpc.runtime.staged.stage_run import Joined, StageRun, Values, arrivals, before_loop, micro_batch
from sbpc.runtime.staged.step_checks import check_step, check_weights
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.mail import Mail
from sbpc.runtime.start.same_calls import SameCalls
from sbpc.runtime.state.dtensors import sharded, take_state
from sbpc.runtime.state.members import RANDOM, STAGED, members_of
from sbpc.runtime.step import no_autocast

log = logging.getLogger("sbpc")
RUNNER = "_sbpc_stage_runner"
IDLE = "stage %d has no trained parameter: give the optimizer a group, as in AdamW([{'params': [*module.parameters()]}])"
AHEAD = 2  # actions: gloo sends nothing before the receiver asks for it
STEP = """Runs the whole step on this rank's stages, micro-batch after micro-batch, and returns what the model returns, detached.

Every rank gives the whole batch, the same on all. Gradients of the whole batch are added to `.grad`. Results are the same on every rank."""


class StageRunner:
    """Runs the chunks of a rank. It holds no weights: they come with every step."""

    def __init__(self, plan: Plan, executor: Executor, where: torch.device) -> None:
        assert plan.loop is not None
        self.plan, self.loop, self.executor, self.where = plan, plan.loop, executor, where
        self.mail: Callable[[torch.device], Mail] = Mail  # makes the messages of a step
        self.stage = plan.stage_of(dist.get_rank())
        self.place = plan.ranks_of(self.stage).index(dist.get_rank())
        self.mine = [at for at, owner in enumerate(plan.owners) if owner == self.stage]
        self.peers = [plan.ranks_of(stage)[self.place] for stage in range(plan.stages)]  # by stage, whom this rank talks to
        self.places = {action: place for mine in plan.actions for place, action in enumerate(mine)}  # in its stage's order
        self.numbers = {name: at for at, name in enumerate(plan.sources)}
        self.positions = [torch.tensor([at], device=where) for at in plan.inner.coordinates(self.place)]
        self.functions: dict[tuple[int, Parts, bool], BoxedFunction] = {}
        whole = [broadcast(plan.mesh.axes) for port in self.loop.ports.inputs if port.kind == INPUT]
        self.same = SameCalls(plan.mesh, whole, self.names, apart=plan.axis is None)

    def names(self) -> list[str]:
        """Returns the names of the arguments, in the order of their leaves."""
        loop = self.loop
        ports = [port for port in loop.ports.inputs if port.kind in (INPUT, BUFFER)]
        named = dict(zip(ports, loop.before.graph.find_nodes(op="placeholder")))
        return [named[Port(INPUT, str(at))].name for at in range(len(self.same.layouts))]

    def function(self, at: int, which: Parts, adding: bool) -> BoxedFunction:
        """Returns the compiled program of some parts of a chunk."""
        if (at, which, adding) not in self.functions:
            program = self.plan.programs[at].local_at(which, adding, self.place)
            self.functions[at, which, adding] = self.executor(placed(program, self.where))
        return self.functions[at, which, adding]

    def step(
        self, values: dict[Port, Tensor], leaves: Sequence[Tensor], sums: StageSums
    ) -> tuple[dict[Port, Any], dict[str, Tensor]]:
        """Runs a step. values: parameters of this rank, buffers and the seed. Returns results by port and gradients by name."""
        with torch.no_grad(), no_autocast(self.where):
            return Step(self, values, leaves, sums).run()


class StageSums(Collector):
    """What steps within `no_sync` have added up of gradients, by chunk and name. collects: whether `no_sync` is on."""

    def __init__(self) -> None:
        self.held = dict[int, Values]()


@dataclass
class StagedWeights:
    """What a module with stages keeps between steps besides its weights. steps: how many have run."""

    guards: Guards
    sums: StageSums = field(default_factory=StageSums)
    steps: int = 0


class Step:
    """One step on this rank."""

    def __init__(self, runner: StageRunner, values: dict[Port, Tensor], leaves: Sequence[Tensor], sums: StageSums) -> None:
        self.runner, self.plan, self.loop, self.leaves, self.sums = runner, runner.plan, runner.loop, leaves, sums
        self.mail = runner.mail(runner.where)
        buffers = {port.name: value for port, value in values.items() if port.kind == BUFFER}
        self.before = before_loop(self.loop, leaves, buffers, runner.where)
        self.joined = Joined(self.loop)
        self.runs = {at: self.stage_run(at, values) for at in runner.mine}

    def stage_run(self, at: int, values: dict[Port, Tensor]) -> StageRun:
        """Returns a chunk with the values that all micro-batches read."""
        programs, chunk = self.plan.programs[at], self.plan.chunks[at]
        fixed: dict[str, Any] = {name: local_of(values[port]) for port, name in programs.fixed.items()}
        run = StageRun(chunk, programs, fixed, self.runner.positions)
        run.added = self.sums.held.get(at, {})
        return run

    def run(self) -> tuple[dict[Port, Any], dict[str, Tensor]]:
        """Runs all actions of this rank, then what is done once."""
        actions = self.plan.actions[self.runner.stage]
        for at in self.runner.mine:
            if (BEFORE, at) in self.plan.apart:
                self.part(at, (BEFORE,), 0)
        for place, action in enumerate(actions):
            for ahead in actions[place : place + 1 + AHEAD]:  # what later actions need may come while this one computes
                self.expect(ahead)
            which = self.plan.runs(action)
            self.arrive(action, which)
            if self.sums.collects:  # the sums go home in a later step
                which = tuple(part for part in which if part != AFTER)
            self.part(action.chunk, which, action.micro_batch)
        self.sums.held = {at: run.added for at, run in self.runs.items()} if self.sums.collects else {}
        gradients = {} if self.sums.collects else self.gradients()
        results = self.results()
        self.mail.finish()
        return results, gradients

    def gradients(self) -> dict[str, Tensor]:
        """Brings the sums of gradients home, and returns them by name of the parameter."""
        mine = set(self.runner.mine)
        gradients: dict[str, dict[int, Tensor]] = {name: {} for name, chunks in self.plan.shared.items() if mine & set(chunks)}
        for at in self.runner.mine:
            if (AFTER, at) in self.plan.apart:
                self.part(at, (AFTER,), 0)
            for port, value in self.runs[at].gradients().items():
                gradients.setdefault(port.name, {})[at] = value
        return {name: self.added(name, terms) for name, terms in gradients.items() if self.plan.summands.get(name, terms)}

    def expect(self, action: Action) -> None:
        """Begins to receive what an action reads of other stages."""
        chunk = self.plan.chunks[action.chunk]
        for port in arrivals(chunk, self.plan.runs(action)):
            source, sent = self.plan.sources[chunk.receives[port]] if port in chunk.receives else (action.chunk, None)
            if sent is not None and self.plan.owners[source] != self.runner.stage:
                name, value = chunk.receives[port], chunk.shapes[port]
                shape = chunk.given[port].local_shape(value.shape, self.plan.inner.sizes, self.place)
                peer = self.runner.peers[self.plan.owners[source]]
                times = sum(name in self.plan.chunks[at].receives.values() for at in self.runner.mine)
                self.mail.expect(self.key(name, action), peer, shape, value.dtype, times)

    @property
    def place(self) -> tuple[int, ...]:
        """Where this rank stands on the mesh of its stage."""
        return self.plan.inner.coordinates(self.runner.place)

    def key(self, name: str, action: Action) -> int:
        """Returns the number of a message, the same on both ends."""
        return self.runner.numbers[name] * self.loop.count + action.micro_batch

    def arrive(self, action: Action, which: Parts) -> None:
        """Puts what the program of some parts reads among the values of the micro-batch."""
        chunk, run, batch = self.plan.chunks[action.chunk], self.runs[action.chunk], action.micro_batch
        for port in arrivals(chunk, which):
            if port in chunk.receives:
                value = self.mail.receive(self.key(chunk.receives[port], action))
                self.arrived(*self.plan.sources[chunk.receives[port]], batch)
            else:
                whole = micro_batch(self.loop, chunk.arguments[port], batch, self.leaves, self.before)
                value = chunk.given[port].shard(whole.to(self.runner.where), self.plan.inner.sizes, self.place)
            run.batches.setdefault(batch, {})[run.programs.own[port]] = value

    def arrived(self, source: int, port: Port, batch: int) -> None:
        """Lets go what another stage has received: by the time at which its chunk `source` sent this, it had done what came before."""
        stage = self.plan.owners[source]
        if stage != self.runner.stage:
            action = self.plan.acting(port in self.plan.chunks[source].sends_late, source, batch)
            self.mail.arrived(self.runner.peers[stage], self.runner.places[action])

    def part(self, at: int, which: Parts, batch: int) -> None:
        """Runs the program of some parts of a chunk, and sends off what it sends."""
        run = self.runs[at]
        out = self.runner.function(at, which, run.adds(which))(run.given(which, batch))
        named = run.take(which, batch, out)
        for port, name in run.programs.outputs.items():
            if name in named:
                self.leave(at, port, batch, named[name])

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
                reading = [self.plan.acting(self.comes_late(to, name), to, batch) for to in readers if owners[to] == stage]
                self.mail.send(key, self.runner.peers[stage], value, min(self.runner.places[action] for action in reading))

    def comes_late(self, at: int, name: str) -> bool:
        """Returns whether a chunk reads a value in its backward."""
        return any(port.kind == TANGENT for port, each in self.plan.chunks[at].receives.items() if each == name)

    def added(self, name: str, known: dict[int, Tensor]) -> Tensor:
        """Returns the gradient of a parameter: with the terms of other stages, too, added up in the order of chunks.

        known: the terms of this stage's chunks. Every stage that has the parameter gets all terms.
        """
        having = self.plan.shared.get(name, list(known))
        chunks = self.plan.summands.get(name, list(known))
        port, chunk = Port(PARAMETER, name), self.plan.chunks[having[0]]
        shape = chunk.given[port].local_shape(chunk.shapes[port].shape, self.plan.inner.sizes, self.place)
        first = len(self.plan.sources) * self.loop.count
        keys = {pair: first + at for at, pair in enumerate(self.pairs)}
        others = {self.plan.owners[at] for at in having} - {self.runner.stage}
        for at in chunks:
            if at in known:
                for stage in sorted(others):
                    self.mail.send(keys[name, at], self.runner.peers[stage], known[at].contiguous())
            else:
                self.mail.expect(keys[name, at], self.runner.peers[self.plan.owners[at]], shape, chunk.shapes[port].dtype)
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
        """Returns the results of the step on every rank: the stage that has an output of the body sends it to the others."""
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


def parallelize_stages(
    model: nn.Module, plan: Plan, value: Callable[[str], Tensor], executor: Executor, where: torch.device, result: nn.Module,
    others: Callable[..., Any] | None = None,
) -> nn.Module:  # fmt: skip
    """Makes `result`, a copy of the model's tree of modules, one that runs this rank's stages. value: the whole tensor of a name.

    others: what a call of the module runs, the programs of further plans; None if there are none.
    """
    runner = StageRunner(plan, executor, where)
    own = {name: layout for at in runner.mine for name, layout in plan.chunks[at].parameters.items()}
    fill_stages(result, plan, own, value, where)
    result.__class__ = staged_class(type(model), runner, others or alone)
    if not any(each.requires_grad for each in result.parameters()):
        log.warning(IDLE, runner.stage)
    return result


def fill_stages(result: nn.Module, plan: Plan, own: dict[str, Layout], value: Callable[[str], Tensor], where: torch.device) -> None:
    """Replaces the weights of a module by this rank's shards; parameters of other stages are None. No stage's are whole on all."""
    made: dict[str, Any] = {}
    homes: dict[str, dict[str, Layout]] = {}
    others, names = plan.parameters.keys() - own.keys(), [name for name, _, _ in slots(result)]
    for name, table, key in list(slots(result)):
        first, old = plan.ports.tied.get(name, name), table[key]
        if first not in made:
            tensor: Any = value(first)
            if isinstance(old, nn.Parameter):
                home = own.get(first, broadcast(plan.inner.axes))
                tensor = None if first in others else nn.Parameter(sharded(tensor, home, plan.inner, where), old.requires_grad)
            made[first] = tensor if tensor is None else tensor.to(where)
        table[key] = made[first]
        if isinstance(made[first], nn.Parameter):
            homes.setdefault(name.rpartition(".")[0], {})[key] = own.get(first, broadcast(plan.inner.axes))
    for path, named in homes.items():
        take_state(result.get_submodule(path), named, plan.inner, where)
    away = [name for name in names if plan.ports.tied.get(name, name) in others]
    result.register_load_state_dict_pre_hook(lambda _, state, prefix, *rest: [state.pop(prefix + name, None) for name in away])


def alone(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Raises PlanError: there is no program of the forward alone."""
    raise PlanError("a module with micro-batches or stages runs forward and backward together\n  Call module.step(*args).")


def staged_class(cls: type[nn.Module], runner: StageRunner, forward: Callable[..., Any]) -> type[nn.Module]:
    """Returns the subclass of a model's class whose `step` runs stages."""
    plan, where = runner.plan, runner.where
    counted = {name: plan.owners[chunks[0]] for name, chunks in plan.shared.items()}  # by the stage that has the first chunk
    elsewhere = frozenset(name for name, stage in counted.items() if stage != runner.stage)

    def step(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in bind.arguments(plan, args, kwargs)]
        check_step(plan, self, kept_by(self).guards, leaves, where)
        tensors = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers(remove_duplicate=False))
        values = {port: tensors[port.name] for port in plan.shapes if port.kind in (PARAMETER, BUFFER) and port.name in tensors}
        check_weights(plan, runner.mine, values, plan.inner.coordinates(runner.place), where)
        random = self.__dict__[RANDOM]
        kept = kept_by(self)
        with runner.same.call(f"forward and backward{within(kept.sums)}", random, leaves, where):
            if SEED_PORT in plan.shapes:
                values[SEED_PORT] = torch.tensor(seed_of_step(**random), device=where)
                random["step"] += 1
            kept.steps += 1
            results, gradients = runner.step(values, [leaf.detach() for leaf in leaves], kept.sums)
            with torch.no_grad():
                for port, value in results.items():
                    if port.kind == MUTATION:
                        tensors[port.name].copy_(value)
                for name, gradient in gradients.items():
                    parameter = tensors[name]
                    made = with_local(parameter, gradient)
                    parameter.grad = made if parameter.grad is None else parameter.grad + made
        asked = [(leaves[int(port.name)], value) for port, value in results.items() if port.kind == INPUT_GRADIENT]
        for leaf, value in asked:
            torch.autograd.backward(leaf, value.to(leaf.device))
        return bind.outputs(plan, {port: value for port, value in results.items() if port.kind != GRADIENT})

    def no_sync(self: nn.Module) -> AbstractContextManager[None]:
        return kept_by(self).sums.no_sync()

    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        kept_by(self).sums.held = {}
        cls.zero_grad(self, set_to_none)

    step.__doc__, no_sync.__doc__, zero_grad.__doc__ = STEP, NO_SYNC, ZERO_GRAD
    own = {"no_sync": no_sync, "zero_grad": zero_grad, RUNNER: runner}
    return type(f"Staged{cls.__name__}", (cls,), members_of(cls, forward, step, elsewhere) | own)


def runner_of(module: nn.Module) -> StageRunner:
    """Returns what runs the stages of a module. Raises PlanError for a module without any."""
    runner: StageRunner | None = getattr(type(module), RUNNER, None)
    if runner is None:
        what = f"a {type(module).__name__} has no stages and no loop over micro-batches"
        raise PlanError(f"{what}\n  Give what sbpc.parallelize returns for a plan that has them.")
    return runner


def kept_by(module: nn.Module) -> StagedWeights:
    """Returns what a module keeps between steps."""
    if STAGED not in vars(module):
        module.__dict__[STAGED] = StagedWeights(Guards(module, runner_of(module).plan.options.guards))
    kept: StagedWeights = module.__dict__[STAGED]
    return kept


def bind_stages(plan: Plan, kind: str) -> None:
    """Makes the process groups of the stages, and the torch DeviceMesh of this rank's. Every rank must call this at the same point."""
    if plan.axis is None:
        process_groups.bind(plan.mesh)
        return
    stages = [plan.ranks_of(stage) for stage in range(plan.stages)]
    process_groups.bind_within(plan.inner, stages, kind)
