"""What a call gives again on fake tensors: the same as torch works out, in the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sbpc._compat import FakeTensorMode, storage_of
from sbpc.passes.capture.capture import capture
from sbpc.passes.capture.repeats import Repeats
from tests import models

aten = torch.ops.aten
CALLS: dict[str, tuple[Any, Callable[[Tensor], tuple[Any, ...]], dict[str, Any]]] = {
    "a product": (aten.mm.default, lambda x: (x, x.new_ones(6, 3)), {}),
    "a view": (aten.view.default, lambda x: (x, [2, 12]), {}),
    "a transpose": (aten.t.default, lambda x: (x,), {}),
    "a slice": (aten.slice.Tensor, lambda x: (x, 0, 1, 3), {}),
    "a cast": (aten._to_copy.default, lambda x: (x,), {"dtype": torch.bfloat16}),
    "several results": (aten.native_layer_norm.default, lambda x: (x, [6], None, None, 1e-5), {}),
    "several views": (aten.split.Tensor, lambda x: (x, 2), {}),
    "a conjugate": (aten._conj.default, lambda x: (aten._to_copy.default(x, dtype=torch.complex64),), {}),
    "a strided view": (aten.as_strided.default, lambda x: (x, [2, 2], [1, 2]), {}),
    "a type that follows a setting": (
        aten.mul.Tensor,
        lambda x: (aten._to_copy.default(x, dtype=torch.int64), 0.5),
        {},
    ),
}


def told(value: Any, given: list[Tensor]) -> Any:
    """All that a tensor without data tells of itself, and whose memory it has."""
    if isinstance(value, (tuple, list)):
        return [told(item, given) for item in value]
    place = value.shape, value.stride(), value.storage_offset(), value.is_conj(), value.is_neg(), value.requires_grad
    shared = [storage_of(value) == storage_of(other) for other in given]
    return place, value.dtype, value.device, value.untyped_storage().nbytes(), shared


@pytest.mark.parametrize("case", CALLS)
def test_a_call_gives_again_what_torch_gives(case: str) -> None:
    op, arguments, named = CALLS[case]
    with FakeTensorMode() as mode:
        repeats = Repeats(mode)
        for dtype in (torch.float32, torch.float64):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                for _ in range(3):
                    args = arguments(torch.ones(4, 6))
                    tensors = [value for value in args if isinstance(value, Tensor)]
                    found = repeats.call(op, args, named, lambda args=args: op(*args, **named))  # type: ignore[misc]
                    assert told(found, tensors) == told(op(*args, **named), tensors)
            finally:
                torch.set_default_dtype(before)


def test_most_calls_of_equal_layers_are_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the graph is that without them."""
    ran: list[int] = []
    call = Repeats.call

    def counted(self: Repeats, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        def running() -> Any:
            ran[-1] += 1
            return run()

        return call(self, func, args, kwargs, running)

    monkeypatch.setattr(Repeats, "call", counted)
    texts = []
    for layers in (2, 6):
        ran.append(0)
        model, args = models.gpt2(layers=layers)
        texts.append(pictured(capture(model, args)))
    assert ran[1] <= ran[0] + 4 * 4  # what is not remembered, such as views of several results
    monkeypatch.setattr(Repeats, "call", lambda self, func, args, kwargs, run: run())
    assert pictured(capture(model, args)) == texts[1]


def pictured(gm: torch.fx.GraphModule) -> list[Any]:
    """Every node of a graph, with its value."""
    return [
        (str(node.format_node()), described(node.meta.get("val")), node.meta.get("stack_trace"))
        for node in gm.graph.nodes
    ]


def described(value: Any) -> Any:
    """Shape, strides and type of a tensor, or of several."""
    if isinstance(value, (tuple, list)):
        return [described(item) for item in value]
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else value
