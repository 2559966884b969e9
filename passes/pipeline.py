"""Runs the passes in order, with a check and a clock after each. Capture comes before, in `sbpc.api.task`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from torch.fx import GraphModule

from sbpc.errors import LayoutError, PinError, PlanError, at_node
from sbpc.graph.about import FLOAT32
from sbpc.graph.no_gc import uncollected
from sbpc.inspect.diff import diff
from sbpc.inspect.graph_text import graph_text
from sbpc.inspect.model_map import model_map
from sbpc.inspect.page import page_html
from sbpc.inspect.report import report
from sbpc.mesh.collectives import EIGHT_BITS
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import Wish
from sbpc.passes.annotate import annotate
from sbpc.passes.assign.space import Space
from sbpc.passes.assign.wishes import Wishes, row_alternatives
from sbpc.passes.box import box
from sbpc.passes.canonicalize.capacity import within_capacity
from sbpc.passes.canonicalize.decompose import decompose
from sbpc.passes.canonicalize.expert_rows import expert_rows, has_groups
from sbpc.passes.canonicalize.lift import lift
from sbpc.passes.canonicalize.normalize import normalize
from sbpc.passes.canonicalize.wide_sums import in_eight_bits, masters_of, wide_sums
from sbpc.passes.capture.capture import capture
from sbpc.passes.explain import best_alternatives, explain
from sbpc.passes.localize import localize
from sbpc.passes.loop.body import loop_of
from sbpc.passes.loop.micro_batches import micro_batches
from sbpc.passes.loop.recompute import recompute
from sbpc.passes.loop.slices import in_slices
from sbpc.passes.memory.limited_space import LimitedSpace, store
from sbpc.passes.memory.search import MemorySearch
from sbpc.passes.panels.cut import in_panels
from sbpc.passes.schedule.choice import Weights, bounded, choose, first_choice, weighted
from sbpc.passes.schedule.schedule import Orders, schedule
from sbpc.passes.stages.cut import cut
from sbpc.passes.verify import verify, verify_annotated, verify_assigned, verify_boxed, verify_captured
from sbpc.plans import plan_bytes, plan_file, rank_programs
from sbpc.plans.chunk import Assignment, Chunk, Rewriter
from sbpc.plans.options import BYTES, Options
from sbpc.plans.plan import Plan
from sbpc.plans.program_check import verify_local
from sbpc.plans.staged.stage_parts import PARTS
from sbpc.plans.symbolic_sizes import declare
from sbpc.plans.timeline import COMPUTE, Event
from sbpc.solver.bounder import is_wide

log = logging.getLogger("sbpc")
progress = logging.getLogger("sbpc.progress")
FEW_CALLS = 1_500  # of a graph that is tried in two micro-batches, in panels, and with boxing counted where it waits
WEIGHTS = 2  # of streams that are tried
GAP, TIE, FEW = 3e-2, 1e-9, 100_000  # see `finish`; seconds that differ by a smaller fraction than TIE are equal
ALTERNATIVES = 3  # layouts of a parameter that a page shows besides its own


class Pass(NamedTuple):
    """A pass: its name, what runs it, the check of the graph that it gives, and when it runs."""

    name: str
    run: Callable[..., Any]
    check: Callable[..., Any]
    when: str


PASSES = {
    each.name: each
    for each in (  # in the order in which they run; `--dump` writes the graph after each
        Pass("capture", capture, verify_captured, "always"),
        Pass("normalize", normalize, verify_captured, "always"),
        Pass("decompose", decompose, verify_captured, "always"),
        Pass("lift", lift, verify_captured, "always"),
        Pass("experts", expert_rows, verify_captured, "where there are products of groups of rows"),
        Pass("annotate", annotate, verify_annotated, "always"),
        Pass("capacity", within_capacity, verify_annotated, "where overflow= is 'drop'"),
        Pass("slices", in_slices, verify_annotated, "where slices= is above 1, or None and `memory` is tight"),
        Pass(
            "sums",
            wide_sums,
            verify_annotated,
            "where numbers have 16 bits, unless reduce= and masters= say no, and where reduce= or gather= is of 8 bits",
        ),
        Pass("recompute", recompute, verify_annotated, "where recompute= is not 'none'"),
        Pass(
            "microbatches",
            micro_batches,
            verify_annotated,
            "in micro-batches that are no loop; in two halves where that is faster",
        ),
        Pass("loop", loop_of, verify_annotated, "in a loop over micro-batches, and in stages"),
        Pass("cut", cut, verify_annotated, "in a loop: the graphs of its chunks"),
        Pass("panels", in_panels, verify_annotated, "where panels= is above 1, or None and they are faster"),
        Pass("assign", Space.solve, verify_assigned, "always; with memory= a `MemorySearch` besides"),
        Pass("box", box, verify_boxed, "always"),
        Pass("schedule", schedule, verify_boxed, "where collectives run beside computing"),
        Pass("localize", localize, verify_local, "always, for each class of ranks"),
    )
}
FRONT = ("normalize", "decompose", "lift", "experts", "annotate")


@dataclass
class Stages:
    """Clocks and dumps the stages of one run of the pipeline.

    dump: a folder for the text of the graph after each pass, or None. times: CPU seconds by pass. shown: texts so far.
    """

    dump: Path | None = None
    times: dict[str, float] = field(default_factory=dict)
    shown: int = 0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Counts the CPU seconds of a block under a name."""
        start = time.process_time()
        progress.debug("%s", name)
        yield
        self.times[name] = self.times.get(name, 0.0) + time.process_time() - start
        log.info("%s: %.2f s", name, self.times[name])

    def show(self, name: str, gm: GraphModule, where: str = "") -> None:
        """Writes the text of the graph after a pass, if asked to. where: what the name of the file begins with."""
        if self.dump is not None:
            self.dump.mkdir(parents=True, exist_ok=True)
            (self.dump / f"{self.shown:02}_{where}{PASSES[name].name}.txt").write_text(graph_text(gm))
            self.shown += 1

    def run(self, name: str, *args: Any, **kwargs: Any) -> GraphModule:
        """Runs a pass that gives one graph, checks that and shows it."""
        with self.timed(name):
            gm: GraphModule = PASSES[name].run(*args, **kwargs)
        return self.passed(name, gm)

    def passed(self, name: str, gm: GraphModule) -> GraphModule:
        """Checks the graph that a pass has given, and shows it."""
        with self.timed("verify"):
            PASSES[name].check(gm)
        self.show(name, gm)
        return gm

    def with_sums(self, gm: GraphModule, options: Options) -> GraphModule:
        """Returns an annotated graph with its sums in wider types, and with masters, where `wide_sums` changes any,
        and what may be sent in 8 bits marked."""
        reduce, eight = options.reduce, {options.reduce, options.gather} & {*EIGHT_BITS}
        with self.timed("sums"):
            made = wide_sums(gm, FLOAT32 if reduce in EIGHT_BITS else reduce, masters_of(gm, options))
            if made is not gm:
                made = annotate(made)
            if eight:
                made = in_eight_bits(made, options)
        return gm if made is gm else self.passed("sums", made)

    def show_plan(self, plan: Plan) -> None:
        """Writes the graphs of a finished plan, those of each chunk where there are several."""
        for at, (chunk, programs) in enumerate(zip(plan.chunks, plan.programs)) if self.dump is not None else ():
            graphs = {"assign": chunk.graph, "box": chunk.unscheduled}
            if plan.loop is not None:
                graphs = {"cut": chunk.annotated, **graphs}
            if plan.overlaps:
                graphs["schedule"] = programs.program(PARTS).gm
            graphs["localize"] = programs.local_at(PARTS, True, 0)
            for name, gm in graphs.items():
                self.show(name, gm, "" if plan.loop is None else f"chunk{at}_")


