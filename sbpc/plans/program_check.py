"""Checks a local program: runs it on the meta device and compares every shape with what the layout gives."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from sbpc._compat import FakeTensorMode
from sbpc.errors import VerifyError, at_node
from sbpc.graph.operands import nodes_in

REPORT = "This is a bug in sbpc: report it with the model and the mesh."


def require(condition: bool, what: str, node: Node) -> None:
    """Raises VerifyError about a node unless the condition holds."""
    if not condition:
        raise VerifyError(at_node(what, node, REPORT))


def verify_local(gm: GraphModule) -> int:
    """Checks that every value has the shape that its layout gives it on this rank; returns the number of edges
    checked."""
    return ShapeCheck(gm).check()


class ShapeCheck(Interpreter):
    """Runs a local program on the meta device and compares shapes."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.edges = 0

    def check(self) -> int:
        """Runs the program and returns the number of edges checked."""
        for node in self.graph.nodes:
            if node.op == "get_attr":
                self.env[node] = torch.empty_like(getattr(self.module, str(node.target)), device="meta")
        inputs = [torch.empty_like(n.meta["val"], device="meta") for n in self.graph.find_nodes(op="placeholder")]
        self.run(*inputs, initial_env=dict(self.env), enable_io_processing=False)
        return self.edges

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Runs one call. Factories make tensors without data."""
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        return target(*args, **kwargs)

    def on_cpu(self, n: Node) -> Any:
        """Returns the value of a node that its producer's fake CPU kernel gives."""
        producer = n.args[0] if n.target is operator.getitem else n
        assert isinstance(producer, Node)
        given = self.fetch_args_kwargs_from_env(producer)
        with FakeTensorMode():
            args, kwargs = empty_like(given, "cpu")
            value = producer.target(*args, **kwargs)  # type: ignore[operator]
        value = value[n.args[1]] if producer is not n else value
        return empty_like(value, "meta")

    def run_node(self, n: Node) -> Any:
        """Runs one node and compares its shape with the recorded one."""
        self.edges += len(nodes_in((n.args, n.kwargs)))
        try:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            value = getattr(self, n.op)(n.target, args, kwargs)  # without the records that tracing wants of each node
        except VerifyError:
            raise
        except NotImplementedError:  # there is no kernel for the meta device
            value = self.on_cpu(n)
        except Exception as error:
            raise VerifyError(at_node(f"a local op fails on its shapes: {error}", n, REPORT)) from error
        expected = n.meta.get("local_shape")
        if expected is None:
            return value
        if tuple(value.shape) != tuple(expected):
            value = self.on_cpu(n)  # kernels of the meta device give other shapes to what nobody reads
        shape = tuple(value.shape)
        require(shape == tuple(expected), f"shape {shape}, its layout gives {tuple(expected)}", n)
        return value


def empty_like(value: Any, device: str) -> Any:
    """Returns the nested value with contiguous tensors of the same shapes and dtypes on a device."""
    return map_aggregate(
        value, lambda t: torch.empty(t.shape, dtype=t.dtype, device=device) if isinstance(t, torch.Tensor) else t
    )
