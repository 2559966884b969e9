"""Files of rules that a person writes and reviews: `sbpc.load_rules`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbpc._compat import OpOverload
from sbpc.errors import RuleError, check_kinds, is_name
from sbpc.mesh.states import Names
from sbpc.rules import registry
from sbpc.rules.grammar import parse
from sbpc.rules.match import WRITTEN, Arguments, Entry, Write
from sbpc.rules.proof.user_rules import Registered, fits, require_pure, resolve
from sbpc.rules.registry import applied, row

UNREVIEWED = "?"
HEADER = f"""# Rules for sbpc.load_rules and --rules: in a line an op and its rule string.
# One with {UNREVIEWED!r} was inferred by a probe: remove the {UNREVIEWED!r} if that is what the op may do, whatever its
# arguments hold.
"""


@dataclass(frozen=True)
class RuleLine:
    """One rule of a file. reviewed: a person has removed the mark of what a probe has inferred."""

    number: int
    name: str
    text: str
    reviewed: bool


def load_rules(path: str | Path) -> list[Registered]:
    """Puts the rules of a reviewed file in force: per line an op and a rule string; what follows '#' is a remark.

        mylib::myop    b s d, d -> b s d ; lin(0)    # seen on float64[3, 4, 5], float64[5]

    `Probe.save` and `sbpc probe` write such files; a line that begins with '?' is not reviewed: read it, and remove
    the '?'. `--rules FILE` gives a file to the commands that plan. Several lines for one op are alternatives: the
    first that fits a call is taken, and a call that none fits has no rule. Raises RuleError with the file and line
    of what is wrong, and for a line that nobody has reviewed.
    """
    check_kinds(RuleError, path=(path, "a path"))
    file = Path(path)
    lines: dict[OpOverload, list[RuleLine]] = {}
    for line in lines_of(file, read(file)):
        with at_line(file, line.number):
            lines.setdefault(op_of(line), []).append(line)
    done = []
    for op, ways in lines.items():
        done.append(Registered(op, registry.TABLE.get(op)))
        texts = tuple(line.text for line in ways)
        factors = tuple(dict.fromkeys(factor for text in texts for factor in parse(text).factors))
        source = f"reviewed, {file.name}:{ways[0].number}"
        registry.put(op, Entry(op, alternatives(texts, op), WRITTEN, nonempty=factors, source=source))
    return done


def op_of(line: RuleLine) -> OpOverload:
    """The op of a line. Raises RuleError unless it may have the rule, and a person has reviewed that."""
    op = resolve(line.name)
    require_pure(op)
    fits(parse(line.text), op, False)
    known = row(op)
    if known is not None and not known.source.startswith("reviewed"):
        raise RuleError(f"{op} has a rule already\n  Remove the line.")
    if not line.reviewed:
        raise RuleError(
            f"the rule of {line.name} was inferred by a probe, and nobody has reviewed it\n  {line.text}\n"
            f"  Remove the {UNREVIEWED!r} if it is right, or put a '#' before it to go without."
        )
    return op


def add_entries(path: str | Path, entries: Iterable[str]) -> int:
    """Add entries, each remarks and a line, at the end of a file of rules, or to a new one; how many were not there
    before.

    A new file is written for no entries as well. Raises RuleError if it is no file of rules or cannot be written.
    """
    check_kinds(RuleError, path=(path, "a path"))
    file = Path(path)
    text, added = read(file) if file.exists() else HEADER, 0
    there = [(line.name, line.text) for line in lines_of(file, text)]
    for new in entries:
        lines = [(line.name, line.text) for line in lines_of(file, new)]
        if not (all(line in there for line in lines) if lines else new in text):
            text, added, there = f"{text.rstrip()}\n\n{new}\n", added + 1, there + lines
    if added or not file.exists():
        try:
            file.write_text(text)
        except OSError as error:
            what = f"cannot write the rules to {file}: {error.strerror}"
            raise RuleError(f"{what}\n  Name a file that may be written to.") from error
    return added


def read(file: Path) -> str:
    """The text of a file of rules."""
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        todo = "Each line holds an op and its rule string; # starts a comment."
        raise RuleError(f"cannot read the rules of {file}: {error}\n  {todo}") from error


def lines_of(file: Path, text: str) -> Iterator[RuleLine]:
    """The rules of a file in order. Raises RuleError with the line of one that is malformed."""
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].expandtabs().strip()
        if not content:
            continue
        name, _, rule = content.removeprefix(UNREVIEWED).strip().partition(" ")
        with at_line(file, number):
            if not is_name(content):
                raise RuleError(
                    "it is very long, or holds characters that cannot be printed\n  Write an op and its rule string."
                )
            parse(rule.strip())
        yield RuleLine(number, name, rule.strip(), not content.startswith(UNREVIEWED))


@contextmanager
def at_line(file: Path, number: int) -> Iterator[None]:
    """Say of an error where in a file it is."""
    try:
        yield
    except RuleError as error:
        raise RuleError(f"{file}, line {number}: {error}") from error


def alternatives(texts: Names, op: OpOverload) -> Write:
    """What writes the rule of a call of an op: the first of these strings that fits it."""

    def write(given: Arguments, outputs: Any) -> str | None:
        for text in texts:
            try:
                if applied(op, text, given, outputs) is not None:
                    return text
            except RuleError:  # for tensors of other numbers of dims
                continue
        return None

    return write
