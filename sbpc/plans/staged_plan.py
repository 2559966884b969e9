"""A plan with pipeline stages: the plan of every chunk of the model, and the schedule in which they work on micro-batches."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from sbpc.errors import PlanError, check_kinds, closest
from sbpc.graph.ports import GRADIENT, PARAMETER, TANGENT, Port, Ports, results
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.plans.cost import OPTIMIZER_STATE, numel
from sbpc.plans.loop import Loop
from sbpc.plans.measure import comm_totals, compute_totals, kernel_of, transfer_of
from sbpc.plans.pipeline import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, actions_of, owners, spans
from sbpc.plans.plan import Plan
from sbpc.plans.stage_parts import AFTER, BEFORE, FREE, parts_of
from sbpc.plans.timeline import COMPUTE, Event, save_trace, works

SENDING = "links between stages"


@dataclass
class Chunk:
    """One chunk of the model: its plan on the mesh of a stage, and what its ports stand for.

    arguments: by input, the name of the body's input. results: by output, the number of the body's output. receives, sends: by port,
    the name of the value that crosses between chunks.
    """

    plan: Plan
    arguments: dict[Port, str]
    results: dict[Port, int]
    receives: dict[Port, str]
    sends: dict[Port, str]

    @functools.cached_property
    def sends_late(self) -> frozenset[Port]:
        """The ports of what the backward sends."""
        parts = parts_of(self.plan.graph)
        ends = zip(self.plan.ports.outputs, results(self.plan.graph))
        return frozenset(port for port, node in ends if port in self.sends and node is not None and parts[node] == INPUTS)


    def value_of(self, port: Port, count: int, how: Any) -> Tensor:
        """Returns a tensor of the shape of an output, joined over `count` micro-batches as `how` says."""
        node = results(self.plan.graph)[self.plan.ports.outputs.index(port)]
        assert node is not None
        value: Tensor = node.meta["val"]
        shape = [size * count if at == how and how != "same" else size for at, size in enumerate(value.shape)]
        return torch.empty(shape, dtype=value.dtype)


@dataclass(frozen=True)
class StagedCost:
    """What one step of a plan with stages costs on the busiest rank.

    seconds: from the start of the step to its end, as the schedule goes. compute_seconds, comm_seconds: that the busiest rank computes
    and communicates; exposed_seconds: of the latter, inside a stage and between stages, those that nothing hides; bubble_seconds: that
    it waits for other stages. bytes_sent: by axis. memory: by kind, "total" is the peak of the busiest rank. lower_bound: what no
    layouts of these stages can beat.
    """

    seconds: float
    compute_seconds: float
    comm_seconds: float
    bubble_seconds: float
    bytes_sent: dict[str, float]
    memory: dict[str, int]
    flops: float
    lower_bound: float
    recompute_seconds: float = 0.0

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which nothing is computed, since a collective is waited for."""
        return self.seconds - self.compute_seconds - self.bubble_seconds

    @property
    def gap(self) -> float:
        """(seconds - lower_bound) / seconds: bubble and uneven stages are in it."""
        return (self.seconds - self.lower_bound) / self.seconds if self.seconds else 0.0


