"""A plan: a layout for every value of a captured model on a mesh, with what it costs and how good it is."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.fx import GraphModule

from sbpc.errors import PlanError, check_kinds, closest, shown
from sbpc.graph.no_gc import uncollected
from sbpc.graph.operands import value_of
from sbpc.graph.ports import INPUT, PARAMETER, Port, Ports, placeholders
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.plans.cost import Cost
from sbpc.plans.measure import lacks_rule, measure, replicated
from sbpc.plans.memory import Life, memory_totals, optimizer_bytes
from sbpc.plans.memory_curve import MemoryCurve, memory_curve
from sbpc.plans.memory_formula import memory_formula
from sbpc.plans.options import Options
from sbpc.plans.timeline import Event, makespan, timeline
from sbpc.plans.trace_file import PREDICTED, measured_step, save_trace
from sbpc.rules.choices import Choice
from sbpc.solver import Proof


@dataclass(frozen=True)
class Assignment:
    """What `assign` decides.

    choices: by name of a node of the annotated graph. aliases: by value (node name, output number), the layout that a
    value is boxed to before it goes to its readers. outputs: the layout of every output, None for an absent one.
    """

    choices: dict[str, Choice]
    aliases: dict[tuple[str, int], Layout]
    outputs: tuple[Layout | None, ...]


@dataclass(frozen=True)
class Rewriter:
    """The functions that a plan calls on first use and does not import; the pipeline hands them in."""

    box: Callable[[GraphModule, Assignment, Mesh], GraphModule]
    schedule: Callable[[GraphModule, Mesh, float | None], GraphModule]
    localize: Callable[[GraphModule, Mesh, tuple[int, ...]], GraphModule]
    verify: Callable[..., int]
    save: Callable[[Any, Path], None]
    export: Callable[[Plan, Path, Plan | None], None]
    text: Callable[[Any], str]
    html: Callable[[Any], str]
    explain: Callable[[Plan, str], Any]
    diff: Callable[[Any, Any], Any]
    page: Callable[[Any, Mapping[str, Sequence[float]] | None, Sequence[Event]], str]


class Prover(Protocol):
    """The problem that a plan solves."""

    @property
    def proof(self) -> Proof:
        """The multipliers that bound the problem, see `sbpc.solver.proof`."""

    @property
    def least(self) -> Mapping[str, float]:
        """By name of a call the seconds that its kernel takes at least, whatever the layouts."""

    def check(self, assignment: Assignment, proof: Any) -> tuple[float, float]:
        """Returns what an assignment costs, and the bound that the multipliers give."""

    def certify(self, plan: Plan, limit: float) -> tuple[Plan | None, float]:
        """Returns a better plan, if one is found in about `limit` CPU seconds, and a bound; `proof` is that of the best bound."""


@dataclass(frozen=True)
class Checked:
    """A plan checked against multipliers alone: `paid` is what its layouts cost, `bound` what every plan costs at least.

    searched: the bound that the plan carries, above `bound` where what may be in a cheaper plan was solved as a mixed-integer program.
    """

    paid: float
    bound: float
    searched: float

    @property
    def gap(self) -> float:
        """(paid - bound) / paid."""
        return (self.paid - self.bound) / self.paid if self.paid else 0.0


@dataclass
class Plan:
    """A layout for every value of a step, made by `sbpc.plan` or `sbpc.load`. `print(plan)` shows it.

    mesh: the mesh that it is for. graph: the annotated fx GraphModule at global shapes, forward and backward; `tangent_0`, ...
    in it are the gradients of the outputs, which come in from outside. options: what `sbpc.plan` was asked (pins, optimizer,
    ...). times: CPU seconds by pass; "capture" is the torch call alone. lower_bound: what no plan of this step on this mesh,
    with these pins, can cost less, in seconds or in bytes as `objective` says. serial_bound: what it cannot take less if nothing
    overlaps, in seconds; 0 where that is `lower_bound`. again: plans the step again on this mesh, with other options as given.

    Three graphs show the stages: `graph` has a layout for every value, `boxed` also the collectives between layouts, `local` is
    the program of rank 0 at local shapes. `sbpc show` prints or draws each.
    """
    mesh: Mesh
    graph: GraphModule
    assignment: Assignment
    rewriter: Rewriter
    lower_bound: float
    options: Options = field(default_factory=Options)
    times: dict[str, float] = field(default_factory=dict)
    programs: dict[Any, GraphModule] = field(default_factory=dict, repr=False)
    prover: Prover | None = field(default=None, repr=False)
    again: Callable[..., Plan] = field(default=lambda **_: no_model(), repr=False)
    serial_bound: float = 0.0

    @property
    def ports(self) -> Ports:
        """What goes into and comes out of the program."""
        return self.graph.meta["ports"]

    @functools.cached_property
    def notes(self) -> tuple[str, ...]:
        """Loud lines, which the report shows: rules without a proof, and ops that run whole on every rank for want of a rule, with what
        that costs.
        """
        replicates = any(map(lacks_rule, self.graph.graph.nodes))
        return (*self.graph.meta["notes"], *(replicated(self.boxed, self.mesh) if replicates else ()))

    @property
    def remarks(self) -> tuple[str, ...]:
        """Quiet lines: rules of the user's that are proved or reviewed, ops that are planned as the parts they are made of, a schedule
        that takes too many bytes."""
        return self.boxed.meta["remarks"]

    @functools.cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layout of every value by its name in the graph, and the home of every parameter by its qualified name."""
        layouts: dict[str, Layout] = {}
        for node in self.graph.graph.nodes:
            producer, index = value_of(node)
            choice = self.assignment.choices.get(producer.name)
            if choice is not None and (node is not producer or len(choice.signatures[0].outputs) == 1):
                layouts[node.name] = choice.output(index, self.mesh.axes)
        for port, node in placeholders(self.graph).items():
            layouts[port.name if port.kind != INPUT else node.name] = layouts[node.name]
        return layouts | {name: layouts[first] for name, first in self.ports.tied.items()}

    @functools.cached_property
    def shapes(self) -> dict[Port, Tensor]:
        """By port of a placeholder: a tensor without data of the shape and dtype that was planned."""
        return {port: node.meta["val"] for port, node in placeholders(self.graph).items()}

    @functools.cached_property
    def given(self) -> dict[Port, Layout]:
        """By port of a placeholder: the layout in which it is stored or comes in."""
        return {port: self.layouts[node.name] for port, node in placeholders(self.graph).items()}

    @functools.cached_property
    def left(self) -> dict[Port, Layout | None]:
        """By port of an output: the layout in which it is left, None for an absent one."""
        return dict(zip(self.ports.outputs, self.assignment.outputs))

    @property
    def parameters(self) -> dict[str, Layout]:
        """The home of every parameter by its qualified name: the layout in which it, its gradient and its optimizer state are stored.

        `pin=plan.parameters` gives another plan the same homes. A parameter may be boxed to other layouts where ops read it.
        """
        return {port.name: self.layouts[port.name] for port in self.ports.inputs if port.kind == PARAMETER}

    def layout(self, name: str) -> Layout:
        """Returns the layout of a parameter (its home) or of a value, by the name that `sbpc show` prints.

        Raises PlanError for a name that is neither.
        """
        return layout_of(self.layouts, name)

    def explain(self, name: str) -> Any:
        """Returns why a parameter or a value has its layout: an `sbpc.inspect.explain.Explanation`, which `print` tells.

        Its alternatives are the best whole plans in which it is laid out otherwise. name: as for `layout`. Raises PlanError for a name
        that is neither, and for a plan under a memory limit that was read from a file.
        """
        return self.rewriter.explain(self, name)

    def diff(self, other: Any) -> Any:
        """Returns what another plan of the same model has otherwise: an `sbpc.inspect.diff.Diff`, which `print` tells.

        It is true where anything differs: layouts, collectives, seconds, bytes, memory, or what was asked for. The other plan may have
        pipeline stages. Raises PlanError for a plan of another model.
        """
        return self.rewriter.diff(self, other)

    @functools.cached_property
    def boxed(self) -> GraphModule:
        """The graph at global shapes with a boxing node wherever layouts disagree, in the order in which it runs.

        Where collectives run beside computing, a boxing starts one, and a node `wait(x)` waits for it.
        """
        if not self.options.overlaps:
            return self.unscheduled
        limit, optimizer = self.options.memory, self.options.optimizer
        budget = None if limit is None else limit - optimizer_bytes(self.unscheduled, self.mesh, optimizer)
        return self.rewriter.schedule(self.unscheduled, self.mesh, budget)

    @functools.cached_property
    def unscheduled(self) -> GraphModule:
        """The boxed graph in the order of capture, where every collective is waited for at once."""
        with uncollected():
            return self.rewriter.box(self.graph, self.assignment, self.mesh)

    def timeline(self) -> list[Event]:
        """Returns what a step is predicted to do on the busiest rank: kernels and collectives, each on its stream from start to end.

        Times are in seconds since the step began. Forward and backward run as one program, as `module.step` runs them.
        """
        return timeline(self.boxed, self.mesh)

    def save_trace(self, path: str | Path) -> None:
        """Writes the timeline as a Chrome trace: open it at ui.perfetto.dev. Raises PlanError if it cannot be written."""
        check_kinds(PlanError, path=(path, "a path"))
        save_trace({PREDICTED: self.timeline()}, Path(path))

    @property
    def local(self) -> GraphModule:
        """The program of rank 0."""
        return self.local_at(0)

    def local_at(self, rank: int) -> GraphModule:
        """Returns the program of `rank`; ranks with equal local shapes share one. Raises PlanError if there is no such rank."""
        check_kinds(PlanError, rank=(rank, "an integer"))
        if not 0 <= rank < self.mesh.ranks:
            raise PlanError(f"rank {shown(rank)} of a mesh of {self.mesh.ranks} ranks\n  Ranks are 0 to {self.mesh.ranks - 1}.")
        key = self.shape_class(rank)
        if key not in self.programs:
            self.programs[key] = self.rewriter.localize(self.boxed, self.mesh, self.mesh.coordinates(rank))
        return self.programs[key]

    def shape_class(self, rank: int) -> tuple[Any, ...]:
        """Returns what distinguishes the program of one rank from another's: the local shapes of everything that is cut."""
        coordinates = self.mesh.coordinates(rank)
        return tuple(layout.local_shape(shape, self.mesh.sizes, coordinates) for layout, shape in self.cut_shapes)

    @functools.cached_property
    def cut_shapes(self) -> list[tuple[Layout, tuple[int, ...]]]:
        """Every layout on whose local shapes the programs depend, with its global shape: those in which tensors are held, and
        what else `Step.layouts` has."""
        pairs: dict[tuple[Layout, tuple[int, ...]], None] = {}  # each once, in order
        for node in self.boxed.graph.nodes:
            sbp, value = node.meta.get("sbp"), node.meta.get("val")
            if "step" in node.meta:
                pairs |= {(layout, tuple(value.shape)): None for layout in node.meta["step"].layouts}
                continue
            for layout, tensor in zip(sbp, value) if isinstance(sbp, tuple) else [(sbp, value)]:
                if isinstance(layout, Layout) and hasattr(tensor, "shape"):
                    pairs[layout, tuple(tensor.shape)] = None
        return list(pairs)

    def forget(self) -> None:
        """Drops the boxed graph, what is alive in it and the programs. They are made again on use."""
        self.programs.clear()
        for name in ("boxed", "unscheduled", "life", "cut_shapes"):
            vars(self).pop(name, None)

    @functools.cached_property
    def life(self) -> Life:
        """What is alive at every moment of a step."""
        with uncollected():
            return Life.of(self.boxed, self.mesh)

    @functools.cached_property
    def memory(self) -> dict[str, int]:
        """Bytes on the busiest rank by what they are for, "total" at the peak; see `Cost`."""
        return memory_totals(self.life, self.boxed, self.mesh, self.options.optimizer)

    def memory_curve(self) -> MemoryCurve:
        """Returns the bytes alive at every moment of a step, by what they are for, and what holds most at the peak."""
        return memory_curve(self.life, self.boxed, self.mesh, self.options.optimizer)

    @functools.cached_property
    def cost(self) -> Cost:
        """Seconds, bytes, flops and memory of a step, with a lower bound: a `Cost`."""
        start = time.process_time()
        with uncollected():
            took = makespan(self.timeline()) if self.options.overlaps else None
            bounds = self.lower_bound, self.options.objective, took, self.serial_bound or self.lower_bound
            formula = functools.partial(memory_formula, self.life, self.boxed, self.mesh, self.options.optimizer)
            cost = measure(self.boxed, self.mesh, self.memory, *bounds, formula)
        self.times["cost"] = self.times.get("cost", 0.0) + time.process_time() - start
        return cost

    def certify(self, *, seconds: float = 60.0) -> float:
        """Looks for a tighter lower bound for about so many CPU seconds, and returns the gap.

        It is of use where the gap is not 0. A plan without a memory limit stays as it is. Under a limit a better plan is looked for,
        too, and replaces this one. Raises PlanError for a plan that was read from a file, and for what is no number of seconds.
        """
        check_kinds(PlanError, seconds=(seconds, "a number of seconds"))
        better, bound = self.problem.certify(self, seconds)
        if better is not None:
            kept = {"again": self.again}
            vars(self).clear()
            vars(self).update(vars(better) | kept)
        self.lower_bound = max(self.lower_bound, bound)
        vars(self).pop("cost", None)
        return self.cost.gap

    @property
    def problem(self) -> Prover:
        """The problem that the plan solves. Raises PlanError for a plan that was read from a file."""
        if self.prover is None:
            raise PlanError("this plan does not hold the problem that it solves\n  Plan the model anew.")
        return self.prover

    @property
    def proof(self) -> Proof:
        """The multipliers behind the bound, see `check_bound`. Raises PlanError for a plan that was read from a file."""
        return self.problem.proof

    def check_bound(self, proof: Proof | None = None) -> Checked:
        """Returns what the layouts cost and the bound that the multipliers give, computed anew with nothing else of the solver.

        proof: other multipliers than those of `plan.proof`; the bound holds for any. Raises PlanError for a plan read from a file.
        """
        if not isinstance(proof, Proof | None):
            raise PlanError(f"the proof is {shown(proof)}\n  Give a proof such as plan.proof, or leave it out.")
        return Checked(*self.problem.check(self.assignment, proof or self.proof), self.lower_bound)

    def verify(self) -> int:
        """Checks every edge, and returns their number: states type-check, shapes agree, gradients land at home. Raises VerifyError."""
        return self.rewriter.verify(self)

    def save(self, path: str | Path) -> None:
        """Writes the plan to one file that `sbpc.load` reads: JSON, no pickle, no code. Raises PlanError if that fails."""
        check_kinds(PlanError, path=(path, "a path"))
        self.rewriter.save(self, Path(path))

    def save_page(
        self, path: str | Path, *, losses: Mapping[str, Sequence[float]] | None = None, trace: str | Path | None = None
    ) -> None:
        """Writes one HTML page about the plan, which loads nothing: figures, map of the model, collectives, memory, graph, alternatives.

        losses: by name of a run, the loss of every step. trace: a file of `sbpc run --trace`, whose measured step is drawn below the
        predicted one. Raises PlanError if the page cannot be written, and for a trace of another plan.
        """
        check_kinds(PlanError, path=(path, "a path"))
        measured = [] if trace is None else measured_step(trace, self.timeline())
        write_page(self.rewriter.page(self, losses, measured), Path(path))

    def export(self, path: str | Path, inference: Plan | None = None) -> None:
        """Writes the plan with the programs of all its ranks, one for each class of ranks with equal local shapes.

        inference: a plan of the forward alone (`train=False`), whose programs go into the same file. `sbpc.load_module` makes the
        parallel module of the file without planning and without the model's source; `sbpc run` runs it. The file holds no weights,
        no pickle and no code: put the weights beside it, as `sbpc export` does (model.safetensors beside model.sbpc).
        examples/04_export_and_run.py shows all this. Raises PlanError if it cannot be written.
        """
        check_kinds(PlanError, path=(path, "a path"))
        if inference is not None and not isinstance(inference, Plan):
            raise PlanError(f"inference is {shown(inference)}\n  Give a plan made with train=False, or None.")
        self.rewriter.export(self, Path(path), inference)

    def __str__(self) -> str:
        return self.rewriter.text(self)

    def _repr_html_(self) -> str:
        return self.rewriter.html(self)

    def __repr__(self) -> str:
        return f"Plan({self.mesh}, {len(self.parameters)} parameters, {self.cost.seconds:.3g} s a step)"


def layout_of(layouts: Mapping[str, Layout], name: str) -> Layout:
    """Returns one of some layouts. Raises PlanError for a name that is none of theirs."""
    check_kinds(PlanError, name=(name, "a text"))
    if name not in layouts:
        names = ", ".join(closest(name, list(layouts)))
        raise PlanError(f"the plan has no parameter and no value {name!r}\n  The closest names are {names}.")
    return layouts[name]


def no_model() -> Plan:
    """Raises the error of a plan that cannot be planned again."""
    raise PlanError("this plan does not hold the step that it plans\n  Plan the model anew with sbpc.plan.")


def write_page(text: str, path: Path) -> None:
    """Writes a page. Raises PlanError if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"the page cannot be written: {error}\n  Name a file in a folder that exists.") from error
