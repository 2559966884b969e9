"""Record what a program launches as a CUDA graph, and launch all of it at once from then on.

A recorded program reads and writes the same memory each time. Weights stay where they are. What else it is given is
copied into memory of its own, and what it gives is copied out of there. Only what a forward saves for its backward
stays in place: until that backward has run, or nobody can run it any more, further forwards run unrecorded.
NCCL asks that all ranks record and launch a collective alike (its user guide, "Using NCCL with CUDA Graphs"). So where
there are several, nothing that is decided here depends on what one rank alone may do.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node

from sbpc._compat import OpOverload, schema_of
from sbpc.errors import PlanError, at_node
from sbpc.graph.expert_rows import COUNTING
from sbpc.graph.operands import named_arguments, nodes_in
from sbpc.graph.ports import BUFFER, PARAMETER
from sbpc.graph.ports import results as outputs_of
from sbpc.plans.step_programs import BACKWARD, ENDING, FORWARD, JOINT, UNSENT, UNSENT_JOINT
from sbpc.plans.timeline import launches_bound
from sbpc.runtime.prepared import memory_of

log = logging.getLogger("sbpc")
RECORD = "recording"  # the key of `About` in the meta of a program
WARM = 2  # calls before the recorded one: they compile kernels and make the handles of libraries
MOST = 4  # recordings of a program, for weights in as many places
aten = torch.ops.aten
READ_BY_HOST = {*COUNTING, torch.ops.sbpc.rows_of_ranks.default, torch.ops.sbpc.rows_within.default}
READ_BY_HOST |= {torch.ops.sbpc.within_capacity.default, torch.ops.aten.is_nonzero.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
VALUES = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
OURS = {"aten", "prims", "_c10d_functional", "sbpc"}
Run = Callable[[list[Tensor]], tuple[Any, ...]]


class Graphs(Protocol):
    """What records and replays on a kind of device."""

    def capturing(self) -> bool:
        """Returns whether somebody else records what runs now."""

    def begin(self) -> None:
        """Has what follows wait for the last replay, whose memory it writes."""

    def record(self, run: Callable[[], Sequence[Any]], keeps: bool) -> tuple[Callable[[], None], Sequence[Any]]:
        """Returns what replays a function, and in which tensors its results are then. They need hold none yet. keeps:
        whether results are read there after others have been replayed."""


class CudaGraphs:
    """Records on a GPU. Recordings share one pool of memory, as they run one after the other: what one has for a moment
    lies where another one has its results. One whose results stay in place has a pool of its own."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.last: Any = None  # stream

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def begin(self) -> None:
        now = torch.cuda.current_stream()
        if self.last not in (None, now):
            now.wait_stream(self.last)
        self.last = now

    def record(self, run: Callable[[], Sequence[Any]], keeps: bool) -> tuple[Callable[[], None], Sequence[Any]]:
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle() if keeps else self.pool
        # NCCL's watchdog, a thread of its own, may ask for events meanwhile
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            results = run()
        return graph.replay, results


BACKENDS: dict[str, Callable[[], Graphs]] = {"cuda": CudaGraphs}


@functools.lru_cache
def graphs_of(where: torch.device) -> Graphs:
    """Returns what records on a device."""
    return BACKENDS[where.type]()


class Lease:
    """The right of one backward to what its forward has left in place."""

    over = False


class Saved:
    """What the last recorded forward has left for its backward. places: addresses. latest: the lease of the forward
    that has just run, None if it ran unrecorded. held: the lease that was given out last, if it is alive."""

    def __init__(self) -> None:
        self.places: list[int] | None = None
        self.latest: Lease | None = None
        self.held: Callable[[], Lease | None] = lambda: None

    @property
    def busy(self) -> bool:
        """Whether a backward may still come that reads what a replay would write."""
        lease = self.held()
        return lease is not None and not lease.over

    def lend(self, values: Sequence[Any], alone: bool) -> None:
        """Gives out a lease. alone: whether it may end as soon as nobody has it, which each rank sees by itself."""
        lease = self.latest = Lease()
        self.places = [x.data_ptr() for x in values]
        self.held = weakref.ref(lease) if alone else lambda: lease


@dataclass(frozen=True)
class About:
    """What recording a program takes. stays: which inputs are weights, or saved by a forward, and stay where they are.
    copied: how many results are copied out, None for all. reads: how many inputs a forward has saved. ranks: of the
    mesh. bound: says whether launches bound the step."""

    stays: Sequence[bool]
    where: torch.device
    ranks: int
    bound: Callable[[], bool] = lambda: False
    saved: Saved = field(default_factory=Saved)
    copied: int | None = None
    reads: int = 0


