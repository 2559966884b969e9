"""A captured step, which is planned on one mesh or on many. `prepare` captures once for all plans."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.fx import GraphModule

from sbpc._compat import left_out_of
from sbpc.api.checks import check_parts, may_loop, values_pinned
from sbpc.api.experts import routed
from sbpc.api.recompute import forms_of, least_recompute
from sbpc.api.staging import may_gain, plan_stages
from sbpc.errors import LayoutError, LoopError, MemoryLimitError, PinError, PlanError, SbpcError, check_kinds
from sbpc.graph.guards import GUARDS
from sbpc.graph.loss import number_of_loss
from sbpc.graph.no_gc import uncollected
from sbpc.graph.ports import TANGENT, placeholders
from sbpc.graph.rewrite import rebuild
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import conflict
from sbpc.passes.assign.space import Space
from sbpc.passes.assign.wishes import Wishes, expert_alternatives, wishes
from sbpc.passes.loop.micro_batches import in_halves
from sbpc.passes.loop.slices import usual_slices
from sbpc.passes.panels.choice import all_in_panels, faster_in_panels, fitting_in_panels
from sbpc.passes.pipeline import Stages, few_calls, finish, front, make_plan
from sbpc.plans.chunk import Assignment
from sbpc.plans.options import AUTO, Options
from sbpc.plans.plan import Plan
from sbpc.plans.symbolic_sizes import name_dims

GAIN = 2e-2  # the part of a step that parts must save
log = logging.getLogger("sbpc")


@dataclass
class Task:
    """A captured and annotated step, to be planned on one mesh or on many."""

    gm: GraphModule
    stages: Stages
    about: dict[str, Any]  # what every plan's options say: the model's name and modes, train, autocast

    def planned(self, mesh: Mesh, options: Options) -> Plan:
        """Returns the plan with stages along an axis; without one that of a loop, where micro-batches are asked for
        and the step is one. Slices that nobody asked for are left out where no plan fits with them: each adds a
        gradient of the head's weight to the last, which may be larger than its logits."""
        gm, mesh, options = routed(self.gm, mesh, options, self.stages)
        given = Task(gm, self.stages, self.about)
        task, asked = given.sliced(mesh, options)
        try:
            return task.in_chunks(mesh, asked)
        except MemoryLimitError:
            if asked.slices == options.slices:
                raise
            with suppress(MemoryLimitError):
                return given.in_chunks(mesh, options)
            raise

    def sliced(self, mesh: Mesh, options: Options) -> tuple[Task, Options]:
        """Returns the step with its head in slices, and options that say in how many."""
        count = options.slices or usual_slices(self.gm, mesh.ranks * (options.microbatches or 1), options.memory)
        if count == 1:
            return self, options
        try:
            gm = self.stages.run("slices", self.gm, count)
        except PlanError:
            if options.slices is not None:
                raise
            return self, options
        return Task(gm, self.stages, self.about), replace(options, slices=count)

    def in_chunks(self, mesh: Mesh, options: Options) -> Plan:
        """Returns the plan of the step as it is now, see `planned`."""
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
    def plan(self, mesh: Mesh, asked: Options, quick: bool = False) -> Plan:
        """Returns the plan on `mesh` in one piece, without stages. quick: whether the first that is found will do."""
        if asked.recompute == AUTO and asked.forms is None and asked.memory is not None:

            def planned(**other: Any) -> Plan:
                return Task(rebuild(self.gm), self.stages, self.about).plan(mesh, replace(asked, **other))

            way = {"objective": asked.in_order.objective, "microbatches": asked.microbatches or 1}
            return least_recompute(self.gm, asked.memory, planned, way)
        forms = forms_of(self.gm, asked.recompute) if asked.forms is None else asked.forms
        gm, whole = self.rewritten(mesh, forms, asked)
        options = replace(asked, microbatches=asked.microbatches or 1, panels=1, forms=None, **self.about)
        options = replace(options, masters=bool(gm.meta["ports"].masters))
        options = options if options.train else replace(options, optimizer=None)
        if asked.dynamic is not None:
            options = replace(options, dynamic=name_dims(gm, mesh, asked.dynamic))
        try:
            wished = wishes(gm, mesh, options, whole)
            experts = None if asked.baseline else partial(expert_alternatives, gm, mesh, wished.nodes, whole)
            try:
                plan = finish(gm, mesh, wished, options, self.stages, experts, quick=quick)
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
        return made

    def rewritten(self, mesh: Mesh, forms: Mapping[str, str], asked: Options) -> tuple[GraphModule, GraphModule | None]:
        """Returns the graph that computes again what `forms` say and works on micro-batches, and that without these
        if it does."""
        gm = self.stages.with_sums(self.gm, replace(asked, **self.about))
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
            Space(gm, mesh, asked.nodes, asked.outputs).solve(exact=False, bounded=False)
        except PinError as error:
            return error
        return None

    return conflict(options.pin, refusal)


@dataclass
class Captured:
    """A captured step. about: what every plan's options say: the model's name and modes, train, autocast."""

    gm: GraphModule
    stages: Stages
    about: dict[str, Any]

    @cached_property
    def task(self) -> Task:
        """The annotated step."""
        with uncollected():
            return Task(front(self.gm, self.stages), self.stages, self.about)


def prepare(model: nn.Module, args: Sequence[Any], **about: Any) -> Task:
    """Captures and annotates a step. Arguments are those of `captured`."""
    return captured(model, args, **about).task


@uncollected()
def captured(
    model: nn.Module,
    args: Sequence[Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | str | None = None,
    targets: Sequence[Any] = (),
    train: bool = True,
    dtype: Any = None,
    capture: str = "light",
    dump: str | Path | None = None,
) -> Captured:
    """Captures a step. Arguments are those of `sbpc.plan`."""
    check_kinds(
        model=(model, "an nn.Module"),
        kwargs=(kwargs, "a mapping whose keys are texts", "None"),
        loss=(loss, "a function", "a text", "None"),
        train=(train, "True or False"),
        capture=(capture, "a text"),
        dtype=(dtype, "a torch.dtype", "None"),
        dump=(dump, "a path", "None"),
    )
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    targets = tuple(targets) if isinstance(targets, (tuple, list)) else (targets,)
    stages = Stages(None if dump is None else Path(dump))
    gm = stages.run(
        "capture", model, args, kwargs, loss=loss, targets=targets, train=train, dtype=dtype, method=capture
    )
    gc.collect(0)  # the tracer leaves cycles, of a large model several times as many objects as its graph has
    about = {
        "train": train,
        "model": type(model).__name__,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "eval": tuple(name for name, module in model.named_modules() if not module.training),
        "left_out": tuple(left_out_of(model)),
        "guards": gm.meta.pop(GUARDS),
        "loss": loss_of(gm, isinstance(loss, str)) if train else None,
    }
    return Captured(gm, stages, about)


def loss_of(gm: GraphModule, needed: bool) -> int | None:
    """Returns which result of a captured step is its loss. Raises PlanError if there is none and one is needed."""
    try:
        tangents = placeholders(gm, TANGENT).items()
        return number_of_loss(gm.meta["ports"], {port: node.meta["val"] for port, node in tangents})
    except PlanError:
        if needed:
            raise
        return None
