"""Simulate a step: run all ranks of a plan in this process, and count the bytes that they send and hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sbpc.errors import PlanError, check_kinds
from sbpc.graph.ports import INPUT, INPUT_GRADIENT, MUTATION, PARAMETER, SEED, Port
from sbpc.graph.random_bits import wrap
from sbpc.plans.plan import Plan
from sbpc.plans.rank_programs import Programs
from sbpc.runtime import bind
from sbpc.runtime.one_process.lockstep import lockstep
from sbpc.runtime.one_process.simulate_stages import simulate_stages


@dataclass
class Simulation:
    """What one step gave, as whole tensors. Unpacks as `outputs, gradients`.

    outputs: in the model's own structure. gradients: by name as in `named_parameters()`; a tied one has its first name, a frozen
    one is absent, an unused one None. buffers: new values by name. bytes_sent: by axis, busiest rank; counted, not predicted.
    peak_memory: bytes, busiest rank, everything that was alive. input_gradients: by number among the tensor arguments.
    """

    outputs: Any
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    bytes_sent: dict[str, float]
    peak_memory: int
    input_gradients: dict[int, Tensor] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.outputs, self.gradients))


def simulate(
    plan: Plan | Programs,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    tangents: Any = None,
    seed: int = 0,
) -> Simulation:
    """Runs one step of `plan` on all its ranks in this process, without GPUs: the programs that torchrun runs, only collectives swapped.

    args are whole, on one device; so is what comes back. Where the plan has a `loss`, they are `(*args, *targets)`. tangents: the
    gradients of the outputs, ones if not given. seed: of all random numbers; one seed gives the same numbers on every mesh. plan
    may also be what `sbpc.load_programs` returns. The model is left unchanged.

    >>> import sbpc, torch
    >>> model, x = torch.nn.Linear(4, 2), torch.ones(6, 4)
    >>> outputs, gradients = sbpc.simulate(sbpc.plan(model, (x,), sbpc.Mesh(data=2)), model, (x,))
    >>> torch.allclose(outputs, model(x)), gradients["bias"].tolist()
    (True, [6.0, 6.0])

    Raises PlanError if model or arguments are not like those planned.
    """
    bind.check_plan(plan)
    check_kinds(PlanError, seed=(seed, "an integer"))
    bind.check_guards(model, plan)
    bind.check_modes(model, plan)
    if plan.loop is not None:
        return told(plan, model, *simulate_stages(plan, model, args, kwargs, seed))
    mesh = plan.mesh
    inputs = shards_of(plan, whole_inputs(plan, model, args, kwargs, tangents, seed))
    groups = {mesh.group_name(axes): mesh.groups(axes) for axes in mesh.runs()}
    run = lockstep([plan.local_at(rank) for rank in range(mesh.ranks)], inputs, groups)
    results = {
        port: None if layout is None else layout.whole([out[at] for out in run.outputs], mesh.sizes)
        for at, (port, layout) in enumerate(plan.left.items())
    }
    sent = {alias.split("::")[-1]: sent for alias, sent in run.bytes_sent.items()}
    return told(plan, model, results, sent, run.peak_memory)


def told(plan: bind.AnyPlan, model: nn.Module, results: Mapping[Port, Any], sent: dict[str, float], peak: int) -> Simulation:
    """Returns what a step gave as a user sees it. results: by port, whole."""
    there = [(port, value) for port, value in results.items() if value is not None]
    return Simulation(
        bind.outputs(plan, results),
        bind.gradients(plan, results, [name for name, _ in model.named_parameters()]),
        {port.name: value for port, value in there if port.kind == MUTATION},
        sent,
        peak,
        {int(port.name): value for port, value in there if port.kind == INPUT_GRADIENT},
    )


def shards_of(plan: Plan | Programs, given: Mapping[Port, Tensor]) -> list[list[Tensor]]:
    """Returns by rank the inputs of its program: its shards of the placeholders, then its coordinates."""
    mesh, layouts = plan.mesh, plan.given
    by_port = [layouts[port].shards(given[port], mesh.sizes) for port in plan.ports.inputs]
    return [
        [*(own(shards[rank]) for shards in by_port), *(torch.tensor([at]) for at in mesh.coordinates(rank))]
        for rank in range(mesh.ranks)
    ]


def whole_inputs(
    plan: Plan | Programs, model: nn.Module, args: Sequence[Any], kwargs: Any, tangents: Any, seed: int
) -> dict[Port, Tensor]:
    """Returns the whole tensor of every placeholder, checked against the plan."""
    given = {port: tensor.detach() for port, tensor in bind.stored(plan, model).items()}
    leaves = bind.arguments(plan, args, kwargs)
    free = iter(bind.default_tangents(plan, tangents))
    for port, planned in plan.shapes.items():
        if port.kind == INPUT:
            bind.check(f"argument {port.name}", leaves[int(port.name)], planned)
            given[port] = leaves[int(port.name)].detach()
        elif port.kind == SEED:
            given[port] = torch.tensor(wrap(seed))
        elif port not in given:
            given[port] = next(free)
    if any(tensor.is_meta for port, tensor in given.items() if port.kind == PARAMETER):
        raise PlanError(
            "the model is on the meta device: there is nothing to simulate with\n  Give it weights: model.to_empty(device='cpu')."
        )
    return given


def own(shard: Tensor) -> Tensor:
    """Returns the shard in memory of its own, as a rank holds it: a view would keep the whole tensor alive, and be strided."""
    whole = shard.untyped_storage().nbytes() > shard.nbytes
    return shard.clone(memory_format=torch.contiguous_format) if whole else shard
