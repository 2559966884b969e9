"""What torch's own DTensor offers for a call on one axis; of what is private of it, this file alone knows.

Its strategies are asked with hints of placements and answer with all that they have; an op that it takes apart is asked
for each hint.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, distributed
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, TupleStrategy
from torch.testing._internal.distributed.fake_pg import FakeStore

import sbpc.mesh.states
from sbpc._compat import tree_leaves, tree_map
from sbpc.mesh.states import B, P, Split, State
from sbpc.rules.binding import Signature, flat_outputs
from sbpc.rules.proof.prove import Case

RANKS = 2
MOST = 100  # tuples of hints that are tried; where there are more, those that are alike
KINDS = (Replicate(), Partial("sum"), Partial("avg"), Partial("max"), Partial("min"))
Row = tuple[tuple[Any, ...], tuple[Any, ...]]


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """While this lasts, a process group of so many ranks whose collectives do nothing."""
    distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


@contextlib.contextmanager
def local_ranks(ranks: int) -> Iterator[None]:
    """While this lasts, DTensors hold the shards of all ranks of a mesh in this process."""
    with fake_group(ranks), LocalTensorMode(ranks):
        yield


@contextlib.contextmanager
def fake_mesh() -> Iterator[Any]:
    """A mesh of one axis without processes."""
    with fake_group(RANKS):
        yield init_device_mesh("cpu", (RANKS,))


def offered(one: Case, mesh: Any) -> list[Row]:
    """The placements of inputs and outputs that DTensor has for a call; it raises where it has none for a hint."""
    found: dict[Row, None] = {}
    for chosen in seeds(one.operands) if one.operands else ():
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            for row in rows(schema(one, chosen, mesh), len(one.operands)):
                found.setdefault(row)
    return list(found)


def seeds(values: Sequence[Tensor]) -> Iterator[tuple[Any, ...]]:
    """Hints for all operands: all that there are, or, if those are many, the ones in which one or all are not whole."""
    each = [[*KINDS, *(Shard(dim) for dim, size in enumerate(value.shape) if size > 1)] for value in values]
    if math.prod(map(len, each)) <= MOST:
        yield from itertools.product(*each)
        return
    whole = (Replicate(),) * len(values)
    yield whole
    for at, options in enumerate(each):
        for option in options[1:]:
            yield (*whole[:at], option, *whole[at + 1 :])
    for kind in KINDS[1:]:
        yield (kind,) * len(values)
    for size in dict.fromkeys(size for value in values for size in value.shape if size > 1):
        yield tuple(Shard(list(value.shape).index(size)) if size in value.shape else Replicate() for value in values)


def schema(one: Case, chosen: Sequence[Any], mesh: Any) -> OpSchema:
    """The call with specs in the place of tensors."""
    left = iter(chosen)
    propagator = DTensor._op_dispatcher.sharding_propagator

    def spec(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return DTensorSpec(mesh, (next(left),), TensorMeta(value.shape, value.stride(), value.dtype))

    info = propagator.op_to_schema_info.get(one.op) or propagator.op_to_schema_info_for_single_dim_strategy.get(one.op)
    args, kwargs = tree_map(spec, (one.args, dict(one.kwargs)))
    return OpSchema(one.op, args, kwargs, schema_info=info)


def rows(asked: OpSchema, operands: int) -> Iterator[Row]:
    """All that DTensor answers."""
    from torch.distributed.tensor._ops.single_dim_strategy import _expand_single_dim_strategy_to_mesh  # 2.13 has it

    propagator, op = DTensor._op_dispatcher.sharding_propagator, asked.op
    if op in propagator.op_single_dim_strategy_funcs:
        wrapped = propagator._wrap_with_op_strategy(asked)
        mesh = next(s for s in tree_leaves((asked.args_schema, asked.kwargs_schema)) if isinstance(s, DTensorSpec)).mesh
        meta = propagator._propagate_tensor_meta(asked)
        made = _expand_single_dim_strategy_to_mesh(mesh, wrapped, propagator.op_single_dim_strategy_funcs[op], meta)(
            op, wrapped.args_meta, wrapped.kwargs_meta
        )
    elif op in propagator.op_strategy_funcs:
        made = propagator.op_strategy_funcs[op](propagator._wrap_with_op_strategy(asked))
    elif op in propagator.op_to_rules:
        sharding = propagator.op_to_rules[op](asked)
        if sharding.output_spec is not None:
            given = [s for s in tree_leaves((asked.args_schema, asked.kwargs_schema)) if isinstance(s, DTensorSpec)]
            yield placements(given), placements(sharding.output_spec)
        return
    else:
        given = [s for s in tree_leaves((asked.args_schema, asked.kwargs_schema)) if isinstance(s, DTensorSpec)]
        every = tree_leaves(asked.args_schema + tuple(asked.kwargs_schema.values()))
        chosen = tuple(spec.placements[0] if isinstance(spec, DTensorSpec) else None for spec in every)
        outs = propagator.decomp_strategy._propagate_through_decomp(asked, chosen, given[0].mesh)
        yield placements(given), outs if isinstance(outs, tuple) else (outs,)
        return
    if isinstance(made, TupleStrategy):
        children = [child.strategies[0] for child in made.children]
        yield (
            tuple(p for c in children for p in placements(c.input_specs)),
            tuple(p for c in children for p in placements(c.output_specs)),
        )
        return
    outputs = len(op._schema.returns)
    for strategy in made.strategies if made is not None else ():
        outs = placements(strategy.output_specs)
        ins = placements(strategy.input_specs) if strategy.input_specs is not None else outs * operands
        if len(ins) == operands:
            yield ins, outs * outputs if len(outs) == 1 else outs


def placements(specs: Any) -> tuple[Any, ...]:
    """The placement of each spec; None for what is no tensor."""
    given = [specs] if isinstance(specs, DTensorSpec) else specs or ()
    return tuple(spec.placements[0] if isinstance(spec, DTensorSpec) else None for spec in given)


def state(placement: Any, given: bool) -> State:
    """Its state; one that has none here is a Partial of its name. given: of an input, where an index masked is whole."""
    if placement is None or isinstance(placement, Replicate):
        return B
    if isinstance(placement, Shard):
        return Split(placement.dim)
    if type(placement) is not Partial:
        masked = type(placement).__name__.endswith("MaskPartial")
        return (B if given else P) if masked else sbpc.mesh.states.Partial(str(placement))
    return sbpc.mesh.states.Partial(placement.reduce_op)


def signatures(one: Case, mesh: Any) -> list[Signature]:
    """What DTensor offers as signatures; outputs that are no tensors are whole."""
    wanted, found = flat_outputs(one.run()), []
    for ins, outs in offered(one, mesh):
        made = [*outs, *[None] * len(wanted)]
        states = tuple(state(p, False) if isinstance(value, Tensor) else B for p, value in zip(made, wanted))
        found.append(Signature(tuple(state(p, True) for p in ins), states))
    return list(dict.fromkeys(found))
