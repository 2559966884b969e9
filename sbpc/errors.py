"""Errors that say where, what, why and what to do; every message about a node is made by `at_node`."""

from __future__ import annotations

from torch.fx import Node


class SbpcError(Exception):
    """Any error that is the caller's to mend; our own mistakes are assertions."""


class CaptureError(SbpcError):
    """The model cannot be captured as one graph."""


class CheckpointError(SbpcError):
    """A checkpoint cannot be written or read, or does not fit the model or the optimizer."""


class LayoutError(SbpcError):
    """A layout is malformed, or a tensor cannot have it."""


class MemoryLimitError(SbpcError):
    """No plan was found that stays under the memory limit."""


class MeshError(SbpcError):
    """A mesh or a cluster is malformed, or does not fit the ranks that there are."""


class NanError(SbpcError):
    """A step computes NaN, and was asked to look for it."""


class PinError(SbpcError):
    """A pin names nothing, contradicts another pin, or cannot be met."""


class PlanError(SbpcError):
    """A plan does not fit the model, the inputs, the ranks or the file it is used with."""


class RuleError(SbpcError):
    """A rule string is malformed, or does not fit the op it is given for."""


class VerifyError(SbpcError):
    """A rewritten graph breaks an invariant."""


def where(node: Node) -> str:
    """The node as the graph prints it with its shape and module path, then the user's own line.

    >>> from torch import fx
    >>> print(where(fx.Graph().placeholder("x")))
      %x : placeholder
    """
    value = node.meta.get("val")
    shape = ""
    if value is not None and hasattr(value, "shape"):
        shape = f" : {dtype_text(value.dtype)}[{', '.join(map(str, value.shape))}]"
    call = "placeholder" if node.op == "placeholder" else f"{node.target}({', '.join(str(a) for a in node.args)})"
    sign = "=" if shape else ":"
    module = node.meta.get("module", "")
    lines = [f"  %{node.name}{shape} {sign} {call}" + (f"    {module}" if module else "")]
    lines += ["  " + line for line in node.meta.get("stack_trace", "").strip().splitlines()]
    return "\n".join(lines)


def at_node(what: str, node: Node, todo: str) -> str:
    """The full message about a node: what and why, where, what to do."""
    return f"{what}\n{where(node)}\n  {todo}"


def dtype_text(dtype: object) -> str:
    """The short name of a torch dtype.

    >>> import torch
    >>> dtype_text(torch.float32), dtype_text(torch.bfloat16), dtype_text(torch.int64), dtype_text(torch.bool)
    ('f32', 'bf16', 'i64', 'bool')
    """
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name
