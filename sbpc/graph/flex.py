"""FlexAttention as two ops: attention whose scores go through small functions of where they stand.

`score_mod` and `mask_mod` of `torch.nn.attention.flex_attention` are written as texts, one call of ATen after the
other, of numbers (score, b, h, q, kv) and of captured tensors (x0, x1, ..):

    t0 = ge(q, kv); t1 = eq(index(x0, [b, q]), index(x0, [b, kv]))    # as a text has it: every call has its own name

What batches, heads, queries and keys are called there, tensors say (`b`, `h`, `q`, `kv`), None for 0, 1, 2, ..: a rank
that has a part of them is given the numbers of that part. So every dim can be cut, whatever the functions do with it.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sbpc._compat import OpOverload, differentiating
from sbpc.graph.random_bits import LIBRARY

aten = torch.ops.aten
SCORE, PLACES = "score", ("b", "h", "q", "kv")
# Ops of these texts besides those that torch calls pointwise: number by number, or what they give are elements of their
# operand. None reads outside it.
FURTHER = frozenset({
    "_to_copy.default", "alias.default", "clone.default", "detach.default", "expand.default", "floor_divide.Scalar",
    "floor_divide.default", "index.Tensor", "select.int", "squeeze.dim", "unsqueeze.default", "view.default",
})  # fmt: skip
HEADS = "Tensor query, Tensor key, Tensor value"
MODS = "Tensor? b, Tensor? h, Tensor? q, Tensor? kv, Tensor[] scores, Tensor[] masks, str score_mod, str mask_mod"
LIBRARY.define(f"flex_attention({HEADS}, {MODS}, float scale) -> (Tensor, Tensor)")
GIVEN = f"Tensor grad_out, Tensor? grad_lse, {HEADS}, Tensor out, Tensor lse"
LIBRARY.define(f"flex_attention_backward({GIVEN}, {MODS}, float scale, bool[] wanted) -> Tensor[]")


class Line(NamedTuple):
    """One call of a text."""

    name: str
    op: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def may_stand(op: Any) -> bool:
    """Whether a text may call an op."""
    name = str(op).removeprefix("aten.")
    pointwise = torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags
    return op.namespace == "aten" and not op._schema.is_mutable and (pointwise or name in FURTHER)


def line(name: str, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The text of one call. Operands are given by their names, as `ast.Name`.

    >>> line("t0", aten.gt.Scalar, [ast.Name("q"), 3.5], {})
    't0 = gt.Scalar(q, 3.5)'
    """
    given = [*map(_text, args), *(f"{key}={_text(value)}" for key, value in kwargs.items())]
    return f"{name} = {str(op).removeprefix('aten.').removesuffix('.default')}({', '.join(given)})"


def _text(value: Any) -> str:
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value) if isinstance(value, str) else str(value)


