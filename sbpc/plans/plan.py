"""A plan: a layout for every value of a captured model on a mesh, with what it costs and how good it is."""

from __future__ import annotations

import fnmatch
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from sbpc.errors import PlanError, check_kinds, shown
from sbpc.graph.no_gc import uncollected
from sbpc.mesh.pins import spelled_out
from sbpc.plans.chunk import Assignment
from sbpc.plans.cost import Cost
from sbpc.plans.memory_curve import MemoryCurve, memory_curve
from sbpc.plans.planned import PlannedStep
from sbpc.plans.staged.staged_timeline import stage_events
from sbpc.plans.trace_file import PREDICTED, measured_step, save_trace
from sbpc.solver import Proof


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
        """Returns a better plan, if one is found in about `limit` CPU seconds, and a bound; `proof` is that of the
        best bound."""


@dataclass(frozen=True)
class Checked:
    """A plan checked against multipliers alone: `paid` is what its layouts cost, `bound` what every plan costs at
    least.

    searched: the bound that the plan carries, above `bound` where what may be in a cheaper plan was solved as a
    mixed-integer program.
    """

    paid: float
    bound: float
    searched: float

    @property
    def gap(self) -> float:
        """(paid - bound) / paid."""
        return (self.paid - self.bound) / self.paid if self.paid else 0.0


def no_model(**_: Any) -> Plan:
    """Raises the error of a plan that cannot be planned again."""
    raise PlanError("this plan does not hold the step that it plans\n  Plan the model anew with sbpc.plan.")


