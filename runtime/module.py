"""Make of the user's module one with DTensor parameters whose forward and backward run a plan's programs."""

from __future__ import annotations

import copy
import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from sbpc._compat import slots
from sbpc.errors import PlanError
from sbpc.graph.guards import FORWARD
from sbpc.graph.ports import INPUT, PARAMETER
from sbpc.graph.pytree import plain, unflatten
from sbpc.graph.random_bits import wrap
from sbpc.mesh.layout import Layout, broadcast
from sbpc.plans.plan import Plan
from sbpc.plans.rank_programs import Programs
from sbpc.runtime import bind
from sbpc.runtime.accumulate import NO_SYNC, ZERO_GRAD
from sbpc.runtime.executors import executor_of
from sbpc.runtime.further_plans import FurtherPlans, check_homes, most_plans, runner_for
from sbpc.runtime.module_weights import Call, ModuleWeights, Unplanned
from sbpc.runtime.own_rows import OwnRows, check_rows_alike
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.agree import agree
from sbpc.runtime.state import dtensor_optimizers, dtensor_writes, wrappers
from sbpc.runtime.state.deferred_init import Recording, check_agreement, same_start
from sbpc.runtime.state.dtensors import of_rank_zero, refuse_parts, sharded, take_state
from sbpc.runtime.state.members import members_of
from sbpc.runtime.state.whole import RANDOM, RUNNERS, WEIGHTS, skeleton
from sbpc.runtime.step import Runner
from sbpc.runtime.step_function import STEP, Apart, joint_step

log = logging.getLogger("sbpc")
IDLE = (
    "stage %d has no trained parameter: give the optimizer a group, as in AdamW([{'params': [*module.parameters()]}])"
)
APART = (
    "the parameter %s is also one of another parallel module: on one device both train it, and here each trains "
    "a copy of its own. Make one module of both, and plan that."
)
made_of: Any = WeakIdKeyDictionary()  # of a parameter: the model that was made parallel last, and what that became


