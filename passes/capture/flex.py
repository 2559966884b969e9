"""Has FlexAttention dispatch one op while a model is captured: see `sbpc.graph.flex`.

torch itself compiles `flex_attention`, which takes functions, and refuses to train it on CPUs. Here both functions run
once, on numbers without values, and what they call is written down as text. What they call that depends on no place
and on no score is done before: its result is a captured tensor, as all others are that they read.

As torch's kernels do, a mask hides what stands in none of its blocks, whatever its `mask_mod` says there, and shows all
of its full blocks. Those that `create_block_mask` makes in the forward follow from the `mask_mod`; any others are
written into the text as a captured table.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sbpc._compat import FakeTensor, TorchDispatchMode, without_modes
from sbpc.graph import flex
from sbpc.graph.operands import leaves
from sbpc.passes.capture.source_lines import user_error, user_stack

aten = torch.ops.aten
MODULE = "torch.nn.attention.flex_attention"
CREATE = "_create_sparse_block_from_block_mask"  # the last step of create_block_mask
MADE = ("new_empty", "new_full", "new_ones", "new_zeros", "empty_like", "full_like", "ones_like", "zeros_like")
PLACED = ("device", "layout", "memory_format", "pin_memory")


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """Has `flex_attention`, and what torch compiles of it, call the op of `sbpc.graph.flex` while this lasts."""
    module: Any = sys.modules.get(MODULE)
    if module is None:  # nobody can call it
        yield
        return
    kind, made = type(torch.ops.higher_order.flex_attention), list[tuple[Any, Any]]()
    places: list[tuple[Any, str, Any]] = [
        (kind, "__call__", functools.partial(call, made)),
        (module, "_validate_device", lambda *_: None),  # it refuses gradients on CPUs
        (module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),  # else torch compiles the call
    ]
    masks = sys.modules.get("transformers.masking_utils")
    if hasattr(masks, "fast_all"):  # with which it asks whether it may leave a mask of padding out
        places.append((masks, "fast_all", lambda _: False))
    create = getattr(module, CREATE, None)
    if create is not None:  # else all blocks are read

        def created(*args: Any, **kwargs: Any) -> Any:
            mask = create(*args, **kwargs)
            made.append((mask.kv_num_blocks, mask.mask_mod))
            return mask

        places.append((module, CREATE, created))
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for (owner, name, _), value in zip(places, before):
            setattr(owner, name, value)


def call(
    made: Sequence[tuple[Any, Any]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Mapping[str, Any],
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """What the operator of torch gives, statistics as logarithms to the base 2; of its third result nothing.
    made: the first tensor of the masks whose blocks follow from a mask_mod, and that."""
    if kernel_options.get("OUTPUT_MAX"):
        raise user_error("flex_attention is asked for max_scores", user_stack(), "Leave them out of its AuxRequest.")
    *_, rows, _, mask_mod = block_mask
    if rows < 1 << 30 and not any(first is block_mask[2] and mask is bare(mask_mod) for first, mask in made):
        mask_mod = in_blocks(block_mask, query)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        low = torch.get_autocast_dtype(kind)
        query, key, value = (x if x.dtype == torch.float64 else x.to(low) for x in (query, key, value))
    if query.shape[0] != key.shape[0]:
        key, value = (part.expand(query.shape[0], *part.shape[1:]) for part in (key, value))
    score_text, scores = written(score_mod, query, True, score_buffers)
    if score_text and flex.SCORE not in flex.reads(score_text):
        what = "a score_mod of flex_attention does not read the score"
        raise user_error(what, user_stack(), "Have it change the score that it is given.")
    mask_text, masks = ("", []) if is_none(mask_mod) else written(mask_mod, query, False, mask_buffers)
    read = flex.reads(score_text) | flex.reads(mask_text)
    sizes = zip(flex.PLACES, (*query.shape[:3], key.shape[2]))
    places = [torch.arange(size, device=query.device) if name in read else None for name, size in sizes]
    masks = [x.detach() for x in masks]
    out, lse = flex.FORWARD(query, key, value, *places, scores, masks, score_text, mask_text, scale)
    return out, lse / math.log(2), lse.new_empty(0)


def bare(mask_mod: Any) -> Any:
    """The function of a mask, which torch may have wrapped."""
    return getattr(mask_mod, "fn", mask_mod)


def is_none(mask_mod: Any) -> bool:
    """Whether a function hides nothing."""
    return bare(mask_mod) is getattr(sys.modules[MODULE], "noop_mask", None)


def in_blocks(block_mask: tuple[Any, ...], query: Tensor) -> Callable[..., Tensor]:
    """The function of a mask that shows what its blocks do, too. block_mask: as `BlockMask.as_tuple` gives it."""
    _, length, count, at, full_count, full_at, *_, rows, columns, mask_mod = block_mask
    lists = [pair for pair in ((count, at), (full_count, full_at)) if pair[0] is not None]
    wide = -(-length // columns)
    if any(isinstance(x, FakeTensor) for pair in lists for x in pair):
        partial, *full = (listed(*pair, wide) for pair in lists)
    else:  # of a mask that was made before: its values are constants
        with without_modes():
            tables = [listed(*pair, wide).to(query.device) for pair in lists]
        partial, *full = map(aten.lift_fresh.default, tables)

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *captured: Any) -> Tensor:
        place = b, h, q // rows, kv // columns

        def inside(table: Tensor) -> Tensor:
            return table.squeeze()[tuple(at for at, size in zip(place, table.shape) if size > 1)]

        seen = inside(partial)
        seen = seen if is_none(mask_mod) else seen & mask_mod(b, h, q, kv, *captured)
        return seen | inside(full[0]) if full else seen

    return visible


def listed(count: Tensor, at: Tensor, columns: int) -> Tensor:
    """Whether blocks are listed [batches, heads, rows of blocks, columns]: of each row the first `count` of `at`."""
    valid = torch.arange(at.shape[-1], device=at.device) < count.unsqueeze(-1)
    places = torch.where(valid, at, columns).long()  # one more than there are
    table = torch.zeros((*at.shape[:-1], columns + 1), dtype=torch.bool, device=at.device)
    return table.scatter(-1, places, valid)[..., :columns]


def written(
    function: Callable[..., Any], query: Tensor, scored: bool, captured: Sequence[Any]
) -> tuple[str, list[Tensor]]:
    """The text of a function, and the tensors that it has captured."""
    precise = torch.float64 if query.dtype == torch.float64 else torch.float32
    names = [*([flex.SCORE] if scored else []), *flex.PLACES]
    given = [
        torch.zeros((), dtype=precise if name == flex.SCORE else torch.int64, device=query.device) for name in names
    ]
    with Writer(dict(zip(names, given))) as writer, Picking():
        end = function(*given, *captured)
    return writer.text_of(end, given[0] if scored else None), writer.captured


class Writer(TorchDispatchMode):
    """Writes down the calls that depend on the given numbers, all of which run as they would. names: by id of a tensor,
    which stays alive."""

    def __init__(self, given: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {id(value): name for name, value in given.items()}
        self.alive: list[Tensor] = [*given.values()]
        self.captured: list[Tensor] = []
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        depends = any(id(value) in self.names for value in leaves((args, kwargs), Tensor)) and leaves(out, Tensor)
        if depends and func._schema.name.removeprefix("aten::") not in MADE:
            if not flex.may_stand(func):
                what = f"a score_mod or mask_mod of flex_attention calls {func}, which depends on where it stands"
                todo = "There may stand pointwise ops and indices: do the rest before, and index what it gives."
                raise user_error(what, user_stack(), todo)
            self.write(func, args, kwargs, out)
        return out

    def write(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        """Adds one call."""
        given = {name: value for name, value in kwargs.items() if name not in PLACED}
        name = f"t{len(self.lines)}"
        self.lines.append(flex.line(name, func, self.named(args), {key: self.named(x) for key, x in given.items()}))
        self.names[id(out)] = name
        self.alive.append(out)

    def named(self, value: Any) -> Any:
        """Arguments with names in the place of tensors."""
        if isinstance(value, (list, tuple)):
            return [self.named(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.names:
            self.names[id(value)] = f"x{len(self.captured)}"
            self.captured.append(value)
            self.alive.append(value)
        return ast.Name(self.names[id(value)])

    def text_of(self, end: Any, same: Tensor | None) -> str:
        """The text whose last value is `end`; nothing for a function that gives what it is given, `same`."""
        if not isinstance(end, Tensor) or end.dim():
            what = f"a score_mod or mask_mod of flex_attention gives {getattr(end, 'shape', end)!r}, not one number"
            raise user_error(what, user_stack(), "Index what it reads with one number for each dim.")
        if end is same:
            return ""
        if not self.lines or self.names.get(id(end)) != f"t{len(self.lines) - 1}":
            self.write(aten.alias.default, [end], {}, end.view(()))
        return "; ".join(self.lines)


class Picking(TorchFunctionMode):
    """Makes x[i], where i is a tensor of one number, an op: torch would ask for the number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            x, at = args
            at = list(at) if isinstance(at, tuple) else [at]
            if any(isinstance(each, Tensor) for each in at) and all(isinstance(each, (Tensor, int)) for each in at):
                whole = {"dtype": torch.int64, "device": x.device}
                at = [each if isinstance(each, Tensor) else torch.full((), each, **whole) for each in at]
                return aten.index.Tensor(x, at)
        return func(*args, **(kwargs or {}))