@dataclass
class Plan(PlannedStep):
    """A layout for every value of a step, made by `sbpc.plan` or `sbpc.load`. `print(plan)` shows it.

    mesh: the mesh that it is for. chunks: of the model, in its order: one, unless it is cut into stages along an axis
    of the mesh. options: what `sbpc.plan` was asked (pins, optimizer, ...). lower_bound: what no plan of this step on
    this mesh, with these pins, can cost less, in seconds or in bytes as `objective` says; with stages or a loop no
    layouts of these. loop: the step as a loop over micro-batches, None where it is one program. in_loop: parameters and
    gradients that are boxed for every micro-batch; others are once for all. serial_bound: what the mean rank computes
    and communicates at least if nothing overlaps, in seconds; 0 where that is `lower_bound`. times: CPU seconds by
    pass; "capture" is the torch call alone. body: of a loop the plan of a micro-batch through all stages, in which
    layouts were chosen. prover: the problem that a step of one program solves; both None where the plan was read from a
    file. again: plans the step again on this mesh, with other options as given. cached: the file of a plan that
    was made before, see `sbpc.api.plan_cache`; anew: makes that plan again. alike: plans further steps of
    the model, see `sbpc.api.alike`; None where the plan was read from a file.

    Three graphs show how a step of one chunk is written: `graph` has a layout for every value (`tangent_0`, ... in
    it are the gradients of the outputs, which come in from outside), `boxed` also the collectives between layouts,
    `local` is the program of rank 0 at local shapes. `sbpc show` prints or draws each.
    """

    body: Plan | None = field(default=None, repr=False, compare=False)
    times: dict[str, float] = field(default_factory=dict)
    prover: Prover | None = field(default=None, repr=False, compare=False)
    again: Callable[..., Plan] = field(default=no_model, repr=False)
    cached: Path | None = field(default=None, init=False, compare=False)  # a plan that is made of this one has neither
    anew: Callable[[], Plan] | None = field(default=None, init=False, repr=False, compare=False)
    alike: Any = field(default=None, init=False, repr=False, compare=False)

    @functools.cached_property
    def cost(self) -> Cost:
        """Seconds, bytes, flops and memory of a step, with a lower bound: a `Cost`."""
        start = time.process_time()
        with uncollected():
            cost = self.costs()
        self.times["cost"] = self.times.get("cost", 0.0) + time.process_time() - start
        return cost

    def memory_curve(self) -> MemoryCurve:
        """Returns the bytes alive at every moment of a step on a rank of the stage that takes most, by what they are
        for, and what holds most at the peak."""
        return memory_curve(self, self.fullest)

    # --- how good it is -----------------------------------------------------------------------------------------------
    @functools.cached_property
    def origin(self) -> Plan:
        """The plan with the problem that it solves: itself, or, if it was made before, the same made again."""
        return self if self.anew is None else self.anew()

    @property
    def solved(self) -> Plan:
        """The plan whose layout problem is that of the step: itself, or that of a micro-batch. Raises PlanError if
        it was not kept."""
        plan = self.origin
        if plan.loop is None:
            return plan
        if plan.body is None or self.options.memory is not None:
            lost = "that was read from a file" if plan.body is None else "under a memory limit"
            what = f"a plan {lost} does not hold the problem that it solves"
            raise PlanError(f"{what}\n  Plan the model anew here, without a memory limit, and ask that plan.")
        return plan.body

    @property
    def problem(self) -> Prover:
        """The problem that the plan solves. Raises PlanError for a plan that was read from a file."""
        prover = self.solved.prover
        if prover is None:
            raise PlanError("this plan does not hold the problem that it solves\n  Plan the model anew.")
        return prover

    @property
    def proof(self) -> Proof:
        """The multipliers behind the bound, see `check_bound`. Raises PlanError for a plan that was read from a
        file."""
        return self.problem.proof

    @property
    def times_solved(self) -> float:
        """How often the mean rank runs what was solved: in a loop each stage has its part of every micro-batch."""
        return self.count / self.stages

    def certify(self, *, seconds: float = 60.0) -> float:
        """Looks for a tighter lower bound for about so many CPU seconds, and returns the gap.

        It is of use where the gap is not 0. A plan without a memory limit stays as it is. Under a limit a better
        plan is looked for, too, and replaces this one. Raises PlanError for a plan that was read from a file, for a
        loop under a limit, and for what is no number of seconds.
        """
        check_kinds(PlanError, seconds=(seconds, "a number of seconds"))
        better, bound = self.problem.certify(self.solved, seconds)
        if better is not None and self.loop is None:
            kept = {"again": self.origin.again}
            vars(self).clear()
            vars(self).update(vars(better) | kept)
        self.lower_bound = max(self.lower_bound, self.times_solved * bound)
        vars(self).pop("cost", None)
        return self.cost.gap

    def check_bound(self, proof: Proof | None = None) -> Checked:
        """Returns what the layouts cost and the bound that the multipliers give, computed anew with nothing else of
        the solver; of a loop those of a micro-batch, times the micro-batches of the mean stage.

        proof: other multipliers than those of `plan.proof`; the bound holds for any. Raises PlanError for a plan
        read from a file.
        """
        if not isinstance(proof, Proof | None):
            raise PlanError(f"the proof is {shown(proof)}\n  Give a proof such as plan.proof, or leave it out.")
        paid, bound = self.problem.check(self.solved.assignment, proof or self.proof)
        return Checked(self.times_solved * paid, self.times_solved * bound, self.lower_bound)

    def explain(self, name: str) -> Any:
        """Returns why a parameter or a value has its layout: an `sbpc.inspect.explain.Explanation`, which `print`
        tells.

        Its alternatives are the best whole plans in which it is laid out otherwise; its seconds are those of the
        step, in a loop those of one micro-batch through all stages. name: as for `layout`, or a
        pattern as for pins, of which the first that it matches is explained. Raises PlanError for a name of nothing,
        for a plan under a memory limit that was read from a file, and for a loop that was, or is under a limit.
        """
        if isinstance(name, str) and name not in self.layouts:
            known = [each for pattern in spelled_out(name) for each in fnmatch.filter(self.layouts, pattern)]
            name = known[0] if known else name
        if self.loop is None:
            return self.rewriter.explain(self.origin, name)
        self.layout(name)
        found = self.rewriter.explain(self.solved, name)
        how = (
            f"{found.how}\n          on the mesh of one stage, for one of {self.count} micro-batches, which passes "
            "through all stages"
        )
        return replace(found, how=how, time="a micro-batch")

    def diff(self, other: Plan) -> Any:
        """Returns what another plan of the same model has otherwise: an `sbpc.inspect.diff.Diff`, which `print` tells.

        It is true where anything differs: layouts, collectives, seconds, bytes, memory, or what was asked for. The
        other plan may have pipeline stages. Raises PlanError for a plan of another model.
        """
        return self.rewriter.diff(self, other)

    # --- where it goes ------------------------------------------------------------------------------------------------
    @property
    def rewriter(self) -> Any:
        """The functions of the pipeline that the plan calls."""
        return self.chunks[0].rewriter

    def save(self, path: str | Path) -> None:
        """Writes the plan to one file that `sbpc.load` reads: JSON, no pickle, no code. Raises PlanError if that
        fails."""
        check_kinds(PlanError, path=(path, "a path"))
        self.rewriter.save(self, Path(path))

    def export(self, path: str | Path, inference: Plan | None = None) -> None:
        """Writes the plan with the programs of all its ranks, one for each class of ranks with equal local shapes.

        inference: a plan of the forward alone (`train=False`), whose programs go into the same file. `sbpc.load_module`
        makes the parallel module of the file without planning and without the model's source; `sbpc run` runs it. The
        file holds no weights, no pickle and no code: put the weights beside it, as `sbpc export` does
        (model.safetensors beside model.sbpc). examples/04_export_and_run.py shows all this. The file of a loop is that
        of `save`: each rank writes its programs from the chunks in it. Raises PlanError if it cannot be written.
        """
        check_kinds(PlanError, path=(path, "a path"))
        if inference is not None and not isinstance(inference, Plan):
            raise PlanError(f"inference is {shown(inference)}\n  Give a plan made with train=False, or None.")
        self.rewriter.export(self, Path(path), inference)

    def save_trace(self, path: str | Path) -> None:
        """Writes the timeline as a Chrome trace: open it at ui.perfetto.dev. Raises PlanError if it cannot be
        written."""
        check_kinds(PlanError, path=(path, "a path"))
        save_trace({PREDICTED: self.timeline()}, Path(path))

    def save_page(
        self, path: str | Path, *, losses: Mapping[str, Sequence[float]] | None = None, trace: str | Path | None = None
    ) -> None:
        """Writes one HTML page about the plan, which loads nothing: figures, map of the model, collectives, memory,
        graph, alternatives; of a loop the schedule, memory by stage, chunks with their parameters.

        losses: by name of a run, the loss of every step. trace: a file of `sbpc run --trace`: what rank 0 did is
        drawn below the prediction. Raises PlanError if the page cannot be written, and for a trace of another plan.
        """
        check_kinds(PlanError, path=(path, "a path"))
        measured = [] if trace is None else measured_step(trace, stage_events(self, 0))
        try:
            Path(path).write_text(self.rewriter.page(self, losses, measured), encoding="utf-8")
        except OSError as error:
            raise PlanError(f"the page cannot be written: {error}\n  Name a file in a folder that exists.") from error

    def __str__(self) -> str:
        return str(self.rewriter.text(self))

    def _repr_html_(self) -> str:
        return str(self.rewriter.html(self))

    def __repr__(self) -> str:
        way = f"{self.way}, " if self.way else ""
        return f"Plan({self.mesh}, {way}{len(self.parameters)} parameters, {self.cost.seconds:.3g} s a step)"
