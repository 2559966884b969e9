"""The rule language: one string says what an op may do with S, B and P on one mesh axis.

    m k, k n -> m n ; +k ; lin(0) ; lin(1)

Left of the arrow stand the arguments of the op in schema order, right of it its outputs, each as the names of its dims
(factors). The clauses say which factors are summed over, fixed, and so on. `parse` turns the text into a `Rule`;
`sbpc.rules.binding` derives the signatures of a call from it.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from sbpc.errors import RuleError
from sbpc.mesh.states import Ints, Names
from sbpc.rules.predicate import predicate_fault

TOKEN = re.compile(r"\s*(?:(->)|([A-Za-z][A-Za-z0-9_]*)|(_)(?![A-Za-z0-9_])|([0-9]+)|([-,;()\[\]+*@=:]))")
CLAUSES = "+f, max f, min f, fix f, same(f -> outs), add(ins), lin(ins -> outs), idx f @ in, via f... = NAME, when(...)"
GRAMMAR = "See the grammar in sbpc/rules/grammar.py."
T = TypeVar("T")


@dataclass(frozen=True)
class Dim:
    """A dim: the row-major product of its factors; without any, of size `literal`; `star`: any number of dims."""

    factors: Names = ()
    literal: int = 1
    star: bool = False

    def size(self, sizes: Mapping[str, Any]) -> Any:
        """The number of elements at these factor sizes; that of one factor as it is, which may be a node of a graph."""
        if self.literal == 1 and len(self.factors) == 1:
            return sizes[self.factors[0]]
        return math.prod((sizes[factor] for factor in self.factors), start=self.literal)


@dataclass(frozen=True)
class Operand:
    """One argument or output. kind: "tensor", "sizes" (integers, in brackets) or "none"; `name` where it was given."""

    kind: str
    dims: tuple[Dim, ...] = ()
    name: str | None = None
    at: int = field(default=0, compare=False)

    @property
    def factors(self) -> Names:
        """The names of all factors, in order."""
        return tuple(factor for dim in self.dims for factor in dim.factors)


@dataclass(frozen=True)
class Rule:
    """A parsed rule. Numbers in clauses count the string's operands (from 0), those of inputs and outputs apart.

    linear: (inputs, outputs) that are jointly linear. idx: (factor, the input whose values address it, or None where
    only the offset is wanted). same: (factors, outputs that do not depend on them).
    """

    text: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    summed: Names = ()
    maxed: Names = ()
    minned: Names = ()
    fixed: Names = ()
    same: tuple[tuple[Names, Ints], ...] = ()
    added: Ints = ()
    linear: tuple[tuple[Ints, Ints], ...] = ()
    idx: tuple[tuple[str, int | None], ...] = ()
    via: tuple[tuple[Names, str], ...] = ()
    when: str | None = None

    def __str__(self) -> str:
        return self.text

    @property
    def factors(self) -> list[str]:
        """All factors in the order of the text."""
        return list(dict.fromkeys(factor for operand in (*self.inputs, *self.outputs) for factor in operand.factors))


@functools.cache
def parse(text: str) -> Rule:
    """The rule that `text` writes.

    >>> rule = parse("m k, k n -> m n ; +k ; lin(0) ; lin(1)")
    >>> rule.summed, rule.linear
    (('k',), (((0,), (0,)), ((1,), (0,))))

    Raises RuleError that points at the offending character.
    """
    return _Parser(text).rule()


def refuse(text: str, at: int, what: str, todo: str) -> NoReturn:
    """Raise RuleError with a caret under character `at` of a rule string."""
    raise RuleError(f"{what}\n  {text}\n  {' ' * at}^\n  {todo}")


class _Parser:
    """A reader of one rule string: `at` is where the next token starts."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.clauses: dict[str, list] = {}
        self.inputs: tuple[Operand, ...] = ()
        self.outputs: tuple[Operand, ...] = ()

    # --- tokens -------------------------------------------------------------------------------------------------------
    def peek(self) -> str:
        """The next token, "" at the end."""
        found = TOKEN.match(self.text, self.at)
        if found is not None:
            return found[0].strip()
        if self.skip() < len(self.text):
            todo = "A rule holds names, numbers and -> , ; ( ) [ ] + * @ = :."
            self.fail(f"unexpected character {self.text[self.at]!r}", todo)
        return ""

    def at_name(self) -> bool:
        return self.peek().isidentifier() and self.peek() != "_"

    def skip(self) -> int:
        """Move over blanks; where the next token starts."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.at

    def take(self) -> str:
        token = self.peek()
        self.at = self.skip() + len(token)
        return token

    def accept(self, token: str) -> bool:
        return self.peek() == token and self.take() == token

    def expect(self, token: str, where: str) -> None:
        if not self.accept(token):
            self.expected(f"{token!r} {where}")

    def expected(self, what: str, todo: str = GRAMMAR) -> NoReturn:
        """Refuse the next token: something else should stand in its place."""
        self.fail(f"expected {what}, found {repr(self.peek()) if self.peek() else 'the end'}", todo)

    def fail(self, what: str, todo: str = GRAMMAR, at: int | None = None) -> NoReturn:
        refuse(self.text, self.skip() if at is None else at, what, todo)

    def several(self, read: Callable[[], T]) -> tuple[T, ...]:
        """One item or more, with commas between them."""
        found = [read()]
        while self.accept(","):
            found.append(read())
        return tuple(found)

    def names(self, read: Callable[[], str]) -> Names:
        """One name or more, with blanks between them."""
        found = [read()]
        while self.at_name():
            found.append(read())
        return tuple(found)

    # --- the signature ------------------------------------------------------------------------------------------------
    def rule(self) -> Rule:
        self.inputs = self.several(self.operand)
        self.expect("->", "after the arguments")
        self.outputs = self.several(self.operand)
        self.check_stars()
        while self.accept(";"):
            self.clause()
        if self.peek():
            self.expected("';' or the end", "Clauses are separated by ';'.")
        clauses: dict[str, Any] = {
            key: found[0] if key == "when" else tuple(found) for key, found in self.clauses.items()
        }
        rule = Rule(self.text, self.inputs, self.outputs, **clauses)
        self.check_outputs(rule)
        return rule

    def operand(self) -> Operand:
        at, name = self.skip(), None
        if re.match(r"[A-Za-z]\w*\s*=", self.text[at:]):
            name = self.take()
            self.take()
        if self.accept("_"):
            return Operand("none", (), name, at)
        if self.accept("["):
            dims = self.dims()
            self.expect("]", "after the sizes")
            return Operand("sizes", dims, name, at)
        if scalar := re.match(r"\s*\(\s*\)", self.text[self.at :]):
            self.at += len(scalar[0])
            return Operand("tensor", (), name, at)
        dims = self.dims()
        if not dims:
            todo = "An operand is dims such as 'b s d', '()' for a scalar, '[d]' for sizes, or '_'."
            self.expected("an operand", todo)
        return Operand("tensor", dims, name, at)

    def dims(self) -> tuple[Dim, ...]:
        found: list[Dim] = []
        while True:
            if self.accept("("):
                found.append(Dim(self.names(lambda: self.name("a factor of a group"))))
                self.expect(")", "after the factors of a group")
            elif self.accept("*"):
                if not self.peek().isidentifier():
                    self.fail("expected a factor after '*'")
                found.append(Dim((self.take(),), star=True))
            elif self.peek().isdigit():
                found.append(Dim(literal=int(self.take())))
            elif self.at_name():
                found.append(Dim((self.take(),)))
            else:
                return tuple(found)

    def check_stars(self) -> None:
        stars: dict[str, bool] = {}
        for operand in (*self.inputs, *self.outputs):
            for factor, star in ((factor, dim.star) for dim in operand.dims for factor in dim.factors):
                if stars.setdefault(factor, star) != star:
                    what = f"factor {factor!r} is one dim here and any number of dims there"
                    self.fail(what, f"Write {factor} or *{factor} everywhere.", operand.at)

    # --- the clauses --------------------------------------------------------------------------------------------------
    def clause(self) -> None:
        at, word = self.skip(), self.take()
        readers: dict[str, tuple[str, Callable[[], Any]]] = {
            "+": ("summed", self.factors),
            "max": ("maxed", self.factors),
            "min": ("minned", self.factors),
            "fix": ("fixed", self.factors),
            "same": ("same", self.same),
            "add": ("added", self.operands),
            "lin": ("linear", self.lin),
            "idx": ("idx", self.index),
            "via": ("via", self.via),
            "when": ("when", self.when),
        }
        if word not in readers:
            what = f"unknown clause {word!r}" if word else "expected a clause, found the end"
            self.fail(what, f"A clause is one of {CLAUSES}.", at)
        key, read = readers[word]
        said, found = self.clauses.setdefault(key, []), read()
        said += found if read in (self.factors, self.operands) else [found]

    def inside(self, read: Callable[[], T]) -> T:
        """What stands in the brackets of a clause."""
        self.expect("(", "after the name of the clause")
        found = read()
        self.expect(")", "at the end of the clause")
        return found

    def name(self, what: str = "a factor") -> str:
        if not self.at_name():
            self.expected(what, "A factor is a name such as b or d1.")
        return self.take()

    def factor(self) -> str:
        at, factor = self.skip(), self.name()
        if not any(factor in operand.factors for operand in (*self.inputs, *self.outputs)):
            self.fail(f"no operand has the factor {factor!r}", "Name a factor of the signature.", at)
        return factor

    def factors(self) -> Names:
        return self.names(self.factor)

    def operands(self) -> Ints:
        return self.inside(lambda: self.numbers(self.inputs))

    def numbers(self, operands: tuple[Operand, ...]) -> Ints:
        if self.accept("all"):
            return tuple(at for at, operand in enumerate(operands) if operand.kind == "tensor")
        return self.several(lambda: self.number(operands))

    def number(self, operands: tuple[Operand, ...]) -> int:
        if not self.peek().isdigit():
            self.expected("the number of an operand", "Operands count from 0.")
        at, number = self.skip(), int(self.take())
        if number >= len(operands) or operands[number].kind != "tensor":
            side = "input" if operands is self.inputs else "output"
            todo = "Operands count from 0, '_' and '[..]' included."
            self.fail(f"{side} {number} is no tensor of this rule", todo, at)
        return number

    def same(self) -> tuple[Names, Ints]:
        def read() -> tuple[Names, Ints]:
            factors = self.factors()
            self.expect("->", "after the factors")
            return factors, self.numbers(self.outputs)

        return self.inside(read)

    def lin(self) -> tuple[Ints, Ints]:
        def read() -> tuple[Ints, Ints]:
            inputs = self.numbers(self.inputs)
            if not self.accept("->"):
                return inputs, tuple(at for at, operand in enumerate(self.outputs) if operand.kind == "tensor")
            return inputs, () if self.peek() == ")" else self.numbers(self.outputs)

        return self.inside(read)

    def index(self) -> tuple[str, int | None]:
        factor = self.factor()
        return factor, self.number(self.inputs) if self.accept("@") else None

    def via(self) -> tuple[Names, str]:
        factors = self.factors()
        self.expect("=", "after the factors")
        at, name = self.skip(), self.name()
        if any(name != other for _, other in self.clauses["via"]):
            self.fail("a second decomposition", "All factors are split through one function.", at)
        return factors, name

    def when(self) -> str:
        self.expect("(", "after the name of the clause")
        start, depth = self.skip(), 1
        while depth and self.at < len(self.text):
            depth += {"(": 1, ")": -1}.get(self.text[self.at], 0)
            self.at += 1
        if depth:
            self.fail("expected ')' at the end of the clause, found the end")
        text = self.text[start : self.at - 1].strip()
        fault = predicate_fault(text)
        if fault is not None:
            self.fail(fault[0], "Compare arguments and sizes, as in when(not is_causal and s > 1).", start + fault[1])
        return text

    # --- what the signature and the clauses say together --------------------------------------------------------------
    def check_outputs(self, rule: Rule) -> None:
        """Refuse a factor that an output lacks for no stated reason: nobody could say what a split of it gives."""
        reduced = (*rule.summed, *rule.maxed, *rule.minned)
        for factor in reduced:
            if reduced.count(factor) > 1:
                self.fail(f"factor {factor!r} is reduced twice", "Keep one of +, max and min.", len(self.text))
        stated = {*reduced, *rule.fixed, *(factor for factors, _ in rule.via for factor in factors)}
        read = [factor for operand in self.inputs if operand.kind == "tensor" for factor in operand.factors]
        for at, output in enumerate(self.outputs):
            same = {factor for factors, outs in rule.same if at in outs for factor in factors}
            lost = [factor for factor in read if factor not in {*output.factors, *stated, *same}]
            if lost and output.kind == "tensor":
                todo = "Say +{0}, max {0}, min {0}, fix {0} or same({0} -> {1}).".format(lost[0], at)
                self.fail(f"output {at} lacks the factor {lost[0]!r} of the inputs", todo, output.at)
