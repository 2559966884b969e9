"""Plan what a module is called with where none of its plans is for it: `parallelize(..., also="auto")`."""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from sbpc.errors import PlanError, SbpcError
from sbpc.graph.guards import Guards
from sbpc.graph.ports import INPUT
from sbpc.graph.pytree import unflatten
from sbpc.plans.plan import Plan
from sbpc.runtime.executors import Executor
from sbpc.runtime.module_weights import Call, text_of_call
from sbpc.runtime.staged.loop_runner import LoopRunner
from sbpc.runtime.start.agree import agree
from sbpc.runtime.step import Runner

AUTO, MOST = "auto", 8
RELAID = 16
DOUBTFUL = 3  # tensors at most of which is tried whether they have rows
OWN = {"forward", *vars(nn.Module())}  # attributes that a module has of its own
log = logging.getLogger("sbpc")


def most_plans(also: Any) -> int | None:
    """Returns how many plans `also="auto"`, or "auto:20", lets a module have; None for a list of plans."""
    if not isinstance(also, str):
        return None
    found = re.fullmatch(rf"{AUTO}(?::([1-9]\d*))?", also)
    if found is None:
        raise PlanError(f'also is {also!r}\n  Give "auto", "auto:20" for at most 20 plans, or a list of plans.')
    return int(found[1] or MOST)


class FurtherPlans:
    """Makes plans like the first one of a module, which has its homes. model: the model of one device, on meta. most:
    how many plans the module may have."""

    def __init__(self, model: nn.Module, plan: Any, most: int, run: Executor, where: torch.device) -> None:
        if not isinstance(plan, Plan) or plan.alike is None:
            raise PlanError(
                "also='auto' plans further steps like the first, and a plan from a file does not know of what model\n"
                "  Give the plan that sbpc.plan returns: it takes from its cache what was planned before."
            )
        self.model, self.plan, self.most = model, plan, most
        self.run, self.where, self.relaid = run, where, list[Runner]()

    def add(self, module: nn.Module, runners: list[Runner], call: Call, error: PlanError) -> None:
        """Adds what runs a plan for a call of a parallel module in the modes that it is in. error: why there is none
        yet. Every rank must call this at the same point.

        Plans in the layouts of others are made quickly, so only the last RELAID of them are kept, and none counts.
        """
        train = self.plan.options.train and torch.is_grad_enabled()
        if (call.at_once and not train) or (self.plan.axis is not None and train and not call.at_once):
            raise error
        modules = dict(module.named_modules())
        for name, own in self.model.named_modules():
            follow(own, vars(modules[name]))
        step, args, call = self.captured(call, train)
        if (changed := Guards(module, step.about["guards"]).broken()) is not None:
            raise changed
        planned = [each.plan for each in runners if each not in self.relaid and isinstance(each.plan, Plan)]
        plan, count = serving(self.plan.alike, step, planned, call.shapes), len(runners) - len(self.relaid)
        named = f"{'train' if train else 'no grad'}: {text_of_call(call.kinds, call.structure)}"
        if is_new := plan is None:
            if count >= self.most:
                raise PlanError(
                    f"the module has {count} of {self.most} plans, as many as also='auto:{self.most}' allows: {error}\n"
                    f"  Pad batches to few lengths, see sbpc.buckets, or allow more: also='auto:{2 * self.most}'."
                ) from error
            log.info("plan %d of at most %d, %s", count + 1, self.most, named)
            plan = self.plan.alike.planned(step, args, self.plan.parameters, self.plan.cuts, call.at_once)
        else:
            log.info("the layouts of a plan serve, %s", named)
        check_homes(self.plan, plan)
        agree(plan)
        made = runner_for(plan, self.run, self.where)
        made.read_masters(self.plan.ports.masters)
        if not made.fits(call.leaves, call.structure, call.shapes) or made.has_rows != [*call.has_rows]:
            raise PlanError(
                f"the batch has as many rows as dim 0 of a tensor without rows is long, of {made.has_rows}\n"
                "  Give that tensor another shape, or leave it in an attribute of the model."
            )
        self.relaid += [] if is_new else [made]
        if len(self.relaid) > RELAID:
            runners.remove(self.relaid.pop(0))
        runners.append(made)

    def captured(self, call: Call, train: bool) -> tuple[Any, Sequence[Any], Call]:
        """Returns a captured step, its arguments, and the call with the rows that it has: where their length alone
        says of tensors that they have some, the only way to share them out in which the model runs.

        Raises PlanError if there are several, and what the capture raises if there is none.
        """
        if len(call.doubtful) > DOUBTFUL:
            raise unclear(call, call.doubtful)
        found, errors = [], []
        for whole in product((False, True), repeat=len(call.doubtful)):
            without = {at for at, each in zip(call.doubtful, whole) if each}
            other = replace(call, has_rows=[has and at not in without for at, has in enumerate(call.has_rows)])
            leaves = [like_meta(leaf, shape) for leaf, shape in zip(call.leaves, other.shapes)]
            args, kwargs = unflatten(call.structure, leaves)
            try:
                found.append((self.plan.alike.captured(self.model, args, kwargs, train), args, other))
            except SbpcError as error:
                errors.append(error)
        if not found:
            raise errors[0]
        if len(found) > 1:
            ways = zip(*(other.has_rows for _, _, other in found))
            raise unclear(call, [at for at, way in enumerate(ways) if len({*way}) > 1])
        return found[0]


