"""The weights of a parallel module, and which of its plans runs a call."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from sbpc._compat import HOOKS, local_of, slots
from sbpc.errors import PlanError
from sbpc.graph.guards import ChangedValue, Guards
from sbpc.graph.ports import BUFFER, PARAMETER, Port
from sbpc.graph.pytree import flatten, plain, unflatten
from sbpc.mesh.pins import leaves_with_rows
from sbpc.runtime import bind
from sbpc.runtime.accumulate import Sums
from sbpc.runtime.own_rows import Rows
from sbpc.runtime.step import Runner, Way


class Unplanned(PlanError):
    """No plan is for a call."""


@dataclass(frozen=True)
class Call:
    """What a module is called with: tensors and the structure around them.

    at_once: whether forward and backward run together, as a loop always runs them. rows: how many rows of the batch
    each rank gives, None where all give the whole; has_rows: which tensors have them; doubtful: those of which only
    their length says so.
    """

    leaves: Sequence[Tensor]
    structure: Any
    at_once: bool
    rows: Rows | None
    has_rows: Sequence[bool]
    doubtful: Sequence[int] = ()

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the tensors, with the rows of all ranks where each gives its own."""
        own = [has and not isinstance(leaf, DTensor) for leaf, has in zip(self.leaves, self.has_rows)]
        total = () if self.rows is None else (self.rows.total,)
        return [(*total, *leaf.shape[1:]) if has else tuple(leaf.shape) for leaf, has in zip(self.leaves, own)]

    @property
    def kinds(self) -> list[tuple[torch.dtype, Sequence[int]]]:
        """The dtype and the shape of each tensor."""
        return [(leaf.dtype, shape) for leaf, shape in zip(self.leaves, self.shapes)]


