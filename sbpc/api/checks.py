"""Checks of what `sbpc.plan` is asked, before anything is captured."""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
import math
import operator
import textwrap
from collections.abc import Callable, Mapping
from numbers import Integral
from types import SimpleNamespace
from typing import Any, TypeVar

from torch.fx import GraphModule

from sbpc.errors import PinError, PlanError, SbpcError, check_kinds, is_number, shown
from sbpc.graph.ports import PARAMETER
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import layout_of_rows
from sbpc.plans.options import BYTES, ERROR, Options
from sbpc.plans.staged.schedules import chunks_in

KEYWORDS = [each for each in dataclasses.fields(Options) if each.metadata]  # of `sbpc.plan`
WIDTH = 116  # of a line of help() about an option
T = TypeVar("T")


def check_mesh(mesh: Any) -> None:
    """Raises SbpcError for what is no mesh."""
    if not isinstance(mesh, Mesh):
        raise SbpcError(
            f"the mesh is of type {type(mesh).__name__}\n"
            "  Give sbpc.Mesh(data=2, tensor=2) or Mesh.from_device_mesh(mesh)."
        )


def with_options(function: Callable[..., T]) -> Callable[..., T]:
    """Gives a function whose last argument is `**options` the keywords of `Options`, and its docstring what they
    mean."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind != each.VAR_KEYWORD]
    more = [inspect.Parameter(each.name, own[-1].kind, default=each.default, annotation=each.type) for each in KEYWORDS]
    function.__signature__ = signature.replace(parameters=own + more)  # type: ignore[attr-defined]
    texts = [
        textwrap.wrap(f"{each.name:10} {each.metadata['doc']}", WIDTH, subsequent_indent=" " * 11) for each in KEYWORDS
    ]
    function.__doc__ = (function.__doc__ or "").replace(
        "{options}", "\n    ".join(line for text in texts for line in text)
    )
    return function


def checked(mesh: Mesh | None, train: bool = True, **asked: Any) -> Options:
    """Returns the options of a plan. Raises SbpcError for what is of the wrong kind or cannot be planned, before
    anything is captured.

    mesh: that of the plan, None where there are many.
    """
    names = [each.name for each in KEYWORDS]
    if unknown := [name for name in asked if name not in names]:
        raise TypeError(f"there is no option {unknown[0]!r}\n  Options are {', '.join(names)}.")
    known = SimpleNamespace(**{each.name: each.default for each in KEYWORDS} | asked)
    check_kinds(
        **{each.name: (getattr(known, each.name), *kinds) for each in KEYWORDS if (kinds := each.metadata["kinds"])}
    )
    check_layouts(known)
    for name in ("microbatches", "panels", "slices"):
        count = getattr(known, name)
        if count is not None and (not is_number(count, Integral) or count < 1):
            raise SbpcError(f"{name} is {shown(count)}\n  It is an integer from 1 on, or None.")
        asked |= {} if count is None else {name: operator.index(count)}
    for name in ("capacity", "routing"):
        times = getattr(known, name)
        if times is None and name == "capacity":
            continue
        if not is_number(times, (int, float)) or not 1 <= times < math.inf:
            raise SbpcError(f"{name} is {shown(times)}\n  It is a multiple of the mean, a number from 1 on.")
    if known.overflow != ERROR and known.capacity is None:
        raise SbpcError(f"overflow={known.overflow!r} without capacity=\n  Say how many rows are not too many.")
    for each in KEYWORDS:
        value, among = getattr(known, each.name), each.metadata["among"]
        if among and value not in among:
            raise SbpcError(f"{each.name} is {shown(value)}\n  It is one of {', '.join(map(repr, among))}.")
    if known.memory is not None and (not is_number(known.memory, (int, float)) or not known.memory > 0):
        raise SbpcError(f"memory is {shown(known.memory)}\n  It is the bytes that a rank has, a positive number.")
    options = Options(**asked)
    check_rows(mesh, options)
    if options.schedule is not None:
        chunks_in(options.schedule)
        if options.stages is None and not (train and may_loop(options)):
            what = f"schedule={options.schedule!r} of a step that is no loop"
            loop = "microbatches= above 1 without inputs=, outputs=, spread=, panels= and objective='bytes'"
            raise SbpcError(f"{what}\n  Give stages=, or {loop}, or leave it out.")
    if mesh is not None and options.stages is not None:
        check_staged(mesh, options)
    return options


def check_layouts(known: Any) -> None:
    """Raises PinError for pins, inputs and outputs that are no layouts."""
    layouts = [(f"pin {name!r}", layout) for name, layout in (known.pin or {}).items()]
    for kind in ("inputs", "outputs"):
        given = getattr(known, kind) or ()
        layouts += [(kind, layout) for layout in ([] if isinstance(given, str) else given) if layout is not None]
    for name, layout in layouts:
        if not isinstance(layout, (str, Layout)):
            raise PinError(
                f"{name}: {shown(layout)} is no layout\n  A layout is a text such as 'S(0)@data', or a sbpc.Layout."
            )


def check_rows(mesh: Mesh | None, options: Options) -> None:
    """Raises SbpcError for axes of each rank's own rows that the mesh has not, or that say something else of
    outputs."""
    if isinstance(options.outputs, str) and options.outputs != options.inputs:
        what = f"outputs={options.outputs!r} with inputs={options.inputs!r}"
        raise SbpcError(f"{what}\n  Name the axes of inputs=, or give a list of layouts.")
    if options.own_rows is None:
        return
    if options.spread:
        raise SbpcError("inputs= names axes with spread=\n  Leave one of them out.")
    if options.stages is not None and options.stages in map(str.strip, options.own_rows.split(",")):
        todo = "Ranks of all stages of one batch give the same rows: name the other axes."
        raise SbpcError(f"inputs={options.own_rows!r} names the axis of the stages\n  {todo}")
    if mesh is not None:
        layout_of_rows(options.own_rows, mesh)


def may_loop(asked: Options) -> bool:
    """Returns whether micro-batches are asked for, and nothing that a loop over them does not have."""
    own = asked.own_rows
    layouts = asked.inputs not in (None, own) or asked.outputs not in (None, own)
    others = layouts or asked.spread or (asked.panels or 1) > 1
    return (asked.microbatches or 1) > 1 and not others and asked.objective != BYTES


def check_staged(mesh: Mesh, options: Options) -> None:
    """Raises SbpcError for what cannot be asked of a plan with stages."""
    mesh.without(options.stages)
    if options.objective == BYTES:
        raise SbpcError("objective='bytes' with stages=\n  Leave it out: a pipeline is planned to be fast.")
    if options.panels not in (None, 1):
        raise SbpcError("panels= with stages=\n  Leave it out: stages and loops are not cut into panels.")
    free = (None, False) if options.own_rows is None else (None, False, options.own_rows)
    given = [name for name in ("inputs", "outputs", "spread") if getattr(options, name) not in free]
    if given:
        todo = 'Leave it out, or name the axes of each rank\'s own rows: inputs="data".'
        raise SbpcError(f"{given[0]}= with stages=: inputs and outputs are whole on every rank\n  {todo}")


def values_pinned(gm: GraphModule, pins: Mapping[str, Any]) -> list[str]:
    """Returns the pins that name no parameter."""
    ports = gm.meta["ports"]
    names = [*(port.name for port in ports.inputs if port.kind == PARAMETER), *ports.tied]
    return [pattern for pattern in pins if not fnmatch.filter(names, pattern)]


def check_parts(gm: GraphModule, options: Options) -> None:
    """Raises PlanError for what cannot be asked of a step in several micro-batches: their graph has other values."""
    pinned = values_pinned(gm, options.pin)
    if pinned or options.dynamic is not None:
        what = f"the pin {pinned[0]!r} of a value" if pinned else "dynamic="
        raise PlanError(
            f"{what} with microbatches=\n  Pin parameters alone and name no dims, or plan with microbatches=1."
        )
