"""How much of real models the rules cover: `python -m tests.coverage [model...]` prints a row for each as it is known.

All models take about five minutes of CPU; a name, or a part of one (`gpt2`, `vision`, `sdpa`), chooses among them. A call is whole where the solver's plan splits nothing of it on any axis, so that every rank does all of it.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

import sbpc
from sbpc import Mesh, Plan
from sbpc.plans.cost import kernel_work
from sbpc.plans.measure import kernel_of
from sbpc.rules import registry
from tests import hf_models, models, vision_models

MESH = Mesh(x=2, y=2)
MOST_FLOPS = 1.05 / 4  # of those of one device, that a rank may have
HEAD = (
    "model",
    "CPU s",
    "calls",
    "overloads",
    "without a rule",
    "whole: flops",
    "whole: bytes",
    "flops/rank",
    "whole calls with most bytes",
)


@dataclass(frozen=True)
class Row:
    """What the plan of one model covers. flops, bytes: the shares of work and memory traffic in calls that stay whole.

    ratio: flops of a rank as a part of those of one device. most: the overloads of whole calls, by bytes.
    """

    model: str
    calls: int
    overloads: int
    lacking: tuple[str, ...]
    flops: float
    bytes: float
    ratio: float
    most: tuple[str, ...]

    def cells(self) -> tuple[str, ...]:
        """The cells of the table."""
        lacking, most = ", ".join(self.lacking) or "none", ", ".join(self.most) or "none"
        shares = f"{self.flops:.3%}", f"{self.bytes:.3%}", f"{self.ratio:.4f}"
        return self.model, str(self.calls), str(self.overloads), lacking, *shares, most


def row(name: str, plan: Plan) -> Row:
    """Count the calls of a plan."""
    calls = [node for node in plan.boxed.graph.nodes if node.op == "call_function" and "choice" in node.meta]
    short = {node: str(node.target).removeprefix("aten.").removesuffix(".default") for node in calls}
    lacking = dict.fromkeys(short[node] for node in calls if "match" not in node.meta)
    flops, moved = [0.0, 0.0], [0.0, 0.0]
    whole: Counter[str] = Counter()
    for node in calls:
        kernel = kernel_of(node, plan.mesh)
        if kernel.free:
            continue
        work, traffic = kernel_work(kernel, (1,) * len(plan.mesh.sizes))
        flops[is_whole(node)] += work
        moved[is_whole(node)] += traffic
        whole[short[node]] += int(traffic) if is_whole(node) else 0
    most = tuple(op for op, size in whole.most_common(3) if size)
    shares = (flops[1] / sum(flops), moved[1] / sum(moved))
    return Row(
        name,
        len(calls),
        len(set(short.values())),
        tuple(lacking),
        *shares,
        plan.cost.flops / plan.cost.flops_one_device,
        most,
    )


def is_whole(node: Node) -> bool:
    """Whether a call does the same on every rank: nothing is split, and nothing it reads is a partial sum."""
    signatures = node.meta["choice"].signatures
    return all(signature.factor is None and signature == node.meta["signatures"][0] for signature in signatures)


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """All models, each as a function that gives the module, its arguments and its keyword arguments."""
    for name, made in models.MODELS.items():
        yield name, lambda made=made: (*made(), {})
    for made in (vision_models.resnet, vision_models.convnext, vision_models.unet):
        yield f"vision {made.__name__}", lambda made=made: (*made(), {})
    for name, build in hf_models.MODELS.items():
        for kind in ("sdpa", "eager"):
            yield f"transformers {name} {kind}", lambda build=build, kind=kind: library(*build(kind, 1))


def library(model: torch.nn.Module, kwargs: dict[str, Any]) -> Any:
    return model, (), kwargs


def listed() -> dict[str, Any]:
    """The ops of overloads.txt: those of thirteen joint graphs of nine models, and of attention and norms on CUDA."""
    names = (Path(__file__).parent / "overloads.txt").read_text().split()
    return {name: functools.reduce(getattr, name.split("."), torch.ops) for name in names}


def main(wanted: list[str]) -> None:
    """Print how many of the listed ops have a rule; plan each model and print its row as soon as it is known."""
    lacking = [name for name, op in listed().items() if registry.row(op) is None]
    own = f"{len(registry.TABLE)} overloads have a rule of their own"
    print(
        f"{len(listed()) - len(lacking)} of {len(listed())} listed overloads have a rule, replicated: {', '.join(lacking) or 'none'}; {own}"
    )
    widths = (26, 7, 6, 10, 15, 13, 13, 11, 0)
    print("".join(cell.ljust(width) for cell, width in zip(HEAD, widths)), flush=True)
    ratios: dict[str, float] = {}
    for name, made in cases():
        if wanted and not any(word in name.split() for word in wanted):
            continue
        start = time.process_time()
        found = row(name, planned(made))
        cells = (name, f"{time.process_time() - start:.0f}", *found.cells()[1:])
        print("".join(f"{cell} ".ljust(width) for cell, width in zip(cells, widths)), flush=True)
        ratios[name] = found.ratio
    over = [name for name, ratio in ratios.items() if ratio > MOST_FLOPS]
    print(
        f"{len(ratios)} models; more than {MOST_FLOPS:.4f} of the flops of one device on a rank: {', '.join(over) or 'none'}"
    )


def planned(made: Callable[[], Any]) -> Plan:
    """The solver's plan of one of `cases`."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model, args, kwargs = made()
    with hf_models.Doubled() if kwargs else nullcontext():
        return sbpc.plan(model.double(), args, MESH, kwargs=kwargs)


if __name__ == "__main__":
    main(sys.argv[1:])
