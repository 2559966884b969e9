"""What a generated program costs beside eager torch and torch.compile: `python -m tests.bench.overhead`.

A step (forward, backward, gradients) of a GPT of 4 layers, 256 wide, on one rank and one thread; CPU seconds, medians of
rounds in which all candidates take turns, and the median over rounds of each one's ratio to another. "loop" is a quarter of a step
in four micro-batches of that size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import sbpc
from sbpc.plans.step_programs import BACKWARD, FORWARD, StepPrograms
from sbpc.runtime.executors import code
from sbpc.runtime.prepared import prepared
from tests import models

PARTS = 4
Step = Callable[[], Any]


def step_of(module: Callable[..., Any], model: nn.Module, args: Any) -> Step:
    """A training step without the optimizer."""
    parameters = list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        module(*args).backward()

    return step


def program_of(plan: sbpc.Plan, model: nn.Module, args: Any) -> Step:
    """The generated code alone: parameters in, gradients out, no autograd. Gradients live until the next step, as in all."""
    programs, count = StepPrograms(plan), len(plan.parameters)
    forward, backward = (
        code(prepared(programs.program(name, 0), torch.device("cpu"), plan.options.overlaps, early, late))
        for name, early, late in ((FORWARD, 1, 0), (BACKWARD, 0, count))
    )
    values = [parameter.detach() for parameter in model.parameters()]
    positions = [torch.tensor([0]) for _ in plan.mesh.axes]
    tangent = torch.ones(())
    gradients: list[Any] = []

    def step() -> None:
        gradients.clear()
        with torch.no_grad():
            found = [*forward([*values, *args, *positions])[1:], tangent, *positions]
            gradients.extend(backward(found))

    return step


def whole_step(module: Any, args: Any) -> Step:
    """A training step of a parallel module in one program, without the optimizer."""

    def step() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        module.step(*args)

    return step


def gpt(batch: int, sequence: int) -> models.Model:
    """The model and its batch."""
    torch.manual_seed(0)
    return models.gpt2(batch, sequence, vocab=256, width=256, heads=8, layers=4, tied=False)


def loop_of(batch: int, sequence: int) -> Step:
    """A step in PARTS micro-batches of the batch."""
    model, args = gpt(PARTS * batch, sequence)
    return whole_step(
        sbpc.parallelize(model, sbpc.plan(model, args, sbpc.Mesh(data=1), microbatches=PARTS), device="cpu"), args
    )


def candidates(batch: int, sequence: int, names: list[str]) -> dict[str, Step]:
    """The steps by name."""
    model, args = gpt(batch, sequence)
    plan = sbpc.plan(model, args, sbpc.Mesh(data=1))
    found: dict[str, Callable[[], Step]] = {
        "eager": lambda: step_of(model, model, args),
        "program": lambda: program_of(plan, model, args),
        "module": lambda: (lambda m: step_of(m, m, args))(sbpc.parallelize(model, plan)),
        "loop": lambda: loop_of(batch, sequence),
        "compile": lambda: step_of(torch.compile(model), model, args),
        "inductor": lambda: (lambda m: step_of(m, m, args))(sbpc.parallelize(model, plan, executor="inductor")),
    }
    return {name: found[name]() for name in names}


def cpu_seconds(step: Step, times: int) -> float:
    """CPU seconds of one step."""
    start = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - start) / times


RATIOS = (("program", "eager", 1.0), ("module", "eager", 1.0), ("loop", "module", 1.1), ("inductor", "compile", 1.05))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="eager,program,module,loop,compile,inductor")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp()
    os.environ.setdefault("RANK", "0")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    steps = candidates(options.batch, options.sequence, options.only.split(","))
    for step in steps.values():
        cpu_seconds(step, 3)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            seconds[name].append(cpu_seconds(step, 5) / (PARTS if name == "loop" else 1))
    for name, found in seconds.items():
        print(f"{name:9} {1e3 * statistics.median(found):8.2f} ms  (least {1e3 * min(found):.2f})")
    ratios = {}
    for name, other, limit in RATIOS:
        if name in seconds and other in seconds:
            ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds[other]))
            ratios[f"{name}/{other}"] = ratio
            print(f"{name} takes {ratio:.3f} times {other}; wanted: at most {limit}")
    print(json.dumps({"ms": {name: 1e3 * statistics.median(found) for name, found in seconds.items()}, **ratios}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
