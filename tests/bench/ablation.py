"""What each mechanism of the solver and of the memory search buys: `python -m tests.bench.ablation [cases] [--off NAMES] [--memory PARTS]`.

Every row is a case with one mechanism turned off, beside the same case with all of them: CPU seconds outside capture, seconds of
the plan, gap; of serial plans, as nothing of the solver knows overlap. A mechanism that buys less than a tenth of the time and
less than 0.3 % of plan and gap in every case should go.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import sbpc
from sbpc import Mesh
from sbpc.errors import MemoryLimitError
from sbpc.mesh.cluster import CLUSTERS, Cluster
from sbpc.passes.memory import search as memory
from sbpc.passes.memory.search import MemorySearch
from sbpc.solver import search
from sbpc.solver.bounder import Bounder
from sbpc.solver.messages import trws
from sbpc.solver.messages.trws import Messages
from sbpc.solver.surroundings import Surroundings
from tests.bench import zoo

FAST = CLUSTERS["h100"]
ETHERNET = dataclasses.replace(FAST, name="eth", inter_bandwidth=3e9, inter_latency=3e-5)
SLOW = dataclasses.replace(
    FAST, name="slow", peak=5e10, memory_bandwidth=1e10, launch=5e-6, ranks_per_node=1, inter_latency=2e-4, inter_bandwidth=25e6
)  # fmt: skip
Make = Callable[[], zoo.Case]
CASES: dict[str, tuple[Make, tuple[int, ...], Cluster]] = {
    "gpt 2x2": (zoo.gpt, (2, 2), FAST),
    "block 4x4x4": (lambda: zoo.block(4), (4, 4, 4), FAST),
    "gpt3-24 16x4": (lambda: zoo.gpt3(24, 4), (16, 4), FAST),
    "gpt3-12 8x4x4x8": (lambda: zoo.gpt3(12), (8, 4, 4, 8), FAST),
    "llama 32x8": (zoo.llama, (32, 8), FAST),
    "llama 16x4x4": (zoo.llama, (16, 4, 4), FAST),
    "llama8 slow 4x2": (lambda: zoo.llama(8, 16, 512), (4, 2), SLOW),
    "mixtral8 4x4x4": (lambda: zoo.mixtral(8), (4, 4, 4), FAST),
    "t5-6 eth 8x4": (lambda: zoo.t5(6, 16), (8, 4), ETHERNET),
    "unet eth 16x2": (lambda: zoo.unet(6, 32), (16, 2), ETHERNET),
    "unet 4x4x4": (lambda: zoo.unet(6), (4, 4, 4), FAST),
}
Patch = tuple[Any, str, Any]
FREE: dict[str, list[Patch]] = {
    "machine code": [(trws, "machine", None)],
    "messages along paths": [(Messages, "follow_paths", lambda self, follow: None)],
    "balance of cost shares": [(Messages, "balance_from", 0)],
    "single precision": [(Bounder, "messages_of", lambda self, problem: Messages(problem, self.big_m))],
    "ends": [(Bounder, "solve_ends", lambda self: None)],
    "restricted program": [(search.Search, "solve_restricted", lambda self, bounder: None)],
    "labels of other orders": [(search, "OWN", 0)],
    "finer classes": [(search, "BOUND_GAP", {False: 1.0, True: 1.0})],
    "all labels below the gap": [(search, "COLUMNS", -1)],
    "tidy": [(Surroundings, "tidy", lambda self, labels, seconds: labels)],
}
LIMITED: dict[str, list[Patch]] = {
    "rounds of prices": [(memory, "ROUNDS", 1)],
    "plans beside the best prices": [(memory, "LADDER", ())],
    "program at prices": [(memory, "ROUGH", 1.0)],
    "mixtures": [(MemorySearch, "mix", lambda self, turns, more=0, until=0.0: None)],
    "polish": [(MemorySearch, "polish", lambda self, more=0, until=0.0: False)],
    "rows about a plan": [(memory, "ROWS", 1)],
    "sharper bound": [(MemorySearch, "sharpen", lambda self: None)],
}


@contextlib.contextmanager
def without(patches: list[Patch]) -> Iterator[None]:
    """Turns a mechanism off."""
    with contextlib.ExitStack() as stack:
        for where, name, value in patches:
            stack.enter_context(mock.patch.object(where, name, value))
        yield


def planned(case: str, memory_limit: float | None) -> tuple[float, sbpc.Plan | None]:
    """CPU seconds outside capture, and the plan; None if the limit cannot be met."""
    make, sizes, cluster = CASES[case]
    model, args, kwargs = make()
    mesh = Mesh(cluster=cluster, **dict(zip("abcd", sizes)))
    start = time.process_time()
    try:
        plan = sbpc.plan(model, args, mesh, kwargs=kwargs, memory=memory_limit, objective="serial")
    except MemoryLimitError:
        return time.process_time() - start, None
    return time.process_time() - start - plan.times["capture"], plan


def line(name: str, seconds: float, plan: sbpc.Plan | None, whole: tuple[float, sbpc.Plan | None] | None = None) -> str:
    """A row of the table; whole: that of all mechanisms."""
    text = f"  {name:30} {seconds:7.2f} s"
    if plan is None:
        return text + "  no plan"
    text += f"  plan {plan.cost.seconds:.6g} s  gap {plan.cost.gap:.3%}"
    if whole is not None and whole[1] is not None:
        slower = plan.cost.seconds / whole[1].cost.seconds - 1
        text += f"   {seconds / whole[0]:.2f} times as long, plan {slower:+.2%}, gap {plan.cost.gap - whole[1].cost.gap:+.2%}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"some of {', '.join(CASES)}; all without")
    parser.add_argument("--off", nargs="*", help=f"some of {', '.join(FREE | LIMITED)}; all without")
    parser.add_argument(
        "--memory", type=float, nargs="*", default=[], help="also under these parts of the plan's bytes"
    )
    options = parser.parse_args()
    for case in options.cases or CASES:
        whole = planned(case, None)
        assert whole[1] is not None
        for part in [None, *options.memory]:
            limit = None if part is None else part * whole[1].cost.memory["total"]
            with_all = whole if limit is None else planned(case, limit)
            print(case if part is None else f"{case}, {part:.0%} of its bytes", flush=True)
            print(line("all", *with_all), flush=True)
            for name, patches in (FREE if limit is None else LIMITED).items():
                if not options.off or name in options.off:
                    with without(patches):
                        print(line(f"without {name}", *planned(case, limit), with_all), flush=True)


if __name__ == "__main__":
    main()
