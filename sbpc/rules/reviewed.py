"""Files of rules that a person writes and reviews: `sbpc.load_rules`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sbpc._compat import OpOverload
from sbpc.errors import RuleError
from sbpc.rules import registry
from sbpc.rules.grammar import parse
from sbpc.rules.own import Registered, factors_of, fits, require_pure, resolve
from sbpc.rules.registry import WRITTEN, Arguments, applied, entry, row


def load_rules(path: str | Path) -> list[Registered]:
    """Put the rules of a reviewed file in force: per line an op and a rule string, what follows '#' is a remark.

        mylib::myop    b s d, d -> b s d ; lin(0)    # seen on float64[3, 4, 5], float64[5]

    Several lines for one op are alternatives: the first that fits a call is taken, and a call that none fits has no
    rule. Raises RuleError with the file and line of what is wrong.
    """
    file = Path(path)
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(
            f"cannot read the rules of {file}: {error}\n  Each line holds an op and its rule string; # starts a comment."
        ) from error
    texts: dict[OpOverload, list[str]] = {}
    first: dict[OpOverload, int] = {}
    for number, line in enumerate(lines, 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        name, _, text = content.partition(" ")
        try:
            op = resolve(name)
            require_pure(op)
            fits(parse(text.strip()), op, False)
            known = row(op)
            if known is not None and not known.source.startswith("reviewed"):
                raise RuleError(f"{op} has a rule already\n  Remove the line.")
        except RuleError as error:
            raise RuleError(f"{file}, line {number}: {error}") from error
        texts.setdefault(op, []).append(text.strip())
        first.setdefault(op, number)
    done = []
    for op, alternatives in texts.items():
        done.append(Registered(op, registry.TABLE.get(op)))
        made = entry(op, Alternatives(tuple(alternatives), op), flops=WRITTEN, nonempty=every_factor(alternatives))
        registry.put(op, replace(made, source=f"reviewed, {file.name}:{first[op]}"))
    return done


def every_factor(texts: Sequence[str]) -> str:
    """The factors of several rules."""
    return " ".join(dict.fromkeys(factor for text in texts for factor in factors_of(parse(text))))


@dataclass(frozen=True)
class Alternatives:
    """Rule strings of one op, of which a call takes the first that fits it."""

    texts: tuple[str, ...]
    op: OpOverload

    def __call__(self, given: Arguments, outputs: Any) -> str | None:
        for text in self.texts:
            try:
                if applied(self.op, text, given, outputs) is not None:
                    return text
            except RuleError:  # for tensors of other numbers of dims
                continue
        return None
