"""Everything private of torch that sbpc uses, imported here and nowhere else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._guards import CompileContext, tracing
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

__all__ = [
    "HOOKS",
    "BufferAOTInput",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "HigherOrderOperator",
    "InputMutationAOTOutput",
    "LazyGraphModule",
    "OpOverload",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "StridedShard",
    "TangentAOTInput",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "aot_export_joint_with_descriptors",
    "autograd_node",
    "compile_id",
    "compiling",
    "composite_ops",
    "decompositions",
    "detached",
    "enable_python_dispatcher",
    "has_kernel",
    "inductor_compile",
    "keeps_graph",
    "load_custom_ops",
    "local_of",
    "local_ranks",
    "next_sequence_number",
    "on_dtensors",
    "op_names",
    "outside_dynamo",
    "overload_of",
    "register_process_group",
    "rename",
    "resolve",
    "schema_of",
    "slots",
    "source_of",
    "storage_of",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "unregister_process_group",
    "with_local",
]


def aot_export_joint_with_descriptors(*args: Any, **kwargs: Any) -> Any:
    """AOTAutograd's joint capture. Imported when it is needed: it brings in dynamo, a second of CPU."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors as run

    return run(*args, **kwargs)


def autograd_node() -> object | None:
    """The autograd node that the engine is running in this thread."""
    return torch._C._current_autograd_node()


@contextlib.contextmanager
def composite_ops() -> Iterator[None]:
    """Without the fused layers of mkldnn and of the attention fast path, which keep opaque workspaces."""
    mkldnn, fast = torch._C._get_mkldnn_enabled(), torch.backends.mha.get_fastpath_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)
        torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """While this lasts torch.compiler.is_compiling() is true: libraries then leave out checks of values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What torch says ops are made of, by op."""
    from torch._decomp import decomposition_table

    return dict(decomposition_table)


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """While this lasts, a process group of so many ranks whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def gloo_in_turn() -> Iterator[None]:
    """Process groups over gloo that are made while this lasts do one collective after the other.

    Otherwise two threads of a group note the name of what they did last in one string without a lock: where it is too long to
    lie in the string itself, as that of an all-gather is, its memory is freed twice.
    """
    from torch.distributed import distributed_c10d

    if not distributed_c10d.is_gloo_available():
        yield
        return
    made = distributed_c10d.ProcessGroupGloo

    class InTurn(made):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options: Any = made._Options()  # type: ignore[attr-defined]
            names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
            devices = [made.create_device(interface=name) for name in names if name]
            options._devices = devices or [made.create_default_device()]
            options._threads, options._timeout = 1, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = InTurn  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = made  # type: ignore[misc]


@contextlib.contextmanager
def local_ranks(ranks: int) -> Iterator[None]:
    """While this lasts, DTensors hold the shards of all ranks of a mesh in this process."""
    from torch.distributed._local_tensor import LocalTensorMode

    with fake_group(ranks), LocalTensorMode(ranks):
        yield


def load_custom_ops() -> None:
    """Import what the first call of a custom op imports, so that not every forked process does it anew."""
    import torch._dynamo  # noqa: F401


def next_sequence_number() -> int:
    """The number that the next autograd node made in this thread will have."""
    return torch._C._autograd._get_sequence_nr()


def op_names() -> list[str]:
    """The names of all ops that are registered, `space::name` or `space::name.overload`."""
    return sorted(map(str, torch._C._dispatch_get_all_op_names()))


def overload_of(op: Any) -> OpOverload | None:
    """The overload that `op` is: itself, the default one of a packet, or what `torch.library.custom_op` returned."""
    found = getattr(op, "_opoverload", op)
    if isinstance(found, torch._ops.OpOverloadPacket) and "default" in found.overloads():
        found = found.default
    return found if isinstance(found, OpOverload) else None


def resolve(packet: Any, *args: Any, **kwargs: Any) -> OpOverload:
    """The overload of an op that takes these arguments."""
    found: OpOverload = getattr(packet, torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs))
    return found


def register_process_group(name: str, group: object) -> None:
    """Bind a name that functional collectives use to a process group."""
    torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]


def unregister_process_group(name: str) -> None:
    """Free a name bound by `register_process_group`."""
    torch._C._distributed_c10d._unregister_process_group(name)  # type: ignore[arg-type]


def rename(node: torch.fx.Node, name: str) -> None:
    """Give a node another name, or one like it if that is taken."""
    node._rename(name)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The tables of a module that hold what its call runs besides its forward."""