def front(captured: GraphModule, stages: Stages) -> GraphModule:
    """Returns the annotated graph of a captured one."""
    gm = captured
    for name in FRONT:
        if name != "experts" or has_groups(gm):
            gm = stages.run(name, gm)
    return gm


def finish(
    gm: GraphModule,
    mesh: Mesh,
    wished: Wishes,
    options: Options,
    stages: Stages,
    experts: Callable[[], Iterable[Mapping[str, Wish]]] | None = None,
    exact: bool = True,
    quick: bool = False,
) -> Plan:
    """Returns the plan of an annotated graph. The boxed and local graphs are made on first use.

    exact: whether a small problem is solved to the end. quick: whether the first plan will do where it fits, see
    `first_choice`. experts: the wishes of schemes that the plan is not to be slower than. They are tried unless the
    plan is proved best: in spaces of more than FEW labels, to a gap of GAP; in others, where nothing overlaps.
    Raises MemoryLimitError if the plan does not fit into the memory that `options` name and none that does is found.
    """
    in_order = options.in_order

    check_types(gm, mesh)

    def layouts_at(weights: Weights) -> Space:
        other = weighted(mesh, weights)
        return Space(gm, other, wished.nodes, wished.outputs, like=space, part=weights[COMPUTE])

    def made(assignment: Assignment) -> Plan:
        return make_plan(gm, mesh, assignment, 0.0, in_order, stages)

    with stages.timed("assign"):
        space = Space(gm, objective_mesh(mesh, options.objective), wished.nodes, wished.outputs)
    if quick:
        with stages.timed("schedule"):
            plan = first_choice(mesh, options, space, layouts_at, made)
        if options.memory is None or plan.cost.memory["total"] <= options.memory:
            return plan
    with stages.timed("assign"):
        assignment, bound = space.solve(exact=exact)
        large = sum(len(v.costs) for v in space.variables) > FEW
        schemes: list[Assignment] = []
        proved = space.gap <= (GAP if large else TIE)
        if experts is not None and (options.overlaps or not proved):
            # the best plan where nothing overlaps may be proved, and tells little of what sending may hide behind
            tried = row_alternatives(gm, mesh, wished.nodes) if proved and large else experts()
            schemes = list(followed(space, wished.outputs, tried))
            assignment, bound = no_slower(space, assignment, bound, schemes)
    plan = replace(made(assignment), lower_bound=bound, prover=space)
    if options.memory is not None and plan.cost.memory["total"] > options.memory:
        with stages.timed("assign"):
            search = searched(gm, plan, wished, stages)
            search.run(plan, float(options.memory))
            search.sharpen(exact=not options.overlaps)
            plan = search.finished()
        if options.overlaps:
            plan = bounded(plan, options, layouts_at)
    elif options.overlaps:
        with stages.timed("schedule"):
            # it predicts no machine, so the layouts that send least are as good as any
            ideal = mesh.cluster.name == "ideal"
            some, rounds = not ideal and few_calls(gm), 1 if ideal else WEIGHTS
            where, moves = space.where_it_counts if some and not is_wide(space.problem) else None, space.moves
            others = () if ideal else schemes
            plan = choose(plan, options, layouts_at, others, made, where, rounds, moves if some else None)
    return plan


