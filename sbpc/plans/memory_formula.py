"""The bytes that a rank takes at the peak of a step, as a formula in dims and sizes of axes: that of the layouts of
one plan.

What is alive at a moment is a sum of products of dims, each so many times. Of two moments one of which has each
product at least as many times, the other is never the peak; what is left is a maximum of few sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
from torch import Tensor
from torch.fx import Node

from sbpc.boxing.steps import Step
from sbpc.graph.flex import DENSE
from sbpc.graph.operands import operands
from sbpc.mesh.layout import Layout, numel
from sbpc.mesh.mesh import Mesh
from sbpc.plans.measure import dims_at
from sbpc.plans.memory import Life
from sbpc.plans.storages import WHOLE, sizes_of

Sizes = Sequence[sympy.Symbol]  # of the axes of the mesh


def moments_of(life: Life, size: Sequence[Any], start: int = 0, end: int | None = None) -> list[Mapping[Any, Any]]:
    """Returns what is alive at each moment of a program, equal ones once: products, each so many times. size:
    formulas of storages. start, end: which moments."""
    terms = [sympy.sympify(formula).as_coeff_Mul() for formula in size]
    dying: dict[float, list[int]] = {}
    for storage, last in enumerate(life.last):
        dying.setdefault(last, []).append(storage)
    alive, moments = dict[Any, Any](), dict[frozenset[tuple[Any, Any]], None]()
    for at, moment in enumerate(life.moments):
        for storage, _ in moment.makes:
            count, product = terms[storage]
            alive[product] = alive.get(product, 0) + count
        if start <= at < (len(life.moments) if end is None else end):
            moments[frozenset(alive.items())] = None
        for storage in dying.get(at, ()):
            count, product = terms[storage]
            alive[product] -= count
    return list(map(dict, moments))


def total(counts: Mapping[Any, Any]) -> sympy.Expr:
    """Returns the sum of products, each so many times."""
    return sympy.Add(*(count * product for product, count in counts.items()))


def largest(moments: Sequence[Mapping[Any, Any]]) -> list[Mapping[Any, Any]]:
    """Returns those which no other one exceeds: has each product at least as many times.

    >>> largest([{"a": 1}, {"a": 1, "b": 2}, {"a": 3}, {"b": 1}])
    [{'a': 1, 'b': 2}, {'a': 3}]
    """
    kept: list[Mapping[Any, Any]] = []
    for moment in sorted(moments, key=lambda each: -sum(each.values())):
        if not any(all(other.get(product, 0) >= count for product, count in moment.items()) for other in kept):
            kept.append(moment)
    return kept


def storage_formulas(life: Life, mesh: Mesh, sizes: Sizes) -> list[Any]:
    """Returns the bytes of every storage of a step, as formulas."""
    found: list[Any] = [sympy.Integer(size) for size in life.size]
    known: dict[Any, Any] = {}  # equal tensors share a formula
    for moment in life.moments:
        for storage, size in moment.makes:
            node, boxing = moment.node, {"step", "awaits"} & moment.node.meta.keys()
            results = life.values[node]
            beside = not boxing and storage not in results  # of a call that is written as several
            if beside and not size:
                continue
            if beside and node.target in DENSE:
                found[storage] = sympy.Rational(size, int(scores(node, mesh))) * scores(node, mesh, sizes)
                continue
            near, place = nearest(node, size, mesh) if beside else (node, 0 if boxing else results.index(storage))
            key = (*about(near, place), size if boxing else None)
            if key not in known:
                known[key] = boxed_bytes(node, size, mesh, sizes) if boxing else bytes_of(near, place, mesh, sizes)
            whole = node.target in WHOLE and size == life.size[moment.reads[0]]
            found[storage] = found[moment.reads[0]] if whole else known[key]
            own = size if boxing or whole else sizes_of(near, mesh)[place]
            if own not in (0, size):  # in proportion to that: a result may lie in a larger storage
                found[storage] *= sympy.Rational(size, own)
    return found


def scores(node: Node, mesh: Mesh, sizes: Sizes | None = None) -> Any:
    """Returns how many scores FlexAttention has on the busiest rank: a number, or a formula in the symbols of axes."""
    match, choice, most = node.meta["match"], node.meta["choice"], mesh.routing.most
    shape, cuts = zip(*(choice.busiest(factor, match.sizes[factor], mesh.sizes, most) for factor in "bgrst"))
    named = node.meta.get("factors")
    dims = [named[factor] for factor in "bgrst"] if named else ()
    return numel(shape, cuts, mesh.sizes, sizes, dims)


def nearest(node: Node, size: int, mesh: Mesh) -> tuple[Node, int]:
    """Returns the result or operand of a call that is nearest to `size` bytes: a node, and which of its outputs."""
    sized = [(each, at, x) for each in (node, *operands(node)) for at, x in enumerate(sizes_of(each, mesh)) if x]
    return min(sized, key=lambda each: abs(math.log(each[2] / size)))[:2]


def about(node: Node, index: int) -> tuple[Any, ...]:
    """Returns what is the same for outputs of equal bytes."""
    value, sbp = node.meta.get("val"), node.meta.get("sbp")
    one, layout = (
        (value[index], sbp[index]) if isinstance(value, (tuple, list)) and isinstance(sbp, tuple) else (value, sbp)
    )
    shape = (tuple(one.shape), one.dtype) if isinstance(one, Tensor) else ()
    step = node.meta.get("step", node.meta.get("awaits"))
    return shape, layout, step, dims_of(node, index)


def dims_of(node: Node, index: int) -> tuple[Any, ...]:
    """Returns the dims of an output as they stand in formulas; none where numbers do."""
    return node.meta["dims"][index] if "dims" in node.meta else dims_at(node)


def bytes_of(node: Node, index: int, mesh: Mesh, sizes: Sizes) -> Any:
    """Returns the bytes of an output on the busiest rank."""
    (_, layout, _, dims), value = about(node, index), node.meta.get("val")
    one = value[index] if isinstance(value, (tuple, list)) else value
    if not isinstance(one, Tensor) or not isinstance(layout, Layout):
        return sympy.Integer(0)
    return one.element_size() * local(one, layout, mesh, sizes, dims)


def boxed_bytes(node: Node, size: int, mesh: Mesh, sizes: Sizes) -> Any:
    """Returns the bytes of a tensor that a boxing step makes: as large as a shard before or after it, or in
    proportion to one."""
    value, dims = node.meta["val"], dims_at(node)
    step: Step = node.meta["step"] if "step" in node.meta else node.meta["awaits"]
    for layout in (step.after, step.before):
        if value.element_size() * local(value, layout, mesh) == size:
            return value.element_size() * local(value, layout, mesh, sizes, dims)
    return sympy.Rational(size, local(value, step.after, mesh) or 1) * local(value, step.after, mesh, sizes, dims)


def local(value: Tensor, layout: Layout, mesh: Mesh, sizes: Sizes | None = None, dims: Sequence[Any] = ()) -> Any:
    """Returns the elements of a tensor on the busiest rank: a number, or a formula in the symbols of axes."""
    shape, cuts = layout.busiest(value.shape, mesh.sizes, mesh.routing.most)
    named, _ = layout.busiest(dims, mesh.sizes, mesh.routing.most)
    return numel(shape, cuts, mesh.sizes, sizes, named)
