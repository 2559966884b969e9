"""Completeness: valid signatures that brute force finds and that no rule offers; lacking.txt explains those that are known.

`python -m tests.completeness [family...]` prints them as lines of that file.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sbpc.rules.match import named_arguments
from sbpc.rules.proof.brute_force import lacking, sizes_of, valid
from sbpc.rules.proof.prove import Case, short
from tests import pointwise_cases, proof_cases

FAMILIES = {**proof_cases.FAMILIES, "pointwise": pointwise_cases.cases}
EXPLAINED = Path(__file__).parent / "lacking.txt"


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
