"""Make of the user's module one with DTensor parameters whose forward and backward run a plan's programs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sbpc._compat import HOOKS, slots
from sbpc.errors import PlanError
from sbpc.graph.ports import PARAMETER
from sbpc.graph.random_bits import wrap
from sbpc.mesh.layout import Layout, broadcast
from sbpc.plans.plan import Plan
from sbpc.plans.rank_programs import Programs
from sbpc.runtime import bind
from sbpc.runtime.accumulate import NO_SYNC, ZERO_GRAD
from sbpc.runtime.executors import executor_of
from sbpc.runtime.joint_step import STEP, joint_step
from sbpc.runtime.module_weights import ModuleWeights
from sbpc.runtime.staged.loop_runner import LoopRunner
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.agree import agree
from sbpc.runtime.state import dtensor_optimizers
from sbpc.runtime.state.deferred_init import Recording, check_agreement, same_start
from sbpc.runtime.state.dtensors import of_rank_zero, refuse_pickles, sharded, take_state
from sbpc.runtime.state.members import RANDOM, WEIGHTS, members_of
from sbpc.runtime.step import Runner
from sbpc.runtime.step_function import Apart

log = logging.getLogger("sbpc")
RUNNERS = "_sbpc_runners"
IDLE = (
    "stage %d has no trained parameter: give the optimizer a group, as in AdamW([{'params': [*module.parameters()]}])"
)


def parallelize(
    model: nn.Module,
    plan: Plan | Programs,
    *,
    also: Sequence[Plan | Programs] = (),
    evaluate: Plan | Programs | None = None,
    init: Callable[[], nn.Module] | None = None,
    weights: Callable[[str], Tensor] | None = None,
    executor: str = "auto",
    device: str | None = None,
) -> nn.Module:
    """Returns `model` as this rank of `plan.mesh` runs it, under torchrun: a new module with DTensor parameters.

    It has the same names and the same forward, and its class is a subclass of the model's. The model is left as it
    was: make the optimizer after this call, of the new module's parameters. They hold this rank's shards, of rank
    0's values, in their homes; one that no output depends on stays whole. Masters (`masters` of `sbpc.plan`) are in
    float32; `state_dict()` holds copies of them in the types of the model, so write to them by `load_state_dict`, and
    go on from `sbpc.Checkpoints`, which hold all their digits. State dicts come as DTensors, and `load_state_dict`
    takes them whole or as DTensors of any layout. `torch.save` refuses parts: all ranks get whole
    tensors from `get_model_state_dict(module, options= StateDictOptions(full_state_dict=True))` of
    torch.distributed.checkpoint.state_dict, which rank 0 may save.

    Every rank gives the whole batch, the same on all, or its own shard where the plan was made with `inputs=`;
    results come likewise. In the first three calls and every twentieth one the ranks compare checksums of what is to
    be the same, and all raise PlanError if it is not, as with a DistributedSampler; after these three not of
    floating-point numbers on GPUs, which ranks may have computed to other last bits. Ranks may evaluate alone where
    their programs send nothing.

    `loss = module.step(*args)` runs forward and backward as one program and leaves the gradients in `.grad`: it takes
    the seconds that the plan predicts. Backwards within `with module.no_sync():` send no gradients; the next one
    outside sends their sum. A DTensor argument is brought to the planned layout. Where the plan has a `loss`, give
    `(*args, *targets)`. `module.clip_grad_norm_(max_norm)` clips the gradients by their norm over all ranks.

    A loop over micro-batches, with stages or without, is run by `module.step(*args)` alone: every rank gives the whole
    batch, the same on all, and gets the results. For a forward, or a backward apart, give a plan of one program in
    `also`, which stages do not have: there a rank holds the parameters of its stages, and those of other stages are
    None. Whole state dicts load as they are; `state_dict()` has this rank's stages alone, `sbpc.Checkpoints` saves all.
    Stages skip a step of `torch.amp.GradScaler` together if all have gradients of the same dtypes.

    also       more plans of the model, made with `pin=plan.parameters`, so that they store the parameters as `plan`
               does: for arguments of other shapes, such as a last smaller batch, for `.eval()`, or with `train=False`;
               loops, too. A call runs the plan that was made in the mode (train or eval) that the module is in and on
               arguments of the same shapes; of two such plans, the one with a backward if gradients are on; of plans
               made with other values of `model.beta`, say, the one made with that which `module.beta` has. There is one
               state, whichever plan runs:

                   small = sbpc.plan(model, last_batch, mesh, pin=plan.parameters)
                   test = sbpc.plan(model.eval(), test_batch, mesh, train=False, pin=plan.parameters)
                   module = sbpc.parallelize(model.train(), plan, also=[small, test])

    evaluate   one more such plan, for when `.eval()` is called on the module.
    init       what builds the model on one device, such as its class, for a model on the meta device that is too large
               for one. Its ops are recorded and replayed for one parameter at a time: a rank holds its shards and the
               largest parameter at most, and the numbers are those that one device draws from the seed of rank 0.
               Constructors that look at values, such as rejection sampling in `trunc_normal_`, are refused.
    weights    what gives the whole tensor of a name, one after another, in place of the model's, which may be on the
               meta device.
    executor   "auto" is Inductor's kernels on GPUs, where equal layers are compiled once, and generated code on CPUs;
               "code", "inductor", "interpreter", or "nans", which ends with NanError at the first op that
               makes NaN, with its module and your line.
    device     "cuda" or "cpu"; by default what there is.

    Random numbers (dropout, `torch.rand` and the like) depend on a seed, on the place in the program and on where an
    element stands in the whole tensor. So one seed gives the same loss on every mesh, one rank included; they are
    not the numbers that `torch.manual_seed` gives in eager torch. Forward number n has the seed
    `sbpc.graph.random_bits.seed_of_step(base, n)`, where base is rank 0's `torch.initial_seed()`. A state_dict does
    not hold it: keep `module.random_state()`, {"seed": base, "step": n}, beside a checkpoint of your own, and give
    it to `module.set_random_state(state)`. `sbpc.Checkpoints` does.

    Ranks with different models, plans or versions of torch say so here. Raises MeshError if there are not as many
    processes as ranks, PlanError if model and plan do not belong together. The module raises PlanError for arguments
    of other shapes, under another autocast than was planned, in a mode that was not planned, with other numbers in
    attributes that the forward reads than were planned, for gradients of gradients, and when it is pickled;
    LostRankError, which names them, when ranks no longer answer.
    """
    run = executor_of(executor)
    others = [*several(also), *([] if evaluate is None else [evaluate])]
    check_plans(model, plan, others)
    where = process_groups.start(device)
    process_groups.check_ranks(plan.mesh)
    for each in (plan, *others):
        agree(each)
    if plan.axis is None:
        process_groups.bind(plan.mesh)
    else:
        process_groups.bind_within(plan.inner, [plan.ranks_of(stage) for stage in range(plan.stages)], where.type)
    if any(isinstance(tensor, DTensor) for tensor in bind.stored(plan, model).values()):
        raise PlanError(
            "the model is parallel already\n  Give the one-device model, then load_state_dict(parallel.state_dict())."
        )
    bind.check_guards(model, plan, *others)
    if type(model) is nn.Module:  # a bare tree of weights, such as `load_module` makes
        plan, *others = map(unguarded, (plan, *others))
    value = source_of_weights(model, plan, init, weights, where)
    dtensor_optimizers.install()
    refuse_pickles()
    result = skeleton(model)
    result.__dict__[RANDOM] = {"seed": agreed_seed(where), "step": 0}
    runners = [(Runner if each.loop is None else LoopRunner)(each, run, where) for each in (plan, *others)]
    for runner in runners:
        runner.read_masters(plan.ports.masters)
    fill(result, runners[0], value)
    result.__class__ = parallel_class(type(model), runners)
    if plan.axis is not None and not any(each.requires_grad for each in result.parameters()):
        log.warning(IDLE, plan.stage_of(dist.get_rank()))
    return result


def source_of_weights(
    model: nn.Module,
    plan: Plan | Programs,
    init: Callable[[], nn.Module] | None,
    weights: Callable[[str], Tensor] | None,
    where: torch.device,
) -> Callable[[str], Tensor]:
    """Returns the function from a name to the whole tensor, the same on all ranks: of `weights`, of `init`, or of
    the model."""
    if weights is not None:
        return lambda name: of_rank_zero(weights(name), where)
    if init is not None:
        same_start()
        recording = Recording(init)
        check_agreement(recording)
        bind.stored(plan, recording.model)
        return recording.tensor
    tensors = {name: table[key] for name, table, key in slots(model)}
    if any(tensor.is_meta for tensor in tensors.values()):
        raise PlanError(
            "the model is on the meta device: there is nothing to distribute\n"
            "  Say what builds it on one device, init=Model, or give it weights: model.to_empty(device='cpu')."
        )
    return lambda name: of_rank_zero(tensors[name], where)


def unguarded(plan: Any) -> Any:
    """Returns a plan without guards."""
    twin = copy.copy(plan)
    vars(twin)["options"] = replace(plan.options, guards={})
    return twin


def several(also: Any) -> Sequence[Any]:
    """Returns the argument `also`. Raises PlanError for what is no list."""
    if not isinstance(also, (list, tuple)):
        raise PlanError(f"also is a {type(also).__name__}\n  Give a list of plans.")
    return also


def check_plans(model: Any, plan: Any, others: Sequence[Any]) -> None:
    """Raises PlanError for what is no module, for what is no plan, and for plans that store the parameters
    differently."""
    bind.check_module(model)
    for each in (plan, *others):
        bind.check_plan(each)
    if others and any(each.axis is not None for each in (plan, *others)):
        todo = "Leave also= and evaluate= out; evaluate in another job, from a checkpoint."
        raise PlanError(f"a module with stages is for training alone, and stages are no further plan\n  {todo}")
    for other in others:
        bind.stored(other, model)
        if other.ports.masters != plan.ports.masters and (other.options.train or other.ports.masters):
            raise PlanError(
                "one plan has float32 masters of parameters, another has none of these\n  Make the other one with "
                f"pin=plan.parameters, masters={bool(plan.ports.masters)}."
            )
        if other.mesh != plan.mesh:
            raise PlanError(f"one plan is for {plan.mesh}, another for {other.mesh}\n  Plan both for one mesh.")
        for name, home in plan.parameters.items():
            if other.parameters.get(name, home) != home:
                raise PlanError(
                    f"{name} is stored in {home} by one plan, in {other.parameters[name]} by the other\n"
                    "  Make the other one with pin=plan.parameters."
                )


def parallel_class(cls: type[nn.Module], runners: list[Runner]) -> type[nn.Module]:
    """Returns the subclass of a model's class whose forward runs programs. A deep copy runs them on its own weights."""

    def weights_of(self: nn.Module) -> ModuleWeights:
        weights: ModuleWeights | None = self.__dict__.get(WEIGHTS)
        if weights is None:
            weights = self.__dict__[WEIGHTS] = ModuleWeights.of(self, runners)
        return weights

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        weights = weights_of(self)
        return weights.step(weights.runner_of(runners, args, kwargs), self.__dict__[RANDOM], args, kwargs, Apart)

    def step(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        weights = weights_of(self)
        return joint_step(
            weights.runner_of(runners, args, kwargs, at_once=True), weights, self.__dict__[RANDOM], args, kwargs
        )

    def no_sync(self: nn.Module) -> AbstractContextManager[None]:
        return weights_of(self).sums.no_sync()

    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        weights_of(self).sums.drop()
        cls.zero_grad(self, set_to_none)

    step.__doc__, no_sync.__doc__, zero_grad.__doc__ = STEP, NO_SYNC, ZERO_GRAD
    own = {"no_sync": no_sync, "zero_grad": zero_grad, RUNNERS: runners}
    return type(f"Parallel{cls.__name__}", (cls,), members_of(cls, forward, step, runners[0].elsewhere) | own)


def runner_of(module: nn.Module) -> Runner:
    """Returns what runs the plan of a parallel module. Raises PlanError for another module."""
    runners: list[Runner] | None = getattr(type(module), RUNNERS, None)
    if runners is None:
        raise PlanError(f"a {type(module).__name__} is not parallel\n  Give what sbpc.parallelize returns.")
    return runners[0]


def masters_of(module: nn.Module) -> dict[str, str]:
    """Returns by name of a parameter with a float32 master the type in which the model has it; none of a module that is
    not parallel."""
    return dict(runner_of(module).plan.ports.masters) if hasattr(type(module), RUNNERS) else {}


def steps_run(module: nn.Module) -> int | None:
    """Returns how many training steps a module has run in this process, None if it is not parallel."""
    if RANDOM not in vars(module):
        return None
    return vars(module)[WEIGHTS].steps if WEIGHTS in vars(module) else 0


def agreed_seed(where: torch.device) -> int:
    """Returns the seed that rank 0's torch was started with."""
    return int(of_rank_zero(torch.tensor(wrap(torch.initial_seed())), where))


def skeleton(module: nn.Module) -> nn.Module:
    """Copies the tree of modules. The copy shares no table with it and has no hooks: the plan holds what they do."""
    copies: dict[int, nn.Module] = {}

    def copied(old: nn.Module) -> nn.Module:
        if id(old) not in copies:
            new = copies[id(old)] = old.__class__.__new__(old.__class__)  # parametrized modules refuse copy.copy
            for key, value in vars(old).items():
                new.__dict__[key] = copy.copy(value) if isinstance(value, dict) else value
            for kind in HOOKS:
                new.__dict__[kind].clear()
            children = new.__dict__["_modules"]
            children.update((name, None if child is None else copied(child)) for name, child in list(children.items()))
        return copies[id(old)]

    return copied(module)


def fill(result: nn.Module, runner: Runner, value: Callable[[str], Tensor]) -> None:
    """Replaces the weights of a module by this rank's shards of `value(name)`; parameters of other stages are None,
    those that are not planned stay whole."""
    plan, made = runner.plan, dict[str, Any]()
    types = {name: getattr(torch, kind) for name, kind in plan.ports.masters.items()}
    own = {port.name: layout for port, layout in runner.layouts.items() if port.kind == PARAMETER}
    away, homes = plan.parameters.keys() - own.keys(), dict[str, dict[str, Layout]]()
    masters: dict[str, dict[str, torch.dtype]] = {}
    places = list(slots(result))
    for name, table, key in places:
        first, old = plan.ports.tied.get(name, name), table[key]
        home = own.get(first, broadcast(plan.inner.axes))
        if first not in made:
            tensor: Any = value(first)
            if isinstance(old, nn.Parameter):
                kind = torch.float32 if first in types else None
                tensor = (
                    None
                    if first in away
                    else nn.Parameter(sharded(tensor, home, plan.inner, runner.where, kind), old.requires_grad)
                )
            made[first] = tensor if tensor is None else tensor.to(runner.where)
        table[key] = made[first]
        if isinstance(made[first], nn.Parameter):
            path = name.rpartition(".")[0]
            homes.setdefault(path, {})[key] = home
            masters.setdefault(path, {}).update({key: types[first]} if first in types else {})
    for path, named in homes.items():
        take_state(result.get_submodule(path), named, masters[path], plan.inner, runner.where)
    elsewhere = [name for name, _, _ in places if plan.ports.tied.get(name, name) in away]
    if elsewhere:
        result.register_load_state_dict_pre_hook(
            lambda _, state, prefix, *rest: [state.pop(prefix + name, None) for name in elsewhere]
        )