def check_types(gm: GraphModule, mesh: Mesh) -> None:
    """Raises PlanError for a product of numbers that the devices of a mesh do not multiply."""
    device = mesh.cluster.device
    for node in gm.graph.nodes:
        match = node.meta.get("match")
        if device is not None and match is not None and match.product and device.lacks(match.kind):
            name = repr(mesh.cluster.name)
            what = f"%{node.name} is a product of {match.kind}, which the devices of cluster {name} do not multiply"
            todo = (
                f"Train there in bfloat16; where {name} was measured before it told of {match.kind}, measure it anew."
            )
            raise PlanError(at_node(what, node, todo))


def few_calls(gm: GraphModule) -> bool:
    """Returns whether a graph is small enough to be written anew, and planned, several times."""
    return sum(node.op == "call_function" for node in gm.graph.nodes) <= FEW_CALLS


def searched(gm: GraphModule, free: Plan, wished: Wishes, stages: Stages) -> MemorySearch:
    """Returns the search for plans of a graph that take less memory than its plan `free`; on the mesh whose seconds
    are minimised."""
    stored = annotate(store(gm))
    if free.options.dynamic is not None:
        declare(stored, free.options.dynamic)
    space = LimitedSpace(stored, objective_mesh(free.mesh, free.options.objective), wished.nodes, wished.outputs)

    def made(assignment: Assignment) -> Plan:
        return make_plan(stored, free.mesh, assignment, 0.0, free.options, stages)

    return MemorySearch(space, stored, 1 + free.options.copies, made)


