"""Gives every value symbolic sizes: the ops' rules carry the names of the dims of inputs and parameters through the
graph.

Nothing is captured symbolically. A rule binds every dim of a call to factors, so the symbols of an operand become
those of the factors, and then those of the results. A size is kept as atoms, major first, so that (b s) comes apart
as b and s. A dim that is not named takes the name of what it meets in a rule: the second dim of down.weight becomes
"4*h" where up.weight has ("4*h", "h"). Of the size of a factory only the number is known: if exactly one named dim
has that number, the size takes its name. Else it stays a number, and a note says so.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from sbpc.errors import SbpcError, shown
from sbpc.graph.operands import operands, value_of
from sbpc.graph.ports import INPUT, OUTPUT, PARAMETER, TANGENT, Port, placeholders
from sbpc.mesh.mesh import Mesh, in_formulas
from sbpc.mesh.pins import matching
from sbpc.rules import Match, Phases

Dims = tuple[Any, ...]  # a sympy expression for each dim of a tensor
Size = tuple[tuple[Any, int], ...]  # one dim as a product of atoms (expression, number), major first
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
EXAMPLE = '{"x": ("b", "s", "h"), "*.up.weight": ("4*h", "h"), "heads": 12}'


def symbol(name: str) -> sympy.Symbol:
    """Returns the symbol of that name. Sizes are positive."""
    return sympy.Symbol(name, positive=True)


def formula(text: Any, what: str) -> sympy.Expr:
    """Returns what a text such as "4*h" or an integer stands for. Only + - * / of names and integers is evaluated.

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
        raise SbpcError(f"dynamic: {what} is {shown(text)}\n  Give names, integers and + - * / of them, as in '4*h'.")

    try:
        return build(ast.parse(str(text).strip(), mode="eval"))
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        return build(ast.Pass())


def declare(gm: GraphModule, dynamic: Mapping[str, Any], outside: Set[str] = frozenset()) -> dict[str, int]:
    """Puts symbolic dims on every value of an annotated graph, and returns the number of every symbol at the
    captured sizes.

    dynamic: name of a parameter (or pattern) or of an input -> its dims, each a text, an integer or None for the
    number it is; name of a symbol that no dim has alone -> its number. After: `meta["dims"]` on every placeholder
    and call, one tuple per output, and `meta["factors"]` on every call that has a rule; `meta["parts"]` the same for
    what a call may be taken apart into. outside: symbols of which no value has that many elements, so that none is
    named so for its number alone.

    Raises SbpcError if a name is unknown, or if the dims do not fit the shapes or each other.
    """
    given = read(gm, dynamic)
    numbers = {name: size for name, size in dynamic.items() if isinstance(size, int)}
    known = solve(given, numbers)
    walk = Walk(given, known, numbers.keys(), outside)
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
    """Returns the dims of all placeholders. A dim that is not given is what it meets, or else the number it is."""
    given = dict(walk.given)
    for node in placeholders(gm).values():
        if node not in given:
            walk.given[node] = tuple(map(walk.unknown, node.meta["val"].shape))
    for node in gm.graph.nodes:
        if node.op != "output":
            walk.visit(node)
    learnt = {node: tuple(map(walk.known, dims)) for node, dims in walk.given.items() if node not in given}
    numbers = dict(walk.numbers)
    for table in (walk.numbers, walk.same, walk.notes):
        table.clear()
    ports = {node: port for port, node in placeholders(gm).items()}
    unnamed = [
        f"{node.name if ports[node].kind == INPUT else ports[node].name}[{at}] = {dim.subs(numbers)}"
        for node, dims in learnt.items()
        for at, dim in enumerate(dims)
        if ports[node].kind != TANGENT and not dim.free_symbols.isdisjoint(numbers)
    ]
    if unnamed:
        more = f" and {len(unnamed) - 3} more" if len(unnamed) > 3 else ""
        walk.notes.append(f"dims that meet none that is named are numbers in formulas: {', '.join(unnamed[:3])}{more}")
    return given | {node: tuple(dim.subs(numbers) for dim in dims) for node, dims in learnt.items()}


def read(gm: GraphModule, dynamic: Mapping[str, Any]) -> dict[Node, Dims]:
    """Returns the dims that are given, by placeholder. Raises SbpcError for names and dims that fit none."""
    if not isinstance(dynamic, Mapping) or not all(isinstance(name, str) for name in dynamic):
        raise SbpcError(f"dynamic is {shown(dynamic)}\n  Give a mapping such as {EXAMPLE}.")
    names = {
        node: gm.meta["ports"].names_of(port.name) if port.kind == PARAMETER else [node.name]
        for port, node in placeholders(gm).items()
    }
    given: dict[Node, Dims] = {}
    for pattern, dims in dynamic.items():
        if isinstance(dims, int):
            continue
        nodes = matching(pattern, names, SbpcError(f"dynamic: {pattern!r} is no parameter and no input"))
        given |= {node: dims_of(node, pattern, dims) for node in nodes}
    return given


