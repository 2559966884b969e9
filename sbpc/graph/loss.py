"""Which result of a model is its loss."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sbpc.errors import PlanError
from sbpc.graph.ports import TANGENT, Port, Ports
from sbpc.graph.pytree import paths


def number_of_loss(ports: Ports, shapes: Mapping[Port, Tensor]) -> int:
    """Returns which result of the forward is the loss: the one called `loss`, else the result itself, else the first
    of several.

    It has one element and a gradient. ports, shapes: of a plan. Raises PlanError if there is no loss.
    """
    tangents = {port.name: value for port, value in shapes.items() if port.kind == TANGENT}
    structure = ports.results
    places = [number for number, path in enumerate(paths(structure)) if path == ("loss",)]
    match structure:
        case (
            ["tensor", first]
            | ["tuple" | "list", [["tensor", first], *_]]
            | ["named tuple", _, [["tensor", first], *_]]
        ):
            places.append(first)
    for number in places:
        if str(number) in tangents and tangents[str(number)].numel() == 1:
            return number
    raise PlanError(
        f"the forward returns results with gradients of shapes {[tuple(value.shape) for value in tangents.values()]}, "
        "none a loss\n"
        "  Return a scalar alone, as `loss`, or first of several; or plan with loss=; or call the module, then "
        "backward on your loss."
    )