@functools.lru_cache(1 << 10)
def lines(text: str) -> tuple[Line, ...]:
    """The calls of a text. Raises ValueError if it is none, or calls an op that may not stand there."""
    found: list[Line] = []
    try:
        for each in ast.parse(text).body:
            match each:
                case ast.Assign(targets=[ast.Name(name)], value=ast.Call(function, args, keywords)):
                    op, _, overload = ast.unparse(function).partition(".")
                    target = getattr(getattr(aten, op), overload or "default")
                    kwargs = {str(key.arg): _value(key.value) for key in keywords}
                    found.append(Line(name, target, [*map(_value, args)], kwargs))
                case _:
                    raise ValueError(ast.unparse(each))
    except (SyntaxError, AttributeError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is no function of FlexAttention") from error
    for _, op, *_ in found:
        if not isinstance(op, OpOverload) or not may_stand(op):
            raise ValueError(f"{text!r} may not call {op}")
    return tuple(found)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name("inf" | "nan" as name):
            return getattr(math, name)
        case ast.Name():
            return node
        case ast.UnaryOp(ast.USub(), ast.Name("inf")):
            return -math.inf
        case ast.List(items):
            return [*map(_value, items)]
        case ast.Attribute(ast.Name("torch"), name) if isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
    return ast.literal_eval(node)


def reads(text: str) -> set[str]:
    """The names of what a text is given and reads."""
    read = {node.id for each in lines(text) for node in _names([*each.args, *each.kwargs.values()])}
    return read - {each.name for each in lines(text)}


def _names(value: Any) -> list[ast.Name]:
    if isinstance(value, (list, tuple)):
        return [name for item in value for name in _names(item)]
    return [value] if isinstance(value, ast.Name) else []


def called(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What a call gives."""
    return op(*args, **kwargs)


def compute(text: str, given: Mapping[str, Any], call: Callable[..., Any] = called) -> Any:
    """The last value of a text, each call of which is made by `call`."""
    known = dict(given)

    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(item) for item in value]
        return known[value.id] if isinstance(value, ast.Name) else value

    for name, op, args, kwargs in lines(text):
        known[name] = call(op, *map(filled, args), **{key: filled(value) for key, value in kwargs.items()})
    return known[name]


class Spread(NamedTuple):
    """A value for all batches, heads, queries and keys: its first four dims, of size 1 where it is the same for all."""

    x: Tensor


def spread(op: Any, *args: Any, **kwargs: Any) -> Spread:
    """What a call gives everywhere. What is captured, a tensor of its own dims, is the same everywhere."""
    rank = max(
        each.x.dim() - 4 if isinstance(each, Spread) else each.dim() if isinstance(each, Tensor) else 0 for each in args
    )

    def dims(value: Any, rank: int = rank) -> Any:
        x = value.x if isinstance(value, Spread) else value
        if not isinstance(x, Tensor):
            return x
        first, own = (x.shape[:4], x.shape[4:]) if isinstance(value, Spread) else ((1, 1, 1, 1), x.shape)
        return x.reshape(*first, *[1] * (rank - len(own)), *own)

    if op is aten.index.Tensor:
        x, at = args[0], [dims(each, 0) for each in args[1]]
        if isinstance(x, Tensor):
            return Spread(op(x, at))
        own = [torch.arange(n, device=x.x.device).view(-1, *[1] * (3 - dim)) for dim, n in enumerate(x.x.shape[:4])]
        return Spread(op(x.x, [*own, *at]))
    if op is aten.select.int:
        x, dim, at = args
        return Spread(op(x.x, dim + 4 if dim >= 0 else dim, at))
    return Spread(op(*map(dims, args), **kwargs))


def everywhere(text: str, places: Sequence[Tensor], captured: Sequence[Tensor], score: Tensor | None = None) -> Tensor:
    """The values of a text for all batches, heads, queries and keys, and their scores [b, h, q, kv]; of size 1 along
    what it does not depend on."""
    given: dict[str, Any] = {f"x{at}": x for at, x in enumerate(captured)}
    for dim, (name, at) in enumerate(zip(PLACES, places)):
        given[name] = Spread(at.view(*[1] * dim, -1, *[1] * (3 - dim)))
    found: Tensor = compute(text, given if score is None else {**given, SCORE: Spread(score)}, spread).x
    return found


class Attention(NamedTuple):
    """A call on dense tensors: the scores before and after both functions, in the precision in which they are
    computed."""

    keys: Tensor
    values: Tensor
    raw: Tensor
    changed: Tensor
    hidden: Tensor | None


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: Sequence[Tensor | None],
    scores: Sequence[Tensor],
    masks: Sequence[Tensor],
    score_mod: str,
    mask_mod: str,
    scale: float,
) -> Attention:
    """All pairs of queries and keys, as torch computes them where nothing is compiled. given: see the head of the
    file. Each head of keys serves several of queries."""
    precise = torch.float64 if query.dtype == torch.float64 else torch.float32
    keys, values = (part.to(precise).repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    raw = query.to(precise) @ keys.mT * scale
    places = [torch.arange(size, device=raw.device) if at is None else at for size, at in zip(raw.shape, given)]
    raw = raw.detach().requires_grad_(torch.is_grad_enabled())
    changed = everywhere(score_mod, places, scores, raw).to(precise).expand_as(raw) if score_mod else raw
    hidden = everywhere(mask_mod, places, masks).logical_not() if mask_mod else None
    return Attention(keys, values, raw, changed, hidden)


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, b: Any, h: Any, q: Any, kv: Any, *mods: Any
) -> tuple[Tensor, Tensor]:
    """softmax(score_mod(scale q k^T), -inf where mask_mod is false) v, zero where it is nowhere true; and the
    logarithm of the sum in the softmax."""
    with torch.no_grad():
        found = dense(query, key, value, (b, h, q, kv), *mods)
        changed = found.changed if found.hidden is None else found.changed.masked_fill(found.hidden, -math.inf)
        share = aten._safe_softmax(changed, -1)
        return (share.to(query.dtype) @ found.values.to(query.dtype)), changed.logsumexp(-1)


def flex_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    b: Any,
    h: Any,
    q: Any,
    kv: Any,
    scores: Sequence[Tensor],
    *rest: Any,
) -> list[Tensor]:
    """The gradients of query, key and value, and of those of `scores` that are wanted."""
    *mods, wanted = rest
    leaves = [x.detach().requires_grad_(want) for x, want in zip(scores, wanted)]
    with differentiating():
        keys, values, raw, changed, hidden = dense(query, key, value, (b, h, q, kv), leaves, *mods)
    share = (changed.detach() - lse.unsqueeze(-1)).exp()
    empty = lse.isneginf().unsqueeze(-1)
    share = share.masked_fill(empty if hidden is None else empty | hidden, 0)
    gradient = grad_out.to(raw.dtype)
    rows = (gradient * out.to(raw.dtype)).sum(-1) - (0 if grad_lse is None else grad_lse)
    of_changed = share * (gradient @ values.mT - rows.unsqueeze(-1))
    ends = [raw, *(leaf for leaf in leaves if leaf.requires_grad)]
    with differentiating():
        of_raw, *captured = torch.autograd.grad(changed, ends, of_changed, materialize_grads=True)
    of_raw = of_raw * mods[-1]
    made = [of_raw @ keys, of_raw.mT @ query.to(raw.dtype), share.mT @ gradient]
    made[1:] = [each.unflatten(1, (key.shape[1], -1)).sum(2) for each in made[1:]]
    return [*(each.to(like.dtype) for each, like in zip(made, (query, key, value))), *captured]


def shape_ahead(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """What the forward gives, without values."""
    for text in rest[6:8]:
        lines(text)
    precise = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=precise)


def shape_back(grad_out: Tensor, grad_lse: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> list[Tensor]:
    """What the backward gives, without values."""
    for text in rest[8:10]:
        lines(text)
    wanted = [x for x, want in zip(rest[6], rest[-1]) if want]
    return [x.new_empty(x.shape) for x in (query, key, value, *wanted)]


def remember(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    """What the forward keeps for the backward."""
    query, key, value, b, h, q, kv, scores, masks, *ctx.rest = inputs
    ctx.counts = len(scores), [x.requires_grad for x in scores]
    ctx.save_for_backward(query, key, value, *output, b, h, q, kv, *scores, *masks)
    ctx.set_materialize_grads(False)


def back(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    """The gradients of all arguments."""
    query, key, value, out, *rest = ctx.saved_tensors
    count, wanted = ctx.counts
    given, scores, masks = rest[1:5], rest[5 : 5 + count], rest[5 + count :]
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    heads = query, key, value, out, rest[0]
    found = BACKWARD(grad_out, grad_lse, *heads, *given, scores, masks, *ctx.rest, wanted)
    captured = iter(found[3:])
    of_scores = [next(captured) if want else None for want in wanted]
    return *found[:3], None, None, None, None, of_scores, [None] * len(masks), None, None, None


FORWARD, BACKWARD = torch.ops.sbpc.flex_attention.default, torch.ops.sbpc.flex_attention_backward.default
DENSE: dict[Any, Callable[..., Any]] = {FORWARD: flex_attention, BACKWARD: flex_attention_backward}
"""By op what runs where no kernel does it, and holds all scores."""
LIBRARY.impl("flex_attention", flex_attention, "CompositeExplicitAutograd")
LIBRARY.impl("flex_attention_backward", flex_attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake("sbpc::flex_attention", shape_ahead, lib=LIBRARY)
torch.library.register_fake("sbpc::flex_attention_backward", shape_back, lib=LIBRARY)
torch.library.register_autograd("sbpc::flex_attention", back, setup_context=remember, lib=LIBRARY)