@dataclass
class StagedPlan:
    """A plan whose step runs as stages of a pipeline along one axis of the mesh. `print(plan)` shows it.

    mesh: all axes. axis: that of the stages. loop: the step as a loop over micro-batches. chunks: in the order of the model.
    schedule: "gpipe", "1f1b", "interleaved" or "zbv". bound: seconds that no layouts of these stages can beat. once: which of
    "parameter" and "gradient" are boxed once for all micro-batches, others for each.
    """

    mesh: Mesh
    axis: str
    loop: Loop
    chunks: list[Chunk]
    schedule: str
    bound: float
    once: frozenset[str] = frozenset((PARAMETER, GRADIENT))
    options: dict[str, Any] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        """How many ranks the axis of stages has."""
        return self.mesh.sizes[self.mesh.axis(self.axis)]

    @property
    def inner(self) -> Mesh:
        """The mesh of one stage."""
        return self.chunks[0].plan.mesh

    @functools.cached_property
    def owners(self) -> list[int]:
        """By chunk the stage that has it."""
        return owners(self.schedule, self.stages)

    @functools.cached_property
    def actions(self) -> list[list[Action]]:
        """By stage what it does, in order."""
        return actions_of(self.schedule, self.stages, self.loop.count)

    @property
    def ports(self) -> Ports:
        """What goes into and comes out of the step."""
        return self.loop.ports

    @property
    def shapes(self) -> Mapping[Port, Tensor]:
        """By port of a placeholder of the step: a tensor without data of the shape and dtype that was planned."""
        return self.loop.shapes

    def ranks_of(self, stage: int) -> list[int]:
        """Returns the ranks of a stage, in the order of the mesh of one stage."""
        at = self.mesh.axis(self.axis)
        return [rank for rank in range(self.mesh.ranks) if self.mesh.coordinates(rank)[at] == stage]

    def stage_of(self, rank: int) -> int:
        """Returns the stage of a rank."""
        return self.mesh.coordinates(rank)[self.mesh.axis(self.axis)]

    @functools.cached_property
    def sources(self) -> dict[str, tuple[int, Port]]:
        """By name of a value that crosses, the chunk that sends it and the port."""
        return {name: (at, port) for at, chunk in enumerate(self.chunks) for port, name in chunk.sends.items()}

    @functools.cached_property
    def shared(self) -> dict[str, list[int]]:
        """By name of a parameter that several chunks have, as tied ones may be, these chunks."""
        having: dict[str, list[int]] = {}
        for at, chunk in enumerate(self.chunks):
            for name in chunk.plan.parameters:
                having.setdefault(name, []).append(at)
        return {name: chunks for name, chunks in having.items() if len(chunks) > 1}

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
        check_kinds(PlanError, name=(name, "a text"))
        if name not in self.layouts:
            raise PlanError(f"the plan has no {name!r}\n  The closest names are {', '.join(closest(name, list(self.layouts)))}.")
        return self.layouts[name]

    def needs(self, action: Action) -> list[Action]:
        """Returns the actions that one can begin only after."""
        chunk, found = self.chunks[action.chunk], []
        forward = action.kind == FORWARD
        for port, name in chunk.receives.items():
            if (port.kind == TANGENT) != forward and action.kind != WEIGHTS:
                source, sent = self.sources[name]
                kind = (INPUTS if self.split else BACKWARD) if sent in self.chunks[source].sends_late else FORWARD
                found.append(Action(kind, source, action.micro_batch))
        if not forward:
            kind = INPUTS if action.kind == WEIGHTS else FORWARD
            found.append(Action(kind, action.chunk, action.micro_batch))
        return list(dict.fromkeys(found))

    @property
    def split(self) -> bool:
        """Whether the backward runs in two parts."""
        return self.schedule == "zbv"

    @functools.cached_property
    def parts(self) -> list[PartCost]:
        """What the parts of each chunk cost."""
        return [PartCost.of(chunk.plan, self.once) for chunk in self.chunks]

    def sending(self, source: Action, action: Action) -> float:
        """Returns the seconds for what one action sends to another one on another stage."""
        if self.owners[source.chunk] == self.owners[action.chunk] or source.kind == WEIGHTS or action.kind == WEIGHTS:
            return 0.0
        sent = sum(self.crossing(source.chunk, action.chunk, late=source.kind != FORWARD).values())
        latency, bandwidth, _ = self.mesh.link((self.mesh.axis(self.axis),), "send")
        return latency + sent / bandwidth

    def crossing(self, source: int, target: int, late: bool) -> dict[str, int]:
        """Returns the bytes on the busiest rank of each value that one chunk sends another, in the forward or `late`."""
        found = {}
        for name in self.chunks[target].receives.values():
            at, port = self.sources[name]
            if at == source and (port in self.chunks[source].sends_late) == late:
                found[name] = self.border_bytes(at, port)
        return found

    def border_bytes(self, chunk: int, port: Port) -> int:
        """Returns the bytes of a sent value on the busiest rank."""
        plan = self.chunks[chunk].plan
        place = plan.ports.outputs.index(port)
        node = results(plan.graph)[place]
        assert node is not None
        return bytes_at(node.meta["val"], plan.left[port], self.inner)

    @functools.cached_property
    def spans(self) -> dict[Action, tuple[float, float]]:
        """When every action starts and ends, in seconds since the first one."""
        seconds: dict[tuple[str, int], float] = {}
        for at, part in enumerate(self.parts):
            seconds |= {(kind, at): part.total(kind) for kind in (FORWARD, INPUTS, WEIGHTS)}
            seconds[BACKWARD, at] = seconds[INPUTS, at] + seconds[WEIGHTS, at]
        return spans(self.actions, self.needs, seconds, self.sending)

    def timeline(self) -> list[Event]:
        """Returns what a step is predicted to do: a lane for each stage, on which chunks work on micro-batches."""
        first = max((self.single(stage, BEFORE) for stage in range(self.stages)), default=0.0)
        events = []
        for action, (start, end) in self.spans.items():
            stage, phase = self.owners[action.chunk], "forward" if action.kind == FORWARD else "backward"
            module = f"chunk {action.chunk}"
            events.append(Event(f"stage {stage}", first + start, first + end, str(action), action.kind, module, phase))
        return events

    def save_trace(self, path: str | Path) -> None:
        """Writes the timeline as a Chrome trace: open it at ui.perfetto.dev."""
        check_kinds(PlanError, path=(path, "a path"))
        save_trace({"predicted": self.timeline()}, Path(path), [f"stage {stage}" for stage in range(self.stages)])

    def single(self, stage: int, part: str) -> float:
        """Returns the seconds that a stage needs once, BEFORE or AFTER the micro-batches."""
        return sum(self.parts[at].total(part) for at, owner in enumerate(self.owners) if owner == stage)

    @functools.cached_property
    def cost(self) -> StagedCost:
        """Seconds, bytes and memory of a step."""
        stages = range(self.stages)
        before, after = ([self.single(stage, part) for stage in stages] for part in (BEFORE, AFTER))
        ends = [max(self.spans[action][1] for action in actions) for actions in self.actions]
        seconds = max(before) + max(end + once for end, once in zip(ends, after))
        compute = [self.busy(stage, "compute") for stage in stages]
        communicate = [self.busy(stage, "comm") for stage in stages]
        most = max(stages, key=lambda stage: compute[stage] + communicate[stage])
        busy = compute[most] + communicate[most]
        memory = max((self.memory_of(stage) for stage in stages), key=lambda each: each["total"])
        flops = max(self.totals(stage, "flops") for stage in stages)
        bound = min(self.bound, seconds)
        return StagedCost(seconds, compute[most], communicate[most], seconds - busy, self.bytes_sent, memory, flops, bound)

    def busy(self, stage: int, which: str) -> float:
        """Returns the seconds that a stage computes or communicates."""
        return self.totals(stage, which)

    def totals(self, stage: int, which: str) -> float:
        """Returns a figure of a stage, added up over its chunks and micro-batches."""
        mine = [part for part, owner in zip(self.parts, self.owners) if owner == stage]
        return sum(getattr(part, which)[key] * self.times_of(key) for part in mine for key in getattr(part, which))

    def times_of(self, part: str) -> int:
        """Returns how often a part runs in a step."""
        return 1 if part in (BEFORE, AFTER) else self.loop.count

    @functools.cached_property
    def bytes_sent(self) -> dict[str, float]:
        """By axis the bytes that the busiest rank sends in a step; those between stages under their axis."""
        by_stage: list[Counter[str]] = [Counter() for _ in range(self.stages)]
        for at, (part, owner) in enumerate(zip(self.parts, self.owners)):
            for key, sent in part.sent.items():
                by_stage[owner] += Counter({axis: size * self.times_of(key) for axis, size in sent.items()})
            for target, late in itertools.product(range(len(self.chunks)), (False, True)):
                if self.owners[target] != owner:
                    by_stage[owner][self.axis] += self.loop.count * sum(self.crossing(at, target, late).values())
        for name, chunks in self.shared.items():
            for at in chunks:
                others = {self.owners[other] for other in chunks} - {self.owners[at]}
                by_stage[self.owners[at]][self.axis] += len(others) * self.parts[at].homes[name]
        axes = dict.fromkeys([*self.mesh.axes, *(axis for sent in by_stage for axis in sent)])
        return {axis: float(max(sent[axis] for sent in by_stage)) for axis in axes}

    def memory_of(self, stage: int) -> dict[str, int]:
        """Returns the bytes that a rank of a stage takes, by kind; "total" is the peak of the step.

        Activations are those of the micro-batches in flight, with what waits to be sent on.
        """
        mine = [at for at, owner in enumerate(self.owners) if owner == stage]
        parts = [self.parts[at] for at in mine]
        alive = most = 0
        for action in self.actions[stage]:
            part = self.parts[action.chunk]
            alive += part.saved if action.kind == FORWARD else 0
            most = max(most, alive)
            alive -= part.saved if action.kind == (WEIGHTS if self.split else BACKWARD) else 0
        parameters = sum(sum(part.homes.values()) for part in parts)
        trained = sum(part.trained for part in parts)
        total = {
            "parameters": parameters,
            "gradients": sum(part.added for part in parts),
            "optimizer": OPTIMIZER_STATE[self.options.get("optimizer")] * trained,
            "activations": most,
            "temporaries": sum(part.gathered for part in parts) + max((part.transient for part in parts), default=0),
        }
        return total | {"total": sum(total.values())}

    def verify(self) -> int:
        """Checks every edge of every chunk, and that both ends of what crosses agree. Returns the number of edges."""
        edges = sum(chunk.plan.verify() for chunk in self.chunks)
        for at, chunk in enumerate(self.chunks):
            for port, name in chunk.receives.items():
                source, sent = self.sources[name]
                if self.chunks[source].plan.left[sent] != chunk.plan.given[port]:
                    raise PlanError(f"{name} is sent by chunk {source} in another layout than chunk {at} reads\n  Plan anew.")
                edges += 1
        return edges

    def __str__(self) -> str:
        return "\n".join(report_lines(self))

    def __repr__(self) -> str:
        return f"StagedPlan({self.mesh}, {self.schedule}, {len(self.parameters)} parameters, {self.cost.seconds:.3g} s a step)"


