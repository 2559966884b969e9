"""The weights of a parallel module, and which of its plans runs a call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sbpc._compat import HOOKS, local_of, slots
from sbpc.errors import PlanError
from sbpc.graph.guards import Guards
from sbpc.graph.ports import BUFFER, PARAMETER, Port
from sbpc.graph.pytree import flatten, plain, unflatten
from sbpc.runtime import bind
from sbpc.runtime.accumulate import Sums
from sbpc.runtime.step import Runner, Way


@dataclass
class ModuleWeights:
    """The places of a parallel module's weights, looked up once: by port, a table of a submodule and the key in it.

    guards: of the plans, by runner. accepted: what `by_port` last found as planned, by runner and whether it trains.
    modes, in_mode: the last modes of the submodules, and the runners of plans made in them. sums: the gradients that
    `no_sync` keeps. steps: how many training steps have run.
    """

    places: dict[Port, tuple[dict[str, Any], str]]
    tied: list[tuple[str, tuple[dict[str, Any], str], Port]]
    submodules: dict[str, nn.Module]
    guards: dict[Runner, Guards]
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
        places = {port: named[name] for name, port in ports.items()}
        tied = [
            (name, named[name], ports[first])
            for name, first in plan.ports.tied.items()
            if name in named and first in ports
        ]
        guards = {runner: Guards(module, runner.plan.options.guards) for runner in runners}
        return cls(places, tied, dict(module.named_modules()), guards)

    def runner_of(
        self, runners: list[Runner], args: Sequence[Any], kwargs: dict[str, Any], at_once: bool = False
    ) -> Runner:
        """Returns the runner of the plan for this call. Raises PlanError if there is none.

        It was made in the modes and with the numbers that the submodules have now, and for arguments of these
        shapes. Among several, it is one that trains if gradients are on, with those that are asked for. at_once:
        whether forward and backward run together, as a loop always runs them.
        """
        modes = [module.training for module in self.submodules.values()]
        if not self.in_mode or modes != self.modes:
            self.in_mode, self.modes = self.of_modes(runners), modes
        found = self.in_mode
        if len(found) > 1:  # one alone says itself what does not fit
            leaves, structure = flatten((tuple(args), kwargs), "the arguments")
            found = [runner for runner in self.in_mode if runner.fits(leaves, structure)]
            if not found:
                raise other_shapes(self.in_mode, leaves, structure)
            values = {port: table[key] for port, (table, key) in self.places.items()}
            found.sort(key=lambda runner: runner.unlike(leaves, values))
        if not at_once:
            found = [runner for runner in found if runner.plan.loop is None]
            if not found:
                raise PlanError(
                    "a module with micro-batches or stages runs forward and backward together\n  Call "
                    "module.step(*args)."
                )
        errors = []
        for runner in found:
            if (error := self.guards[runner].broken()) is None:
                return runner
            errors.append(error)
        raise errors[0]

    def of_modes(self, runners: list[Runner]) -> list[Runner]:
        """Returns the runners of plans made in the modes in which the submodules are now."""
        modes = frozenset(name for name, module in self.submodules.items() if not module.training)
        found = [runner for runner in runners if modes == runner.modes & self.submodules.keys()]
        if not found:
            raise bind.other_mode(modes, runners[0].modes & self.submodules.keys())
        return found

    def step(
        self, runner: Runner, random: dict[str, int], args: Sequence[Any], kwargs: dict[str, Any], way: Way
    ) -> Any:
        """Runs a step, see `Runner.run`."""
        train = runner.trains and torch.is_grad_enabled()
        given = self.by_port(runner, train)
        for port, leaf in zip(runner.inputs, bind.arguments(runner.plan, args, kwargs)):
            given[port] = runner.shard_of(port, leaf, train)
        self.steps += train
        return runner.run(given, random, train, way, self.sums)

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
        for port, value in given.items():
            runner.check_weight(port, value, train)
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


def other_shapes(runners: Sequence[Runner], leaves: Sequence[Tensor], structure: Any) -> PlanError:
    """Returns the error about arguments for which none of the plans in the mode of the module is."""

    def text(kinds: Sequence[tuple[torch.dtype, Sequence[int]]], structure: Any) -> str:
        texts = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in kinds]
        args, kwargs = unflatten(plain(structure), texts)
        named = [f"{name}={value}" for name, value in kwargs.items()]
        return f"({', '.join([*map(str, args), *named])})".replace("'", "")

    known = [
        text(
            [(runner.shapes[port].dtype, runner.local_shapes[port]) for port in runner.inputs],
            runner.plan.ports.arguments,
        )
        for runner in runners
    ]
    given = text([(leaf.dtype, leaf.shape) for leaf in leaves], structure)
    lines = ["no plan is for arguments of these shapes", f"given:   {given}", *(f"planned: {each}" for each in known)]
    todo = (
        "Plan the model on such arguments, too, with pin=plan.parameters, and give it as parallelize(..., also=[...])"
    )
    return PlanError("\n  ".join([*lines, f"{todo}; or pad them to planned shapes."]))
