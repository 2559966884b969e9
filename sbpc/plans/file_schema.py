"""What the JSON of a plan's file may hold, place by place: it is checked as a whole before anything is made of it."""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable
from typing import Any

import torch

from sbpc.errors import is_name, is_number, shown
from sbpc.graph.about import EXCHANGE, FLOAT32, PANEL_OF, RECOMPUTES, REDUCE, SENDS, SLICE
from sbpc.graph.ports import INPUTS, OUTPUTS
from sbpc.mesh.collectives import EIGHT_BITS
from sbpc.plans.options import GATHERED, OBJECTIVES, OPTIMIZER_STATE, OVERFLOWS, REDUCTIONS
from sbpc.plans.staged.stage_parts import PARTS

# the first place within a value that does not fit, with what stands there; None if all fits. Plain loops: a large
# model's file has some 200,000 places
Check = Callable[[Any], str | None]
# which are told one by one, and of which a small file can ask for very many
MOST_RANKS, MOST_MICRO_BATCHES = 1 << 20, 1 << 14
DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
NAMES_OF_DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}


def leaf(fits: Callable[[Any], bool]) -> Check:
    """Returns the check of a value without parts."""
    return lambda value: None if fits(value) else f" is {shown(value)}"


def either(*checks: Check) -> Check:
    """Returns the check of a value that fits one of several."""
    return leaf(lambda value: any(check(value) is None for check in checks))


def many(check: Check) -> Check:
    """Returns the check of a list of any number of equal parts."""

    def inner(value: Any) -> str | None:
        if type(value) is not list:
            return f" is {shown(value)}"
        for at, item in enumerate(value):
            if (wrong := check(item)) is not None:
                return f"[{at}]{wrong}"
        return None

    return inner


def row(*checks: Check) -> Check:
    """Returns the check of a list with these parts."""

    def inner(value: Any) -> str | None:
        if type(value) is not list or len(value) != len(checks):
            return f" is {shown(value)}"
        for at, check in enumerate(checks):
            if (wrong := check(value[at])) is not None:
                return f"[{at}]{wrong}"
        return None

    return inner


def table(check: Check) -> Check:
    """Returns the check of an object whose keys are names of any kind."""

    def inner(value: Any) -> str | None:
        if type(value) is not dict or not all(map(is_name, value)):
            return f" is {shown(value)}"
        for key, item in value.items():
            if (wrong := check(item)) is not None:
                return f"[{key!r}]{wrong}"
        return None

    return inner


def record(needed: dict[str, Check], allowed: dict[str, Check] | None = None) -> Check:
    """Returns the check of an object with these keys, and no others."""
    checks = needed | (allowed or {})

    def inner(value: Any) -> str | None:
        if type(value) is not dict or not needed.keys() <= value.keys() <= checks.keys():
            return f" is {shown(value)}"
        for key, item in value.items():
            if (wrong := checks[key](item)) is not None:
                return f".{key}{wrong}"
        return None

    return inner


def none(value: Any) -> str | None:
    """Checks that there is no value."""
    return None if value is None else " is a value"  # that of `either` says which


NONE, NAME = none, leaf(is_name)
LINE = leaf(lambda v: type(v) is str and v.isprintable())
FLAG, TEXT = leaf(lambda v: type(v) is bool), leaf(lambda v: type(v) is str)
IDENTIFIER = leaf(lambda v: is_name(v) and v.isidentifier() and not keyword.iskeyword(v))
RANKS = leaf(lambda v: type(v) is int and 1 <= v <= MOST_RANKS)
COUNT = leaf(lambda v: type(v) is int and 1 <= v <= MOST_MICRO_BATCHES)
INTEGER, NUMBER = leaf(lambda v: type(v) is int), leaf(lambda v: is_number(v, (int, float)) and 0 <= v < math.inf)
DTYPE, SIZES = leaf(lambda v: is_name(v) and v in DTYPES), many(leaf(lambda v: type(v) is int and v >= 0))


def one_of(*names: str) -> Check:
    """Returns the check of a text that is one of these."""
    return leaf(lambda value: type(value) is str and value in names)


def call_argument(value: Any) -> str | None:
    """Checks an argument of a call: a plain value, a list of arguments, or an object of one key that says what it
    is."""
    kind = type(value)
    if kind is list:
        return ARGUMENTS(value)
    if kind is not dict:
        return None if value is None or kind in (bool, int) or is_name(value) else f" is {shown(value)}"
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key in KINDS:
            return KINDS[key](inner)
    return f" is {shown(value)}"


def structure(value: Any) -> str | None:
    """Checks arguments or results as lists of lists and plain values; `unflatten` checks the rest."""
    if type(value) is list:
        return many(structure)(value)
    plain = value is None or is_name(value) or (isinstance(value, (bool, int, float)) and math.isfinite(value))
    return None if plain else f" is {shown(value)}"


def choice(value: Any) -> str | None:
    """Checks the choice of a node: a signature and its factor for each axis, then the axes in the order of their
    cuts."""
    fits = type(value) is list and value and WAYS(value[:-1]) is None and INTEGERS(value[-1]) is None
    return None if fits and sorted(value[-1]) == list(range(len(value) - 1)) else f" is {shown(value)}"


