"""Tells how well a training step uses its devices: the share of their peak, and tokens or samples a second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from sbpc.graph.about import is_boxing
from sbpc.graph.loss import chosen, names_of
from sbpc.graph.ports import INPUT, OUTPUT, TANGENT, Port, outputs
from sbpc.mesh.mesh import Mesh
from sbpc.plans.cost import Cost
from sbpc.plans.measure import comm_totals, layout_at, transfer_of
from sbpc.plans.timeline import exposed_seconds, timeline

DEAR = 0.1  # the part of a step for which it waits for a result, from which on the report tells of it


@dataclass(frozen=True)
class Usage:
    """What a training step, the optimizer's update among it, makes of its devices.

    mfu: flops of the model, without any that are computed again, as a share of what all devices could do at their
    peak. rate: tokens, or samples, that one device works off in a second. unit: which of the two.

    >>> print(Usage(0.4217, 12345.6, "tokens"))
    42.2 % of the peak (MFU), 12,300 tokens/s a device
    """

    mfu: float
    rate: float
    unit: str

    def __str__(self) -> str:
        rate = float(f"{self.rate:.3g}")
        return f"{100 * self.mfu:.1f} % of the peak (MFU), {rate:,.12g} {self.unit}/s a device"

    @classmethod
    def of(cls, cost: Cost, mesh: Mesh, shapes: Mapping[Port, Tensor], seconds: float | None = None) -> Usage | None:
        """Returns the usage of a step on a mesh; None where nothing is told of its machine or its batch. shapes: of
        the whole step, by port. seconds: that it took, by default those that are predicted."""
        inputs = [value for port, value in shapes.items() if port.kind == INPUT and value.dim()]
        took = (cost.step_seconds if seconds is None else seconds) * mesh.ranks
        if not inputs or not took or mesh.cluster.name == "ideal":
            return None
        texts = [value for value in inputs if value.dim() == 2 and not value.is_floating_point()]
        count, unit = (texts[0].numel(), "tokens") if texts else (inputs[0].shape[0], "samples")
        return cls(cost.model_flops / (took * mesh.cluster.peak), count / took, unit)


def dear_results(boxed: GraphModule, mesh: Mesh, shapes: Mapping[Port, Tensor], cost: Cost) -> Iterator[str]:
    """Yields a line for each result beside the loss that a step waits long for. shapes: by port."""
    results: Any = boxed.meta["ports"].results
    scalars = [int(port.name) for port, value in shapes.items() if port.kind == TANGENT and value.numel() == 1]
    loss, names = chosen(results, scalars), {number: name for name, number in names_of(results).items()}
    exposed = exposed_seconds(timeline(boxed, mesh)) if loss is not None and len(names) > 1 else {}
    for port, node in outputs(boxed, OUTPUT) if exposed else ():
        moves = list[Node]()
        while is_boxing(node):
            moves += [node] if "step" in node.meta else []
            (node,) = node.all_input_nodes
        number, seconds, made = int(port.name), sum(exposed.get(move.name, 0.0) for move in moves), layout_at(node)
        if number == loss or seconds < DEAR * cost.seconds:
            continue
        sent = sum(sum(comm_totals({transfer_of(move, mesh): 1}, mesh)[1].values()) for move in moves)
        layouts = [None if at != number else str(made) for at in range(len(names))]
        parts = "" if made.partial else f", or leave it in parts by outputs={layouts}"
        yield (
            f"the step waits {seconds:.3g} s for the result {names[number]}, of which a rank sends {sent:,.0f} bytes, "
            f"and the loss does not need it there: return the loss alone{parts}"
        )
