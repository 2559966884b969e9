"""Everything private of torch that sbpc uses, imported here and nowhere else."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
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
    in_kernel_invocation_manager,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "BufferAOTInput", "DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode",
    "GradAOTOutput", "HigherOrderOperator", "InputMutationAOTOutput", "LazyGraphModule", "OpOverload", "ParamAOTInput",
    "PlainAOTInput", "PlainAOTOutput", "StridedShard", "TangentAOTInput", "TorchDispatchMode",
    "UnsupportedOperatorException", "enable_python_dispatcher", "in_kernel_invocation_manager", "tree_leaves",
    "tree_map", "without_modes",
]  # fmt: skip
"""What is handed on as it is; the functions below are for whoever imports them."""

TRIED = (2, 15)  # the newest release of torch that sbpc was tried with; `make test-newest` tries the newest there is


def untried(version: str) -> str:
    """Returns what to tell the user of a release of torch that is newer than the newest tried one, else nothing."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) <= TRIED:
        return ""
    major, minor = TRIED
    return (
        f"torch {version} is newer than {major}.{minor}, the newest tried with this sbpc (sbpc._compat.TRIED). "
        f"Nothing need be done; if something fails, report it, and go back by pip install 'torch<{major}.{minor + 1}'."
    )


if untried(torch.__version__) and os.environ.get("RANK", "0") == "0":
    logging.getLogger("sbpc").warning(untried(torch.__version__))


def aot_export_joint_with_descriptors(*args: Any, **kwargs: Any) -> Any:
    """Runs AOTAutograd's joint capture. The import waits until here because it loads dynamo, which takes a second."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors as run

    return run(*args, **kwargs)


def autograd_node() -> object | None:
    """Returns the autograd node that the engine is running in this thread."""
    return torch._C._current_autograd_node()


@contextlib.contextmanager
def composite_ops() -> Iterator[None]:
    """Turns off fused layers of mkldnn and attention's fast path while this lasts: they keep opaque workspaces."""
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
    """Makes torch.compiler.is_compiling() true while this lasts, so that libraries leave out checks of values."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns torch's table of decompositions: for an op the function that computes it by other ops."""
    from torch._decomp import decomposition_table

    return dict(decomposition_table)


def default_store() -> Any:
    """Returns the store by which the ranks of the default process group have met."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


@contextlib.contextmanager
def gloo_in_turn() -> Iterator[None]:
    """Gives every gloo group that is made while this lasts one thread, so that it runs one collective after the other.

    With two threads torch crashes now and then. Both write the name of their last collective into one string without
    a lock. A long name, such as that of an all-gather, lies on the heap, and its memory is then freed twice.
    """
    from torch.distributed import distributed_c10d

    if not distributed_c10d.is_gloo_available():
        yield
        return
    original = distributed_c10d.ProcessGroupGloo

    class OneThread(original):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
            options: Any = original._Options()  # type: ignore[attr-defined]
            for name, value in others.items():  # torch 2.14 gives enable_reconfigure, and a later one what it thinks of
                if hasattr(options, name):
                    setattr(options, name, value)
            names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
            devices = [original.create_device(interface=name) for name in names if name]
            options._devices = devices or [original.create_default_device()]
            options._threads, options._timeout = 1, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneThread  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = original  # type: ignore[misc]


def load_custom_ops() -> None:
    """Imports what the first call of a custom op would import, so that forked processes need not do it each."""
    import torch._dynamo  # noqa: F401


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keeps torch from logging, with a traceback, each op that refuses fake operands; the error tells the same."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


META = torch.library.Library("aten", "IMPL")


def give_shapes(name: str, function: Callable[..., Tensor]) -> None:
    """Has a function say what an op of ATen gives without values, in the place of torch's own one."""
    META.impl(name, function, "Meta", allow_override=True)
    op = getattr(torch.ops.aten, name).default
    op.py_kernels[torch._C.DispatchKey.Meta] = function  # for the Python dispatcher
    op._dispatch_cache.clear()


