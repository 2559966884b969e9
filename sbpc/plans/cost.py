"""Holds what a plan costs: seconds, bytes on the wire, flops and memory, written once for numbers and for sympy
symbols.

Per rank, on the busiest one: a kernel takes max(flops / peak, bytes / memory bandwidth, launch), or what its shape
says on GPUs of which that is known (`sbpc.mesh.kernels`). A collective takes rounds * latency + bytes / bandwidth, or
what the collective takes at least (see `Mesh.link`), or the least of what its ways take (see `Way`). The step takes
the sum of both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sympy

from sbpc.boxing.steps import Step, group, group_of, kernel_seconds, wire
from sbpc.errors import PlanError, check_kinds
from sbpc.mesh.cluster import collective_seconds
from sbpc.mesh.collectives import CARRIERS, WIRE, WORKS, Min
from sbpc.mesh.layout import cut, numel
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import Axes

ROUNDING = 1e-12  # fraction of a step's seconds, of which nothing less is told
CHUNK = 1 << 13  # configurations that are evaluated at once: what fits into a cache


@dataclass(frozen=True)
class Kernel:
    """One op of a plan: its factors with their global sizes and the axes that cut them, and the tensors it touches.

    op: its name, empty where it has no rule. tensors: per tensor read or written, its bytes per element, its global
    shape and the axes that cut each dim. free: a view, for which no kernel runs. work: local factor sizes -> flops.
    dims: the sizes of the factors, then those of each tensor's dims, as they stand in formulas; empty where the
    numbers do. shape: local factor sizes, and which factors are cut -> the shape of its work (`sbpc.mesh.kernels`).
    alone: flops of one device, where rows are shared out: sizes are then such that the largest shard is the busiest
    rank's.
    """

    op: str
    factors: tuple[tuple[str, int, tuple[int, ...]], ...]
    tensors: tuple[tuple[int, tuple[int, ...], tuple[tuple[int, ...], ...]], ...]
    free: bool
    work: Callable[[Mapping[str, Any]], Any] = field(compare=False)
    dims: tuple[tuple[Any, ...], ...] = ()
    shape: Callable[[Mapping[str, Any], Mapping[str, Any]], Any] = field(default=lambda *_: None, compare=False)
    alone: float | None = None


def kernel_work(kernel: Kernel, sizes: Sequence[int], symbols: Sequence[Any] | None = None) -> tuple[Any, Any, Any]:
    """Returns flops, bytes of memory traffic and the shape of the work of one op on the busiest rank."""
    factors, *tensors = kernel.dims or ((None,) * len(kernel.factors), *((),) * len(kernel.tensors))
    local = {name: cut(size, axes, sizes, symbols, dim) for (name, size, axes), dim in zip(kernel.factors, factors)}
    moved: Any = 0
    for (itemsize, shape, cuts), dims in zip(kernel.tensors, tensors):
        moved = moved + itemsize * numel(shape, cuts, sizes, symbols, dims)
    return kernel.work(local), moved, kernel.shape(local, {name: bool(axes) for name, _, axes in kernel.factors})


@dataclass(frozen=True)
class Transfer:
    """One collective of a plan: the boxing step, and the global shape and bytes per element of the tensor it moves.

    dims: the sizes of the shape as they stand in formulas; empty where the numbers do.
    """

    step: Step
    shape: tuple[int, ...]
    itemsize: int
    dims: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Terms:
    """What the formulas of a cost are sums over: kernels and transfers of the busiest stage, equal ones once, with
    how often they run, a number or a formula.

    mesh: of a stage. numbers: values of the symbols that are no figure of mesh or cluster. memory_of: sizes of axes
    -> bytes at the peak.
    """

    mesh: Mesh
    kernels: tuple[tuple[Kernel, Any], ...]
    transfers: tuple[tuple[Transfer, Any], ...]
    numbers: Mapping[str, float]
    memory_of: Callable[[Sequence[sympy.Symbol]], sympy.Expr]


@dataclass(frozen=True)
class Cost:
    """The cost of one step of a plan on the busiest rank.

    compute_seconds, comm_seconds: that kernels and collectives are busy, if each collective goes by itself. makespan:
    seconds from the start of the step to its end, with collectives beside kernels, several in one message
    (`sbpc.plans.timeline`), and stages as their schedule goes; None where everything runs one after the other.
    bubble_seconds: that a rank waits for other stages. flops, flops_one_device: of a rank, and of the model on one
    device. bytes_sent: by axis ("data", merged ones "data+tensor", that of stages), padding included. memory: bytes
    by kind (parameters, gradients, optimizer, activations, temporaries); "total" is the peak over the step.
    lower_bound: what no plan of the same space, or no layouts of the same stages, can beat; seconds, or bytes where
    `objective` is "bytes". serial_bound: what compute_seconds + comm_seconds of no plan can beat; with stages, those
    of the mean one. recompute_seconds: the part of compute_seconds in which values of the forward are computed
    again. optimizer_seconds: what the optimizer's update takes behind the step (`module.step` and `seconds` are
    without it), in one pass over parameters, gradients and its state, as with `fused=True`; 0 where there is none.
    model_flops: flops_one_device without those of values that are computed again.

    `expr` (of compute_seconds + comm_seconds, whatever overlaps, of the busiest stage), `bytes_expr` (over the axes
    of a stage) and `memory_expr` (of the peak, with the calls in the plan's order) are formulas in the sizes of
    axes, the figures of the cluster, the dims that `dynamic=` of `sbpc.plan` names, and of a loop the number of
    micro-batches `m` and the `batch`. `subs` puts numbers into `expr`, `evaluate` arrays of numbers.
    """

    compute_seconds: float
    comm_seconds: float
    flops: float
    flops_one_device: float
    bytes_sent: dict[str, float]
    memory: dict[str, int]
    lower_bound: float
    objective: str = "seconds"
    makespan: float | None = None
    serial_bound: float = 0.0
    recompute_seconds: float = 0.0
    bubble_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    model_flops: float = 0.0
    terms_of: Callable[[], Terms] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        sent = ", ".join(f"{size:,.0f} over {axes}" for axes, size in self.bytes_sent.items() if size) or "none"
        return (
            f"Cost({self.seconds:.6g} s: computing {self.compute_seconds:.6g} s, communicating "
            f"{self.comm_seconds:.6g} s; bytes sent {sent}; memory {self.memory['total']:,} bytes; gap {self.gap:.2%})"
        )

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        if self.makespan is None:
            return self.compute_seconds + self.comm_seconds
        return max(self.makespan, self.compute_seconds)  # which differ by rounding where nothing is sent

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a training step: forward, backward and the optimizer's update."""
        return self.seconds + self.optimizer_seconds

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which nothing is computed, since a collective is waited for."""
        waited = self.seconds - self.compute_seconds - self.bubble_seconds
        return waited if waited > ROUNDING * self.seconds else 0.0

    @property
    def gap(self) -> float:
        """How far the plan may be from the best one: (seconds - lower_bound) / seconds, or the same of bytes."""
        return (self.paid - self.lower_bound) / self.paid if self.paid else 0.0

    @property
    def paid(self) -> float:
        """What the plan was made to have little of: seconds, or the bytes that the busiest rank sends, as
        `objective` says."""
        return sum(self.bytes_sent.values()) if self.objective == "bytes" else self.seconds

    @property
    def serial_gap(self) -> float:
        """How far the layouts may be from the best ones if nothing overlapped: the gap of compute_seconds +
        comm_seconds."""
        serial = self.compute_seconds + self.comm_seconds
        return (serial - self.serial_bound) / serial if serial else 0.0

    @functools.cached_property
    def terms(self) -> Terms:
        """Kernels and transfers. Raises PlanError for the estimate of a step, of which none are known."""
        if self.terms_of is None:
            raise PlanError("an estimate of a step has no formula\n  Ask the plan of the row, row.plan.cost.")
        return self.terms_of()

    @property
    def kernels(self) -> tuple[tuple[Kernel, Any], ...]:
        """The kernels, equal ones once, with how often they run."""
        return self.terms.kernels

    @property
    def transfers(self) -> tuple[tuple[Transfer, Any], ...]:
        """The collectives that send, equal ones once, with how often they run."""
        return self.terms.transfers

    @functools.cached_property
    def symbols(self) -> dict[str, sympy.Symbol]:
        """The symbols of `expr` by name: axis sizes by their axis, the cluster's figures, the symbolic dims."""
        return {name: sympy.Symbol(name, positive=True) for name in self.numbers}

    @functools.cached_property
    def numbers(self) -> dict[str, float]:
        """The value of every symbol on this plan's mesh and cluster."""
        mesh, cluster = self.terms.mesh, self.terms.mesh.cluster
        numbers: dict[str, float] = dict(zip(mesh.axes, mesh.sizes))
        numbers |= {"peak": cluster.peak, "memory_bandwidth": cluster.memory_bandwidth, "launch": cluster.launch}
        for transfer, _ in self.transfers:
            latency, bandwidth, least = mesh.link(transfer.step.axes, transfer.step.collective)
            key = self.link_name(transfer.step)
            numbers |= {f"bandwidth_{key}": bandwidth}
            if not mesh.ways(transfer.step.axes, transfer.step.collective):
                numbers |= {f"latency_{key}": latency} | ({f"least_{key}": least} if least else {})
        return numbers | dict(self.terms.numbers)

    def link_name(self, step: Step) -> str:
        """Returns how the symbols of a step's link end: by axis, and by collective where the cluster tells them
        apart."""
        key = self.terms.mesh.key(step.axes).replace("+", "_")
        rated = {rate.collective for rate in self.terms.mesh.cluster.collectives}
        sends = (name for name in (step.collective, CARRIERS.get(step.collective)) if name in rated)
        return "_".join((key, *itertools.islice(sends, 1)))

    @property
    def bytes_on_wire(self) -> dict[str, float]:
        """By axis, the bytes that the backend puts on the wire: `bytes_sent` times the traffic that the cluster says
        it makes."""
        traffic, mesh = dict.fromkeys(self.bytes_sent, 0.0), self.terms.mesh
        for transfer, count in self.transfers:
            step = transfer.step
            _, sent = wire(step, transfer.shape, transfer.itemsize, mesh.sizes)
            traffic[mesh.key(step.axes)] += (
                self.counted(count) * float(sent) * mesh.rate(step.axes, step.collective).traffic
            )
        return traffic

    def counted(self, times: Any) -> int:
        """Returns how often a kernel or a transfer of `terms` runs, as a number."""
        return int(sympy.sympify(times).xreplace({self.symbols[name]: number for name, number in self.numbers.items()}))

    @functools.cached_property
    def expr(self) -> sympy.Expr:
        """`compute_seconds + comm_seconds` as a formula in dims, axis sizes and figures of the cluster; see
        `symbols` and `numbers`."""
        s, mesh = self.symbols, self.terms.mesh
        sizes = tuple(s[name] for name in mesh.axes)
        terms = []
        for kernel, count in self.kernels:
            if not kernel.free:
                work = kernel_work(kernel, mesh.sizes, sizes)
                rates = s["peak"], s["memory_bandwidth"], s["launch"]
                terms.append(count * mesh.cluster.kernel_seconds(kernel.op, *work, rates=rates))
        terms += [count * self.transfer_expr(transfer) for transfer, count in self.transfers]
        return sympy.Add(*terms)

    def transfer_expr(self, transfer: Transfer) -> sympy.Expr:
        """Returns the seconds of one collective as a formula."""
        s, step, key = self.symbols, transfer.step, self.link_name(transfer.step)
        ranks, block = self.group_expr(transfer)
        some = sympy.Min(ranks - 1, 1)  # on one rank nothing is sent
        kernels = some * self.packing_expr(transfer) if step.collective in WORKS else 0
        if lines := self.lines_expr(step.axes, step.collective, key):
            return some * Min(*(start + block * each for start, each in lines)) + kernels
        rounds, sent = WIRE[step.collective](ranks, block)
        least = s[f"least_{key}"] * some if f"least_{key}" in s else 0
        return collective_seconds(rounds, sent, s[f"latency_{key}"], s[f"bandwidth_{key}"], least) + kernels

    def lines_expr(self, axes: Axes, collective: str, key: str) -> list[tuple[Any, Any]]:
        """Returns the lines of all ways of a collective (see `Way.line`) as formulas; none where it is one ring."""
        if (axes, collective) not in self.known_lines:
            mesh = self.terms.mesh
            ranks = sympy.Mul(*(self.symbols[mesh.axes[axis]] for axis in axes))
            at = collective, ranks, mesh.nodes(axes, ranks), self.symbols[f"bandwidth_{key}"]
            self.known_lines[axes, collective] = [way.line(*at) for way in mesh.ways(axes, collective)]
        return self.known_lines[axes, collective]

    @functools.cached_property
    def known_lines(self) -> dict[tuple[Axes, str], list[tuple[Any, Any]]]:
        """What `lines_expr` returned."""
        return {}

    @functools.cached_property
    def bytes_expr(self) -> dict[str, sympy.Expr]:
        """`bytes_sent` as formulas, by axis."""
        mesh = self.terms.mesh
        own = (*mesh.axes, *map(mesh.key, mesh.runs()))
        terms: dict[str, list[Any]] = {key: [] for key in self.bytes_sent if key in own}
        for transfer, count in self.transfers:
            terms[mesh.key(transfer.step.axes)].append(count * self.sent_expr(transfer))
        return {key: sympy.Add(*each) for key, each in terms.items()}

    @functools.cached_property
    def memory_expr(self) -> sympy.Expr:
        """`memory["total"]` as a formula: put all numbers in at once, `memory_expr.xreplace({symbols["b"]: 64,
        ...})`, as sympy's `subs` takes long to compare the terms of a maximum."""
        return self.terms.memory_of([self.symbols[name] for name in self.terms.mesh.axes])

    def sent_expr(self, transfer: Transfer) -> Any:
        """Returns the bytes that a rank sends in one collective as a formula."""
        return WIRE[transfer.step.collective](*self.group_expr(transfer))[1]

    def group_expr(self, transfer: Transfer) -> tuple[Any, Any]:
        """Returns the ranks of one collective and the bytes of its block as formulas."""
        mesh = self.terms.mesh
        sizes = tuple(self.symbols[name] for name in mesh.axes)
        return group(transfer.step, transfer.shape, transfer.itemsize, mesh.sizes, sizes, transfer.dims)

    def packing_expr(self, transfer: Transfer) -> sympy.Expr:
        """Returns the seconds of the kernels before and behind one collective as a formula."""
        s, mesh = self.symbols, self.terms.mesh
        sizes, rates = tuple(s[name] for name in mesh.axes), (s["peak"], s["memory_bandwidth"], s["launch"])
        ranks, block = group_of(transfer.step, transfer.shape, mesh.sizes, sizes, transfer.dims)
        return sympy.Add(*kernel_seconds(transfer.step.collective, ranks, sympy.prod(block), mesh, rates))

    def subs(self, values: Mapping[str, float] | None = None, **more: float) -> float:
        """Returns `expr` in seconds, with the values given here in place of this plan's own: `plan.cost.subs(b=64,
        data=8)`.

        The names are those of `symbols`. Where a size divided on this mesh it is taken to divide at the new sizes
        too. The layouts stay those of the plan, though others may be better there. Raises KeyError for a name that
        the formula lacks.
        """
        return float(self.evaluate(values, **more))

    def evaluate(self, values: Mapping[str, Any] | None = None, **more: Any) -> np.ndarray:
        """Returns what `subs` does for arrays of values that broadcast: a million configurations in a second."""
        check_kinds(values=(values, "a mapping whose keys are texts", "None"))
        numbers = self.numbers | dict(values or {}) | more
        unknown = sorted(numbers.keys() - self.symbols.keys())
        if unknown:
            raise KeyError(f"{', '.join(unknown)}: the formula has {', '.join(self.symbols)}")
        arrays = np.broadcast_arrays(*(np.asarray(numbers[name], dtype=float) for name in self.symbols))
        flat = [array.ravel() for array in arrays]
        seconds = np.empty(flat[0].size)
        for start in range(0, len(seconds), CHUNK):
            piece = slice(start, start + CHUNK)
            seconds[piece] = self.compiled(*(column[piece] for column in flat))
        return seconds.reshape(arrays[0].shape)

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        """`expr` as a function of arrays, one per symbol."""
        return sympy.lambdify(list(self.symbols.values()), self.expr, "numpy", cse=True)