def dims_of(node: Node, pattern: str, dims: Any) -> Dims:
    """Returns the given dims of a placeholder. Raises SbpcError if there is not one per dim."""
    shape = tuple(node.meta["val"].shape)
    if not isinstance(dims, (tuple, list)) or len(dims) != len(shape):
        what = f"dynamic: {pattern!r} has the dims {shown(dims)}, %{node.name} the shape {list(shape)}"
        raise SbpcError(f"{what}\n  Give one per dim, as in {EXAMPLE}.")
    return tuple(
        sympy.Integer(size) if dim is None else formula(dim, f"dim {at} of {pattern!r}")
        for at, (dim, size) in enumerate(zip(dims, shape))
    )


def solve(given: Mapping[Node, Dims], numbers: Mapping[str, int]) -> dict[str, int]:
    """Returns the number of every symbol. Symbols that are alone in a dim are solved first. Raises SbpcError if dims
    disagree."""
    known = dict(numbers)
    pairs = [(dim, size, node) for node, dims in given.items() for dim, size in zip(dims, node.meta["val"].shape)]
    for _ in pairs:
        for dim, size, node in pairs:
            rest = dim.subs({symbol(name): number for name, number in known.items()})
            if len(rest.free_symbols) == 1:
                (unknown,) = rest.free_symbols
                solutions = [number for number in sympy.solve(rest - size, unknown) if number.is_Integer]
                if len(solutions) == 1:
                    known[unknown.name] = int(solutions[0])
            elif not rest.free_symbols and rest != size:
                sizes = ", ".join(f"{s.name} = {known[s.name]}" for s in sorted(dim.free_symbols, key=str))
                what = f"dynamic: a dim of %{node.name} is {dim}, which is {rest}, and has {size} elements"
                raise SbpcError(f"{what}\n  With {sizes or 'no symbols'}: mend one of them.")
    lost = sorted({s.name for dim, _, _ in pairs for s in dim.free_symbols} - known.keys())
    if lost:
        raise SbpcError(
            f"dynamic: the number of {', '.join(lost)} cannot be told\n  Give it, as in {{'{lost[0]}': 12}}."
        )
    for name in sorted(known):
        if known[name] < 2:
            todo = "Plan at sizes from 2 on: dims of 1 element are not told apart."
            raise SbpcError(f"dynamic: {name} is {known[name]}\n  {todo}")
    return known


