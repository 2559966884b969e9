"""A plan whose step is a loop over micro-batches, with pipeline stages or with one: the plan of every chunk of the model, and the
schedule in which they work."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sbpc.errors import PlanError, VerifyError, check_kinds
from sbpc.graph.ports import GRADIENT, PARAMETER, TANGENT, Port, Ports
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.plans.cost import Terms
from sbpc.plans.options import Options
from sbpc.plans.plan import Checked, Plan, Rewriter, layout_of, write_page
from sbpc.plans.program_check import REPORT
from sbpc.plans.staged.chunk_cost import ChunkCost, costs_of
from sbpc.plans.staged.chunk_programs import Chunk, ChunkPrograms, OnUse
from sbpc.plans.staged.loop import Loop
from sbpc.plans.staged.loop_formula import name_parts, terms, with_dims
from sbpc.plans.staged.part_memory import bytes_at
from sbpc.plans.staged.pipeline_cost import Pipeline
from sbpc.plans.staged.schedules import FORWARD, INPUTS, Arrival
from sbpc.plans.staged.staged_timeline import stage_events, stage_lanes
from sbpc.plans.timeline import Event
from sbpc.plans.trace_file import PREDICTED, measured_step, save_trace

OF_CHUNKS = ("graph", "boxed", "local", "local_at", "memory_curve")  # a plan of one chunk has those of the chunk
AGAIN = "Plan the model anew here, without a memory limit, and ask that plan."


@dataclass
class StagedPlan(Pipeline):
    """A plan whose step runs as stages of a pipeline along one axis of the mesh. `print(plan)` shows it.

    mesh: all axes. axis: that of the stages, None where all ranks are one stage. loop: the step as a loop over micro-batches. chunks: in
    the order of the model. schedule: as `sbpc.plan` takes it. bound: seconds that no layouts of these stages can beat. in_loop:
    parameters and gradients that are boxed for every micro-batch; others are once for all. serial_bound: what the mean stage computes
    and communicates at least, whatever its layouts. body: the plan of a micro-batch through all
    stages, in which layouts were chosen; None where the plan was read from a file.
    """

    mesh: Mesh
    axis: str | None
    loop: Loop
    chunks: list[Chunk]
    schedule: str
    bound: float
    in_loop: frozenset[Port] = frozenset()
    options: Options = field(default_factory=Options)
    times: dict[str, float] = field(default_factory=dict)
    body: Plan | None = field(default=None, repr=False, compare=False)
    serial_bound: float = 0.0

    @functools.cached_property
    def count(self) -> int:  # type: ignore[override]
        """How many micro-batches a step has."""
        return self.loop.count

    @property
    def inner(self) -> Mesh:
        """The mesh of one stage."""
        return self.chunks[0].plan.mesh

    @property
    def ports(self) -> Ports:
        """What goes into and comes out of the step."""
        return self.loop.ports

    @property
    def shapes(self) -> Mapping[Port, Tensor]:
        """By port of a placeholder of the step: a tensor without data of the shape and dtype that was planned."""
        return self.loop.shapes

    @property
    def way(self) -> str:
        """How the step runs, in words."""
        stages = "" if self.axis is None else f"{self.stages} stages along {self.axis!r}, {self.schedule}, "
        return f"{stages}{self.count} micro-batches"

    def ranks_of(self, stage: int) -> list[int]:
        """Returns the ranks of a stage, in the order of the mesh of one stage."""
        return [rank for rank in range(self.mesh.ranks) if self.stage_of(rank) == stage]

    def stage_of(self, rank: int) -> int:
        """Returns the stage of a rank."""
        return 0 if self.axis is None else self.mesh.coordinates(rank)[self.mesh.axis(self.axis)]

    @property
    def notes(self) -> tuple[str, ...]:
        """Loud lines about any chunk, see `Plan.notes`."""
        return tuple(dict.fromkeys(note for chunk in self.chunks for note in chunk.plan.notes))

    @property
    def remarks(self) -> tuple[str, ...]:
        """Quiet lines about any chunk, see `Plan.remarks`."""
        return tuple(dict.fromkeys(remark for chunk in self.chunks for remark in chunk.plan.graph.meta["remarks"]))

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
        """By name of a parameter that several chunks have, those with a term of its gradient: with recomputation some may have none."""
        return {
            name: [at for at in chunks if Port(GRADIENT, name) in self.chunks[at].ports.outputs]
            for name, chunks in self.shared.items()
        }

    @functools.cached_property
    def parameters(self) -> dict[str, Layout]:
        """The home of every parameter on the mesh of its stage."""
        return {name: layout for chunk in self.chunks for name, layout in chunk.plan.parameters.items()}

    @functools.cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layout of every value by its name, and the home of every parameter, on the mesh of a stage."""
        known: dict[str, Layout] = {}
        for chunk in self.chunks:
            known = chunk.plan.layouts | known
        return known | {name: known[first] for name, first in self.ports.tied.items() if first in known}

    def layout(self, name: str) -> Layout:
        """Returns the layout of a parameter or of a value on the mesh of its stage. Raises PlanError for a name that is neither."""
        return layout_of(self.layouts, name)

    def terms_of(self, stage: int) -> Callable[[], Terms]:
        """Returns what makes the terms of the formulas of a stage's cost."""
        most = max(range(self.stages), key=lambda each: self.memory_of(each)["total"])
        return lambda: terms(self, self.symbolic(stage), self.numbers, lambda: self.symbolic(most))

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """The numbers of the symbols in the dims of the body. A plan of several chunks that was read from a file has none."""
        source = self.body or (self.chunks[0].plan if len(self.chunks) == 1 else None)
        return {} if source is None else name_parts(source.graph, self.loop, self.inner, self.options.dynamic or {})

    def symbolic(self, stage: int) -> dict[int, ChunkPrograms]:
        """Returns the programs of a stage's chunks by their number, with symbolic dims if there are any."""
        mine = {at: self.programs[at] for at, owner in enumerate(self.owners) if owner == stage}
        if not self.numbers:
            return mine
        source = (self.body or self.chunks[0].plan).graph
        return {at: ChunkPrograms(with_dims(each.plan, source), self.in_loop, self.overlaps) for at, each in mine.items()}

    @functools.cached_property
    def programs(self) -> Sequence[ChunkPrograms]:
        """The programs of each chunk."""
        return OnUse(len(self.chunks), lambda at: ChunkPrograms(self.chunks[at].plan, self.in_loop, self.overlaps))

    @functools.cached_property
    def parts(self) -> list[ChunkCost]:  # type: ignore[override]
        """What each chunk costs."""
        return costs_of(self.chunks, self.in_loop, self.programs)

    @functools.cached_property
    def arrivals(self) -> list[list[Arrival]]:  # type: ignore[override]
        """By chunk what it receives. A stage gets a value once: it is sent to the first of its chunks that reads it."""
        found = []
        for at, chunk in enumerate(self.chunks):
            found.append(list[Arrival]())
            for port, name in chunk.receives.items():
                number, sent = self.sources[name]
                source = self.chunks[number]
                first = self.first_readers[name, self.owners[at]] == at
                size = bytes_at(source.value(sent), source.left[sent], self.inner) if first else None
                found[-1].append(Arrival(number, sent in source.sends_late, port.kind == TANGENT, size))
        return found

    @functools.cached_property
    def first_readers(self) -> dict[tuple[str, int], int]:
        """By name of a value that crosses, and stage, its chunk that reads it first: forwards go up the chunks, then backwards down."""
        readers = [
            (port.kind == TANGENT, -at if port.kind == TANGENT else at, at, name)
            for at, chunk in enumerate(self.chunks) for port, name in chunk.receives.items()
        ]  # fmt: skip
        return {(name, self.owners[at]): at for _, _, at, name in sorted(readers, reverse=True)}

    def timeline(self) -> list[Event]:
        """Returns what a step is predicted to do: a lane for each stage, on which chunks work on micro-batches, and beside it lanes of the
        collectives inside it and of what it sends to others."""
        return stage_lanes(self)

    def save_trace(self, path: str | Path) -> None:
        """Writes the timeline as a Chrome trace: open it at ui.perfetto.dev."""
        check_kinds(PlanError, path=(path, "a path"))
        save_trace({PREDICTED: self.timeline()}, Path(path))

    def sent_by(self, stage: int) -> Counter[str]:
        sent = super().sent_by(stage)
        for name, having in self.summands.items() if self.axis else ():
            others = {self.owners[other] for other in self.shared[name]} - {stage}
            mine = [at for at in having if self.owners[at] == stage]
            sent[str(self.axis)] += len(others) * sum(self.parts[at].homes[name] for at in mine)
        return sent

    def verify(self) -> int:
        """Checks every edge of every chunk, and that what crosses is left by one chunk as others read it. Returns the number of edges.

        Raises VerifyError.
        """
        edges = 0
        for at, (chunk, programs) in enumerate(zip(self.chunks, self.programs)):
            written = [
                (programs.program(which, adding).gm, functools.partial(programs.local_at, which, adding))
                for which in self.tally(at) for adding in (False, True)
            ]  # fmt: skip
            edges += self.rewriter.verify(chunk.plan, written) + len(chunk.receives)
        for mistake in self.wrong_crossings():
            raise VerifyError(f"{mistake}\n  {REPORT}")
        return edges

    def wrong_crossings(self) -> Iterator[str]:
        """Yields what chunks receive that does not come as it is read, and what they are to send and do not leave.

        It relies on chunks that are right in themselves.
        """
        if len(self.sources) != sum(len(chunk.sends) for chunk in self.chunks):
            yield "a value that two chunks send"
        for at, chunk in enumerate(self.chunks):
            for port, name in chunk.receives.items():
                if name not in self.sources:
                    yield f"{name}, which chunk {at} receives and none sends"
                    return
                number, sent = self.sources[name]
                source = self.chunks[number]
                if number == at or alike(source.value(sent)) != alike(chunk.plan.shapes[port]):
                    yield f"{name}, which chunk {number} sends in another shape than chunk {at} receives"
                if source.left[sent] != chunk.plan.given[port]:
                    yield f"{name}, which chunk {number} sends in another layout than chunk {at} receives"
        for at, chunk in enumerate(self.chunks):
            for port, name in chunk.sends.items():
                if not self.leaves(at, port):
                    yield f"{name}, which chunk {at} is to send and leaves in no micro-batch"

    def leaves(self, chunk: int, port: Port) -> bool:
        """Returns whether all programs of a chunk that are to leave an output do."""
        programs, kind = self.programs[chunk], INPUTS if port in self.chunks[chunk].sends_late else FORWARD
        running = [programs.program(which, adding) for which in self.tally(chunk) if kind in which for adding in (False, True)]
        return bool(running) and all(programs.outputs.get(port) in program.gives for program in running)

    def save_page(
        self, path: str | Path, *, losses: Mapping[str, Sequence[float]] | None = None, trace: str | Path | None = None
    ) -> None:
        """Writes one HTML page about the plan, which loads nothing: figures, the schedule, memory by stage, chunks with their parameters.

        losses: by name of a run, the loss of every step. trace: a file of `sbpc run --trace`: what rank 0 did is drawn below the
        predicted schedule. Raises PlanError if the page cannot be written, and for a trace of another plan.
        """
        check_kinds(PlanError, path=(path, "a path"))
        measured = [] if trace is None else measured_step(trace, stage_events(self, 0))
        write_page(self.rewriter.page(self, losses, measured), Path(path))

    def explain(self, name: str) -> Any:
        """Returns why a parameter or a value has its layout on the mesh of its stage: an `sbpc.inspect.explain.Explanation`.

        Its seconds are those of one micro-batch through all stages, where layouts were chosen. Raises PlanError for a name that is
        neither, and for a plan under a memory limit or one that was read from a file.
        """
        self.layout(name)
        found = self.rewriter.explain(self.solved, name)
        how = f"{found.how}\n          on the mesh of one stage, for one of {self.count} micro-batches, which passes through all stages"
        return replace(found, how=how, time="a micro-batch")

    @property
    def solved(self) -> Plan:
        """The plan of the body, whose layout problem is that of the step. Raises PlanError under a memory limit, and if it was not kept."""
        if self.body is None or self.options.memory is not None:
            lost = "that was read from a file" if self.body is None else "under a memory limit"
            raise PlanError(f"a plan {lost} does not hold the problem that it solves\n  {AGAIN}")
        return self.body

    def certify(self, *, seconds: float = 60.0) -> float:
        """Looks for a tighter lower bound for about so many CPU seconds, and returns the gap; see `Plan.certify`."""
        check_kinds(PlanError, seconds=(seconds, "a number of seconds"))
        _, bound = self.solved.problem.certify(self.solved, seconds)
        self.bound = max(self.bound, self.count * bound / self.stages)
        vars(self).pop("cost", None)
        return self.cost.gap

    def check_bound(self) -> Checked:
        """Returns what the layouts of a micro-batch cost and the bound that the multipliers give, times the micro-batches of the mean
        stage; see `Plan.check_bound`."""
        checked, times = self.solved.check_bound(), self.count / self.stages
        return Checked(times * checked.paid, times * checked.bound, self.bound)

    def diff(self, other: Plan | StagedPlan) -> Any:
        """Returns what another plan of the same model has otherwise: an `sbpc.inspect.diff.Diff`, which `print` tells.

        The other plan may have stages or none. Raises PlanError for a plan of another model.
        """
        return self.rewriter.diff(self, other)

    def save(self, path: str | Path) -> None:
        """Writes the plan to one file that `sbpc.load` reads: JSON, no pickle, no code. Raises PlanError if that fails."""
        check_kinds(PlanError, path=(path, "a path"))
        self.rewriter.save(self, Path(path))

    def export(self, path: str | Path) -> None:
        """Writes the plan to a file that `sbpc.load_module` and `sbpc run` run without planning and without the model's source.

        It is that of `save`: each rank writes its programs from the chunks in it. The file holds no weights: put them beside it, as
        `sbpc export` does. Raises PlanError if it cannot be written.
        """
        self.save(path)

    @property
    def rewriter(self) -> Rewriter:
        """The functions of the pipeline that the plan calls."""
        return self.chunks[0].plan.rewriter

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in OF_CHUNKS:
                raise AttributeError(f"a plan with stages has no {name!r}")
            if len(self.chunks) > 1:
                raise PlanError(f"a plan with stages has no {name}\n  Every chunk has one: plan.chunks[0].plan.{name}.")
            return getattr(self.chunks[0].plan, name)

    def __str__(self) -> str:
        return self.rewriter.text(self)

    def _repr_html_(self) -> str:
        return self.rewriter.html(self)

    def __repr__(self) -> str:
        return f"StagedPlan({self.mesh}, {self.schedule}, {len(self.parameters)} parameters, {self.cost.seconds:.3g} s a step)"


def alike(value: Tensor) -> tuple[Any, ...]:
    """Returns dtype and shape of a tensor."""
    return value.dtype, tuple(value.shape)
