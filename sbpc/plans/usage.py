"""Tells how well a training step uses its devices: the share of their peak, and tokens or samples a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sbpc.graph.ports import INPUT, Port
from sbpc.mesh.mesh import Mesh
from sbpc.plans.cost import Cost


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
