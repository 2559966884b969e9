"""How kernels read memory: operands are laid out for kernels that give wrong numbers, or refuse, in other strides.

A graph that was captured with some strides runs with others: collectives give contiguous tensors, callers give what
they have, and the calls of `contiguous` that autograd puts between kernels do nothing while capturing. Most kernels
take any strides. What the others need stands in NEEDS, for CPUs and GPUs together; the executors lay their operands
out when they run, so that no copy is made where none is needed. The proof of rules runs every sample call in other
strides, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sbpc.rules.match import overloads

ALIGNED = 16  # bytes


def format_of(x: Tensor) -> torch.memory_format:
    """Returns the memory format in which a kernel reads a tensor: channels last, on CPUs, if an image lies so, else
    contiguous.

    Kernels ask for just these strides, also of dims of one element; of any others they take a tensor to be contiguous.
    """
    if x.dim() == 4 and x.device.type == "cpu" and not x.is_contiguous():
        _, c, h, w = x.shape
        if x.stride() == (c * h * w, 1, w * c, c):
            return torch.channels_last
    return torch.contiguous_format


def dense(x: Tensor) -> Tensor:
    """Returns a tensor contiguous."""
    return x.contiguous()


def image(x: Tensor) -> Tensor:
    """Returns a tensor without gaps in its own memory format."""
    return x.contiguous(memory_format=format_of(x))


def filters(x: Tensor) -> Tensor:
    """Returns the weight of a convolution without gaps where its kernel makes the gradient like it, and then refuses
    other strides."""
    return image(x) if x.device.type == "cpu" else x


def rows(x: Tensor) -> Tensor:
    """Returns a tensor whose last dim lies without gaps."""
    return x if x.dim() == 0 or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def begins(x: Tensor, size: int = ALIGNED) -> bool:
    """Returns whether all of a tensor but its first element begins at multiples of so many bytes along all dims but
    the last."""
    return all(stride * x.element_size() % size == 0 for stride in x.stride()[:-1])


def aligned(x: Tensor, size: int = ALIGNED) -> Tensor:
    """Returns a tensor whose last dim lies without gaps, at multiples of so many bytes."""
    x = rows(x)
    return x if begins(x, size) and x.storage_offset() * x.element_size() % size == 0 else x.contiguous()


def padded(x: Tensor) -> Tensor:
    """Returns a bias whose last dim lies without gaps, at multiples of 16 bytes, whatever its length."""
    given = aligned(x)
    return given if begins(given) else torch.nn.functional.pad(x, (0, -x.shape[-1] % ALIGNED))[..., : x.shape[-1]]


def heads_last(x: Tensor) -> Tensor:
    """Returns what attention gives as its kernels leave it: the heads of a query lie together, [b, s, h, d] without
    gaps."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def pairs(x: Tensor) -> Tensor:
    """Returns a tensor whose pairs along the last dim can be read as complex numbers."""
    return aligned(x, 2 * x.element_size())


def columns(x: Tensor) -> Tensor:
    """Returns a matrix whose columns lie without gaps, at multiples of 16 bytes."""
    return aligned(x.mT).mT


def matrices(x: Tensor) -> Tensor:
    """Returns matrices whose rows, or columns, lie without gaps and begin at multiples of 16 bytes."""
    for far, near in ((-1, -2), (-2, -1)):
        if x.stride(near) == 1 and x.stride(far) >= max(1, x.shape[near]):
            return x if x.stride(far) * x.element_size() % ALIGNED == 0 else x.contiguous()
    return x.contiguous()


Need = Callable[[Tensor], Tensor] | str
Needs = dict[str, Need]
CPU_HEADS: Needs = dict.fromkeys(("query", "key", "value"), rows)
HEADS: Needs = dict.fromkeys(("query", "key", "value"), aligned)
BACK: Needs = HEADS | dict.fromkeys(("grad_out", "grad_out_", "out"), heads_last) | {"logsumexp": dense}
BIAS: Needs = {"attn_bias": padded}
BY_NAME: dict[str, Needs] = {
    "_fused_rms_norm_backward": {"rstd": dense},
    "_grouped_mm": {"self": matrices, "mat2": matrices, "offs": dense},
    "_scaled_mm": {"self": aligned, "mat2": columns, "scale_a": dense, "scale_b": dense, "bias": dense},
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention": HEADS | BIAS,
    "_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward": BACK | BIAS,
    "_scaled_dot_product_flash_attention": HEADS,
    "_scaled_dot_product_flash_attention_backward": BACK,
    "_scaled_dot_product_flash_attention_for_cpu": CPU_HEADS,
    "_scaled_dot_product_flash_attention_for_cpu_backward": CPU_HEADS | {"out": rows},
    "_weight_norm_interface": {"v": dense, "g": dense},
    "_weight_norm_interface_backward": dict.fromkeys(("grad_w", "saved_v", "saved_g", "saved_norms"), dense),
    "avg_pool2d_backward": {"self": dense},  # on CUDA, channels last
    "convolution_backward": {"weight": filters},
    "median.dim": {"self": dense},  # it sorts a copy of these strides in place, so an expanded one over itself
    "native_batch_norm_backward": dict.fromkeys(("weight", "running_mean", "running_var"), dense),
    "native_group_norm": {"input": image, "weight": dense, "bias": dense},
    "native_group_norm_backward": {
        "input": image,
        "grad_out": "input",
        "mean": dense,
        "rstd": dense,
        "weight": dense,
    },
    "native_layer_norm_backward": {"mean": dense, "rstd": dense},
    "nll_loss2d_backward": {"self": dense},
    "view_as_complex": {"self": pairs},
}
NEEDS: dict[Any, Needs] = {op: needs for names, needs in BY_NAME.items() for op in overloads(names)}
"""By op and argument, what lays it out; the name of an argument before it: in the memory format of that one."""


@functools.cache
def laid_out(op: Any) -> Any:
    """Returns what calls an op with its operands as its kernel reads them: the op itself if it reads any strides."""
    if op not in NEEDS:
        return op
    places = {argument.name: at for at, argument in enumerate(op._schema.arguments)}
    needs = [(places[name], need) for name, need in NEEDS[op].items() if name in places]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(enumerate(args)) | {places[name]: value for name, value in kwargs.items()}
        for at, need in needs:
            x = given.get(at)
            if isinstance(x, Tensor):
                given[at] = (
                    x.contiguous(memory_format=format_of(given[places[need]])) if isinstance(need, str) else need(x)
                )
        return op(*(given[at] for at in range(len(args))), **{name: given[places[name]] for name in kwargs})

    run.__name__ = op._schema.name.split("::")[1]
    return run
