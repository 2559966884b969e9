"""Check a local program: run it on the meta device and compare every shape with what the layout gives."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from sbpc._compat import FakeTensorMode
from sbpc.errors import VerifyError, at_node
from sbpc.graph.operands import nodes_in

REPORT = "This is a bug in sbpc: report it with the model and the mesh."


def require(condition: bool, what: str, node: Node) -> None:
    """Raise VerifyError about a node unless the condition holds."""
    if not condition:
        raise VerifyError(at_node(what, node, REPORT))


def verify_local(gm: GraphModule) -> int:
    """Run the program on the meta device: every value has the shape that its layout gives it on this rank."""
    return ShapeCheck(gm).check()


class ShapeCheck(Interpreter):
    """Runs a local program on the meta device and compares shapes."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.edges = 0

    def check(self) -> int:
        """The number of edges checked."""
        for node in self.graph.nodes:
            if node.op == "get_attr":
                self.env[node] = torch.empty_like(getattr(self.module, str(node.target)), device="meta")
        inputs = [
            torch.empty_like(node.meta["val"], device="meta") for node in self.graph.nodes if node.op == "placeholder"
        ]
        self.run(*inputs, initial_env=dict(self.env), enable_io_processing=False)
        return self.edges

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """One call; factories make tensors without data."""
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        return target(*args, **kwargs)

    def on_cpu(self, n: Node) -> Any:
        """The value of a node that its producer's fake CPU kernel gives."""
        producer = n.args[0] if n.target is operator.getitem else n
        assert isinstance(producer, Node)
        with FakeTensorMode():
            args, kwargs = torch.fx.node.map_aggregate(
                self.fetch_args_kwargs_from_env(producer),
                lambda t: torch.empty(t.shape, dtype=t.dtype) if isinstance(t, torch.Tensor) else t,
            )
            found = producer.target(*args, **kwargs)  # type: ignore[operator]
        found = found[n.args[1]] if producer is not n else found
        return torch.fx.node.map_aggregate(
            found, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta") if isinstance(t, torch.Tensor) else t
        )

    def run_node(self, n: Node) -> Any:
        """One node, its shape compared with the recorded one."""
        self.edges += len(nodes_in((n.args, n.kwargs)))
        try:
            value = super().run_node(n)
        except VerifyError:
            raise
        except NotImplementedError:  # there is no kernel for the meta device
            value = self.on_cpu(n)
        except Exception as error:
            raise VerifyError(at_node(f"a local op fails on its shapes: {error}", n, REPORT)) from error
        expected = n.meta.get("local_shape")
        if expected is not None and tuple(value.shape) != tuple(expected):
            value = self.on_cpu(n)  # kernels of the meta device give other shapes to what nobody reads
        if expected is not None:
            require(
                tuple(value.shape) == tuple(expected),
                f"shape {tuple(value.shape)}, its layout gives {tuple(expected)}",
                n,
            )
        return value