def next_sequence_number() -> int:
    """Returns the sequence number of the next autograd node that this thread makes."""
    return torch._C._autograd._get_sequence_nr()


def op_names() -> list[str]:
    """Returns the names of all registered ops, `space::name` or `space::name.overload`."""
    return sorted(map(str, torch._C._dispatch_get_all_op_names()))


def overload_of(op: Any) -> OpOverload | None:
    """Returns the overload of `op`: itself, a packet's default one, or what `torch.library.custom_op` made."""
    overload = getattr(op, "_opoverload", op)
    if isinstance(overload, torch._ops.OpOverloadPacket) and "default" in overload.overloads():
        overload = overload.default
    return overload if isinstance(overload, OpOverload) else None


def resolve(packet: Any, *args: Any, **kwargs: Any) -> OpOverload:
    """Returns the overload of an op that takes these arguments."""
    overload: OpOverload = getattr(packet, torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs))
    return overload


def register_process_group(name: str, group: object) -> None:
    """Binds the name that functional collectives use to a process group."""
    torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]


def unregister_process_group(name: str) -> None:
    """Frees a name bound by `register_process_group`."""
    torch._C._distributed_c10d._unregister_process_group(name)  # type: ignore[arg-type]


def rename(node: torch.fx.Node, name: str) -> None:
    """Renames a node. If the name is taken, torch appends a number to it."""
    node._rename(name)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The tables of hooks that a call of a module runs besides its forward."""
GLOBAL_HOOKS = tuple(f"_global{kind}" for kind in HOOKS)
"""Those of `torch.nn.modules.module` that the calls of all modules run."""
CHILDREN, TENSORS = "_modules", ("_parameters", "_buffers")  # attributes: of submodules, of parameters and buffers


def has_hook(tensor: Tensor) -> bool:
    """Returns whether a backward calls a function with the gradient of a tensor."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def schema_of(op: Any) -> Any:
    """Returns the schema of an op: its arguments and results, and which of them are views or are written."""
    return op._schema