@dataclass
class Recording:
    """A program as recorded for some places of what stays. calls: before that."""

    calls: int = 0
    inputs: list[Tensor] = field(default_factory=list)
    results: Sequence[Any] = ()
    replay: Callable[[], None] | None = None


class Recorded:
    """Runs a program twice, then records it, then replays it. strict: whether it must be recorded."""

    def __init__(self, run: Run, about: About, strict: bool) -> None:
        self.run, self.about, self.strict = run, about, strict
        self.known: dict[Any, Recording] = {}
        self.failed = self.warned = False

    def __call__(self, given: list[Tensor]) -> tuple[Any, ...]:
        """Returns the results, and empties the list."""
        about, saved, graphs = self.about, self.about.saved, graphs_of(self.about.where)
        if about.copied is not None:
            saved.latest = None
        # a number of the CPU would be part of a recording
        given[:] = [x if x.device.type == about.where.type else x.to(about.where) for x in given]
        if self.failed or graphs.capturing() or not self.in_place(given):
            return self.run(given)
        recording = self.recording(given)
        if recording.calls < WARM:
            recording.calls += 1
            return self.run(given)
        graphs.begin()
        if recording.replay is None:
            try:
                self.record(recording, given)
            except Exception as error:  # whatever CUDA makes of it
                return self.unrecorded(error, given)
        else:
            for place, x, stays in zip(recording.inputs, given, about.stays):
                if not stays:
                    place.copy_(x)
        given.clear()
        assert recording.replay is not None
        recording.replay()
        count = len(recording.results) if about.copied is None else about.copied
        if about.copied is not None:
            saved.lend(recording.results[count:], about.ranks == 1)
        out = [x.clone() if isinstance(x, Tensor) else x for x in recording.results[:count]]
        return (*out, *recording.results[count:])

    def in_place(self, given: list[Tensor]) -> bool:
        """Whether a backward gets what a recorded forward left; whether a forward may leave something."""
        about = self.about
        if about.reads:
            return [x.data_ptr() for x in given[: about.reads]] == about.saved.places
        busy = about.copied is not None and about.saved.busy
        if busy and not self.warned:
            self.warned = True
            log.warning(
                "a forward runs while an earlier one waits for its backward: it is not replayed, which is slower. Run "
                "those without a backward under torch.no_grad()"
            )
        return not busy

    def recording(self, given: list[Tensor]) -> Recording:
        """Returns the recording for these inputs; a new one takes the place of the one that was used longest ago.
        Raises PlanError if weights have moved where ranks record together."""
        stays = self.about.stays
        places = [(x.data_ptr(), x.shape, x.stride()) for x, stay in zip(given, stays) if stay]
        others = [(x.shape, x.dtype) for x, stay in zip(given, stays) if not stay]
        key = tuple(places), tuple(others)
        if key not in self.known:
            if self.known and self.about.ranks > 1:
                raise PlanError(
                    "weights lie elsewhere than in the first step, of which all ranks record a CUDA graph together\n"
                    "  Write into them in place, as by load_state_dict or copy_; or take executor='inductor'."
                )
            if len(self.known) == MOST:
                del self.known[next(iter(self.known))]
            self.known[key] = Recording()
        self.known[key] = self.known.pop(key)  # the last one used stands last
        return self.known[key]

    def record(self, recording: Recording, given: list[Tensor]) -> None:
        """Records a program on these inputs. The tensors are made as those that autograd may count writes of."""
        with torch.inference_mode(False), torch.no_grad():
            recording.inputs = [x if stays else x.clone() for x, stays in zip(given, self.about.stays)]
            recorded = graphs_of(self.about.where).record(
                lambda: self.run(recording.inputs.copy()), self.about.copied is not None
            )
        recording.replay, recording.results = recorded

    def unrecorded(self, error: Exception, given: list[Tensor]) -> tuple[Any, ...]:
        """Runs a program that cannot be recorded. Raises PlanError if it must be."""
        if self.strict:
            raise PlanError(
                f"the step cannot be recorded as a CUDA graph: {error}\n  Leave out executor='graph'. Ops of your own "
                "may read no value on the CPU."
            ) from error
        log.warning("the step is not replayed as a CUDA graph, as it cannot be recorded: %s", error)
        self.failed = True
        return self.run(given)


