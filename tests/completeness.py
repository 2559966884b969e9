"""Completeness: valid signatures that brute force finds and that no rule offers; lacking.txt explains those that are known.

`python -m tests.completeness [family...]` prints them as lines of that file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sbpc.graph.operands import named_arguments
from sbpc.rules.binding import Signature
from sbpc.rules.proof.brute_force import Size, follows, search
from sbpc.rules.proof.prove import Case, short
from tests import pointwise_cases, proof_cases

FAMILIES = {**proof_cases.FAMILIES, "pointwise": pointwise_cases.cases}
EXPLAINED = Path(__file__).parent / "lacking.txt"


def valid(one: Case, sizes: Sequence[Size] = ()) -> list[Signature]:
    """All signatures of a call that hold on two ranks."""
    return list(search(one, sizes).signatures)


def lacking(found: Sequence[Signature], offered: Sequence[Signature]) -> list[Signature]:
    """Those of `found` that cost more without a signature of their own: neither offered nor an offered one with free boxings."""
    missing = [s for s in found if not any(follows(s, other) for other in offered)]
    return [s for s in missing if not any(other is not s and follows(s, other) for other in missing)]


def sizes_of(fills: Sequence[Any], named: Mapping[str, Any]) -> list[Size]:
    """The integers that a rule rewrites, one by one."""
    found = []
    for fill in fills:
        value = named[fill.name]
        found += [Size(fill.name, None)] if fill.single else [Size(fill.name, at) for at in range(len(value))]
    return found


def not_offered(one: Case) -> tuple[int, list[str]]:
    """How many signatures of a case are valid, and those that no rule offers."""
    m = one.match()
    found = valid(one, sizes_of(m.bound.fills, named_arguments(one.op, one.args, one.kwargs)))
    return len(found), [f"{one.op}: {short(signature)}" for signature in lacking(found, m.signatures)]


def of_family(name: str) -> tuple[int, list[str]]:
    """The same of all cases of a family, each once, sorted."""
    count, lines = 0, {}
    for one in FAMILIES[name]():
        valid_ones, missing = not_offered(one)
        count += valid_ones
        lines.update(dict.fromkeys(missing))
    return count, sorted(lines)


def explained(path: Path = EXPLAINED) -> dict[str, str]:
    """The reason of every line of the file: the last heading before it."""
    found, reason = {}, ""
    for line in path.read_text().splitlines():
        if line.startswith("# "):
            reason = line[2:]
        elif line.strip():
            found[line.strip()] = reason
    return found


if __name__ == "__main__":
    for family in sys.argv[1:] or FAMILIES:
        total, missing = of_family(family)
        print(f"# {family}: {total} valid, {len(missing)} that no rule offers", *missing, sep="\n", flush=True)
