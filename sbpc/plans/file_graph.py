"""Checks the graph of a stranger's file: it calls only ops that keep to their tensors, and its values are what these
ops make.

Kernels of torch that its users do not call themselves trust what they are given: `aten._reshape_alias` its strides,
the backward of a norm that there are as many means as rows, that of max pooling its indices. So a call of an op with
a rule has to fit its rule, which binds the shapes of all operands, and other ops have to be listed here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from sbpc._compat import OpOverload
from sbpc.errors import VerifyError
from sbpc.graph.expert_rows import COUNT, COUNTS
from sbpc.graph.operands import hashable, leaves, named_arguments
from sbpc.graph.ports import results
from sbpc.plans.program_check import ShapeCheck
from sbpc.rules.registry import match, row

# Ops of captured models without a rule, or with one that fits some calls only (index_put: not of masks), where torch
# has no decomposition of them into ops with rules. Each checks its operands itself, or FileCheck does; ops that crash
# or give silent numbers on operands of other shapes, or on indices far outside, are left out.
UNRULED = frozenset({
    "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward", "_cdist_forward", "_fft_c2c", "_fft_c2r", "_fft_r2c",
    "_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "adaptive_max_pool2d",
    "adaptive_max_pool2d_backward", "adaptive_max_pool3d", "adaptive_max_pool3d_backward", "as_strided",
    "as_strided_scatter", "avg_pool3d", "avg_pool3d_backward", "contiguous", "eye", "gather", "grid_sampler_2d",
    "grid_sampler_2d_backward", "grid_sampler_3d", "grid_sampler_3d_backward", "histc", "index_add", "index_copy",
    "index_put", "index_reduce", "linalg_cholesky_ex", "linalg_inv_ex", "linalg_matrix_exp", "linalg_qr",
    "linalg_solve_triangular", "masked_scatter", "median", "nanmedian", "resolve_conj", "scatter", "scatter_add",
    "scatter_reduce", "slice_copy", "view.dtype",
})  # fmt: skip
OF_ROWS = frozenset({  # sbpc's own, likewise
    "add_rows", "row_count", "row_counts", "rows_by_number", "rows_by_place", "rows_of_peers", "rows_of_ranks",
    "rows_within",
})  # fmt: skip
# the backward of a pooling, which trusts its indices and the shape of its gradient, and how many dims it pools
POOLED = {
    "_adaptive_avg_pool3d_backward": 3, "adaptive_max_pool2d_backward": 2, "adaptive_max_pool3d_backward": 3,
    "max_pool2d_with_indices_backward": 2,
}  # fmt: skip
SAMPLED = ("grid_sampler_2d_backward", "grid_sampler_3d_backward")  # which trust the shape of their gradient
MOVING = frozenset({  # what these give holds nothing but elements of their operands
    "_unsafe_view", "alias", "all_gather_into_tensor", "all_to_all_single", "cat", "clone", "contiguous", "expand",
    "getitem", "narrow", "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unsqueeze", "view", "wait_tensor",
})  # fmt: skip


def may_call(op: OpOverload) -> bool:
    """Returns whether a file may name an op: it has a rule or is listed, makes tensors, and writes into none."""
    schema = op._schema
    made = any("Tensor" in str(result.type) for result in schema.returns) or op in (COUNT, COUNTS)
    return made and not schema.is_mutable and (row(op) is not None or name_of(op) in UNRULED | OF_ROWS)


def name_of(target: Any) -> str:
    """Returns the name of an op of torch, without its overload, unless that is a view in another type,
    which makes other elements; "" for an op of somebody else."""
    if target is torch.ops.aten.view.dtype:
        return "view.dtype"
    space, _, name = (
        target._schema.name.partition("::") if isinstance(target, OpOverload) else ("aten", "", target.__name__)
    )
    return name if space in ("aten", "_c10d_functional") or (space == "sbpc" and name in OF_ROWS) else ""


Bounds = Sequence[int | None]  # by value a number above all its elements, where they are indices of a pooling


def check_graph(
    gm: GraphModule, made: dict[Any, Any], collectives: bool = False, given: Bounds = ()
) -> list[int | None]:
    """Raises SbpcError for a graph that calls what it may not, or says of a value what it is not.

    made: what calls of the file's graphs give, by op and operands. collectives: it is a rank's program. given:
    bounds of its first placeholders, by what has computed them. Returns those of its results.
    """
    check = FileCheck(gm, collectives, made)
    check.bounds |= {
        node: bound for node, bound in zip(gm.graph.find_nodes(op="placeholder"), given) if bound is not None
    }
    check.check()
    return [None if node is None else check.bounds.get(node) for node in results(gm)]


class FileCheck(ShapeCheck):
    """Runs a graph on the meta device. bounds: of values that hold indices of a pooling, a number above all of them."""

    def __init__(self, gm: GraphModule, local: bool, made: dict[Any, Any]) -> None:
        super().__init__(gm)
        self.local = local
        self.bounds: dict[Node, int] = {}
        self.made = made  # most calls of a deep model are as an earlier one
        self.new = True  # whether the call that runs is the first one such

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Runs one call, or takes what an equal one gave."""
        key = target, hashable((args, kwargs), about)
        self.new = target is operator.getitem or key not in self.made
        if self.new:
            self.made[key] = super().call_function(target, args, kwargs)
        return self.made[key]

    def run_node(self, n: Node) -> Any:
        """Runs one node, and compares what it makes with what the file says."""
        value = super().run_node(n)
        if n.op not in ("call_function", "get_attr"):
            return value
        said = n.meta.get("val")
        if (said is not None or not self.local) and kinds(value) != kinds(said):
            value = self.on_cpu(n)  # kernels of the meta device give others to what nobody reads
            self.require(kinds(value) == kinds(said), f"it makes {told(value)}, not {told(said)}", n)
        if n.op == "call_function":
            self.check_call(n, value)
        return value

    def check_call(self, n: Node, value: Any) -> None:
        """Checks the arguments of a call, and that what it makes lies within memory."""
        name = name_of(n.target)
        if self.new:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if n.target is operator.getitem:
                self.require(
                    isinstance(args[0], (tuple, list)) and type(args[1]) is int, "it takes no part of several values", n
                )
            elif (
                isinstance(n.target, OpOverload)
                and n.target.namespace != "_c10d_functional"
                and name not in UNRULED | OF_ROWS
            ):
                entry = row(n.target)
                vouched = entry is not None and entry.source  # by who gave the rule
                self.require(
                    vouched or match(n.target, args, kwargs, value) is not None,
                    "the rule of the op does not fit the call",
                    n,
                )
            self.require(all(map(within, leaves(value, Tensor))), "it reads memory outside its operand", n)
        if name in POOLED or name in SAMPLED:
            op: Any = n.target
            self.check_backward(n, named_arguments(op, n.args, n.kwargs), POOLED.get(name))
        bound = self.bound(n, name)
        if bound is not None:
            self.bounds[n] = bound

    def check_backward(self, n: Node, given: dict[str, Any], dims: int | None) -> None:
        """Checks that the gradient has the shape of the result, and that indices are those of a pooling of planes as
        large."""
        shape = {key: tuple(self.env[value].shape) for key, value in given.items() if isinstance(value, Node)}
        gradient = shape["grad_output"]
        if dims is None:
            return self.require(
                gradient == (*shape["input"][:2], *shape["grid"][1:-1]), "its gradient has another shape", n
            )
        plane = math.prod(shape["self"][-dims:])
        same = gradient[:-dims] == shape["self"][:-dims] and shape.get("indices", gradient) == gradient
        self.require(same, "its gradient has another shape", n)
        known = "indices" not in given or self.bounds.get(given["indices"], plane + 1) <= plane
        self.require(known, "its indices are not those of a pooling", n)

    def bound(self, n: Node, name: str) -> int | None:
        """Returns a number above all elements of a value that holds indices of a pooling, None if it does not."""
        if n.target is operator.getitem and n.args[1] == 1:
            producer = n.args[0]
            assert isinstance(producer, Node)
            dims = POOLED.get(f"{name_of(producer.target)}_backward")
            if dims is not None:
                return math.prod(self.env[producer.all_input_nodes[0]].shape[-dims:])
        known = [self.bounds.get(operand) for operand in n.all_input_nodes]
        if name not in MOVING or None in known:
            return None
        return max((bound for bound in known if bound is not None), default=None)

    def require(self, condition: object, what: str, n: Node) -> None:
        """Raises VerifyError about a node unless the condition holds."""
        if not condition:
            raise VerifyError(f"%{n.name} calls {n.target}: {what}")


def about(value: Tensor) -> Any:
    """Returns what a call may depend on of an operand without data."""
    return value.dtype, value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes()


def kinds(value: Any) -> Any:
    """Returns dtype and shape of a tensor, or of several."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape
    return [kinds(item) for item in value] if isinstance(value, (tuple, list)) else None


def told(value: Any) -> Any:
    """Returns the same for a message."""
    if isinstance(value, (tuple, list)):
        return [told(item) for item in value]
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else None


def within(value: Tensor) -> bool:
    """Returns whether all elements of a tensor lie in its storage."""
    last = value.storage_offset() + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    return value.numel() == 0 or (last + 1) * value.element_size() <= value.untyped_storage().nbytes()
