"""What a user calls to get a plan: `plan`, `baseline` and `load`. `prepare` captures once for many plans."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, overload

from torch import nn
from torch.fx import GraphModule

from sbpc._compat import left_out_of, trace_artifact
from sbpc.api.checks import check_mesh, check_options, check_parts, values_pinned
from sbpc.api.recompute import AUTO, forms_of, least_recompute
from sbpc.api.staging import check_schedule, check_staged, plan_stages
from sbpc.errors import LayoutError, LoopError, MemoryLimitError, PinError, PlanError, SbpcError, check_kinds
from sbpc.graph.guards import GUARDS
from sbpc.graph.no_gc import uncollected
from sbpc.graph.rewrite import rebuild
from sbpc.inspect.graph_text import graph_text
from sbpc.inspect.report import plan_json
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import conflict
from sbpc.passes.assign.space import Space
from sbpc.passes.assign.wishes import Layouts, Requests, Wishes, expert_alternatives, wishes
from sbpc.passes.capture.capture import capture as capture_graph
from sbpc.passes.loop.micro_batches import in_halves, micro_batches
from sbpc.passes.loop.recompute import recompute as compute_again
from sbpc.passes.panels.choice import all_in_panels, faster_in_panels, fitting_in_panels
from sbpc.passes.pipeline import Stages, finish, front, make_plan
from sbpc.plans.plan import Assignment, Plan
from sbpc.plans.staged.staged_plan import StagedPlan
from sbpc.plans.symbolic_sizes import name_dims

STEP = ("kwargs", "loss", "targets", "train", "dtype", "capture", "dump")  # what `prepare` takes
GAIN, EXPOSED = 2e-2, 5e-2  # fractions of the step: what parts must save, and what must be exposed before they are tried
FEW_CALLS = 1_500  # of a graph that is tried in two micro-batches, or in panels
LOOP: dict[str, Any] = {  # options that a plan with stages has, with their defaults, in the order in which `plan_stages` takes them
    "microbatches": None, "recompute": "none", "optimizer": "adamw", "memory": None, "pin": None, "baseline": None,
    "objective": "seconds", "dynamic": None,
}  # fmt: skip
log = logging.getLogger("sbpc")


@overload
def plan(model: nn.Module, args: Sequence[Any], mesh: Mesh, *, stages: str, **options: Any) -> StagedPlan: ...
@overload
def plan(model: nn.Module, args: Sequence[Any], mesh: Mesh, *, stages: None = None, **options: Any) -> Plan: ...
def plan(  # type: ignore[misc]  # it names its options
    model: nn.Module,
    args: Sequence[Any],
    mesh: Mesh,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    train: bool = True,
    optimizer: str | None = "adamw",
    dtype: Any = None,
    memory: float | None = None,
    pin: Mapping[str, str | Layout] | None = None,
    inputs: Sequence[str | Layout | None] | None = None,
    outputs: Sequence[str | Layout | None] | None = None,
    spread: bool = False,
    objective: str = "seconds",
    dynamic: Any = None,
    microbatches: int | None = None,
    panels: int | None = None,
    stages: str | None = None,
    schedule: str = "1f1b",
    recompute: str = "none",
    capture: str = "light",
    dump: str | Path | None = None,
) -> Plan | StagedPlan:
    """Returns the plan of one step of `model(*args, **kwargs)` on `mesh`: the fastest layouts, with a bound and a proof.

    model and args may be on the meta device: no op is computed, nothing is allocated. A model that returns a scalar is its own
    loss. Otherwise `loss` makes one: the step is `loss(model(*args, **kwargs), *targets)`, and `sbpc.simulate` and the module
    from `sbpc.parallelize` take `(*args, *targets)`. Without it, the gradients of the outputs come from outside: call the
    parallel module, and `backward` on a loss of your own. A plan holds for the shapes of args, for train or eval mode as the
    modules are in now, and for the numbers that a forward reads from attributes: with others it is refused, so make those that
    change buffers or arguments. A forward that counts its calls in an attribute, or keeps a tensor in one, is refused.

    train      forward and backward, else the forward alone. To evaluate beside training, plan `model.eval()` with `train=False,
               pin=plan.parameters`; see `evaluate` of `sbpc.parallelize`.
    optimizer  whose state counts as memory: "adamw", "adam" (2 tensors for each parameter), "momentum" (1), "sgd", None (0).
    dtype      the type for autocast, such as torch.bfloat16; None is no autocast.
    memory     bytes that a rank may take at the peak of the step; None is no limit, whatever the cluster has. The plan is then
               as fast as can be found under it: that can take minutes, and the gap may be some percent.
    pin        {name: layout}: what you know better. A name is that of a parameter or of a value that `sbpc show` prints, or a
               pattern such as "*.up.weight". "S(0)@tensor" leaves the other axes free, "B@data, S(1)@tensor" names two,
               "S(0)@tensor>data" cuts over tensor first, "[B, S(0)]" is all axes in the order of the mesh. "S(0)" will do on
               a mesh of one axis. A `sbpc.Layout` is taken too.
    inputs     one layout, or None, for each tensor among the arguments: ["S(0)@data", None]. Axes that it does not name are B.
    outputs    With an input layout each rank passes its own shard. Without, inputs and outputs are whole on every rank.
    spread     store inputs, parameters and outputs exactly once over the ranks.
    objective  "seconds", where collectives run beside computing; "serial", where they do not; or "bytes", which
               counts what the busiest rank sends and nothing else. With spread=True a single product then attains the tight lower
               bound on the best mesh (tests/matmul_bound.py).
    dynamic    {"x": ("b", "s", "h"), "*up.weight": ("4*h", "h"), "heads": 12} names dims of inputs and parameters, so that
               `plan.cost.expr` is a formula in them. A dim that is not named is what it meets in an op, such as the bias of
               up, or else its number, and a note says so. A name with a number is a symbol that no dim has alone. The layouts
               are those of the plan.
    microbatches  how many equal parts of the batch the step works on. Numbers are those of the whole batch: means, counts of targets,
               batch statistics and random numbers. With a number above 1 the step is a loop: `module.step(*args)` takes the whole
               batch on every rank, gradients add up and go home once, and the plan is an
               `sbpc.plans.staged.staged_plan.StagedPlan` of one stage, whose formulas have the number as `m`. A step is written out
               part by part, as a `Plan`, where it has no loss, where its parts need each other (batch norm), or with inputs=,
               outputs=, spread=, panels= or objective="bytes". None is two parts side by side where the simulated step is
               shorter by 2 % so, else 1; spaces of many layouts are not tried.
    panels     into how many equal parts the products next to a collective are cut, so that one part is computed while the next is
               gathered, or the last one reduced and scattered. Bytes and results are the same, each part gathered is smaller. None is
               2, 4 or 8, where the simulated step is shorter by 2 % with them, or no plan fits into `memory` without, else 1.
    stages     the axis of the mesh along which the model is cut into stages of a pipeline, such as "pipe". The plan is then an
               `sbpc.plans.staged.staged_plan.StagedPlan`: layouts are those on the other axes. None is no pipeline. With stages,
               microbatches is by default the largest divisor of the batch up to four for each stage.
    schedule   the order in which stages work: "gpipe", "1f1b", "interleaved" (two chunks of the model on each stage, or so
               many as "interleaved:3" says) or "zbv" (two, there and back, and the backward in two parts).
    recompute  what a backward computes again instead of having it kept since the forward: "none"; "selective", in each repeated block
               what is cheap, or where attention is written out its values between the products; "full", all but the inputs of
               each block; "auto", nothing where `memory` allows it, else what makes the fastest plan that fits. A block is a module
               such as "layers.3", or a child of a model without such. `plan.cost.recompute_seconds` tells what that takes.
    capture    "light", or "aot" for torch's own tracer.
    dump       a folder for the text of the graph after every pass.

    The logger "sbpc" tells the seconds of each pass at INFO, "sbpc.progress" what the search is at, at DEBUG. An op without a
    rule runs whole on every rank, and `plan.notes` says so; see `sbpc.rule` and `sbpc.probe`.

    >>> import sbpc, torch
    >>> with torch.device("meta"):
    ...     model, x = torch.nn.Linear(16, 64), torch.empty(32, 16)
    >>> plan = sbpc.plan(model, (x,), sbpc.Mesh(p=2), pin={"weight": "B"}, dynamic={"weight": ("4*h", "h")}, objective="serial")
    >>> plan.layout("weight"), plan.cost.gap, sorted(map(str, plan.cost.bytes_expr["p"].free_symbols))
    ([B], 0.0, ['h', 'p'])

    Raises CaptureError if the model is not one graph, PinError for pins that match nothing or cannot be met, LayoutError,
    MemoryLimitError if nothing fits into `memory`, SbpcError for a bad option. Each says what to do.
    """
    options: dict[str, Any] = {
        "optimizer": optimizer, "memory": memory, "objective": objective, "pin": pin,
        "spread": spread, "inputs": inputs, "outputs": outputs, "dynamic": dynamic, "microbatches": microbatches,
        "panels": panels, "recompute": recompute,
    }  # fmt: skip
    check_mesh(mesh)
    check_options(**options)
    check_schedule(schedule)
    if stages is not None:
        check_staged(mesh, stages, train=train, **options)
    task = prepare(
        model, args, kwargs=kwargs, loss=loss, targets=targets, train=train, dtype=dtype, capture=capture, dump=dump
    )
    return task.planned(mesh, stages, schedule, options)


@overload
def baseline(name: str, model: nn.Module, args: Sequence[Any], mesh: Mesh, *, stages: str, **options: Any) -> StagedPlan: ...
@overload
def baseline(name: str, model: nn.Module, args: Sequence[Any], mesh: Mesh, *, stages: None = None, **options: Any) -> Plan: ...
def baseline(
    name: str, model: nn.Module, args: Sequence[Any], mesh: Mesh, *, stages: str | None = None, schedule: str = "1f1b", **options: Any
) -> Plan | StagedPlan:
    """Returns the plan that an expert would make by hand, under the same cost model. options are those of `sbpc.plan`.

    "data"              every axis splits the batch, parameters are whole
    "fsdp"              the same, parameters are stored once over all ranks
    "megatron"          columns then rows on the last axis, the batch on the others (Shoeybi et al. 2019)
    "megatron+sp"       between those pairs the last axis splits the sequence (Korthikanti et al. 2022)
    "summa"             batch and features on the last two axes (Xu and You 2021)
    "agarwal"           a 3-D product on the last three axes (Agarwal et al. 1995; Singh et al. 2024)
    "one weird trick"   convolutions split the batch, linear layers are columns then rows (Krizhevsky 2014)

    What a scheme leaves open is solved, so this is the best plan of its kind. Where nothing overlaps (`objective="serial"`) no plan
    of `sbpc.plan` is slower than the best of these, except where all nodes together have more than 100,000 choices (a large model,
    or a few layers on four axes): there it may be slower by a gap below 3 %.

    Raises PlanError if the scheme does not fit the model or the mesh, and what `sbpc.plan` raises.
    """
    check_mesh(mesh)
    check_kinds(name=(name, "a text"))
    about = {key: options.pop(key) for key in STEP if key in options}
    check_options(**options)
    check_schedule(schedule)
    if stages is not None:
        check_staged(mesh, stages, train=about.get("train", True), **options)
    return prepare(model, args, **about).planned(mesh, stages, schedule, {**options, "baseline": name})


@dataclass
class Task:
    """A captured and annotated step, to be planned on one mesh or on many."""

    gm: GraphModule
    stages: Stages
    about: dict[str, Any]  # what every plan's options say: the model's name and modes, train, autocast

    def planned(self, mesh: Mesh, axis: str | None, schedule: str, options: Mapping[str, Any]) -> Plan | StagedPlan:
        """Returns the plan with stages along an axis; without one that of a loop, where micro-batches are asked for and the step is one.

        options: those of `plan`, already checked.
        """
        if axis is not None or (self.about["train"] and may_loop(options)):
            asked = [options.get(name, default) for name, default in LOOP.items()]
            try:
                return plan_stages(self.gm, self.stages, self.about, mesh, axis, schedule, *asked)
            except LoopError as error:
                if axis is not None:
                    raise
                log.info("micro-batches are written out one by one, as the step is no loop over them: %s", error)
        return self.plan(mesh, **options)

    @uncollected()
    def plan(
        self, mesh: Mesh, *,
        optimizer: str | None = "adamw", memory: float | None = None, objective: str = "seconds",
        pin: Mapping[str, str | Layout] | None = None, spread: bool = False,
        inputs: Layouts = None, outputs: Layouts = None, dynamic: Any = None, baseline: str | None = None,
        microbatches: int | None = None, panels: int | None = None, recompute: str = "none", forms: Mapping[str, str] | None = None,
    ) -> Plan:  # fmt: skip
        """Returns the plan on `mesh`. Options are those of `plan`, already checked. baseline: the expert to follow. forms: by block,
        what it computes again; by default what `recompute` says.
        """
        asked_for = {
            "optimizer": optimizer, "memory": memory, "objective": objective, "inputs": inputs, "forms": forms, "panels": panels,
            "outputs": outputs, "baseline": baseline, "microbatches": microbatches, "recompute": recompute, "spread": spread, "pin": pin,
        }  # fmt: skip
        if recompute == AUTO and forms is None:
            def planned(**other: Any) -> Plan:
                return Task(rebuild(self.gm), self.stages, self.about).plan(mesh, **{**asked_for, **other})

            quick = {"objective": "serial" if objective == "seconds" else objective, "microbatches": microbatches or 1}
            return least_recompute(self.gm, memory, planned, quick)
        gm, whole = self.rewritten(mesh, forms_of(self.gm, recompute) if forms is None else forms, microbatches or 1, pin or {}, dynamic)
        pins = {name: str(layout) for name, layout in (pin or {}).items()}
        options = {
            "optimizer": optimizer if self.about["train"] else None, "memory": memory, "objective": objective,
            "pin": pins, "spread": spread, "microbatches": microbatches or 1, "panels": 1, "recompute": recompute, **self.about,
        }  # fmt: skip
        if baseline is not None:
            options["baseline"] = baseline
        if dynamic is not None:
            options["dynamic"] = name_dims(gm, mesh, dynamic)
        requests = Requests(pins, inputs, outputs, spread, baseline)
        try:
            asked = wishes(gm, mesh, requests, whole)
            experts = None if baseline else partial(expert_alternatives, gm, mesh, asked.nodes, whole)
            try:
                plan = finish(gm, mesh, asked.nodes, asked.outputs, options, self.stages, experts)
            except MemoryLimitError as error:
                if panels == 1 or baseline is not None or (panels is None and not few_calls(gm)):
                    raise
                free = finish(gm, mesh, asked.nodes, asked.outputs, options | {"memory": None}, self.stages, experts)
                plan = self.fitting(free, error, options, panels)
            made = self.faster_in_halves(plan, asked) if microbatches is None else plan
            made = self.in_panels(made, panels)
        except PinError as error:
            raise conflicting_pins(gm, mesh, requests) from error
        plan.again = made.again = lambda **other: self.again().plan(mesh, **{**asked_for, **other})
        trace_artifact("plan", "string", lambda: str(made))
        trace_artifact("plan_figures", "json", lambda: json.dumps(plan_json(made)))
        trace_artifact("plan_graph", "string", lambda: graph_text(made.boxed, mesh))
        return made

    def rewritten(
        self, mesh: Mesh, forms: Mapping[str, str], count: int, pin: Mapping[str, Any], dynamic: Any
    ) -> tuple[GraphModule, GraphModule | None]:
        """Returns the graph that computes again what `forms` say and works on `count` micro-batches, and that without these if it does."""
        gm = self.gm
        if forms:
            with self.stages.timed("recompute"):
                gm = compute_again(gm, forms)
        if count == 1:
            return gm, None
        check_parts(gm, pin, dynamic)
        with self.stages.timed("microbatches"):
            return micro_batches(gm, count, mesh.cluster), gm

    def faster_in_halves(self, plan: Plan, asked: Wishes) -> Plan:
        """Returns the plan in two micro-batches if it may be and is faster, fits and is possible, else the plan."""
        if not may_gain(plan) or not plan.options["train"] or values_pinned(plan.graph, plan.options["pin"]):
            return plan
        options = plan.options | {"microbatches": 2}
        in_order = options | {"objective": "serial"}
        with suppress(PlanError, PinError, LayoutError), self.stages.timed("microbatches"):
            halves = in_halves(plan, asked, options, lambda gm, a: make_plan(gm, plan.mesh, a, 0.0, in_order, self.stages))
            limit = plan.options["memory"]
            fits = limit is None or halves.cost.memory["total"] <= limit
            return halves if fits and halves.cost.seconds < (1 - GAIN) * plan.cost.seconds else plan
        return plan

    def in_panels(self, plan: Plan, panels: int | None) -> Plan:
        """Returns the plan in so many panels; None: in as many as make it faster, if it may gain by them."""
        if panels == 1 or plan.options["panels"] > 1 or (panels is None and not may_gain(plan)):
            return plan
        made = self.maker(plan)
        with self.stages.timed("panels"):
            return faster_in_panels(plan, GAIN, made) if panels is None else all_in_panels(plan, panels, made)

    def maker(self, plan: Plan) -> Callable[[GraphModule, Assignment], Plan]:
        """Returns what makes a plan like `plan` of a graph in panels and its assignment."""

        def made(gm: GraphModule, assignment: Assignment) -> Plan:
            if "dynamic" in plan.options:
                name_dims(gm, plan.mesh, plan.options["dynamic"])
            return make_plan(gm, plan.mesh, assignment, 0.0, plan.options | {"objective": "serial"}, self.stages)

        return made

    def fitting(self, free: Plan, error: MemoryLimitError, options: dict[str, Any], panels: int | None) -> Plan:
        """Returns a plan that fits by its panels, else raises the error of a search without any. free: the plan without a limit."""
        with self.stages.timed("panels"):
            if (plan := fitting_in_panels(free, error.nearest, options, panels, self.maker(free))) is None:
                raise error
        return plan

    def again(self) -> Task:
        """Returns the same step with a graph and clocks of its own, for a further plan beside the others."""
        return Task(rebuild(self.gm), Stages(times=dict(self.stages.times)), self.about)


def may_gain(plan: Plan) -> bool:
    """Returns whether a step in parts may be shorter, and can be planned in little time.

    Not on the ideal cluster, where a kernel of half the size takes half the time however small it is.
    """
    if plan.objective != "seconds" or plan.mesh.cluster.name == "ideal" or not {"baseline", "dynamic"}.isdisjoint(plan.options):
        return False
    return few_calls(plan.graph) and plan.cost.exposed_seconds > EXPOSED * plan.cost.seconds


def few_calls(gm: GraphModule) -> bool:
    """Returns whether a graph is small enough to be written anew, and planned, several times."""
    return sum(node.op == "call_function" for node in gm.graph.nodes) <= FEW_CALLS


def may_loop(options: Mapping[str, Any]) -> bool:
    """Returns whether options ask for micro-batches, and for nothing that a loop over them does not have."""
    several = {name: (options.get(name) or 1) > 1 for name in ("microbatches", "panels")}
    others = any(options.get(name) is not None for name in ("inputs", "outputs")) or options.get("spread") or several["panels"]
    return several["microbatches"] and not others and options.get("objective") != "bytes"


def conflicting_pins(gm: GraphModule, mesh: Mesh, requests: Requests) -> SbpcError:
    """Returns the error about requests that cannot be met, with the fewest pins that conflict."""

    def refusal(pins: Mapping[str, str]) -> SbpcError | None:
        try:
            asked = wishes(gm, mesh, replace(requests, pins=pins))
            Space(gm, mesh, asked.nodes, asked.outputs)
        except PinError as error:
            return error
        return None

    return conflict(requests.pins, refusal)


@uncollected()
def prepare(
    model: nn.Module, args: Sequence[Any], *,
    kwargs: Mapping[str, Any] | None = None, loss: Callable[..., Any] | None = None, targets: Sequence[Any] = (),
    train: bool = True, dtype: Any = None, capture: str = "light", dump: str | Path | None = None,
) -> Task:  # fmt: skip
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
    with stages.timed("capture"):
        captured = capture_graph(
            model, args, kwargs, loss=loss, targets=targets, train=train, dtype=dtype, method=capture
        )
        gc.collect(0)  # the tracer leaves cycles, of a large model several times as many objects as its graph has
    about = {
        "train": train,
        "model": type(model).__name__,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "eval": [name for name, module in model.named_modules() if not module.training],
        "left_out": list(left_out_of(model)),
        GUARDS: captured.meta.pop(GUARDS),
    }
    return Task(front(captured, stages), stages, about)