@dataclass(frozen=True)
class PartCost:
    """What a chunk costs: by part the seconds, the flops and the bytes sent by axis; and bytes of memory on the busiest rank.

    homes: by parameter. trained: of trained ones. added: of gradients while they add up. gathered: of what is boxed before the
    micro-batches. saved: of what a micro-batch keeps between forward and backward. transient: of what else is alive at the peak.
    """

    compute: dict[str, float]
    comm: dict[str, float]
    flops: dict[str, float]
    sent: dict[str, dict[str, float]]
    homes: dict[str, int]
    trained: int
    added: int
    gathered: int
    saved: int
    transient: int

    def total(self, part: str) -> float:
        """Returns the seconds of a part."""
        return self.compute.get(part, 0.0) + self.comm.get(part, 0.0)

    @classmethod
    def of(cls, plan: Plan, once: Container[str]) -> PartCost:
        """Measures the boxed graph of a chunk. once: what is boxed once for all micro-batches."""
        boxed, mesh = plan.unscheduled, plan.mesh
        parts, every = parts_of(boxed, once), works(boxed, mesh)
        groups: dict[str, list[Node]] = {}
        for node, part in parts.items():
            groups.setdefault(FORWARD if part == FREE else part, []).append(node)
        compute, comm = dict[str, float](), dict[str, float]()
        flops, sent = dict[str, float](), dict[str, dict[str, float]]()
        for part, nodes in groups.items():
            moved = Counter(transfer_of(node) for node in nodes if "step" in node.meta)
            kernels = Counter(kernel_of(n) for n in nodes if "choice" in n.meta and n.op == "call_function")
            compute[part] = sum(every[node].seconds for node in nodes if every[node].stream == COMPUTE)
            comm[part], sent[part] = comm_totals(moved, mesh)
            flops[part] = compute_totals(kernels, mesh)[1]
        return cls(compute, comm, flops, sent, *memory_of(plan, parts))


