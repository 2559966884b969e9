"""Symbolic sizes: what the dims of inputs and parameters are called is carried through the graph by the ops' rules.

Nothing is captured symbolically. A rule binds every dim of a call to factors, so an operand's symbols become those of
the factors, and those of the results. A size is kept as atoms, major first, so that (b s) comes apart as b and s. A dim
of an input or a parameter that is not named is what it meets in a rule: of down.weight the second one, after up.weight
with ("4*h", "h"). What only a number tells, such as the size of a factory, is what was called so if that is
one thing; else it stays a number, and a note says so.
"""

from __future__ import annotations

import ast
import fnmatch
import math
import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from sbpc.errors import SbpcError, closest
from sbpc.graph.operands import operands, value_of
from sbpc.graph.ports import INPUT, OUTPUT, PARAMETER, TANGENT, Port, placeholders
from sbpc.mesh.mesh import Mesh, in_formulas
from sbpc.rules import Match, Phases

Dims = tuple[Any, ...]  # per dim of a tensor: a sympy expression
Size = tuple[tuple[Any, int], ...]  # of one dim: atoms (expression, number) of which it is the product, major first
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
EXAMPLE = '{"x": ("b", "s", "h"), "*.up.weight": ("4*h", "h"), "heads": 12}'


def symbol(name: str) -> sympy.Symbol:
    """The symbol of that name: sizes are positive."""
    return sympy.Symbol(name, positive=True)


def formula(text: Any, what: str) -> sympy.Expr:
    """What a text such as "4*h" or an integer stands for; nothing is evaluated but + - * / of names and integers.

    >>> formula("(4*h + 2) / p", "dim 0 of w")
    (4*h + 2)/p

    Raises SbpcError for anything else.
    """

    def build(node: ast.AST) -> Any:
        match node:
            case ast.Expression(body):
                return build(body)
            case ast.Name(name):
                return symbol(name)
            case ast.Constant(int(value)) if not isinstance(value, bool):
                return sympy.Integer(value)
            case ast.BinOp(left, op, right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](build(left), build(right))
        raise SbpcError(f"dynamic: {what} is {text!r}\n  Give names, integers and + - * / of them, as in '4*h'.")

    try:
        return build(ast.parse(str(text).strip(), mode="eval"))
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        return build(ast.Pass())


def declare(gm: GraphModule, dynamic: Mapping[str, Any]) -> dict[str, int]:
    """Put symbolic dims on every value of an annotated graph; the number of every symbol at the captured sizes.

    dynamic: name of a parameter (or pattern) or of an input -> its dims, each a text, an integer or None for the number
    it is; name of a symbol that no dim has alone -> its number. After: `meta["dims"]` on every placeholder and call, one
    tuple per output, and `meta["factors"]` on every call that has a rule; `meta["parts"]` the same for what a call may be
    taken apart into.

    Raises SbpcError if a name is unknown, or if the dims do not fit the shapes or each other.
    """
    given, known = read(gm, dynamic)
    small = sorted(name for name, size in known.items() if size < 2)
    if small:
        raise SbpcError(
            f"dynamic: {small[0]} is {known[small[0]]}\n  Plan at sizes from 2 on: dims of 1 element are not told apart."
        )
    walk = Walk(given, known, {name for name, size in dynamic.items() if isinstance(size, int)})
    walk.given = given = met(gm, walk)
    for _ in range(2):  # the second time with the dims that outputs have for their tangents
        for node in gm.graph.nodes:
            if node.op != "output":
                walk.visit(node)
        results = dict(zip(gm.meta["ports"].outputs, list(gm.graph.output_node().args[0])))  # type: ignore[arg-type]
        for port, node in placeholders(gm).items():
            result = results.get(Port(OUTPUT, port.name)) if port.kind == TANGENT else None
            if result is not None:
                producer, index = value_of(result)
                given[node] = producer.meta["dims"][index]
    gm.meta["notes"] = tuple(dict.fromkeys((*gm.meta["notes"], *walk.notes)))
    return known


