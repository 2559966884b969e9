"""Attention over packed sequences, one behind the other: cut by heads alone, since the data says where one ends.

The ops are those of `torch.nn.attention.varlen`. They are not there before it is imported, which takes seconds, so they
are known by their names.
"""

from __future__ import annotations

import functools
from typing import Any

from sbpc._compat import OpOverload
from sbpc.rules.match import Arguments, Entry, Match
from sbpc.rules.registry import GENERATORS


def packed(given: Arguments) -> tuple[str, str]:
    """The further operands and the clauses that both have in common of attention over packed sequences. m: the length
    of the longest keys, w: of the window before a query, if it has one."""
    left, right = given.get("window_size") or (-1, -1)  # older torch knows no windows
    window = f", window_size=[w {right}]" if left > 0 and right >= 0 else ""
    places = " ; idx s ; idx t" if given["is_causal"] or right == 0 else ""
    return f", cu_seq_q=n, cu_seq_k=c, max_k=[m]{window}", f"fix s t d n c m{' w' if window else ''}{places}"


def packed_forward(given: Arguments, outputs: Any) -> str | None:
    """Keys that lie in pages belong to no sequence before the data says so: there is no rule for them."""
    if given.get("block_table") is not None:
        return None
    more, clauses = packed(given)
    used = given.get("seqused_k") is not None
    sign = f"s (g r) d, t g d, t g d{more}{', seqused_k=u' if used else ''} -> s (g r) d, (g r) s, _"
    return f"{sign}{' ; fix u' if used else ''} ; lin(2 -> 0) ; {clauses}"


def packed_backward(given: Arguments, outputs: Any) -> str:
    """Linear as the others are, see `backward`."""
    more, clauses = packed(given)
    queries, keys = "s (g r) d", "t g d"
    operands = f"{queries}, {queries}, {keys}, {keys}, {queries}, (g r) s{more}, rng_state=p"
    return f"{operands} -> {queries}, {keys}, {keys} ; +r ; fix p ; lin(0) ; lin(3,4 -> 0,1) ; {clauses}"


def counted(products: int, m: Match) -> str:
    """The flops of packed sequences as if all were as long as the longest, and no window longer."""
    return f"{2 * products * m.keys(m.sizes)} g r s d"


PACKED = {
    "_varlen_attn": (packed_forward, functools.partial(counted, 2), "s"),
    "_varlen_attn_backward": (packed_backward, functools.partial(counted, 5), "s t"),
}


def late(op: OpOverload) -> Entry | None:
    """The row of an op of PACKED."""
    space, _, name = op._schema.name.partition("::")
    if space != "torch_attn" or name not in PACKED:
        return None
    write, flops, nonempty = PACKED[name]
    return Entry(op, write, flops, nonempty=("g", *nonempty.split()))


GENERATORS.append(late)
