"""Which result of a model is its loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from sbpc.errors import PlanError, closest
from sbpc.graph.ports import TANGENT, Port, Ports
from sbpc.graph.pytree import paths


def number_of_loss(ports: Ports, shapes: Mapping[Port, Tensor]) -> int:
    """Returns which result of the forward is the loss, see `chosen`; it has one element and a gradient.

    ports, shapes: of a plan. Raises PlanError if there is no loss.
    """
    tangents = {port.name: value for port, value in shapes.items() if port.kind == TANGENT}
    number = chosen(ports.results, [int(name) for name, value in tangents.items() if value.numel() == 1])
    if number is not None:
        return number
    names = {str(number): name for name, number in names_of(ports.results).items()}
    found = [f"{names.get(name, '')} {tuple(value.shape)}".strip() for name, value in tangents.items()]
    scalar = next((names[name] for name, value in tangents.items() if value.numel() == 1 and name in names), "losses.1")
    raise PlanError(
        f"the forward returns results with gradients, {', '.join(found) or 'of which there is none'}, none a loss\n"
        "  Return a scalar alone, as `loss`, first of several, or as the only one with a gradient; or name it: "
        f"loss={scalar!r}; or make one by loss=; or call the module, then backward on your loss."
    )


def chosen(structure: Any, scalars: Collection[int]) -> int | None:
    """Returns which of several results is the loss: the one called `loss`, else the result itself or the first of
    several, else the only scalar; None if there is none. scalars: those that may be."""
    places = [number for name, number in names_of(structure).items() if name == "loss"]
    match structure:
        case (
            ["tensor", first]
            | ["tuple" | "list", [["tensor", first], *_]]
            | ["named tuple", _, [["tensor", first], *_]]
        ):
            places.append(first)
    found = [number for number in places if number in scalars]
    return found[0] if found else next(iter(scalars)) if len(scalars) == 1 else None


def named_loss(structure: Any, name: str) -> int:
    """Returns the number of the result that a text names, as "loss", "1" or "losses.first". Raises PlanError if there
    is none."""
    names = names_of(structure)
    if name not in names:
        near = ", ".join(closest(name, list(names)))
        raise PlanError(f"the forward returns nothing called {name!r}\n  The closest are {near}.")
    return names[name]


def names_of(structure: Any) -> dict[str, int]:
    """Returns the numbers of several results by name: keys, fields and places, with points between."""
    return {".".join(map(str, path)): number for number, path in enumerate(paths(structure)) if path}