def no_slower(
    space: Space, assignment: Assignment, bound: float, others: Iterable[Assignment]
) -> tuple[Assignment, float]:
    """Returns an assignment that is not slower than any of `others`, and the better bound."""
    most = space.seconds(assignment) * (1 - TIE)
    better = [other for other in others if space.seconds(other) < most]
    if not better:
        return assignment, bound
    assignment, again = space.solve(starts=[assignment, *better])
    return assignment, max(bound, again)


def followed(space: Space, outputs: Mapping[int, Wish], experts: Iterable[Mapping[str, Wish]]) -> Iterator[Assignment]:
    """Yields the best assignment of each scheme that can be met on the graph and mesh of a space."""
    for wishes in experts:
        with suppress(PinError, LayoutError):
            yield Space(space.gm, space.mesh, wishes, outputs, like=space).solve()[0]


def make_plan(
    gm: GraphModule, mesh: Mesh, assignment: Assignment, bound: float, options: Options, stages: Stages
) -> Plan:
    """Returns the plan of an assignment for an annotated graph, checked."""
    return Plan(
        mesh,
        [Chunk(mesh, assigned(stages, mesh, gm, assignment), assignment, rewriter_of(options))],
        options,
        bound,
        times=stages.times,
    )


def make_chunk(mesh: Mesh, stages: Stages, gm: GraphModule, assignment: Assignment, *about: Any) -> Chunk:
    """Returns a chunk, which is annotated and checked when its graph is first asked for. about: what its ports stand
    for, see `Chunk`."""
    return Chunk(
        mesh, gm, assignment, REWRITER, lambda gm, assignment: assigned(stages, mesh, annotate(gm), assignment), *about
    )


def assigned(stages: Stages, mesh: Mesh, gm: GraphModule, assignment: Assignment) -> GraphModule:
    """Returns an annotated graph after a check of its layouts."""
    with stages.timed("verify"):
        verify_assigned(gm, assignment, mesh)
    return gm


def objective_mesh(mesh: Mesh, objective: str) -> Mesh:
    """Returns the mesh whose seconds the solver minimises: for "bytes" one where nothing but bytes costs."""
    if objective != BYTES:
        return mesh
    links = replace(
        mesh.cluster,
        name="bytes",
        peak=inf,
        memory_bandwidth=inf,
        launch=0.0,
        device=None,
        collectives=(),
        ways=(),
        ranks_per_node=1 << 30,
        intra_latency=0.0,
        inter_latency=0.0,
        intra_bandwidth=1.0,
        inter_bandwidth=1.0,
    )
    return mesh.like(links)


@uncollected()
def page(plan: Plan, losses: Mapping[str, Sequence[float]] | None, measured: Sequence[Event]) -> str:
    """Returns the page about a plan, with the best alternatives of its parameters; of equal blocks, those of the
    first."""
    names = [row.name for row in model_map(plan) if row.home is not None]
    return page_html(plan, best_alternatives(plan.origin, names, ALTERNATIVES), losses, measured)


def save(plan: Plan, path: Path) -> None:
    """Writes a plan to one file."""
    plan_bytes.write(plan_file.encode(plan), path)


def export(plan: Plan, path: Path, inference: Plan | None) -> None:
    """Writes a plan with its programs to one file; that of a loop is the plan's."""
    if plan.loop is None:
        return rank_programs.save(plan, path, inference)
    if inference is not None:
        raise PlanError("a file of a loop holds one plan\n  Export the plan for inference to a file of its own.")
    return save(plan, path)


def text(plan: Plan) -> str:
    """Returns the report of a plan for a terminal."""
    return report(plan).text()


def html(plan: Plan) -> str:
    """Returns the report of a plan for a notebook."""
    return report(plan).html()


def box_in_bytes(gm: GraphModule, assignment: Assignment, mesh: Mesh) -> GraphModule:
    """Boxes by the ways that send least, which need not be the fastest ones."""
    return box(gm, assignment, objective_mesh(mesh, BYTES))


REWRITER = Rewriter(box, schedule, Orders, localize, verify, save, export, text, html, explain, diff, page)


def rewriter_of(options: Options) -> Rewriter:
    """Returns the functions that a plan with these options calls."""
    return replace(REWRITER, box=box_in_bytes) if options.objective == BYTES else REWRITER