def memory_of(plan: Plan, parts: Mapping[Node, str]) -> tuple[dict[str, int], int, int, int, int, int]:
    """Returns the memory of a chunk as `PartCost` has it: homes, trained, added, gathered, saved, transient."""
    boxed, mesh = plan.unscheduled, plan.mesh
    ends = list(zip(plan.ports.outputs, results(boxed)))
    homes = {
        port.name: bytes_at(value, plan.given[port], mesh) for port, value in plan.shapes.items() if port.kind == PARAMETER
    }
    trained = sum(homes[port.name] for port, _ in ends if port.kind == GRADIENT)
    late = (INPUTS, WEIGHTS, AFTER)
    gathered = saved = added = 0
    for storage, owner in enumerate(plan.life.owner):
        readers = {parts[m.node] for m in plan.life.moments if storage in m.reads and m.node in parts}
        if owner.op == "placeholder" and parts[owner] in (BEFORE, FREE):
            continue
        if parts[owner] == BEFORE and readers - {BEFORE}:
            gathered += plan.life.size[storage]
        if parts[owner] == FORWARD and any(reader in late for reader in readers):
            saved += plan.life.size[storage]
    for port, node in ends:
        if port.kind == GRADIENT and node is not None:
            while parts[node] == AFTER:
                (node,) = node.all_input_nodes
            added += bytes_at(node.meta["val"], node.meta["sbp"], mesh)
    transient = max(0, plan.life.peak - sum(homes.values()) - gathered - saved)
    return homes, trained, added, gathered, saved, transient