def parallelize(
    model: nn.Module,
    plan: Plan | Programs,
    *,
    also: str | Sequence[Plan | Programs] = (),
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
    takes them whole or as DTensors of any layout, as `parameter.data = x` does. `torch.save` refuses parts: take whole
    tensors by `sbpc.full_state_dict(module)`, or call `module.save_pretrained(folder)` of transformers and peft on all
    ranks. What would be written into a copy of a part, as by `parameter[3].zero_()`, is refused.

    Every rank gives the whole batch, the same on all; or its own rows of it where the plan was made with
    `inputs="data"`, evenly or not, as the loaders of DistributedSampler and accelerate give them, and gets its rows
    of the results; or its shards where `inputs=` is a list. In the first three calls and every twentieth one the
    ranks compare checksums of what is to be the same, and all raise PlanError if it is not; after these three not
    of floating-point numbers on GPUs, which ranks may have computed to other last bits. Ranks may evaluate alone
    where their programs send nothing.

    `loss = module.step(*args)` runs forward and backward as one program and leaves the gradients in `.grad`: it takes
    the seconds that the plan predicts. Backwards within `with module.no_sync():` send no gradients; the next one
    outside sends their sum. A DTensor argument is brought to the planned layout. Where the plan has a `loss`, give
    `(*args, *targets)`. `module.clip_grad_norm_(max_norm)` clips the gradients by their norm over all ranks.

    A loop over micro-batches, with stages or without, is run by `module.step(*args)` alone; with `inputs="data"`
    rows are gathered first. For a forward, or a backward apart, give a plan of one program in `also`; with stages,
    for a forward alone, one with the same stages and `train=False, cuts=plan.cuts`. With stages a rank holds the
    parameters of its stages, and those of other stages are None. Whole state dicts load as they are; `state_dict()`
    has this rank's stages alone, `full_state_dict` has all. Stages skip a step of `torch.amp.GradScaler`
    together if all have gradients of the same dtypes.

    also       more plans of the model, made with `pin=plan.parameters`, so that they store the parameters as `plan`
               does: for arguments of other shapes, such as a last smaller batch, for `.eval()`, or with `train=False`;
               loops, too. A call runs the plan that was made in the mode (train or eval) that the module is in and on
               arguments of the same shapes; of two such plans, the one with a backward if gradients are on; of plans
               made with other values of `model.beta`, say, the one made with that which `module.beta` has. There is one
               state, whichever plan runs:

                   small = sbpc.plan(model, last_batch, mesh, pin=plan.parameters)
                   test = sbpc.plan(model.eval(), test_batch, mesh, train=False, pin=plan.parameters)
                   module = sbpc.parallelize(model.train(), plan, also=[small, test])

               Or "auto": new shapes of arguments, modes (`.eval()`, `torch.no_grad()`), constants and values in
               attributes that the forward reads are planned when they come, with the homes and the options of `plan`,
               on all ranks at once, up to 8 plans in all, or 20 by "auto:20". A step that differs in sizes alone takes
               the layouts of a plan as they are where they are legal: nothing is searched, it counts as no plan, and
               the last 16 such are kept. The logger "sbpc" tells of each at INFO. `sbpc.buckets` pads batches to few
               shapes. The ranks compare their calls each time.

    evaluate   one more such plan, for when `.eval()` is called on the module.
    init       what builds the model on one device, such as its class, for a model on the meta device that is too large
               for one. Its ops are recorded and replayed for one parameter at a time: a rank holds its shards and the
               largest parameter at most, and the numbers are those that one device draws from the seed of rank 0.
               Constructors that look at values, such as rejection sampling in `trunc_normal_`, are refused.
    weights    what gives the whole tensor of a name, one after another, in place of the model's, which may be on the
               meta device.
    executor   "auto" is Inductor's kernels on GPUs, where equal layers are compiled once, and generated code on CPUs;
               on one GPU of a named or measured cluster, whose kernels would be done before they are all launched,
               as "graph", without a limit of memory. "graph" runs the same as a CUDA graph, recorded at the third
               call: arguments are copied into memory of its own, and results and gradients out of it, so it takes
               that much more. Weights stay where they are: with several ranks, do not move them. It refuses CPUs,
               stages, and programs that wait for values, as where ranks share out rows of experts. In a loop, steps
               within `no_sync` and the one that ends them are launched call by call. Or "code", "inductor",
               "interpreter", or "nans", which ends with NanError at the first op that makes NaN, with its module and
               your line.
    device     "cuda" or "cpu"; by default what there is.

    Random numbers (dropout, `torch.rand` and the like) depend on a seed, on the place in the program and on where an
    element stands in the whole tensor. So one seed gives the same loss on every mesh, one rank included; they are
    not the numbers that `torch.manual_seed` gives in eager torch. Forward number n has the seed
    `sbpc.graph.random_bits.seed_of_step(base, n)`, where base is rank 0's `torch.initial_seed()`. A state_dict does
    not hold it: keep `module.random_state()`, {"seed": base, "step": n}, beside a checkpoint of your own, and give
    it to `module.set_random_state(state)`. `sbpc.Checkpoints` does.

    The plan is the parallelism: DDP, FSDP and `fully_shard` around the module are refused. Lightning and Fabric take it
    by their ModelParallelStrategy: examples/10_lightning.py.

    Ranks with different models, plans or versions of torch say so here. Raises MeshError if there are not as many
    processes as ranks, PlanError if model and plan do not belong together. The module raises PlanError for arguments
    of other shapes, under another autocast than was planned, in a mode that was not planned, with other numbers in
    attributes that the forward reads than were planned, for gradients of gradients, and when it is pickled;
    LostRankError, which names them, when ranks no longer answer.
    """
    run, most = executor_of(executor), most_plans(also)
    others = [*([] if most is not None else several(also)), *([] if evaluate is None else [evaluate])]
    check_plans(model, plan, others)
    where = process_groups.start(device)
    process_groups.check_ranks(plan.mesh)
    for each in (plan, *others):
        agree(each)
    further = None if most is None else FurtherPlans(unfilled(model), plan, most, run, where)
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
    dtensor_writes.install()
    refuse_parts()
    wrappers.refuse()
    result = skeleton(model)
    if "forward" in vars(result):  # a library put it on the instance, which stands before the programs in the class
        vars(result)[FORWARD] = vars(result).pop("forward")
    result.__dict__[RANDOM] = {"seed": agreed_seed(where), "step": 0}
    runners = [runner_for(each, run, where) for each in (plan, *others)]
    for runner in runners:
        runner.read_masters(plan.ports.masters)
    fill(result, runners[0], value)
    result.__class__ = parallel_class(type(model), runners, signature_of(model, plan), further)
    warn_of_copies(model, result)
    if plan.axis is not None and not any(each.requires_grad for each in result.parameters()):
        log.warning(IDLE, plan.stage_of(dist.get_rank()))
    return result


def warn_of_copies(model: nn.Module, result: nn.Module) -> None:
    """Logs a trained parameter that another model shares of which a parallel module is there, and notes those of this
    one."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            other, parallel = made_of.get(parameter, (lambda: None, lambda: None))
            if other() not in (None, model) and parallel() is not None:
                log.warning(APART, name)
            made_of[parameter] = weakref.ref(model), weakref.ref(result)


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
    for other in others:
        bind.stored(other, model)
        if other.ports.masters != plan.ports.masters and (other.options.train or other.ports.masters):
            raise PlanError(
                "one plan has float32 masters of parameters, another has none of these\n  Make the other one with "
                f"pin=plan.parameters, masters={bool(plan.ports.masters)}."
            )
        if other.mesh != plan.mesh:
            raise PlanError(f"one plan is for {plan.mesh}, another for {other.mesh}\n  Plan both for one mesh.")
        check_rows_alike(plan, other)
        check_homes(plan, other)


def signature_of(model: nn.Module, plan: Plan | Programs) -> inspect.Signature:
    """Returns the signature of the model's forward, `self` first, or one that takes anything where targets of a loss
    do not fit into it. Trainers look there for the columns of a batch that they pass on."""
    args, kwargs = unflatten(
        plain(plan.ports.arguments), [None] * sum(port.kind == INPUT for port in plan.ports.inputs)
    )
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    try:
        found = inspect.signature(model.forward)
        found.bind(*args, **kwargs)
        return found.replace(parameters=[itself, *found.parameters.values()])
    except (TypeError, ValueError):
        return inspect.signature(lambda self, *args, **kwargs: None)


def parallel_class(
    cls: type[nn.Module], runners: list[Runner], signature: inspect.Signature, further: FurtherPlans | None = None
) -> type[nn.Module]:
    """Returns the subclass of a model's class whose forward runs programs. A deep copy runs them on its own weights.

    further: what makes a plan for a call that none is for.
    """
    names = runners[0].plan.options.own_rows
    ranks = None if names is None and further is None else OwnRows(names, runners[0].plan.mesh)

    def weights_of(self: nn.Module) -> ModuleWeights:
        weights: ModuleWeights | None = self.__dict__.get(WEIGHTS)
        if weights is None:
            weights = self.__dict__[WEIGHTS] = ModuleWeights.of(self, runners)
        return weights

    def of_call(self: nn.Module, args: Any, kwargs: Any, at_once: bool) -> tuple[Runner, ModuleWeights, Call]:
        weights = weights_of(self)
        call = weights.call_of(runners, args, kwargs, at_once, ranks)
        try:
            return weights.runner_of(runners, call, alone=further is None), weights, call
        except Unplanned as error:
            if further is None:
                raise
            further.add(self, runners, call, error)
            call = weights.call_of(runners, args, kwargs, at_once, ranks)  # now known by a plan which tensors have rows
            return weights.runner_of(runners, call, alone=False), weights, call

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runner, weights, call = of_call(self, args, kwargs, False)
        return weights.step(runner, self.__dict__[RANDOM], call, Apart)

    def step(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return joint_step(*of_call(self, args, kwargs, True), self.__dict__[RANDOM])

    def no_sync(self: nn.Module) -> AbstractContextManager[None]:
        return weights_of(self).sums.no_sync()

    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        weights_of(self).sums.drop()
        cls.zero_grad(self, set_to_none)

    step.__doc__, no_sync.__doc__, zero_grad.__doc__ = STEP, NO_SYNC, ZERO_GRAD
    own = {"no_sync": no_sync, "zero_grad": zero_grad, RUNNERS: runners}
    return type(
        f"Parallel{cls.__name__}", (cls,), members_of(cls, forward, step, signature, runners[0].elsewhere) | own
    )


def runner_of(module: nn.Module) -> Runner:
    """Returns what runs the plan of a parallel module. Raises PlanError for another module."""
    runners: list[Runner] | None = getattr(type(module), RUNNERS, None)
    if runners is None:
        raise PlanError(f"a {type(module).__name__} is not parallel\n  Give what sbpc.parallelize returns.")
    return runners[0]


def steps_run(module: nn.Module) -> int | None:
    """Returns how many training steps a module has run in this process, None if it is not parallel."""
    if RANDOM not in vars(module):
        return None
    return vars(module)[WEIGHTS].steps if WEIGHTS in vars(module) else 0


def agreed_seed(where: torch.device) -> int:
    """Returns the seed that rank 0's torch was started with."""
    return int(of_rank_zero(torch.tensor(wrap(torch.initial_seed())), where))


def unfilled(model: nn.Module) -> nn.Module:
    """Returns a copy of a model on one device, with its hooks, whose weights hold no numbers."""
    result, made = skeleton(model, hooks=True), dict[int, Tensor]()
    for _, table, key in list(slots(result)):
        old = table[key]
        if id(old) not in made:
            empty = torch.empty_like(old, device="meta")
            made[id(old)] = nn.Parameter(empty, old.requires_grad) if isinstance(old, nn.Parameter) else empty
        table[key] = made[id(old)]
    return result


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