def schema_of(op: Any) -> Any:
    """The schema of an op: its arguments and results, which of them are views of others, which are written."""
    return op._schema


def slots(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Where the parameters and buffers of a module are held: qualified name, table, key."""
    for path, part in module.named_modules():
        for table in (part._parameters, part._buffers):
            for key, value in table.items():
                if value is not None:
                    yield f"{path}.{key}" if path else key, table, key  # type: ignore[misc]


def left_out_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the buffers that the state_dict of a module leaves out."""
    parts = module.named_modules(remove_duplicate=False)
    found = [(path, key) for path, part in parts for key in part._buffers if key in part._non_persistent_buffers_set]
    return tuple(f"{path}.{key}" if path else key for path, key in found)


def local_of(tensor: Any) -> Any:
    """What this rank holds of a DTensor, a plain tensor itself; unlike `to_local`, autograd does not see it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def with_local(like: Any, local: Tensor) -> Any:
    """A DTensor of the layout of another one; its part is made contiguous, as that of a parameter is. Else itself."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.__new__(DTensor, local.contiguous(), like._spec, requires_grad=False)  # type: ignore[call-arg]


def detached(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """detach of a DTensor. torch's own takes four times as long, and autograd asks for one with every gradient."""
    local = args[0]._local_tensor.detach()
    return DTensor.__new__(DTensor, local, args[0]._spec, requires_grad=False)  # type: ignore[call-arg]


def on_dtensors(op: Any, handler: Any) -> None:
    """Have `handler(op, args, kwargs)` called for an op on DTensors."""
    DTensor._op_dispatcher._custom_op_handlers[op] = handler


def source_of(placeholder: torch.fx.Node) -> str:
    """Where dynamo takes an input of its graph from, as Python."""
    return placeholder.meta["grapharg"].source.name if "grapharg" in placeholder.meta else placeholder.name


def compile_id() -> tuple[int, int]:
    """Which function dynamo compiles just now, counted from 0, and for which time."""
    found: Any = CompileContext.current_compile_id()
    return (found.frame_id, found.frame_compile_id) if found is not None else (0, 0)


@contextlib.contextmanager
def outside_dynamo() -> Iterator[None]:
    """Tracing within this takes no notice of the one from which it is called."""
    with tracing(None):
        yield


def has_kernel(op: OpOverload, device: str) -> bool:
    """Whether an op runs on devices of this type."""
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), torch._C._dispatch_key_for_device(device))


def inductor_compile(gm: torch.fx.GraphModule, examples: list[Any]) -> Any:
    """A function of one list, which it empties, that computes what a graph computes, by Inductor's kernels.

    What it needs is imported now. That the list is emptied is how torch calls what stands in such a wrapper. Nodes stay in
    the order in which they are: Inductor moves those of a graph without autograd next to their first use, in a backward the
    gradients of all weights to its end, until when all that they are computed from stays in memory.
    """
    from torch._dynamo.utils import GmWrapper
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad():
        wrapped: Any = GmWrapper(gm, lambda values: values)
        return compile_fx(wrapped, examples, config_patches={"reorder_for_locality": False})


def storage_of(tensor: Tensor) -> int:
    """What tensors that share memory have in common, while they live."""
    return tensor.untyped_storage()._cdata


def writes_of(tensor: Tensor) -> int:
    """How often autograd has seen a tensor written."""
    return tensor._version


def keeps_graph() -> bool:
    """Whether the backward that runs in this thread was called with retain_graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()