def met(gm: GraphModule, walk: Walk) -> dict[Node, Dims]:
    """The dims of all placeholders: what is not given is what it meets, or else the number it is."""
    given = dict(walk.given)
    for node in placeholders(gm).values():
        if node not in given:
            walk.given[node] = tuple(map(walk.unknown, node.meta["val"].shape))
    for node in gm.graph.nodes:
        if node.op != "output":
            walk.visit(node)
    found = {node: tuple(map(walk.known, dims)) for node, dims in walk.given.items() if node not in given}
    numbers = dict(walk.numbers)
    for known in (walk.numbers, walk.same, walk.notes):
        known.clear()
    ports = {node: port for port, node in placeholders(gm).items()}
    left = [
        f"{node.name if ports[node].kind == INPUT else ports[node].name}[{at}] = {dim.subs(numbers)}"
        for node, dims in found.items()
        for at, dim in enumerate(dims)
        if ports[node].kind != TANGENT and not dim.free_symbols.isdisjoint(numbers)
    ]
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        walk.notes.append(f"dims that meet none that is named are numbers in formulas: {', '.join(left[:3])}{more}")
    return given | {node: tuple(dim.subs(numbers) for dim in dims) for node, dims in found.items()}


def read(gm: GraphModule, dynamic: Mapping[str, Any]) -> tuple[dict[Node, Dims], dict[str, int]]:
    """The dims that are given, by placeholder, and the numbers of all symbols."""
    if not isinstance(dynamic, Mapping) or not all(isinstance(name, str) for name in dynamic):
        raise SbpcError(f"dynamic is {dynamic!r}\n  Give a mapping such as {EXAMPLE}.")
    known = {name: size for name, size in dynamic.items() if isinstance(size, int)}
    ports = gm.meta["ports"]
    names = {
        node: [port.name, *(name for name, first in ports.tied.items() if first == port.name)]
        if port.kind == PARAMETER
        else [node.name]
        for port, node in placeholders(gm).items()
    }
    found: dict[Node, Dims] = {}
    for pattern, dims in dynamic.items():
        if isinstance(dims, int):
            continue
        hits = [node for node, called in names.items() if any(fnmatch.fnmatchcase(name, pattern) for name in called)]
        if not hits:
            near = ", ".join(closest(pattern, [name for called in names.values() for name in called]))
            raise SbpcError(f"dynamic: {pattern!r} is no parameter and no input\n  The closest names are {near}.")
        for node in hits:
            shape = tuple(node.meta["val"].shape)
            if not isinstance(dims, (tuple, list)) or len(dims) != len(shape):
                raise SbpcError(
                    f"dynamic: {pattern!r} has the dims {dims!r}, %{node.name} the shape {list(shape)}\n"
                    f"  Give one per dim, as in {EXAMPLE}."
                )
            found[node] = tuple(
                sympy.Integer(size) if dim is None else formula(dim, f"dim {at} of {pattern!r}")
                for at, (dim, size) in enumerate(zip(dims, shape))
            )
    return found, solve(found, known)


def solve(given: Mapping[Node, Dims], known: dict[str, int]) -> dict[str, int]:
    """The number of every symbol: from the dims that it is alone in first. Raises SbpcError if dims disagree."""
    pairs = [(dim, size, node) for node, dims in given.items() for dim, size in zip(dims, node.meta["val"].shape)]
    for _ in pairs:
        for dim, size, node in pairs:
            rest = dim.subs({symbol(name): number for name, number in known.items()})
            if len(rest.free_symbols) == 1:
                (unknown,) = rest.free_symbols
                numbers = [number for number in sympy.solve(rest - size, unknown) if number.is_Integer]
                if len(numbers) == 1:
                    known[unknown.name] = int(numbers[0])
            elif not rest.free_symbols and rest != size:
                sizes = ", ".join(f"{s.name} = {known[s.name]}" for s in sorted(dim.free_symbols, key=str))
                raise SbpcError(
                    f"dynamic: a dim of %{node.name} is {dim}, which is {rest}, and has {size} elements\n"
                    f"  With {sizes or 'no symbols'}: mend one of them."
                )
    lost = sorted({s.name for dim, _, _ in pairs for s in dim.free_symbols} - known.keys())
    if lost:
        raise SbpcError(
            f"dynamic: the number of {', '.join(lost)} cannot be told\n  Give it, as in {{'{lost[0]}': 12}}."
        )
    return known


