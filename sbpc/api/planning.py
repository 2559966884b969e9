"""What a user calls to get a plan: `plan` and `baseline`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from sbpc._compat import trace_artifact
from sbpc.api.alike import Alike
from sbpc.api.checks import check_mesh, checked, with_options
from sbpc.api.plan_cache import remembered
from sbpc.api.task import Captured, captured
from sbpc.errors import check_kinds
from sbpc.inspect.graph_text import graph_text
from sbpc.inspect.report import plan_json
from sbpc.mesh.mesh import Mesh
from sbpc.plans.options import Options
from sbpc.plans.plan import Plan

STEP = ("kwargs", "loss", "targets", "train", "dtype", "capture", "dump")  # what `captured` takes


@with_options
def plan(
    model: nn.Module,
    args: Sequence[Any],
    mesh: Mesh,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | str | None = None,
    targets: Sequence[Any] = (),
    train: bool = True,
    dtype: Any = None,
    capture: str = "light",
    dump: str | Path | None = None,
    **options: Any,
) -> Plan:
    """Returns the plan of one step of `model(*args, **kwargs)` on `mesh`: the fastest layouts, with a bound and a
    proof.

    model and args may be on the meta device: no op is computed, nothing is allocated. The loss is the result called
    `loss`, else a scalar that the model returns alone, first of several, or as the only one with a gradient; a text
    names another: loss="1" or loss="losses.first", and then the others get no gradient. A function as `loss` makes
    it: the step is `loss(model(*args, **kwargs), *targets)`, and
    `sbpc.simulate` and the module from `sbpc.parallelize` take `(*args, *targets)`. Without it, the gradients of the
    outputs come from outside: call the parallel module, and `backward` on a loss of your own. A plan holds for the
    shapes of args, for train or eval mode as the modules are in now, for the code of your own forwards, and for the
    numbers that they, your hooks and `loss` read from attributes, globals and free variables: with others it is
    refused, so make those that change buffers or arguments. Attributes of the loss and of hooks are looked at in the
    process that made the plan. A forward that counts its calls in an attribute or a global, keeps a tensor in one,
    or draws random numbers of Python or numpy, is refused, and so are hooks on parameters.

    train      forward and backward, else the forward alone. To evaluate beside training, plan `model.eval()` with
               `train=False, pin=plan.parameters`, with stages also `cuts=plan.cuts`; see `also` of `sbpc.parallelize`.
    dtype      the type for autocast, such as torch.bfloat16; None is no autocast.
    capture    "light", or "aot" for torch's own tracer.
    dump       a folder for the text of the graph after every pass.
    {options}

    The logger "sbpc" tells the seconds of each pass at INFO, "sbpc.progress" what the search is at, at DEBUG. An op
    without a rule runs whole on every rank, and `plan.notes` says so; see `sbpc.rule` and `sbpc.probe`.

    >>> import sbpc, torch
    >>> with torch.device("meta"):
    ...     model, x = torch.nn.Linear(16, 64), torch.empty(32, 16)
    >>> options = {"pin": {"weight": "B"}, "dynamic": {"weight": ("4*h", "h")}, "objective": "serial"}
    >>> plan = sbpc.plan(model, (x,), sbpc.Mesh(p=2), **options)
    >>> plan.layout("weight"), plan.cost.gap, sorted(map(str, plan.cost.bytes_expr["p"].free_symbols))
    ([B], 0.0, ['h', 'p'])

    Raises CaptureError if the model is not one graph, PinError for pins that match nothing or cannot be met,
    LayoutError, MemoryLimitError if nothing fits into `memory`, SbpcError for a bad option. Each says what to do.
    """
    check_mesh(mesh)
    asked = checked(mesh, train=train, **options)
    step = captured(
        model, args, kwargs=kwargs, loss=loss, targets=targets, train=train, dtype=dtype, capture=capture, dump=dump
    )
    return knowing(made(step, mesh, asked), options, targets, loss=loss, dtype=dtype, capture=capture)


def knowing(plan: Plan, options: Mapping[str, Any], targets: Any = (), **about: Any) -> Plan:
    """Returns a plan that knows how to plan further steps of its model."""
    plan.alike = Alike(plan.mesh, about, options, len(targets) if isinstance(targets, (tuple, list)) else 1, made)
    return plan


def made(step: Captured, mesh: Mesh, asked: Options) -> Plan:
    """Returns the plan of a captured step, made before or now."""
    return traced(remembered(step, mesh, asked))


def baseline(name: str, model: nn.Module, args: Sequence[Any], mesh: Mesh, **options: Any) -> Plan:
    """Returns the plan that an expert would make by hand, under the same cost model. options are those of `sbpc.plan`.

    "data"              every axis splits the batch, parameters are whole
    "fsdp"              the same, parameters are stored once over all ranks
    "megatron"          columns then rows on the last axis, the batch on the others (Shoeybi et al. 2019)
    "megatron+sp"       between those pairs the last axis splits the sequence (Korthikanti et al. 2022)
    "summa"             batch and features on the last two axes (Xu and You 2021)
    "agarwal"           a 3-D product on the last three axes (Agarwal et al. 1995; Singh et al. 2024)
    "one weird trick"   convolutions split the batch, linear layers are columns then rows (Krizhevsky 2014)

    What a scheme leaves open is solved, so this is the best plan of its kind. Where nothing overlaps
    (`objective="serial"`) no plan of `sbpc.plan` is slower than the best of these, except where all nodes together have
    more than 100,000 choices (a large model, or a few layers on four axes): there it may be slower by a gap below 3 %.

    Raises PlanError if the scheme does not fit the model or the mesh, and what `sbpc.plan` raises.
    """
    check_mesh(mesh)
    check_kinds(name=(name, "a text"))
    about = {key: options.pop(key) for key in STEP if key in options}
    asked = checked(mesh, train=about.get("train", True), **options)
    further = {key: about[key] for key in ("targets", "loss", "dtype", "capture") if key in about}
    return knowing(made(captured(model, args, **about), mesh, replace(asked, baseline=name)), options, **further)


def traced(plan: Plan) -> Plan:
    """Returns a plan that is told of in the trace of torch, if one is written."""
    trace_artifact("plan", "string", lambda: str(plan))
    trace_artifact("plan_figures", "json", lambda: json.dumps(plan_json(plan)))
    if plan.loop is None:
        trace_artifact("plan_graph", "string", lambda: graph_text(plan.boxed, plan.mesh))
    return plan