@dataclass
class ModuleWeights:
    """The places of a parallel module's weights, looked up once: by port, a table of a submodule and the key in it.

    guards: of the plans, by runner; known: those that were there at the last call. accepted: what `by_port` last found
    as planned, by runner and whether it trains. modes, in_mode: the last modes of the submodules, and the runners of
    plans made in them. sums: the gradients that `no_sync` keeps. steps: how many training steps have run.
    """

    places: dict[Port, tuple[dict[str, Any], str]]
    tied: list[tuple[str, tuple[dict[str, Any], str], Port]]
    submodules: dict[str, nn.Module]
    guards: dict[Runner, Guards] = field(default_factory=dict)
    known: Sequence[Runner] = ()
    accepted: dict[tuple[Runner, bool], Sequence[Any]] = field(default_factory=dict)
    modes: Sequence[bool] = ()
    in_mode: Sequence[Runner] = ()
    sums: Sums = field(default_factory=Sums)
    steps: int = 0

    @classmethod
    def of(cls, module: nn.Module, runners: Sequence[Runner]) -> ModuleWeights:
        """Finds the places in a module. Raises PlanError if it lacks a parameter of the plan on this rank."""
        plan = runners[0].plan
        named = {name: (table, key) for name, table, key in slots(module)}
        ports = {port.name: port for port in runners[0].takes if port.kind in (PARAMETER, BUFFER)}
        lost = [name for name in ports if name not in named]
        if lost:
            raise PlanError(f"the module no longer has {lost[0]!r}\n  Plan and parallelize the model as it is now.")
        # a loop leaves out what it does not use, and a further plan may be none
        ports = {name: Port(PARAMETER, name) for name in plan.ports.unused if name in named} | ports
        places = {port: named[name] for name, port in ports.items()}
        tied = [
            (name, named[name], ports[first])
            for name, first in plan.ports.tied.items()
            if name in named and first in ports
        ]
        return cls(places, tied, dict(module.named_modules()))

    def call_of(self, runners: Sequence[Runner], args: Sequence[Any], kwargs: Any, at_once: bool, ranks: Any) -> Call:
        """Returns what a call gives. ranks: what tells the ranks of each other's call, None where each finds its plan
        alone; then every rank must call this at the same point."""
        leaves, structure = flatten((tuple(args), dict(kwargs)), "the arguments")
        if ranks is None:
            return Call(leaves, structure, at_once, None, [False] * len(leaves))
        own = ranks.names is not None
        has_rows, doubtful = which_have_rows(runners, leaves, structure) if own else ([False] * len(leaves), [])
        modes = [name for name, module in self.submodules.items() if not module.training]
        sums = {"within no_sync": at_once and self.sums.collects, "keeps gradients": self.sums.unfinished}
        errors = [str(self.guards_of(each).broken() or "").partition(",")[0] for each in runners]
        rows = ranks.of(leaves, has_rows, [structure, modes, at_once, torch.is_grad_enabled(), sums, errors])
        apart = {count for _, count in rows.spans} != {rows.total}
        return Call(leaves, structure, at_once, rows if own else None, has_rows, doubtful if apart else [])

    def runner_of(self, runners: Sequence[Runner], call: Call, alone: bool = True) -> Runner:
        """Returns the runner of the plan for this call. Raises PlanError, Unplanned if a further plan would do, if
        there is none.

        It was made in the modes and with the numbers that the submodules have now, and for arguments of these
        shapes. Among several, it is one that trains if gradients are on, with those that are asked for. alone: if one
        plan is left, its runner says itself what does not fit.
        """
        modes = [module.training for module in self.submodules.values()]
        if self.known != runners:
            self.known, self.guards = [*runners], {each: self.guards_of(each) for each in runners}
            self.accepted = {key: tensors for key, tensors in self.accepted.items() if key[0] in self.guards}
            self.modes = ()
        if modes != self.modes:
            self.in_mode, self.modes = self.of_modes(runners), modes
        found = self.in_mode
        if len(found) > 1 or not alone:
            found = [runner for runner in self.in_mode if runner.fits(call.leaves, call.structure, call.shapes)]
            if not found:
                raise other_shapes(self.in_mode, call)
            values = {port: table[key] for port, (table, key) in self.places.items()}
            found.sort(key=lambda runner: runner.unlike(call.leaves, values))
        if not call.at_once:
            found = [runner for runner in found if runner.plan.loop is None or not runner.plan.options.train]
            if not found:
                raise Unplanned(
                    "a module with micro-batches or stages runs forward and backward together\n  Call "
                    "module.step(*args)."
                )
        errors = []
        for runner in found:
            if (error := self.guards[runner].broken()) is None:
                if not alone and self.lacks_backward(runners[0], runner, call):
                    raise Unplanned("gradients are on, and the only plan for this call is a forward alone")
                return runner
            errors.append(error)
        raise Unplanned(errors[0]) if isinstance(errors[0], ChangedValue) else errors[0]

    @staticmethod
    def lacks_backward(first: Runner, runner: Runner, call: Call) -> bool:
        """Returns whether a plan is for a forward alone where a further one may have a backward, and gradients are on.
        first: whose plan further ones are like; with stages they have a backward in `step` alone."""
        asked = torch.is_grad_enabled() and first.plan.options.train and not runner.plan.options.train
        return asked and (call.at_once or first.plan.axis is None)

    def guards_of(self, runner: Runner) -> Guards:
        """Returns the guards of a plan on this module."""
        if runner not in self.guards:
            self.guards[runner] = Guards(self.submodules[""], runner.plan.options.guards)
        return self.guards[runner]

    def of_modes(self, runners: Sequence[Runner]) -> list[Runner]:
        """Returns the runners of plans made in the modes in which the submodules are now."""
        modes = frozenset(name for name, module in self.submodules.items() if not module.training)
        found = [runner for runner in runners if modes == runner.modes & self.submodules.keys()]
        if not found:
            raise Unplanned(bind.other_mode(modes, runners[0].modes & self.submodules.keys()))
        return found

    def step(self, runner: Runner, random: dict[str, int], call: Call, way: Way) -> Any:
        """Runs a step, see `Runner.run`."""
        train = runner.trains and torch.is_grad_enabled()
        given = self.by_port(runner, train)
        bind.check_structure(runner.plan, call.structure)
        for port, leaf in zip(runner.inputs, call.leaves):
            given[port] = runner.shard_of(port, leaf, train, call.rows)
        self.steps += train
        return runner.run(given, random, train, way, self.sums, call.rows)

    def by_port(self, runner: Runner, train: bool) -> dict[Port, Any]:
        """Returns the parameters and buffers by port. Raises PlanError if they are no longer what was planned.

        The check takes as long as a small model's step, so it is done again only when something is another object.
        """
        tensors = [table[key] for table, key in self.places.values()]
        tied = (table[key] for _, (table, key), _ in self.tied)
        trained = (getattr(value, "requires_grad", None) for value in tensors)  # a parameter may have become None
        now = [RemovableHandle.next_id, *tensors, *map(local_of, tensors), *trained, *tied]
        given = dict(zip(self.places, tensors))
        before = self.accepted.get((runner, train), ())
        if len(now) != len(before) or not all(map(operator.is_, now, before)):
            self.check(runner, train, given)
            self.accepted[runner, train] = now
        return given

    def check(self, runner: Runner, train: bool, given: dict[Port, Any]) -> None:
        """Raises PlanError for what is no longer as it was planned."""
        for name, (table, key), port in self.tied:
            if table[key] is not given[port]:
                raise PlanError(
                    f"{name} was tied to {port.name}, and is not any more\n  Tie them again: both names, one tensor."
                )
        for port in [port for port in given if port in runner.local_shapes]:
            runner.check_weight(port, given[port], train)
        self.refuse_hooks()

    def refuse_hooks(self) -> None:
        """Raises PlanError for a hook on a submodule: nothing would call it."""
        for name, module in self.submodules.items():
            for kind in HOOKS if name else ():
                if getattr(module, kind, None):
                    raise PlanError(
                        f"{name!r} has a hook of the forward or backward, which nothing calls: the plan runs the "
                        "model as a whole\n"
                        "  Register it before sbpc.plan, so that its tensor ops are planned, or on the whole module."
                    )


