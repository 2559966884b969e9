"""Signatures that DTensor has and no rule offers, each run on shards; dtensor.txt says why they are not wanted.

`python -m tests.cross_check [family...]` prints them as lines of that file; what is wrong of them follows them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sbpc.graph.operands import named_arguments
from sbpc.mesh.states import REDUCE, B, P, Partial, Split, State, shards
from sbpc.rules.binding import Signature, flat_outputs
from sbpc.rules.proof.brute_force import RANKS, Size, close, follows, others, parts_of, resized
from sbpc.rules.proof.prove import BROKEN, Case, call, equal, short, swapped
from tests.completeness import FAMILIES, explained, sizes_of
from tests.dtensor_rules import fake_mesh, signatures

EXPLAINED = Path(__file__).parent / "dtensor.txt"
MEAN = Partial("avg")


@dataclass(frozen=True)
class Found:
    """calls: how many were asked for. offered: DTensor's signatures, by op. lines: those of them that no rule has."""

    calls: int
    offered: Counter[str]
    lines: list[str]


def of_families(names: Sequence[str]) -> Found:
    """What DTensor offers for the calls of these families."""
    calls, offered, lines = 0, Counter[str](), {}
    known = explained()
    with fake_mesh() as mesh:
        for one in (one for name in names for one in FAMILIES[name]()):
            found = signatures(one, mesh)
            calls += 1
            offered[str(one.op)] += len(found)
            for signature in found:
                line = f"{one.op}: {short(signature)}"
                if not has(one, signature) and line not in known and line not in lines:
                    lines[line] = fault(one, signature)
    return Found(calls, offered, sorted(f"{line}    {why}".rstrip() for line, why in lines.items()))


def has(one: Case, signature: Signature) -> bool:
    """Whether a rule does the same. What is linear does to a mean of the ranks what it does to their sum."""
    as_sums = Signature(
        *(tuple(P if state == MEAN else state for state in states) for states in (signature.inputs, signature.outputs))
    )
    return any(follows(as_sums, own) for own in one.match().signatures)


def fault(one: Case, signature: Signature) -> str:
    """What shows that a signature does not hold: a wrong number or shape; "" if it holds, or if a state has no meaning here."""
    states = (*signature.inputs, *signature.outputs)
    if any(isinstance(state, Partial) and state != MEAN and state.op not in REDUCE for state in states):
        return ""
    sizes = sizes_of(one.match().bound.fills, named_arguments(one.op, one.args, one.kwargs))
    for each in (one, *others(one)):
        try:
            wanted = flat_outputs(each.run())
        except BROKEN:
            continue
        faults = [differs(each, signature, size, wanted) for size in (None, *sizes)]
        if all(faults):
            return min(faults, key=lambda text: "for" not in text)
    return ""


def differs(one: Case, signature: Signature, size: Size | None, wanted: Sequence[Any]) -> str:
    """The first output that is not what it must be."""
    generator = torch.Generator().manual_seed(3)
    results = []
    try:
        held = [parts(value, state, generator) for value, state in zip(one.operands, signature.inputs)]
        for rank in range(RANKS):
            args, kwargs = resized(one, *swapped(one, [each[rank] for each in held]), size, rank)
            results.append(flat_outputs(call(one.op, *args, **kwargs)))
    except BROKEN:
        return "does not run"
    for at, expected in enumerate(wanted):
        if isinstance(expected, Tensor):
            found = joined([result[at] for result in results], signature.outputs[at])
            if found is None:
                return "the parts do not fit"
            if found.shape != expected.shape:
                return f"{list(found.shape)} for {list(expected.shape)}"
            if one.values and not equal(found.to(expected.dtype), expected, close(one)):
                off = (found - expected).abs().nan_to_num(torch.inf, torch.inf).flatten().argmax()
                return f"{found.flatten()[off]:.4g} for {expected.flatten()[off]:.4g}"
    return ""


def parts(value: Tensor, state: State, generator: torch.Generator) -> list[Tensor]:
    """What each rank holds."""
    if state == MEAN:
        noise = torch.randint(1, 5, value.shape, generator=generator).to(value)
        return [value - noise, value + noise]
    return (
        shards(value, state, RANKS, generator)
        if isinstance(state, Partial) and state != P
        else parts_of(value, state, generator)
    )


def joined(results: Sequence[Tensor], state: State) -> Tensor | None:
    """The tensor that these parts are; None if they do not fit. Of a whole one, the last rank tells."""
    try:
        if isinstance(state, Split):
            return torch.cat(list(results), state.dim)
        if state == B:
            return results[-1]
        return (results[0] + results[1]) / RANKS if state == MEAN else REDUCE[state.op](*results)  # type: ignore[union-attr]
    except BROKEN:
        return None


if __name__ == "__main__":
    found = of_families(sys.argv[1:] or list(FAMILIES))
    print(
        f"# {found.calls} calls: {found.offered.total()} signatures of DTensor, {len(found.lines)} that no rule has",
        *found.lines,
        sep="\n",
    )
    print("# none for", ", ".join(sorted(name for name, count in found.offered.items() if not count)))