class Walk:
    """Finds the sizes of values and of factors, node by node in the order of the graph.

    given: the dims of placeholders. known: the numbers of symbols. called: the symbols that were given as numbers.
    outside: see `declare`.
    """

    def __init__(self, given: dict[Node, Dims], known: Mapping[str, int], called: Set[str], outside: Set[str]) -> None:
        self.given, self.notes = dict(given), list[str]()
        self.numbers: dict[Any, int] = {}  # by symbol of a size that is not known yet: its number
        self.same: dict[Any, Any] = {}  # by such a symbol: what it is, as far as that has been met
        self.sizes: dict[tuple[Node, int], tuple[Size, ...]] = {}
        self.called = {known[name]: symbol(name) for name in sorted(called - outside)}
        self.declared: dict[int, list[Any]] = {}  # by number: the dims and symbols that are declared with it
        dims = [dim for dims in given.values() for dim in dims if dim.free_symbols]
        for dim in dict.fromkeys([*(symbol(name) for name in known if name not in outside), *dims]):
            number = int(dim.subs({symbol(name): size for name, size in known.items()}))
            self.declared.setdefault(number, []).append(dim)

    def visit(self, node: Node) -> None:
        """Puts dims on one node whose operands have theirs."""
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
        self.sizes |= {(node, index): size for index, size in enumerate(sizes)}
        node.meta["dims"] = tuple(tuple(map(product, size)) for size in sizes)

    def parts(self, node: Node, phases: Phases) -> dict[int, tuple[dict[str, Any], Dims]]:
        """Returns factors and dims of the parts into which a node may be taken apart, by the number of the part's
        value."""
        sizes = {slot: self.sizes[value_of(operand)] for slot, operand in enumerate(operands(node))}
        parts = {}
        for part in phases.parts:
            factors = self.factors(node, part.match, [sizes[number] for number in part.reads])
            sizes[part.number] = tuple(size_of(dim, factors) for dim in part.match.bound.outputs[0].dims or ())
            dims = tuple(map(product, sizes[part.number]))
            parts[part.number] = {name: product(size) for name, size in factors.items()}, dims
        return parts

    def by_number(self, node: Node, number: int) -> Size:
        """Returns the size of which only the number is known."""
        dims = self.declared.get(number, [])
        if len(dims) > 1:
            names = " or ".join(map(str, dims))
            self.notes.append(f"{node.name}: a dim of {number} elements may be {names}; in formulas it is a number")
        return ((dims[0] if len(dims) == 1 else sympy.Integer(number), number),)

    def factors(self, node: Node, match: Match, read: Sequence[tuple[Size, ...]]) -> dict[str, Size]:
        """Returns the sizes of the factors of a call, from the dims of its operands: first from those that have
        symbols."""
        bound = [
            (dim, size)
            for value, sizes in zip(match.bound.inputs, read)
            for dim, size in zip(value.dims or (), sizes)
            if dim.factors and dim.literal == 1
        ]
        bound.sort(key=lambda item: (not self.named(product(item[1])), len(item[0].factors)))
        told: dict[str, Size] = {}
        for dim, size in bound:
            numbers = [match.sizes[factor] for factor in dim.factors]
            if math.prod(numbers) == math.prod(number for _, number in size):  # else one element is broadcast
                for factor, part in zip(dim.factors, self.apart(size, numbers)):
                    if factor in told and self.numbers:
                        self.meet(told[factor], part)
                    if factor not in told or not product(told[factor]).free_symbols:
                        told[factor] = part
        return {f: told[f] if f in told else self.by_number(node, number) for f, number in match.sizes.items()}

    def unknown(self, number: int) -> Any:
        """Returns a symbol for a size of which only the number is known yet; a size of 1 is 1."""
        if number == 1:
            return sympy.Integer(1)
        stand_in = sympy.Dummy(positive=True)
        self.numbers[stand_in] = number
        return stand_in

    def named(self, size: Any) -> bool:
        """Returns whether a size has symbols that were given."""
        return any(symbol not in self.numbers for symbol in size.free_symbols)

    def meet(self, one: Size, other: Size) -> None:
        """Notes that two sizes are the same, atom by atom where those have the same numbers."""
        if [number for _, number in one] == [number for _, number in other]:
            for (first, _), (second, _) in zip(one, other):
                self.equal(first, second)
        else:
            self.equal(product(one), product(other))

    def equal(self, one: Any, other: Any) -> None:
        """Notes that two expressions are equal. If one is a multiple of a symbol that is not known yet, that symbol
        is known now."""
        if one == other or (one.free_symbols | other.free_symbols).isdisjoint(self.numbers):
            return
        one, other = self.known(one), self.known(other)
        for size, told in ((other, one), (one, other)):
            free = [symbol for symbol in size.free_symbols if symbol in self.numbers]
            if len(free) == 1 and not self.named(size) and free[0] not in told.free_symbols and told.free_symbols:
                self.same[free[0]] = told * free[0] / size
                return

    def known(self, size: Any) -> Any:
        """Returns a size in terms of what is known of it."""
        while told := {symbol: self.same[symbol] for symbol in size.free_symbols if symbol in self.same}:
            size = size.subs(told)
        return size

    def apart(self, size: Size, numbers: Sequence[int]) -> list[Size]:
        """Returns a size as the product of sizes of these numbers, major first."""
        left, parts = list(size), []
        for number in numbers[:-1]:
            atoms: list[tuple[Any, int]] = []
            while left and number > 1 and number % left[0][1] == 0:
                atoms.append(left.pop(0))
                number //= atoms[-1][1]
            if number > 1:
                if not left or left[0][1] % number:  # borders that do not meet
                    return [((sympy.Integer(n), n),) for n in numbers]
                major = self.called.get(number, sympy.Integer(number))
                atoms.append((major, number))
                left[0] = (left[0][0] / major, left[0][1] // number)
            parts.append(tuple(atoms))
        return [*parts, tuple(left)]


def product(size: Size) -> Any:
    """Returns the expression of a size."""
    return sympy.Mul(*(expression for expression, _ in size))


def size_of(dim: Any, factors: Mapping[str, Size]) -> Size:
    """Returns the size of a dim of a call."""
    literal = ((sympy.Integer(dim.literal), dim.literal),) if dim.literal != 1 else ()
    return (*literal, *(atom for factor in dim.factors for atom in factors[factor]))


def name_dims(
    gm: GraphModule, mesh: Mesh, dynamic: Mapping[str, Any], outside: Set[str] = frozenset()
) -> dict[str, Any]:
    """Makes the dims of the graph symbolic, with the symbols' numbers in `meta["dynamic"]`; returns `dynamic` as
    JSON values.

    outside: see `declare`.
    """
    numbers = declare(gm, dynamic, outside)
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
