"""Captures a module as one joint forward and backward graph of ATen ops, at global shapes, on fake tensors.

The light tracer comes first; what it refuses (writes into buffers, views or arguments) goes to AOTAutograd.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from sbpc._compat import enable_python_dispatcher
from sbpc.errors import CaptureError, SbpcError
from sbpc.graph import ports
from sbpc.graph.guards import ABSENT, COMPUTED, GUARDS, HOOK
from sbpc.graph.ports import Port
from sbpc.graph.values import is_foreign, text_of
from sbpc.passes.capture import attention, flex
from sbpc.passes.capture.aot_tracer import joint
from sbpc.passes.capture.attributes import DRAWN
from sbpc.passes.capture.contents import First, settled
from sbpc.passes.capture.fake_model import FakeModel, environment, fake_model, finish
from sbpc.passes.capture.light_tracer import Light, NeedsAot
from sbpc.passes.capture.random_ops import streams
from sbpc.passes.capture.source_lines import traceback_stack, user_error, user_stack

log = logging.getLogger("sbpc")


def capture(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    train: bool = True,
    dtype: torch.dtype | None = None,
    method: str = "light",
) -> GraphModule:
    """Returns the graph of `loss(module(*args, **kwargs), *targets)` and, with `train`, of its gradients.

    Before: a module and its arguments, real, meta or fake. After: `gm.meta["ports"]` says what goes in and comes out;
    every node has `val`, `module`, `stack_trace` and `phase` in its meta. The module is left as it was.

    method: "light" (AOTAutograd where that gives up) or "aot". Raises CaptureError with the user's line.
    """
    if method not in ("light", "aot"):
        raise CaptureError(f"method is {method!r}\n  It is 'light' or 'aot'.")
    request = module, args, kwargs or {}, loss, targets, dtype
    with environment(train), _all_seeded(), flex.captured(), attention.of_one_width():
        gm, first = _traced(request, train, method)
        if first:  # the second call must compute the same
            with settled(first):
                again, more = _traced(request, train, method)
            _settle(gm, again, first, more)
    return gm


@contextlib.contextmanager
def _all_seeded() -> Iterator[None]:
    """Has the model's code raise CaptureError where it makes a generator of random numbers without a seed, or asks
    the system for some."""
    # numpy draws its seeds by `secrets`, that by `random`
    places: list[tuple[Any, str]] = [(random, "_urandom"), (random.Random, "seed")]
    before = [getattr(owner, name) for owner, name in places]

    def refused() -> None:
        frame: Any = sys._getframe(2)
        while frame.f_globals.get("__name__") in ("random", "secrets"):
            frame = frame.f_back
        if is_foreign(frame.f_globals.get("__name__")):
            what = (
                "the forward draws random numbers without a seed, and its program would have the same ones in every "
                "step"
            )
            raise user_error(what, user_stack(), DRAWN)

    def random_bytes(count: int) -> bytes:
        refused()
        return bytes(before[0](count))

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None:
            refused()
        before[1](self, a, version)

    for (owner, name), function in zip(places, (random_bytes, seed)):
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name), function in zip(places, before):
            setattr(owner, name, function)


def _traced(request: tuple[Any, ...], train: bool, method: str) -> tuple[GraphModule, list[First]]:
    """Returns the graph, and what the forward has set that was not there. Fresh fakes for each method: the first may
    write into its own."""
    if method == "light":
        try:
            source = fake_model(*request)
            with streams():
                return _light(source, train), source.first
        except NeedsAot as reason:
            log.info("the light tracer gives up, AOTAutograd takes over: %s", reason)
    source = fake_model(*request)
    with streams(), _blame("step"):
        return joint(source, train), source.first


def _settle(gm: GraphModule, again: GraphModule, first: Sequence[First], more: Sequence[First]) -> None:
    """Adds the guards of a second forward, on the attributes that a first has set. Raises CaptureError if it
    computes something else."""

    def text(each: GraphModule) -> str:
        return f"{each.graph} {[(name, value.tolist()) for name, value in each.named_buffers()]}"

    if more or text(gm) != text(again):
        path, _, _, value, lines = [*more, *first][0]
        what = f"the forward sets {path!r} to {text_of(value)}, and computes something else in the next call"
        raise user_error(
            what, lines, "Run the model once before it is planned: the plan is then of the calls after the first."
        )
    for path, texts in again.meta[GUARDS].items():
        # as a cached property, or a hook that the first call puts there, until then
        known = gm.meta[GUARDS].setdefault(path, [ABSENT if path.startswith(HOOK) else COMPUTED])
        known += [text for text in texts if text not in known]


def _light(source: FakeModel, train: bool) -> GraphModule:
    """Returns the graph of a model by the light tracer."""
    light = Light(source)
    for port, label, value in source.placeholders():
        light.placeholder(port, label, value)
    wanted = source.wanted(train)
    values = [value for _, _, value in source.placeholders()]
    with source.substituted(source.parameters, source.buffers) as replaced, light.watching(values):
        with _recording(source, light), _blame("forward"):
            outputs, results = source(source.inputs)
        written = replaced()
        light.phase = "backward"
        tangents = _tangents(source, light, outputs) if train else {}
        gradients: Sequence[Tensor | None] = [None] * len(wanted)
        if wanted and tangents:
            with _recording(source, light), _blame("backward"):
                roots, leaves = [outputs[at] for at in tangents], [value for _, value in wanted]
                gradients = torch.autograd.grad(roots, leaves, list(tangents.values()), allow_unused=True)
    ends = [(Port(ports.OUTPUT, str(at)), light.node_of(value)) for at, value in enumerate(outputs)]
    ends += [(Port(ports.MUTATION, name), light.node_of(value)) for name, value in written.items()]
    ends += [(port, light.node_of(value)) for (port, _), value in zip(wanted, gradients) if value is not None]
    return finish(source, light.graph, light.constants, light.ports, ends, results, dict(light.kept), train)


def _tangents(source: FakeModel, light: Light, outputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """Returns a tangent for every output that has a gradient, contiguous whatever the strides of the output."""
    with source.mode:
        tangents = {
            at: torch.empty(value.shape, dtype=value.dtype, device=value.device)
            for at, value in enumerate(outputs)
            if value.requires_grad
        }
    for at, value in tangents.items():
        light.placeholder(Port(ports.TANGENT, str(at)), f"tangent_{at}", value)
    return tangents


# What torch says of fake tensors where the model does what no graph can hold -> what it does, and what to do instead.
CAUSES = {
    ".numpy() is not supported": ("asks for the values of a tensor with .numpy()", "Write it with torch alone."),
    "Mixing fake modes": ("makes copies with copy.deepcopy", "Copy in __init__, or copy a tensor with clone()."),
    "its data is not allocated yet": (
        "asks for the values of tensors, as torch.tensor([x, y]) does",
        "Write torch.stack.",
    ),
    "shape_env must not be None": ("makes a nested tensor", "Pad to one length, and mask the padding."),
    "backward through the graph a second time": (
        "finds that the forward has called backward already",
        "Leave that to the training loop, or use autograd.grad.",
    ),
    "use_reentrant=True": ("uses torch.utils.checkpoint with use_reentrant=True", "Give it use_reentrant=False."),
}


@contextlib.contextmanager
def _blame(part: str) -> Iterator[None]:
    """Turns an error of the model's own code into a CaptureError that shows its line; the error is its cause."""
    try:
        yield
    except (SbpcError, NeedsAot):
        raise
    except Exception as error:  # whatever the model raises
        text = str(error).strip() or "no message"
        raises = f"raises {type(error).__name__}: {text}", "Call the model on these arguments on one device first."
        what, todo = next((known for said, known in CAUSES.items() if said in text), raises)
        raise user_error(f"the model's {part} {what}", traceback_stack(error), todo) from error


@contextlib.contextmanager
def _recording(source: FakeModel, light: Light) -> Iterator[None]:
    with source.mode, light, enable_python_dispatcher():
        yield
