"""Match a plan to the user's objects: parameters and buffers by name, arguments by place, results by structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sbpc._compat import has_hook
from sbpc.errors import PlanError, check_kinds, shown
from sbpc.graph.guards import Guards
from sbpc.graph.ports import BUFFER, GRADIENT, OUTPUT, PARAMETER, TANGENT, Port
from sbpc.graph.pytree import flatten, same_structure, unflatten
from sbpc.plans.plan import Plan
from sbpc.plans.rank_programs import Programs

AnyPlan = Plan | Programs
ANOTHER_MODEL = "Give the model that was planned, or plan this one."
OTHER_SHAPES = (
    "Give also='auto' to sbpc.parallelize, which plans other shapes when they come, or pad the last batch to the"
    " planned one."
)


def check_plan(plan: Any) -> None:
    """Raises PlanError for what is no plan."""
    if not isinstance(plan, (Plan, Programs)):
        raise PlanError(f"the plan is {shown(plan)}\n  Give what sbpc.plan or sbpc.load returns.")


def stored(plan: AnyPlan, model: nn.Module) -> dict[Port, Tensor]:
    """Returns the parameters and buffers of `model` by port. Raises PlanError if they are not those of the plan."""
    check_module(model)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    planned = weights(plan)
    known = {*planned, *plan.ports.tied, *plan.ports.unused}
    missing = [name for name in planned if name not in tensors]
    more = [name for name in dict(model.named_parameters()) if name not in known]
    if missing or more:
        raise PlanError(
            f"the model is not the one that was planned: it lacks {missing[:3] or 'nothing'} and has "
            f"{more[:3] or 'nothing'} besides\n"
            f"  {ANOTHER_MODEL}"
        )
    for name, value in planned.items():
        check(f"parameter {name}", tensors[name], value, todo=ANOTHER_MODEL)
    for name, first in plan.ports.tied.items():
        if name in tensors and first in tensors and tensors[name] is not tensors[first]:
            raise PlanError(f"{name} was tied to {first} when planned, and is not\n  Tie them, or plan this model.")
    names: dict[int, str] = {}
    for port in plan.shapes:
        if port.kind == PARAMETER and (first := names.setdefault(id(tensors[port.name]), port.name)) != port.name:
            raise PlanError(f"{port.name} is tied to {first}, and was not when planned\n  Plan the model as it is now.")
    return {port: tensors[port.name] for port in plan.shapes if port.kind in (PARAMETER, BUFFER)}


def weights(plan: AnyPlan) -> dict[str, Tensor]:
    """Returns by name of a parameter or buffer a tensor without data as the model has it: where the plan has a master,
    in the type of the model."""
    stored = {port.name: value for port, value in plan.shapes.items() if port.kind in (PARAMETER, BUFFER)}
    own = {name: getattr(torch, kind) for name, kind in plan.ports.masters.items()}
    return {name: value.to(own[name]) if name in own else value for name, value in stored.items()}


def check_module(model: Any) -> None:
    """Raises PlanError for what is no module."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"the model is {shown(model)}\n  Give the nn.Module that was planned.")


def check_guards(model: nn.Module, *plans: AnyPlan) -> None:
    """Raises PlanError if a model's attributes are not as they were for any of some plans. A bare tree of weights
    has none."""
    check_module(model)
    if type(model) is nn.Module:
        return
    hooked = next((name for name, value in model.named_parameters() if has_hook(value)), None)
    if hooked is not None:
        raise PlanError(
            f"the parameter {hooked!r} has a hook, which nothing calls\n  Register it on that of the parallel module."
        )
    errors = [Guards(model, plan.options.guards, hooks=True).broken() for plan in plans]
    if errors[0] is not None and None not in errors:
        raise errors[0]


def check_modes(model: nn.Module, plan: AnyPlan) -> None:
    """Raises PlanError if submodules are in another mode (train or eval) than when the plan was made. A bare tree of
    weights has none."""
    submodules = dict(model.named_modules())
    modes = frozenset(name for name, each in submodules.items() if not each.training)
    if type(model) is not nn.Module and modes != (planned := frozenset(plan.options.eval) & submodules.keys()):
        raise other_mode(modes, planned)


def other_mode(modes: frozenset[str], planned: frozenset[str]) -> PlanError:
    """Returns the error about submodules in eval mode, by name, that are not those that were when the model was
    planned."""
    name = min(modes ^ planned)
    mode = {True: "eval", False: "train"}
    return PlanError(
        f"the module is in another mode (train or eval) than when it was planned:"
        f" {name or 'the model itself'} is in {mode[name in modes]}, was in {mode[name in planned]}\n"
        "  Give also='auto' to sbpc.parallelize, which plans evaluation when it comes; or plan model.eval() too, with"
        " train=False and pin=plan.parameters, and give it as parallelize(..., evaluate=)."
    )


def arguments(plan: AnyPlan, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Tensor]:
    """Returns the tensor leaves of the arguments. Raises PlanError if their structure is not the planned one."""
    check_kinds(PlanError, kwargs=(kwargs, "a mapping whose keys are texts", "None"))
    args = args if isinstance(args, (tuple, list)) else (args,)
    leaves, structure = flatten((tuple(args), dict(kwargs or {})), "the arguments")
    check_structure(plan, structure)
    return leaves


def check_structure(plan: AnyPlan, structure: Any) -> None:
    """Raises PlanError if the structure of arguments is not the planned one."""
    if not same_structure(structure, plan.ports.arguments):
        raise PlanError(
            f"the arguments are not like those planned\n  given:   {structure}\n  planned: {plan.ports.arguments}\n"
            "  Constants are part of a plan: plan once for each, or pass a tensor. parallelize(..., also='auto') plans "
            "what comes."
        )


def check(
    what: str, given: Tensor, planned: Tensor, shape: Sequence[int] | None = None, todo: str = OTHER_SHAPES
) -> None:
    """Raises PlanError unless a tensor has the planned dtype and shape, or the planned dtype and `shape`. todo: what
    then is to be done."""
    shape = tuple(planned.shape if shape is None else shape)
    if tuple(given.shape) != shape or given.dtype != planned.dtype:
        raise PlanError(
            f"{what} is {given.dtype} {tuple(given.shape)}, the plan is for {planned.dtype} {shape}\n  {todo}"
        )


def default_tangents(plan: AnyPlan, tangents: Any) -> list[Tensor]:
    """Returns the tangents as a list, or ones if there are none."""
    planned = [value for port, value in plan.shapes.items() if port.kind == TANGENT]
    if tangents is None:
        return [torch.ones(value.shape, dtype=value.dtype) for value in planned]
    given, _ = flatten(tangents, "tangents")
    if len(given) != len(planned):
        raise PlanError(f"{len(given)} tangents for {len(planned)} differentiable outputs\n  Give one for each.")
    for number, (tensor, value) in enumerate(zip(given, planned)):
        check(f"tangent {number}", tensor, value)
    return given


def outputs(plan: AnyPlan, results: Mapping[Port, Any]) -> Any:
    """Returns the results in the structure that the model returns."""
    count = sum(port.kind == OUTPUT for port in plan.ports.outputs)
    return unflatten(plan.ports.results, [results[Port(OUTPUT, str(at))] for at in range(count)])


def gradients(plan: AnyPlan, results: Mapping[Port, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns gradients by parameter in the order of `names`. Unused parameters have None, frozen ones are absent."""
    computed = {port.name: value for port, value in results.items() if port.kind == GRADIENT}
    return {name: computed.get(name) for name in names if name in computed or name in plan.ports.unused}
