"""A planned step: chunks of a model with their layouts, the schedule in which they work, and the programs of ranks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor
from torch.fx import GraphModule

from sbpc.errors import PlanError, VerifyError, check_kinds, closest, shown
from sbpc.graph.ports import GRADIENT, PARAMETER, TANGENT, Port, Ports
from sbpc.graph.pytree import dropped
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.plans.chunk import Assignment, Chunk, OnUse
from sbpc.plans.cost import Terms
from sbpc.plans.memory import Life
from sbpc.plans.options import Options
from sbpc.plans.program_check import REPORT
from sbpc.plans.staged.chunk_cost import ChunkCost, costs_of
from sbpc.plans.staged.chunk_programs import Budget, ChunkPrograms
from sbpc.plans.staged.loop import Loop
from sbpc.plans.staged.loop_checks import wrong_crossings
from sbpc.plans.staged.loop_formula import name_parts, terms, with_dims
from sbpc.plans.staged.part_memory import bytes_at
from sbpc.plans.staged.pipeline_cost import Pipeline
from sbpc.plans.staged.schedules import STEP, USUAL, Arrival
from sbpc.plans.staged.stage_parts import PARTS
from sbpc.plans.staged.staged_timeline import stage_events, stage_lanes
from sbpc.plans.timeline import Event
from sbpc.plans.usage import Usage, dear_results

T = TypeVar("T", bound="PlannedStep")
ROOM = 0.75  # of a device's bytes; others have the rest: kernels, collectives, what the allocator cannot use
OUTSIDE = (
    "each rank gets its own rows of the results, and no loss: gradients are those of the sum over ranks of what you "
    "make of them, so divide a mean over a rank's rows by the number of ranks, or plan with loss="
)


@dataclass
class PlannedStep(Pipeline):
    """A step of which everything is decided, and what follows from that. See `sbpc.plans.plan.Plan`, which has the
    same fields."""

    mesh: Mesh
    chunks: Sequence[Chunk]
    options: Options = field(default_factory=Options)
    lower_bound: float = 0.0
    loop: Loop | None = None
    in_loop: frozenset[Port] = frozenset()
    serial_bound: float = 0.0
    body: PlannedStep | None = field(default=None, repr=False, compare=False)

    # --- its stages, and its loop -------------------------------------------------------------------------------------
    @property
    def axis(self) -> str | None:  # type: ignore[override]
        """The axis of the stages, None where all ranks are one stage."""
        return None if self.loop is None else self.options.stages

    @property
    def schedule(self) -> str:  # type: ignore[override]
        """The order in which stages work, see `sbpc.plan`."""
        return STEP if self.loop is None else self.options.schedule or USUAL

    @property
    def count(self) -> int:  # type: ignore[override]
        """How many micro-batches a step has that run in a loop."""
        return 1 if self.loop is None else self.loop.count

    @property
    def inner(self) -> Mesh:
        """The mesh of one stage."""
        return self.chunks[0].mesh

    @property
    def way(self) -> str:
        """How the step runs, in words; nothing where it is one program."""
        stages = "" if self.axis is None else f"{self.stages} stages along {self.axis!r}, "
        order = f"{self.schedule}, " if stages or len(self.chunks) > 1 else ""
        return "" if self.loop is None else f"{stages}{order}{self.count} micro-batches"

    def ranks_of(self, stage: int) -> list[int]:
        """Returns the ranks of a stage, in the order of the mesh of one stage."""
        return [rank for rank in range(self.mesh.ranks) if self.stage_of(rank) == stage]

    def stage_of(self, rank: int) -> int:
        """Returns the stage of a rank."""
        return 0 if self.axis is None else self.mesh.coordinates(rank)[self.mesh.axis(self.axis)]

    @functools.cached_property
    def cuts(self) -> list[str]:
        """Where every chunk but the first begins, as `cuts=` takes it: its first parameter that earlier ones do not
        have, where that leads back to the same place."""
        if self.options.cuts is not None:
            return list(self.options.cuts)
        known, found = set[str](), list[str]()
        for chunk in self.chunks:
            own = [port.name for port in chunk.ports.inputs if port.kind == PARAMETER and port.name not in known]
            found += own[:1]
            known.update(own)
        return found[1:]

    @functools.cached_property
    def sources(self) -> dict[str, tuple[int, Port]]:
        """By name of a value that crosses, the chunk that sends it and the port."""
        return {name: (at, port) for at, chunk in enumerate(self.chunks) for port, name in chunk.sends.items()}

    @functools.cached_property
    def shared(self) -> dict[str, list[int]]:
        """By name of a parameter that several chunks have, as tied ones may be, these chunks."""
        having: dict[str, list[int]] = {}
        for at, chunk in enumerate(self.chunks):
            for name in (port.name for port in chunk.ports.inputs if port.kind == PARAMETER):
                having.setdefault(name, []).append(at)
        return {name: chunks for name, chunks in having.items() if len(chunks) > 1}

    @functools.cached_property
    def summands(self) -> dict[str, list[int]]:
        """By name of a parameter that several chunks have, those with a term of its gradient: with recomputation
        some may have none."""
        return {
            name: [at for at in chunks if Port(GRADIENT, name) in self.chunks[at].ports.outputs]
            for name, chunks in self.shared.items()
        }

    @functools.cached_property
    def arrivals(self) -> list[list[Arrival]]:  # type: ignore[override]
        """By chunk what it receives. A stage gets a value once: it is sent to the first of its chunks that reads it."""
        known, found = {} if self.loop is None else self.loop.joined, []
        makers = {number: at for at, chunk in enumerate(self.chunks) for number in chunk.results.values()}
        for at, chunk in enumerate(self.chunks):
            read = (makers[known[name]] for name in chunk.arguments.values() if name in known)
            found.append([Arrival(maker, False, True, None, joined=True) for maker in read])
            for port, name in chunk.receives.items():
                number, sent = self.sources[name]
                source = self.chunks[number]
                first = self.first_readers[name, self.owners[at]] == at
                size = bytes_at(source.value(sent), source.left[sent], self.inner) if first else None
                place, late = chunk.ports.inputs.index(port), port.kind == TANGENT
                found[-1].append(Arrival(number, sent in source.sends_late, late, size, name, place))
        return found

    @functools.cached_property
    def first_readers(self) -> dict[tuple[str, int], int]:
        """By name of a value that crosses, and stage, its chunk that reads it first: forwards go up the chunks, then
        backwards down."""
        readers = [
            (port.kind == TANGENT, -at if port.kind == TANGENT else at, at, name)
            for at, chunk in enumerate(self.chunks)
            for port, name in chunk.receives.items()
        ]
        return {(name, self.owners[at]): at for _, _, at, name in sorted(readers, reverse=True)}

    def sent_by(self, stage: int) -> Counter[str]:
        sent = super().sent_by(stage)
        for name, having in self.summands.items() if self.axis else ():
            others = {self.owners[other] for other in self.shared[name]} - {stage}
            port, mine = Port(GRADIENT, name), [self.chunks[at] for at in having if self.owners[at] == stage]
            sizes = (bytes_at(chunk.value(port), chunk.left[port], self.inner) for chunk in mine)
            sent[str(self.axis)] += len(others) * sum(sizes)
        return sent

    # --- its layouts --------------------------------------------------------------------------------------------------
    @property
    def ports(self) -> Ports:
        """What goes into and comes out of the step."""
        return self.chunk.ports if self.loop is None else self.loop.ports

    @property
    def shapes(self) -> Mapping[Port, Tensor]:
        """By port of a placeholder of the step: a tensor without data of the shape and dtype that was planned."""
        return self.chunk.shapes if self.loop is None else self.loop.shapes

    @property
    def usage(self) -> Usage | None:
        """The share of its devices' peak at which a training step runs, and tokens or samples a second; None where
        nothing is told of the machine."""
        return Usage.of(self.cost, self.mesh, self.shapes)

    @functools.cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layout of every value by its name in the graph, and the home of every parameter by its qualified name;
        on the mesh of a stage."""
        known: dict[str, Layout] = {}
        for chunk in self.chunks:
            known = chunk.layouts | known
        return known | {name: known[first] for name, first in self.ports.tied.items() if first in known}

    @functools.cached_property
    def parameters(self) -> dict[str, Layout]:
        """The home of every parameter by its qualified name: the layout in which it, its gradient and its optimizer
        state are stored.

        `pin=plan.parameters` gives another plan the same homes. A parameter may be boxed to other layouts where ops
        read it.
        """
        return {name: layout for chunk in self.chunks for name, layout in chunk.parameters.items()}

    def layout(self, name: str) -> Layout:
        """Returns the layout of a parameter (its home) or of a value, by the name that `sbpc show` prints; on the
        mesh of its stage.

        Raises PlanError for a name that is neither.
        """
        check_kinds(PlanError, name=(name, "a text"))
        if name not in self.layouts:
            names = ", ".join(closest(name, list(self.layouts)))
            raise PlanError(f"the plan has no parameter and no value {name!r}\n  The closest names are {names}.")
        return self.layouts[name]

    @functools.cached_property
    def notes(self) -> tuple[str, ...]:
        """Loud lines, which the report shows: rules without a proof, ops that run whole on every rank for want of a
        rule, with what that costs, and rows of each rank's own of which you make the loss."""
        tangents = [value for port, value in self.shapes.items() if port.kind == TANGENT]
        outside = self.options.own_rows is not None and tangents and all(value.numel() > 1 for value in tangents)
        found = [note for chunk in self.chunks for note in chunk.notes]
        return tuple(dict.fromkeys([*found, OUTSIDE] if outside else found))

    @property
    def remarks(self) -> tuple[str, ...]:
        """Quiet lines: rules of the user's that are proved or reviewed, ops that are planned as the parts they are
        made of, a schedule that takes too many bytes, a cache that is not returned, a result that is dear."""
        graphs = [self.boxed] if self.loop is None else [chunk.annotated for chunk in self.chunks]
        caches = [f"the {name} among the results is left out: None is returned" for name in dropped(self.ports.results)]
        dear = dear_results(self.boxed, self.mesh, self.shapes, self.cost) if self.loop is None else ()
        return tuple(dict.fromkeys([*(remark for gm in graphs for remark in gm.meta["remarks"]), *caches, *dear]))

    # --- its programs -------------------------------------------------------------------------------------------------
    @property
    def chunk(self) -> Chunk:
        """The only chunk. Raises PlanError where there are several, each of which has graphs of its own."""
        if len(self.chunks) > 1:
            raise PlanError(
                f"a plan of {len(self.chunks)} chunks has no one graph\n  Every chunk has one: plan.chunks[0].graph."
            )
        return self.chunks[0]

    @property
    def graph(self) -> GraphModule:
        """The annotated graph of the only chunk, forward and backward at global shapes, with the layout of every
        value as `meta["sbp"]`.

        It is a copy to look at: what is changed in it changes nothing that runs."""
        return self.chunk.graph

    @property
    def annotated(self) -> GraphModule:
        """The annotated graph of the only chunk, which plans in other layouts may share."""
        return self.chunk.annotated

    @property
    def assignment(self) -> Assignment:
        """What was decided for the only chunk."""
        return self.chunk.assignment

    @property
    def given(self) -> dict[Port, Layout]:
        """By port of a placeholder of the only chunk: the layout in which it is stored or comes in."""
        return self.chunk.given

    @property
    def left(self) -> dict[Port, Layout | None]:
        """By port of an output of the only chunk: the layout in which it is left, None for an absent one."""
        return self.chunk.left

    @property
    def unscheduled(self) -> GraphModule:
        """The boxed graph in the order of capture, where every collective is waited for at once."""
        return self.chunk.unscheduled

    @property
    def boxed(self) -> GraphModule:
        """The graph at global shapes with a boxing node wherever layouts disagree, in the order in which it runs as
        one program.

        Where collectives run beside computing, a boxing starts one, and a node `wait(x)` waits for it.
        """
        self.chunk  # noqa: B018 (raises where there are several)
        return self.programs[0].program(PARTS).gm

    @property
    def local(self) -> GraphModule:
        """The program of rank 0."""
        return self.local_at(0)

    def local_at(self, rank: int) -> GraphModule:
        """Returns the program of `rank`; ranks with equal local shapes share one. Raises PlanError if there is no
        such rank."""
        check_kinds(PlanError, rank=(rank, "an integer"))
        if not 0 <= rank < self.inner.ranks:
            raise PlanError(
                f"rank {shown(rank)} of a mesh of {self.inner.ranks} ranks\n  Ranks are 0 to {self.inner.ranks - 1}."
            )
        self.chunk  # noqa: B018 (raises where there are several)
        return self.programs[0].local_at(PARTS, True, rank)

    @functools.cached_property
    def programs(self) -> Sequence[ChunkPrograms]:
        """The programs of each chunk. Nothing comes early or late of them where stages share cores, as nobody predicts
        how long that takes beside others."""
        several = len(self.chunks) > self.stages and self.alone == 1.0
        return OnUse(
            len(self.chunks),
            lambda at: ChunkPrograms(self.chunks[at], self.in_loop, self.overlaps, self.budget, several),
        )

    def budget(self) -> Budget:
        """Returns the bytes that a schedule may take of the whole step, besides those of the optimizer: of a limit
        all, of the device ROOM where it is faster. In a loop neither, as others are alive beside a program."""
        if self.loop is not None:
            return Budget()
        state = self.options.copies * self.chunk_costs[0].trained
        if self.options.memory is not None:
            return Budget(self.options.memory - state)
        return Budget(room=ROOM * self.mesh.cluster.memory - state)

    def forget(self) -> None:
        """Drops the boxed graph, what is alive in it and the programs. They are made again on use."""
        for name in ("programs", "chunk_costs"):
            vars(self).pop(name, None)
        for chunk in self.chunks:
            for name in ("unscheduled", "cut_shapes"):
                vars(chunk).pop(name, None)

    def with_layouts(self: T, assignment: Assignment, **others: Any) -> T:
        """Returns the plan of one chunk in other layouts. others: fields that are to be others."""
        return replace(self, chunks=[replace(self.chunk, assignment=assignment, orders={})], **others)

    def verify(self) -> int:
        """Checks every edge, and returns their number: states type-check, shapes agree, gradients land at home and
        are summed in the types that `reduce` says, and what crosses is left by one chunk as others read it. Raises
        VerifyError."""
        edges = 0
        for at, (chunk, programs) in enumerate(zip(self.chunks, self.programs)):
            kinds = [
                (which, adding) for which in self.tally(at) for adding in ((True,) if which == PARTS else (False, True))
            ]
            written = [(programs.program(*kind).gm, functools.partial(programs.local_at, *kind)) for kind in kinds]
            edges += chunk.rewriter.verify(chunk, written, self.options) + len(chunk.receives)
        for mistake in wrong_crossings(self):
            raise VerifyError(f"{mistake}\n  {REPORT}")
        return edges

    # --- what it costs ------------------------------------------------------------------------------------------------
    @functools.cached_property
    def chunk_costs(self) -> list[ChunkCost]:  # type: ignore[override]
        """What each chunk costs."""
        return costs_of(self.chunks, self.in_loop, self.programs)

    def timeline(self) -> list[Event]:
        """Returns what a step is predicted to do on the busiest rank: kernels and collectives, each on its stream
        from start to end, in seconds since the step began. Forward and backward run as one program, as `module.step`
        runs them.

        Of a loop, with stages or with one: a lane for each stage, on which chunks work on micro-batches, and beside
        it lanes of the collectives inside it and of what it sends to others.
        """
        return stage_events(self, 0) if self.loop is None else stage_lanes(self)

    @property
    def life(self) -> Life:
        """What is alive at every moment of a step of one program."""
        return self.programs[0].life

    @functools.cached_property
    def named(self) -> GraphModule | None:
        """The graph whose dims have symbols, of which chunks are parts. None where none have: of several chunks that
        were read from a file there is no such graph."""
        if self.loop is None:
            return self.annotated
        source = self.body or (self if len(self.chunks) == 1 else None)
        if source is None or source.options.microbatches == 2 or (source.options.panels or 1) > 1:
            return None
        return name_parts(source.annotated, self.loop, self.inner, self.options.dynamic or {})

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers of the symbols in dims."""
        return {} if self.named is None else self.named.meta.get("dynamic", {})

    def terms_of(self, stage: int) -> Callable[[], Terms]:
        """Returns what makes the terms of the formulas of a stage's cost."""
        return lambda: terms(self, self.symbolic(stage), self.numbers, lambda: self.symbolic(self.fullest))

    def symbolic(self, stage: int) -> dict[int, ChunkPrograms]:
        """Returns the programs of a stage's chunks by their number, with symbolic dims if there are any."""
        mine = {at: self.programs[at] for at in self.chunks_on(stage)}
        if self.named is None or self.loop is None:
            return mine
        return {
            at: ChunkPrograms(with_dims(each.chunk, self.named), self.in_loop, self.overlaps, goes_on=each.goes_on)
            for at, each in mine.items()
        }