ARGUMENTS, INTEGERS, WAYS = many(call_argument), many(INTEGER), many(row(NAME, either(NONE, NAME)))
KWARGS = record({"dict": table(call_argument)})
KINDS = {"node": IDENTIFIER, "float": NAME, "dict": table(call_argument), "device": NAME, "torch": NAME}
TENSOR = row(DTYPE, SIZES, SIZES)
VALUE = either(NONE, TENSOR, record({"several": many(either(NONE, TENSOR))}))
META = {
    "module": NAME, "stack_trace": INTEGER, "phase": one_of("forward", "backward"), "decomposed": NAME, PANEL_OF: NAME,
    RECOMPUTES: NAME, REDUCE: one_of(FLOAT32, EXCHANGE), SENDS: one_of(*EIGHT_BITS), "part": row(NAME, SIZES),
    SLICE: INTEGER,
}  # fmt: skip
NODE = {"name": IDENTIFIER, "op": NAME, "target": NAME, "val": VALUE, "args": ARGUMENTS, "kwargs": KWARGS}
CONSTANTS = {"constants": table(row(DTYPE, SIZES, ARGUMENTS))}
GRAPH = CONSTANTS | {"graph": many(record(NODE, META))}
HELD = one_of("bfloat16", "float16")  # the type in which a model has what is stored in float32
PORTS = record({
    "inputs": many(record({"kind": one_of(*INPUTS), "name": NAME})),
    "outputs": many(record({"kind": one_of(*OUTPUTS), "name": NAME})), "arguments": structure, "results": structure,
    "tied": table(NAME), "unused": many(NAME), "frozen": many(NAME),
}, {"masters": table(HELD)})  # fmt: skip
LAYOUTS = many(either(NONE, NAME))
ENDS = either(NAME, LAYOUTS)
MEMORY = either(NONE, NUMBER, leaf(lambda v: v == math.inf))
OPTIMIZER = leaf(lambda v: v in (*OPTIMIZER_STATE,))
TIMES = leaf(lambda v: is_number(v, (int, float)) and 1 <= v < math.inf)
OPTIONS = record({
    "train": FLAG, "model": NAME, "objective": one_of(*OBJECTIVES), "optimizer": OPTIMIZER,
    "reduce": one_of(*REDUCTIONS),
}, {
    "dtype": either(NONE, NAME), "eval": many(NAME), "left_out": many(NAME), "memory": MEMORY, "pin": table(NAME),
    "spread": FLAG, "microbatches": COUNT, "panels": COUNT, "slices": COUNT, "recompute": NAME, "baseline": NAME,
    "gather": one_of(*GATHERED), "schedule": NAME, "stages": either(NONE, NAME), "inputs": ENDS, "outputs": ENDS,
    "guards": table(many(LINE)), "cuts": many(NAME),
    "dynamic": many(row(NAME, either(INTEGER, many(either(NONE, NAME))))),
    "capacity": TIMES, "overflow": one_of(*OVERFLOWS), "routing": TIMES, "most": TIMES,
    "masters": FLAG, "loss": leaf(lambda v: type(v) is int and v >= 0),
})  # fmt: skip
FIGURE = either(NONE, LINE, leaf(lambda v: is_number(v, (int, float))))
FIGURES = table(either(FIGURE, table(FIGURE), many(table(FIGURE))))  # `Cluster.of` checks the rest
NAMED = many(row(one_of(*INPUTS, *OUTPUTS), NAME, either(INTEGER, NAME)))  # ports of a chunk, with what they stand for
CHUNK = record({
    **GRAPH, "ports": PORTS, "choices": table(choice), "aliases": many(row(IDENTIFIER, INTEGER, NAME)),
    "outputs": LAYOUTS, "arguments": NAMED, "results": NAMED, "receives": NAMED, "sends": NAMED,
}, {"orders": many(row(many(one_of(*PARTS)), many(either(INTEGER, INTEGERS))))})  # fmt: skip
LOOP = record({
    "count": COUNT, "in_loop": many(row(NAME, NAME)), "joins": many(either(INTEGER, NAME)), "before": record(GRAPH),
    "after": record(GRAPH), "inputs": table(row(NAME, INTEGER, either(NONE, INTEGER))),
    "shapes": many(row(one_of(*INPUTS), NAME, TENSOR)),
})  # fmt: skip
PLAN = {
    "torch": NAME, "mesh": many(row(IDENTIFIER, RANKS)), "cluster": FIGURES, "ports": PORTS, "options": OPTIONS,
    "lower_bound": NUMBER, "serial_bound": NUMBER, "chunks": many(CHUNK), "loop": either(NONE, LOOP),
}  # fmt: skip
PROGRAMS = PLAN | {
    "programs": table(many(record(GRAPH))), "ranks": INTEGERS, "given": LAYOUTS, "left": LAYOUTS,
    "inputs": many(VALUE), "outputs": many(VALUE),
}  # fmt: skip
TRACES = {"traces": many(TEXT)}  # lines of the source, to which nodes refer by number
EXPORTED = record(PROGRAMS | TRACES | {"steps": table(record(PROGRAMS))})


def misfit(body: dict[str, Any]) -> str | None:
    """Returns the first place in the body of a file that no plan or exported file has so; None if there is none."""
    return (EXPORTED if "programs" in body else record(PLAN | TRACES))(body)