def bytes_at(value: Tensor, layout: Layout | None, mesh: Mesh) -> int:
    """Returns the bytes of a tensor in a layout on the busiest rank."""
    cuts = {} if layout is None else layout.cuts
    return value.element_size() * int(numel(value.shape, [cuts.get(dim, ()) for dim in range(value.dim())], mesh.sizes))


def report_lines(plan: StagedPlan) -> Sequence[str]:
    """Returns the lines that `print(plan)` shows."""
    cost, count = plan.cost, plan.loop.count
    sent = ", ".join(f"{size:,.0f} over {axis}" for axis, size in cost.bytes_sent.items() if size) or "none"
    lines = [
        f"{plan.mesh}: {plan.stages} stages along {plan.axis!r}, {plan.schedule}, {count} micro-batches",
        f"{cost.seconds:.4g} s a step: computing {cost.compute_seconds:.4g}, communication that nothing hides "
        f"{cost.exposed_seconds:.4g}, bubble {cost.bubble_seconds:.4g} ({cost.bubble_seconds / max(cost.seconds, 1e-300):.1%}); "
        f"no layouts of these stages take less than {cost.lower_bound:.4g} s",
        f"bytes that the busiest rank sends: {sent}",
        f"memory of the busiest rank: {cost.memory['total']:,} bytes; "
        + ", ".join(f"{kind} {size:,}" for kind, size in cost.memory.items() if kind != "total"),
    ]
    for at, (chunk, part) in enumerate(zip(plan.chunks, plan.parts)):
        modules = dict.fromkeys(node.meta.get("module") or "" for node in chunk.plan.graph.graph.nodes if node.op == "call_function")
        named = [module for module in modules if module]
        span = f"{named[0]} to {named[-1]}" if named else "no module"
        backward = part.total(INPUTS) + part.total(WEIGHTS)
        lines.append(
            f"chunk {at} on stage {plan.owners[at]}: {span}; forward {part.total(FORWARD):.3g} s, backward {backward:.3g} s, "
            f"{sum(part.homes.values()):,} bytes of parameters, sends {', '.join(chunk.sends.values()) or 'nothing'}"
        )
        lines += [f"  {name}  {layout}" for name, layout in chunk.plan.parameters.items()]
    return lines