def serving(alike: Any, step: Any, planned: Sequence[Plan], shapes: Sequence[Sequence[int]]) -> Plan | None:
    """Returns the plan of a captured step in the layouts of one of some plans, of the nearest in size that will do."""
    nearest = sorted(planned, key=lambda plan: distance(plan, shapes))
    return next((found for each in nearest if (found := alike.relaid(step, each)) is not None), None)


def follow(own: nn.Module, now: Mapping[str, Any]) -> None:
    """Gives a module of one device the mode and the other attributes that its parallel twin has now, without weights,
    submodules and hooks."""
    vars(own)["training"] = now["training"]
    for key, value in now.items():
        if key not in OWN and not key.startswith("_sbpc_") and not isinstance(value, (Tensor, nn.Module)):
            vars(own)[key] = copy.copy(value) if isinstance(value, dict) else value


def unclear(call: Call, doubtful: Sequence[int]) -> PlanError:
    """Returns the error about tensors that may be rows of the batch, or the same on all ranks."""
    given = text_of_call(call.kinds, call.structure)
    return PlanError(
        f"no plan says whether each rank gives its own rows of the tensors {[*doubtful]} of {given}, or all of them\n"
        "  Plan such arguments, the whole batch, with pin=plan.parameters and inputs=, and give it as "
        "parallelize(..., also=[...]); or plan the first time with all arguments."
    )


def like_meta(leaf: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns a tensor of a shape without data."""
    return torch.empty(shape, dtype=leaf.dtype, device="meta").requires_grad_(leaf.requires_grad)


def distance(plan: Plan, shapes: Sequence[Sequence[int]]) -> float:
    """Returns how far the number of elements that a plan takes is from that of some shapes."""
    sizes = [value.numel() for port, value in plan.shapes.items() if port.kind == INPUT]
    return abs(math.log((1 + sum(sizes)) / (1 + sum(map(math.prod, shapes)))))


def runner_for(plan: Any, run: Executor, where: torch.device) -> Runner:
    """Returns what runs a plan."""
    return (Runner if plan.loop is None else LoopRunner)(plan, run, where)


def check_homes(plan: Any, other: Any) -> None:
    """Raises PlanError unless two plans store the parameters alike, each on the same stage."""
    for name, home in plan.parameters.items():
        if other.parameters.get(name, home) != home:
            raise PlanError(
                f"{name} is stored in {home} by one plan, in {other.parameters[name]} by the other\n"
                "  Make the other one with pin=plan.parameters."
            )
    if plan.axis != other.axis:
        raise PlanError(
            f"one plan has stages along {plan.axis!r}, another along {other.axis!r}\n  Give both the same stages=; a "
            "forward alone has them with train=False."
        )
    held = [stages_of(each) for each in (plan, other)] if plan.axis is not None else [{}, {}]
    for name, stages in held[1].items():
        if stages != held[0].get(name, stages):
            raise PlanError(
                f"{name} is on the stages {held[0][name]} of one plan, on {stages} of the other\n"
                "  Make the other one with cuts=plan.cuts."
            )


def stages_of(plan: Plan) -> dict[str, list[int]]:
    """Returns the stages on which each parameter is."""
    found: dict[str, list[int]] = {}
    for at, chunk in enumerate(plan.chunks):
        for name in chunk.parameters:
            found[name] = sorted({*found.get(name, ()), plan.owners[at]})
    return found