def described(runner: Any, name: str, gm: GraphModule) -> GraphModule:
    """Notes in a program of a step of a `Runner` what recording it takes."""
    count, last = len(gm.graph.find_nodes(op="placeholder")), len(runner.positions)
    weights = [port.kind in (PARAMETER, BUFFER) and port not in runner.masters for port in runner.takes]
    reads, copied = 0, None
    if name in (BACKWARD, UNSENT):
        reads = count - last - len(runner.tangents)
        weights = [True] * reads + [False] * len(runner.tangents)
    elif name == ENDING:
        weights = [False] * (count - last)
    elif name in (JOINT, UNSENT_JOINT):
        for at in runner.tangents:
            weights.insert(at, False)
    if name == FORWARD and len(outputs_of(gm)) > len(runner.results):
        copied = len(runner.results)
    stays, ranks = [*weights, *[True] * last], runner.plan.mesh.ranks
    assert len(stays) == count, (name, len(stays), count)
    gm.meta[RECORD] = About(stays, runner.where, ranks, functools.partial(bound, runner), runner.saved, copied, reads)
    return gm


def bound(runner: Any) -> bool:
    """Whether a step takes as long as the CPU takes to launch it, on a mesh of one rank, as no other one need then
    record with it. Not where a limit of memory counts every byte, nor of a file of programs, which has no prices."""
    plan = runner.plan
    if runner.where.type not in BACKENDS or plan.mesh.ranks > 1 or plan.options.memory or not hasattr(plan, "chunks"):
        return False
    graphs = [plan.boxed] if plan.loop is None else [chunk.unscheduled for chunk in plan.chunks]
    return launches_bound(graphs, plan.mesh)


def recorded(run: Run, gm: GraphModule, strict: bool) -> Run:
    """Returns what records and replays a program: where launches bound it, and always if it must be, or else raises
    PlanError. One of which nothing is noted is part of what `recorded_step` records."""
    about: About | None = gm.meta.get(RECORD)
    if about is None or not (strict or about.bound()) or not recordable(gm, about.where, strict):
        return run
    return Recorded(run, about, strict)


def recorded_step(runner: Any, run: Run, strict: bool) -> Run | None:
    """Returns what records and replays a step in a loop as a whole, None where it is not to be. strict, errors: see
    `recorded`."""
    if not (strict or bound(runner)):
        return None
    if runner.plan.stages > 1 and strict:
        raise PlanError(
            "executor='graph' with stages, which wait for each other's messages on the CPU\n  Leave it out, or plan "
            "without stages."
        )
    loop, stays = runner.loop, [port.kind in (PARAMETER, BUFFER) for port in runner.takes]
    if runner.plan.stages > 1 or not all(recordable(gm, runner.where, strict) for gm in (loop.before, loop.after)):
        return None
    stays += [True] * len(runner.positions)
    return Recorded(run, About(stays, runner.where, runner.plan.mesh.ranks), strict)


def recordable(gm: GraphModule, where: torch.device, strict: bool, inside: bool = False) -> bool:
    """Returns whether a program can be recorded. Raises PlanError if it must be; see `refusal`."""
    why = refusal(gm, where, strict, inside)
    if why is not None and strict:
        raise PlanError(why)
    return why is None


def refusal(gm: GraphModule, where: torch.device, strict: bool, inside: bool = False) -> str | None:
    """Returns why a program cannot be recorded, None if it can, as far as is known. strict: not because of ops that
    are not known. inside: of a step that is recorded as a whole."""
    if where.type not in BACKENDS:
        return f"executor='graph' replays CUDA graphs, and this rank computes on {where}\n  Leave it out."
    for node in gm.graph.nodes:
        if (why := why_not(node, where, strict, inside)) is not None:
            return at_node(
                f"%{node.name} {why}, so that no CUDA graph can hold it", node, "Leave out executor='graph'."
            )
    return None


def why_not(node: Node, where: torch.device, strict: bool, inside: bool) -> str | None:
    """Returns why a call cannot be recorded, None if it can."""
    op = node.target
    for device in (*node.args, *node.kwargs.values()):
        if isinstance(device, torch.device) and device.type != where.type:
            return f"makes its result on {device}"
    if not isinstance(op, OpOverload):
        return None
    if "_c10d_functional" in str(op) and dist.get_backend() == "gloo":
        return "sends by gloo, which runs on CPUs"
    masks = [n for n in nodes_in(node.args[1:2]) if getattr(n.meta.get("val"), "dtype", None) in MASKS]
    if op in READ_BY_HOST or (op in INDEXED and masks) or (op not in INDEXED and any(tag in op.tags for tag in VALUES)):
        return "has the CPU wait for values"
    if not inside and any(written.op == "placeholder" for written in written_by(node)):
        return "writes what the program is given"
    return None if strict or op.namespace in OURS else "is an op of which it is not known whether the CPU reads values"


MASKS = torch.bool, torch.uint8


def written_by(node: Node) -> list[Node]:
    """Returns the nodes whose memory a call writes."""
    given = named_arguments(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    kinds = [argument for argument in schema_of(node.target).arguments if argument.alias_info is not None]
    written = [given.get(argument.name) for argument in kinds if argument.alias_info.is_write]
    return [memory_of(each) for each in nodes_in(tuple(written))]
