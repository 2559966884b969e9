"""What a user calls to get a plan: `plan`, `baseline` and `load`. `prepare` captures once for many plans."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.fx import GraphModule

from sbpc._compat import left_out_of, trace_artifact
from sbpc.api.checks import check_mesh, check_parts, checked, may_loop, values_pinned, with_options
from sbpc.api.recompute import forms_of, least_recompute
from sbpc.api.staging import few_calls, may_gain, plan_stages
from sbpc.errors import LayoutError, LoopError, MemoryLimitError, PinError, PlanError, SbpcError, check_kinds
from sbpc.graph.guards import GUARDS
from sbpc.graph.no_gc import uncollected
from sbpc.graph.rewrite import rebuild
from sbpc.inspect.graph_text import graph_text
from sbpc.inspect.report import plan_json
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import conflict
from sbpc.passes.assign.space import Space
from sbpc.passes.assign.wishes import Wishes, expert_alternatives, wishes
from sbpc.passes.loop.micro_batches import in_halves
from sbpc.passes.panels.choice import all_in_panels, faster_in_panels, fitting_in_panels
from sbpc.passes.pipeline import Stages, finish, front, make_plan
from sbpc.plans.chunk import Assignment
from sbpc.plans.options import AUTO, Options
from sbpc.plans.plan import Plan
from sbpc.plans.symbolic_sizes import name_dims

STEP = ("kwargs", "loss", "targets", "train", "dtype", "capture", "dump")  # what `prepare` takes
GAIN = 2e-2  # the part of a step that parts must save
log = logging.getLogger("sbpc")


@with_options
def plan(
    model: nn.Module,
    args: Sequence[Any],
    mesh: Mesh,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    train: bool = True,
    dtype: Any = None,
    capture: str = "light",
    dump: str | Path | None = None,
    **options: Any,
) -> Plan:
    """Returns the plan of one step of `model(*args, **kwargs)` on `mesh`: the fastest layouts, with a bound and a
    proof.

    model and args may be on the meta device: no op is computed, nothing is allocated. A model that returns a scalar
    is its own loss. Otherwise `loss` makes one: the step is `loss(model(*args, **kwargs), *targets)`, and
    `sbpc.simulate` and the module from `sbpc.parallelize` take `(*args, *targets)`. Without it, the gradients of the
    outputs come from outside: call the parallel module, and `backward` on a loss of your own. A plan holds for the
    shapes of args, for train or eval mode as the modules are in now, for the code of your own forwards, and for the
    numbers that they, your hooks and `loss` read from attributes, globals and free variables: with others it is
    refused, so make those that change buffers or arguments. Attributes of the loss and of hooks are looked at in the
    process that made the plan. A forward that counts its calls in an attribute or a global, keeps a tensor in one,
    or draws random numbers of Python or numpy, is refused, and so are hooks on parameters.

    train      forward and backward, else the forward alone. To evaluate beside training, plan `model.eval()` with
               `train=False, pin=plan.parameters`; see `evaluate` of `sbpc.parallelize`.
    dtype      the type for autocast, such as torch.bfloat16; None is no autocast.
    capture    "light", or "aot" for torch's own tracer.
    dump       a folder for the text of the graph after every pass.
    {options}

    The logger "sbpc" tells the seconds of each pass at INFO, "sbpc.progress" what the search is at, at DEBUG. An op
    without a rule runs whole on every rank, and `plan.notes` says so; see `sbpc.rule` and `sbpc.probe`.

    >>> import sbpc, torch
    >>> with torch.device("meta"):
    ...     model, x = torch.nn.Linear(16, 64), torch.empty(32, 16)
    >>> options = {"pin": {"weight": "B"}, "dynamic": {"weight": ("4*h", "h")}, "objective": "serial"}
    >>> plan = sbpc.plan(model, (x,), sbpc.Mesh(p=2), **options)
    >>> plan.layout("weight"), plan.cost.gap, sorted(map(str, plan.cost.bytes_expr["p"].free_symbols))
    ([B], 0.0, ['h', 'p'])

    Raises CaptureError if the model is not one graph, PinError for pins that match nothing or cannot be met,
    LayoutError, MemoryLimitError if nothing fits into `memory`, SbpcError for a bad option. Each says what to do.
    """
    check_mesh(mesh)
    asked = checked(mesh, train=train, **options)
    task = prepare(
        model, args, kwargs=kwargs, loss=loss, targets=targets, train=train, dtype=dtype, capture=capture, dump=dump
    )
    return task.planned(mesh, asked)


def baseline(name: str, model: nn.Module, args: Sequence[Any], mesh: Mesh, **options: Any) -> Plan:
    """Returns the plan that an expert would make by hand, under the same cost model. options are those of `sbpc.plan`.

    "data"              every axis splits the batch, parameters are whole
    "fsdp"              the same, parameters are stored once over all ranks
    "megatron"          columns then rows on the last axis, the batch on the others (Shoeybi et al. 2019)
    "megatron+sp"       between those pairs the last axis splits the sequence (Korthikanti et al. 2022)
    "summa"             batch and features on the last two axes (Xu and You 2021)
    "agarwal"           a 3-D product on the last three axes (Agarwal et al. 1995; Singh et al. 2024)
    "one weird trick"   convolutions split the batch, linear layers are columns then rows (Krizhevsky 2014)

    What a scheme leaves open is solved, so this is the best plan of its kind. Where nothing overlaps
    (`objective="serial"`) no plan of `sbpc.plan` is slower than the best of these, except where all nodes together have
    more than 100,000 choices (a large model, or a few layers on four axes): there it may be slower by a gap below 3 %.

    Raises PlanError if the scheme does not fit the model or the mesh, and what `sbpc.plan` raises.
    """
    check_mesh(mesh)
    check_kinds(name=(name, "a text"))
    about = {key: options.pop(key) for key in STEP if key in options}
    asked = checked(mesh, train=about.get("train", True), **options)
    return prepare(model, args, **about).planned(mesh, replace(asked, baseline=name))


@dataclass
class Task:
    """A captured and annotated step, to be planned on one mesh or on many."""

    gm: GraphModule
    stages: Stages
    about: dict[str, Any]  # what every plan's options say: the model's name and modes, train, autocast

    def planned(self, mesh: Mesh, options: Options) -> Plan:
        """Returns the plan with stages along an axis; without one that of a loop, where micro-batches are asked for
        and the step is one."""
        if options.stages is not None or (self.about["train"] and may_loop(options)):
            try:
                return plan_stages(self.gm, self.stages, mesh, replace(options, **self.about))
            except LoopError as error:
                if options.stages is not None:
                    raise
                if options.schedule is not None:
                    what = f"schedule={options.schedule!r} of a step that is no loop over micro-batches: {error}"
                    raise PlanError(f"{what}\n  Leave schedule= out.") from error
                log.info("micro-batches are written out one by one, as the step is no loop over them: %s", error)
        return self.plan(mesh, options)

    @uncollected()
    def plan(self, mesh: Mesh, asked: Options) -> Plan:
        """Returns the plan on `mesh` in one piece, without stages."""
        if asked.recompute == AUTO and asked.forms is None:

            def planned(**other: Any) -> Plan:
                return Task(rebuild(self.gm), self.stages, self.about).plan(mesh, replace(asked, **other))

            quick = {"objective": asked.in_order.objective, "microbatches": asked.microbatches or 1}
            return least_recompute(self.gm, asked.memory, planned, quick)
        forms = forms_of(self.gm, asked.recompute) if asked.forms is None else asked.forms
        gm, whole = self.rewritten(mesh, forms, asked)
        options = replace(asked, microbatches=asked.microbatches or 1, panels=1, forms=None, **self.about)
        options = options if options.train else replace(options, optimizer=None)
        if asked.dynamic is not None:
            options = replace(options, dynamic=name_dims(gm, mesh, asked.dynamic))
        try:
            wished = wishes(gm, mesh, options, whole)
            experts = None if asked.baseline else partial(expert_alternatives, gm, mesh, wished.nodes, whole)
            try:
                plan = finish(gm, mesh, wished, options, self.stages, experts)
            except MemoryLimitError as error:
                if asked.panels == 1 or asked.baseline is not None or (asked.panels is None and not few_calls(gm)):
                    raise
                free = finish(gm, mesh, wished, replace(options, memory=None), self.stages, experts)
                plan = self.fitting(free, error, options, asked.panels)
            made = self.faster_in_halves(plan, wished) if asked.microbatches is None else plan
            made = self.in_panels(made, asked.panels)
        except PinError as error:
            raise conflicting_pins(gm, mesh, options) from error
        plan.again = made.again = lambda **other: self.again().plan(mesh, replace(asked, **other))
        self.stages.show_plan(made)
        trace_artifact("plan", "string", lambda: str(made))
        trace_artifact("plan_figures", "json", lambda: json.dumps(plan_json(made)))
        trace_artifact("plan_graph", "string", lambda: graph_text(made.boxed, mesh))
        return made

    def rewritten(self, mesh: Mesh, forms: Mapping[str, str], asked: Options) -> tuple[GraphModule, GraphModule | None]:
        """Returns the graph that computes again what `forms` say and works on micro-batches, and that without these
        if it does."""
        gm = self.gm
        if forms:
            gm = self.stages.run("recompute", gm, forms)
        count = asked.microbatches or 1
        if count == 1:
            return gm, None
        check_parts(gm, asked)
        return self.stages.run("microbatches", gm, count, mesh.cluster), gm

    def faster_in_halves(self, plan: Plan, asked: Wishes) -> Plan:
        """Returns the plan in two micro-batches if it may be and is faster, fits and is possible, else the plan."""
        if not may_gain(plan, plan) or not plan.options.train or values_pinned(plan.annotated, plan.options.pin):
            return plan
        options = replace(plan.options, microbatches=2)
        try:
            with self.stages.timed("microbatches"):
                halves = in_halves(
                    plan, asked, options, lambda gm, a: make_plan(gm, plan.mesh, a, 0.0, options.in_order, self.stages)
                )
        except (PlanError, PinError, LayoutError):  # the batch cannot be halved, or not beside the pins
            return plan
        fits = options.memory is None or halves.cost.memory["total"] <= options.memory
        if not fits or halves.cost.seconds >= (1 - GAIN) * plan.cost.seconds:
            return plan
        self.stages.passed("microbatches", halves.annotated)
        return halves

    def in_panels(self, plan: Plan, panels: int | None) -> Plan:
        """Returns the plan in so many panels; None: in as many as make it faster, if it may gain by them."""
        if panels == 1 or (plan.options.panels or 1) > 1 or (panels is None and not may_gain(plan, plan)):
            return plan
        made = self.maker(plan)
        with self.stages.timed("panels"):
            found = faster_in_panels(plan, GAIN, made) if panels is None else all_in_panels(plan, panels, made)
        if found is not plan:
            self.stages.passed("panels", found.annotated)
        return found

    def maker(self, plan: Plan) -> Callable[[GraphModule, Assignment], Plan]:
        """Returns what makes a plan like `plan` of a graph in panels and its assignment."""

        def made(gm: GraphModule, assignment: Assignment) -> Plan:
            if plan.options.dynamic is not None:
                name_dims(gm, plan.mesh, plan.options.dynamic)
            return make_plan(gm, plan.mesh, assignment, 0.0, plan.options.in_order, self.stages)

        return made

    def fitting(self, free: Plan, error: MemoryLimitError, options: Options, panels: int | None) -> Plan:
        """Returns a plan that fits by its panels, else raises the error of a search without any. free: the plan
        without a limit."""
        with self.stages.timed("panels"):
            if (plan := fitting_in_panels(free, error.nearest, options, panels, self.maker(free))) is None:
                raise error
        return plan

    def again(self) -> Task:
        """Returns the same step with a graph and clocks of its own, for a further plan beside the others."""
        return Task(rebuild(self.gm), Stages(times=dict(self.stages.times)), self.about)


def conflicting_pins(gm: GraphModule, mesh: Mesh, options: Options) -> SbpcError:
    """Returns the error about requests that cannot be met, with the fewest pins that conflict."""

    def refusal(pins: Mapping[str, str]) -> SbpcError | None:
        try:
            asked = wishes(gm, mesh, replace(options, pin=pins))
            Space(gm, mesh, asked.nodes, asked.outputs)
        except PinError as error:
            return error
        return None

    return conflict(options.pin, refusal)


@uncollected()
def prepare(
    model: nn.Module,
    args: Sequence[Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    train: bool = True,
    dtype: Any = None,
    capture: str = "light",
    dump: str | Path | None = None,
) -> Task:
    """Captures and annotates a step. Arguments are those of `plan`."""
    check_kinds(
        model=(model, "an nn.Module"),
        kwargs=(kwargs, "a mapping whose keys are texts", "None"),
        loss=(loss, "a function", "None"),
        train=(train, "True or False"),
        capture=(capture, "a text"),
        dtype=(dtype, "a torch.dtype", "None"),
        dump=(dump, "a path", "None"),
    )
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    targets = tuple(targets) if isinstance(targets, (tuple, list)) else (targets,)
    stages = Stages(None if dump is None else Path(dump))
    captured = stages.run(
        "capture", model, args, kwargs, loss=loss, targets=targets, train=train, dtype=dtype, method=capture
    )
    gc.collect(0)  # the tracer leaves cycles, of a large model several times as many objects as its graph has
    about = {
        "train": train,
        "model": type(model).__name__,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "eval": tuple(name for name, module in model.named_modules() if not module.training),
        "left_out": tuple(left_out_of(model)),
        "guards": captured.meta.pop(GUARDS),
    }
    return Task(front(captured, stages), stages, about)