def which_have_rows(
    runners: Sequence[Runner], leaves: Sequence[Tensor], structure: Any
) -> tuple[Sequence[bool], Sequence[int]]:
    """Returns which arguments have rows where each rank gives its own, and of which of these that is a guess by their
    length: those that no plan has, neither in this structure nor as an argument of this name or at this place."""
    like = next((each for each in runners if each.plan.ports.arguments == structure), None)
    if like is not None:
        return like.has_rows, []
    known: dict[Any, bool] = {}
    for runner in reversed(runners):
        places = places_of(runner.plan.ports.arguments, len(runner.has_rows))
        known |= {place: runner.has_rows[at] for place, at in places.items()}
    shapes = [leaf.shape for leaf in leaves]
    sure = {at: known[place] for place, at in places_of(structure, len(leaves)).items() if place in known}
    has_rows = [sure.get(at, guess) for at, guess in enumerate(leaves_with_rows(shapes))]
    first = next((at for at, shape in enumerate(shapes) if shape), None)
    return has_rows, [at for at, has in enumerate(has_rows) if has and at not in sure and at != first]


def places_of(structure: Any, count: int) -> dict[Any, int]:
    """Returns the numbers of the tensors that are arguments by themselves, by position or name."""
    numbers = {object(): at for at in range(count)}
    args, kwargs = unflatten(plain(structure), [*numbers])
    given = [*enumerate(args), *kwargs.items()]
    return {place: numbers[each] for place, each in given if type(each) is object}


def other_shapes(runners: Sequence[Runner], call: Call) -> Unplanned:
    """Returns the error about arguments for which none of the plans in the mode of the module is."""
    known = [
        text_of_call(
            [(runner.shapes[port].dtype, runner.planned_shape(at)) for at, port in enumerate(runner.inputs)],
            runner.plan.ports.arguments,
        )
        for runner in runners
    ]
    given = text_of_call(call.kinds, call.structure)
    lines = ["no plan is for arguments of these shapes", f"given:   {given}", *(f"planned: {each}" for each in known)]
    todo = (
        "Plan the model on such arguments, too, with pin=plan.parameters, and give it as parallelize(..., also=[...])"
    )
    return Unplanned("\n  ".join([*lines, f"{todo}; or pad them to planned shapes."]))


def text_of_call(kinds: Iterable[tuple[torch.dtype, Sequence[int]]], structure: Any) -> str:
    """Returns arguments as text, with dtypes and shapes in the place of tensors."""
    texts = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in kinds]
    args, kwargs = unflatten(plain(structure), texts)
    named = [f"{name}={value}" for name, value in kwargs.items()]
    return f"({', '.join([*map(str, args), *named])})".replace("'", "")