class Walk:
    """Sizes of values and of factors, node by node in the order of the graph.

    given: dims of placeholders. called: names of the symbols that were given as numbers, for what has no dim alone.
    """

    def __init__(self, given: dict[Node, Dims], known: Mapping[str, int], called: Set[str]) -> None:
        self.given, self.notes = dict(given), list[str]()
        self.numbers: dict[Any, int] = {}  # of the symbols that stand for sizes which are not known yet
        self.same: dict[Any, Any] = {}  # what such a symbol is, as far as that has been met
        self.sizes: dict[tuple[Node, int], tuple[Size, ...]] = {}
        self.called = {known[name]: symbol(name) for name in sorted(called)}
        self.told: dict[int, list[Any]] = {}
        declared = [dim for dims in given.values() for dim in dims]
        for dim in dict.fromkeys([*map(symbol, known), *(dim for dim in declared if dim.free_symbols)]):
            number = int(dim.subs({symbol(name): size for name, size in known.items()}))
            self.told.setdefault(number, []).append(dim)

    def visit(self, node: Node) -> None:
        """Put dims on one node whose operands have theirs."""
        value = node.meta["val"]
        if node.target is operator.getitem:
            return
        values = list(value) if isinstance(value, (tuple, list)) else [value]
        shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else () for v in values]
        match = node.meta.get("match")
        sizes: list[tuple[Size, ...]]
        if node.op != "call_function":
            dims = self.given.get(node, tuple(map(sympy.Integer, shapes[0])))
            sizes = [tuple(((dim, number),) for dim, number in zip(dims, shapes[0]))]
        elif match is None:
            sizes = [tuple(self.by_number(node, number) for number in shape) for shape in shapes]
        else:
            factors = self.factors(node, match, [self.sizes[value_of(operand)] for operand in operands(node)])
            node.meta["factors"] = {name: product(size) for name, size in factors.items()}
            sizes = [tuple(size_of(dim, factors) for dim in output.dims or ()) for output in match.bound.outputs]
            if match.phases is not None:
                node.meta["parts"] = self.parts(node, match.phases)
        for index, found in enumerate(sizes):
            self.sizes[node, index] = found
        node.meta["dims"] = tuple(tuple(map(product, found)) for found in sizes)

    def parts(self, node: Node, phases: Phases) -> dict[int, tuple[dict[str, Any], Dims]]:
        """Of the parts into which a node may be taken apart, by the number of the value: its factors and its dims."""
        sizes = {slot: self.sizes[value_of(operand)] for slot, operand in enumerate(operands(node))}
        found = {}
        for part in phases.parts:
            factors = self.factors(node, part.match, [sizes[number] for number in part.reads])
            sizes[part.number] = tuple(size_of(dim, factors) for dim in part.match.bound.outputs[0].dims or ())
            named = {name: product(size) for name, size in factors.items()}
            found[part.number] = named, tuple(map(product, sizes[part.number]))
        return found

    def by_number(self, node: Node, number: int) -> Size:
        """The size that nothing but a number tells."""
        found = self.told.get(number, [])
        if len(found) > 1:
            names = " or ".join(map(str, found))
            self.notes.append(f"{node.name}: a dim of {number} elements may be {names}; in formulas it is a number")
        return ((found[0] if len(found) == 1 else sympy.Integer(number), number),)

    def factors(self, node: Node, match: Match, read: Sequence[tuple[Size, ...]]) -> dict[str, Size]:
        """What the factors of a call are, told by the dims of its operands; what has symbols first."""
        bound = [
            (dim, size)
            for value, sizes in zip(match.bound.inputs, read)
            for dim, size in zip(value.dims or (), sizes)
            if dim.factors and dim.literal == 1
        ]
        bound.sort(key=lambda item: (not self.named(product(item[1])), len(item[0].factors)))
        found: dict[str, Size] = {}
        for dim, size in bound:
            numbers = [match.sizes[factor] for factor in dim.factors]
            if math.prod(numbers) == math.prod(number for _, number in size):  # else one element is broadcast
                for factor, part in zip(dim.factors, self.apart(size, numbers)):
                    if factor in found and self.numbers:
                        self.meet(found[factor], part)
                    if factor not in found or not product(found[factor]).free_symbols:
                        found[factor] = part
        return {f: found[f] if f in found else self.by_number(node, number) for f, number in match.sizes.items()}

    def unknown(self, number: int) -> Any:
        """What stands for a size of that number of which nothing else is known yet; 1 is what it is."""
        if number == 1:
            return sympy.Integer(1)
        made = sympy.Dummy(positive=True)
        self.numbers[made] = number
        return made

    def named(self, size: Any) -> bool:
        """Whether a size has symbols that were given."""
        return any(symbol not in self.numbers for symbol in size.free_symbols)

    def meet(self, one: Size, other: Size) -> None:
        """Two sizes are the same, atom by atom where those have the same numbers."""
        if [number for _, number in one] == [number for _, number in other]:
            for (first, _), (second, _) in zip(one, other):
                self.equal(first, second)
        else:
            self.equal(product(one), product(other))

    def equal(self, one: Any, other: Any) -> None:
        """Two expressions are equal: if one of them is a multiple of what is not known yet, it is now."""
        if one == other or (one.free_symbols | other.free_symbols).isdisjoint(self.numbers):
            return
        one, other = self.known(one), self.known(other)
        for size, told in ((other, one), (one, other)):
            free = [symbol for symbol in size.free_symbols if symbol in self.numbers]
            if len(free) == 1 and not self.named(size) and free[0] not in told.free_symbols and told.free_symbols:
                self.same[free[0]] = told * free[0] / size
                return

    def known(self, size: Any) -> Any:
        """A size in terms of what is known of it."""
        while told := {symbol: self.same[symbol] for symbol in size.free_symbols if symbol in self.same}:
            size = size.subs(told)
        return size

    def apart(self, size: Size, numbers: Sequence[int]) -> list[Size]:
        """A size as the product of sizes of these numbers, major first."""
        left, parts = list(size), []
        for number in numbers[:-1]:
            part: list[tuple[Any, int]] = []
            while left and number > 1 and number % left[0][1] == 0:
                part.append(left.pop(0))
                number //= part[-1][1]
            if number > 1:
                if not left or left[0][1] % number:  # borders that do not meet
                    return [((sympy.Integer(n), n),) for n in numbers]
                cut = self.called.get(number, sympy.Integer(number))
                part.append((cut, number))
                left[0] = (left[0][0] / cut, left[0][1] // number)
            parts.append(tuple(part))
        return [*parts, tuple(left)]


def product(size: Size) -> Any:
    """The expression of a size."""
    return sympy.Mul(*(expression for expression, _ in size))


def size_of(dim: Any, factors: Mapping[str, Size]) -> Size:
    """The size of a dim of a call."""
    literal = ((sympy.Integer(dim.literal), dim.literal),) if dim.literal != 1 else ()
    return (*literal, *(atom for factor in dim.factors for atom in factors[factor]))


def name_dims(gm: GraphModule, mesh: Mesh, dynamic: Mapping[str, Any]) -> dict[str, Any]:
    """Make the dims of the graph symbolic; `meta["dynamic"]` has the symbols' numbers. `dynamic` as JSON values."""
    numbers = declare(gm, dynamic)
    taken = sorted(name for name in numbers if name in mesh.axes or in_formulas(name))
    if taken:
        raise SbpcError(
            f"dynamic: {taken[0]!r} is the name of something else in the formula\n  Call the dim otherwise."
        )
    gm.meta["dynamic"] = numbers
    return {
        name: dims if isinstance(dims, int) else [None if dim is None else str(dim) for dim in dims]
        for name, dims in dynamic.items()
    }
