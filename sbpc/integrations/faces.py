"""One model object with two faces: parallel as it is used, on one device while it is planned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from sbpc._compat import slots
from sbpc.runtime.further_plans import follow


class Faces:
    """A model that becomes parallel in its place, so that all who hold it, such as a trainer's callbacks and the
    user's own variable, hold what is trained.

    What was bound to it, such as a forward that a library put on the instance, runs on one device's face: it is what
    is planned. There its weights are on the meta device once the parallel one has them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.alone, self.parallel = model, (type(model), model.__dict__), model

    def show(self, parallel: nn.Module) -> None:
        """Makes the model parallel, and frees the weights of one device."""
        self.parallel, known = parallel, dict[int, Any]()  # kept: hooks of its own refer to it
        for _, table, key in slots(self.model):
            tensor = table[key]
            if id(tensor) not in known:
                meta = tensor.detach().to("meta")
                trained = tensor.requires_grad
                known[id(tensor)] = (tensor, nn.Parameter(meta, trained) if isinstance(tensor, nn.Parameter) else meta)
            table[key] = known[id(tensor)][1]
        self.turn(type(parallel), parallel.__dict__)

    def turn(self, cls: type[nn.Module], attributes: dict[str, Any]) -> None:
        """Shows one face."""
        object.__setattr__(self.model, "__dict__", attributes)
        object.__setattr__(self.model, "__class__", cls)

    @contextlib.contextmanager
    def one_device(self) -> Iterator[nn.Module]:
        """Shows the model as it is on one device while this lasts, with the modes and values that the parallel one
        has."""
        held = [vars(each) for each in self.model.modules()]
        now = type(self.model), self.model.__dict__
        self.turn(*self.alone)
        try:
            for each, attributes in zip(self.model.modules(), held):
                follow(each, attributes)
            yield self.model
        finally:
            self.turn(*now)