def slots(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields the place of every parameter and buffer: its qualified name, the table that holds it, its key there."""
    for path, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for key, value in table.items():
                if value is not None:
                    yield f"{path}.{key}" if path else key, table, key  # type: ignore[misc]


def left_out_of(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the buffers that the state_dict of a module leaves out."""
    owners = module.named_modules(remove_duplicate=False)
    keys = ((path, key) for path, owner in owners for key in owner._buffers if key in owner._non_persistent_buffers_set)
    return tuple(f"{path}.{key}" if path else key for path, key in keys)


def local_of(tensor: Any) -> Any:
    """Returns this rank's shard of a DTensor, or a plain tensor itself. Unlike `to_local`, autograd does not see it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def hold(tensor: DTensor, local: Tensor) -> None:
    """Has a DTensor hold another shard from now on. What was saved of the one before keeps its numbers."""
    tensor._local_tensor = local


def with_local(like: Any, local: Tensor) -> Any:
    """Returns the DTensor laid out like `like` with this shard, contiguous; the shard if `like` is no DTensor."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.__new__(DTensor, local.contiguous(), like._spec, requires_grad=False)  # type: ignore[call-arg]


def detached(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Detaches a DTensor in a quarter of the time that torch takes; autograd detaches every gradient."""
    local = args[0]._local_tensor.detach()
    return DTensor.__new__(DTensor, local, args[0]._spec, requires_grad=False)  # type: ignore[call-arg]


def on_dtensors(op: Any, handler: Any) -> None:
    """Has torch call `handler(op, args, kwargs)` for an op on DTensors, in this process from now on."""
    DTensor._op_dispatcher._custom_op_handlers[op] = handler


def on_steps(wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has torch call `wrapped(step)` in the place of the step of each class of optimizers, of which the first is made
    from now on."""
    optimizers: Any = torch.optim.Optimizer
    original = optimizers.profile_hook_step
    optimizers.profile_hook_step = staticmethod(lambda step: original(wrapped(step)))


MIXED = "got mixed torch.Tensor and DTensor"  # what torch says of an op that gets both; C++ raises it
in_turn = threading.RLock()  # of threads that change torch's table of handlers for a moment


def as_torch_does(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an op on DTensors without the handler that it has, for a handler that leaves the rest to torch."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    with in_turn:
        handler = handlers.pop(op)
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = handler


def source_of(placeholder: torch.fx.Node) -> str:
    """Returns the Python expression from which dynamo takes an input of its graph."""
    return placeholder.meta["grapharg"].source.name if "grapharg" in placeholder.meta else placeholder.name


def compile_id() -> tuple[int, int]:
    """Returns the number of the function that dynamo is compiling, from 0, and how often it has compiled it before."""
    current: Any = CompileContext.current_compile_id()
    return (current.frame_id, current.frame_compile_id) if current is not None else (0, 0)


def compiled_enough(times: int) -> bool:
    """Whether dynamo compiles a function no more often; then has it raise where it would run one as it is written."""
    config: Any = torch._dynamo.config
    config.fail_on_recompile_limit_hit |= (enough := times >= config.recompile_limit)
    return enough


def fsdp_param() -> type:
    """Returns the class of which `fully_shard` makes one for each parameter."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return FSDPParam


def outside_dynamo() -> contextlib.AbstractContextManager[Any]:
    """Hides dynamo's tracing context while this lasts, so that a capture within it starts afresh."""
    return tracing(None)


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Writes an artifact into torch's structured trace (TORCH_TRACE), which tlparse shows; the payload is made only
    if there is one. Without one torch's handler, which has no folder, makes payloads until it is first used."""
    from torch._logging._internal import trace_log, trace_structured_artifact

    if any(getattr(handler, "root_dir", None) for handler in trace_log.handlers):
        trace_structured_artifact(name, encoding, payload)


def has_kernel(op: OpOverload, device: str) -> bool:
    """Returns whether an op has a kernel for devices of this type."""
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), torch._C._dispatch_key_for_device(device))


def inductor_compile(gm: torch.fx.GraphModule, examples: list[Any]) -> Any:
    """Compiles a graph by Inductor to a function of one list, which it empties. The imports wait until here.

    GmWrapper is torch's way to hand over arguments as such a list. Inductor may not reorder the nodes: it would move
    the gradients of all weights to the end, and what they are computed from would stay in memory until then.
    """
    from torch._dynamo.utils import GmWrapper
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad():
        wrapped: Any = GmWrapper(gm, lambda values: values)
        return compile_fx(wrapped, examples, config_patches={"reorder_for_locality": False})


def float8_product(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Returns the product of two float8 matrices, the second in the order of its columns, both times a scale."""
    return torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)


def storage_of(tensor: Tensor) -> int:
    """Returns a number that two live tensors have in common if they share memory."""
    return tensor.untyped_storage()._cdata


def loses_writes(tensor: Tensor) -> bool:
    """Returns whether a tensor is a view of a DTensor, and has memory of its own."""
    return tensor._base is not None and storage_of(local_of(tensor)) != storage_of(local_of(tensor._base))


def writes_of(tensor: Tensor) -> int:
    """Returns how often autograd has seen a tensor written."""
    return tensor._version


def keeps_graph() -> bool:
    """Returns whether the backward that runs in this thread was called with retain_graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def flex_parts() -> tuple[Any, Any]:
    """Returns what makes the graph of the gradients of a function of FlexAttention, and its index into a tensor."""
    from torch._dynamo._trace_wrapped_higher_order_op import mod_index
    from torch._higher_order_ops.flex_attention import create_fw_bw_graph

    return create_fw_bw_graph, mod_index


@contextlib.contextmanager
def differentiating() -> Iterator[None]:
    """Has autograd record what runs while this lasts, also within the kernel of an op, where torch turns it off."""
    left = torch._C._dispatch_tls_local_exclude_set()
    for name in (name for name in dir(torch._C.DispatchKey) if name.startswith("Autograd")):
        left = left.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left), torch.enable_grad():
        yield
