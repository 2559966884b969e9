"""Everything private of torch that sbpc uses, imported here and nowhere else."""

from __future__ import annotations

import torch
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
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "BufferAOTInput",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "OpOverload",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "StridedShard",
    "TangentAOTInput",
    "aot_export_joint_with_descriptors",
    "autograd_node",
    "enable_python_dispatcher",
    "next_sequence_number",
    "register_process_group",
    "unregister_process_group",
]


def autograd_node() -> object | None:
    """The autograd node that the engine is running in this thread."""
    return torch._C._current_autograd_node()


def next_sequence_number() -> int:
    """The number that the next autograd node made in this thread will have."""
    return torch._C._autograd._get_sequence_nr()


def register_process_group(name: str, group: object) -> None:
    """Bind a name that functional collectives use to a process group."""
    torch._C._distributed_c10d._register_process_group(name, group)


def unregister_process_group(name: str) -> None:
    """Free a name bound by `register_process_group`."""
    torch._C._distributed_c10d._unregister_process_group(name)
