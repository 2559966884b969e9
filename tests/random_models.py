"""Random models, planned with random options, and checked against eager torch: `python -m tests.random_models SEED [COUNT]`."""

from __future__ import annotations

import collections
import copy
import functools
import hashlib
import os
import random
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh, SbpcError
from sbpc.api.task import Task, prepare
from sbpc.errors import CaptureError, PlanError
from sbpc.graph.pytree import flatten
from sbpc.mesh.cluster import CLUSTERS
from sbpc.plans.plan import Plan
from tests.compare import relative_error
from tests.random_nets import APART, INPUTS, Layer, Net, built, draw_net, source
from tests.random_plans import random_loop, random_plan
from tests.rounding import RoundedOtherwise

TOLERANCE, HALF_TOLERANCE = 1e-10, 0.1
WAYS, SPREAD = 3, 10  # ways to round, and how many times further than these other sums may be off
HELD = ("", "refused", "left out")  # outcomes that are no failure
# whose backward reads products
COSTLY = ("linear", "gated", "tied", "attention", "conv1d", "conv2d", "moe", "multihead", "turns")
# what is known to be wrong -> how it fails, which cases may fail so
BROKEN: dict[str, tuple[str, Callable[[Case], bool]]] = {}


@dataclass(frozen=True)
class Case:
    """A net, a mesh, and what `sbpc.plan` is asked. share: the memory limit as a share of what the plan without one takes."""

    net: Net
    mesh: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    share: float | None = None
    pins: int = 0

    def text(self) -> str:
        """Python that can be pasted: it plans, simulates, and compares the loss and gradients with eager torch."""
        text = source(self.net)
        given = ["args", "kwargs=kwargs", *(["loss=loss", "targets=targets"] if self.net.end.kind == APART else [])]
        options = ", ".join(
            ["model", given[0], "mesh", *given[1:], *(f"{k}={v!r}" for k, v in asked(self, built(text)).items())]
        )
        text += f"\nimport sbpc\n\nmesh = sbpc.Mesh({', '.join(f'{k}={v!r}' for k, v in self.mesh.items())})\n"
        if self.share:
            text += f"free = sbpc.plan({options})\n"
            options += f", memory={self.share} * free.cost.memory['total']"
        return f"{text}plan = sbpc.plan({options})\n{TAIL}"


TAIL = """\
plan.verify()
run = sbpc.simulate(plan, model, (*args, *globals().get("targets", ())), kwargs, seed=3)
out = model(*args, **kwargs)
print(run.outputs, out)
if isinstance(out, torch.Tensor) and run.gradients:
    out = loss(out, *targets) if "loss" in globals() else out
    out.backward(torch.ones_like(out))
    for name, p in model.named_parameters():
        if p.grad is not None:
            print(name, float((run.gradients[name] - p.grad).abs().max() / p.grad.abs().max()))
print(run.bytes_sent, plan.cost.bytes_sent, run.peak_memory, plan.cost.memory)
"""


class Failure(Exception):
    """A check that failed. Its first word says which one."""


def draw_case(seed: int) -> Case:
    """Draws the case of a number."""
    net = draw_net(seed)
    r = random.Random(f"options {seed}")
    sizes, most = list[int](), r.choice((4, 4, 4, 8))
    while not 1 < torch.Size(sizes).numel() <= most:
        sizes = [r.choice((1, 2, 2, 2, 3, 4)) for _ in range(r.choice((1, 1, 1, 2, 2, 3)))]
    mesh: dict[str, Any] = dict(zip("abc", sizes))
    if r.random() < 0.3:
        mesh["cluster"] = r.choice(sorted(CLUSTERS))
    options: dict[str, Any] = {"objective": "serial"} if r.random() < 0.6 else {}  # "seconds" takes longer to plan
    take: Callable[[float], bool] = lambda share: r.random() < share  # noqa: E731
    if take(0.15):
        options["capture"] = "aot"
    if take(0.5):
        options["optimizer"] = r.choice(("sgd", "momentum", None))
    if net.half:
        options["dtype"] = torch.bfloat16
    loss = net.end.kind not in ("outputs",)
    way = r.random()
    divisors = [n for n in (1, 2, 3, 4) if net.sizes["B"] % n == 0]
    if loss and way < 0.2:
        options |= {
            "stages": r.choice([name for name, size in zip("abc", sizes) if size > 1]),
            "schedule": r.choice(("1f1b", "gpipe", "interleaved", "zbv")),
        }
        options |= {"microbatches": r.choice(divisors)} if take(0.6) else {}
    elif loss and way < 0.4:
        options["microbatches"] = r.choice(divisors)
    else:
        options |= {"panels": r.choice((1, 1, 1, 2, 3, 4)), "microbatches": 1} if take(0.6) else {}  # None takes longer
        options |= {"train": False} if take(0.1) else {}
        options |= {"spread": True} if take(0.04) else {}
        options |= {"objective": "bytes"} if take(0.08) else {}
        where = [
            f"S({dim})@{axis}"
            for dim, n in enumerate("BTC")
            for axis in "abc"[: len(sizes)]
            if may_split(net.sizes[n], mesh[axis])
        ]
        options |= {"inputs": [r.choice(where)]} if where and take(0.08) else {}
    if take(0.3) and net.has(*COSTLY):
        options["recompute"] = r.choice(("selective", "full", "auto"))
    if options.get("microbatches", 1) > 1 and seed % 2:
        options = {name: value for name, value in options.items() if name != "objective"} | {
            "schedule": "breadth-first"
        }
    share = r.choice((1.0, 0.9, 0.8, 0.7, 0.6)) if take(0.2) and len(net.layers) < 2 and len(sizes) < 3 else None
    return Case(net, mesh, options, share, r.randrange(1, 1000) if take(0.15) else 0)


def may_split(size: int, ranks: int) -> bool:
    """Whether every rank gets a piece."""
    return ranks == 1 or -(-size // ranks) * (ranks - 1) < size


def pins(model: nn.Module, case: Case) -> dict[str, str]:
    """Random legal pins of some parameters."""
    r = random.Random(case.pins)
    axes = [name for name in case.mesh if name not in ("cluster", case.options.get("stages"))]
    found = {}
    for name, p in model.named_parameters():
        axis = r.choice(axes) if axes else None
        dims = [dim for dim, size in enumerate(p.shape) if axis and may_split(size, case.mesh[axis])]
        if axis and r.random() < 0.3 and not re.search(r"\.gate|unused", name):
            found[name] = r.choice([f"B@{axis}", *(f"S({dim})@{axis}" for dim in dims)])
    return found


def asked(case: Case, made: dict[str, Any]) -> dict[str, Any]:
    """The options of `sbpc.plan` but those that belong to the net and the limit."""
    options = case.options | ({"pin": pins(made["model"], case)} if case.pins else {})
    if "inputs" in options:
        options["inputs"] = options["inputs"] + [None] * (
            len(flatten((made["args"], made["kwargs"]), "arguments")[0]) - 1
        )
    return options


def planned(case: Case, made: dict[str, Any], mesh: Mesh | None = None) -> Plan:
    """The plan of a case, or, on a mesh of one rank, one without options that change no numbers."""
    options = asked(case, made)
    if mesh is not None:
        options = {key: options[key] for key in ("capture", "dtype", "train") if key in options} | {
            "microbatches": 1,
            "objective": "serial",
        }
    options |= {"loss": made["loss"], "targets": made["targets"]} if "loss" in made else {}
    plan = functools.partial(
        sbpc.plan, made["model"], made["args"], mesh or Mesh(**case.mesh), kwargs=made["kwargs"], **options
    )
    if case.share and mesh is None:
        return plan(memory=case.share * plan().cost.memory["total"])
    return plan()


def prepared(case: Case, made: dict[str, Any]) -> Task:
    """The captured step of a case."""
    about = {key: case.options[key] for key in ("capture", "dtype") if key in case.options}
    about |= {"loss": made["loss"], "targets": made["targets"]} if "loss" in made else {}
    return prepare(made["model"], made["args"], kwargs=made["kwargs"], **about)


@dataclass
class Expected:
    """What a step gives on one device."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    input_gradient: Tensor | None = None

    @classmethod
    def of(cls, run: Any) -> Expected:
        """What a simulated step gives."""
        return cls(flatten(run.outputs, "outputs")[0], run.gradients, run.buffers, run.input_gradients.get(0))

    def by_name(self) -> dict[str, Tensor | None]:
        """All values by what they are."""
        values: dict[str, Tensor | None] = {f"output {at}": value for at, value in enumerate(self.outputs)}
        values |= {f"gradient of {name}": value for name, value in self.gradients.items()}
        values |= {f"buffer {name}": value for name, value in self.buffers.items()}
        return values | {"gradient of input": self.input_gradient}


def expected(case: Case, made: dict[str, Any], rounded: int | None = None) -> Expected:
    """A step of eager torch; with random numbers, of a plan for one rank, as eager torch draws others.

    rounded: the number of another way to round, which eager torch alone has.
    """
    with nullcontext() if rounded is None else RoundedOtherwise(rounded):
        found = eager(case, made)  # which may refuse the net
    return Expected.of(simulated(planned(case, made, Mesh(one=1)), made)) if is_drawing(case.net) else found


def is_drawing(net: Net) -> bool:
    """Whether it draws random numbers."""
    return net.has("dropout") and "eval" not in net.done


def eager(case: Case, made: dict[str, Any]) -> Expected:
    """A step of eager torch."""
    model, args, kwargs = copy.deepcopy(made["model"]), made["args"], made["kwargs"]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.autocast("cpu", torch.bfloat16, enabled=case.net.half):
        out = model(*args, **kwargs)
        out = made["loss"](out, *made["targets"]) if "loss" in made else out
    leaves, _ = flatten(out, "outputs")
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    wanted = [p for p in (*model.parameters(), args[0]) if p.requires_grad]
    roots = [leaf for leaf in leaves if leaf.requires_grad]
    gradients: Sequence[Tensor | None] = [None] * len(wanted)
    if roots and wanted:
        gradients = torch.autograd.grad(roots, wanted, [torch.ones_like(leaf) for leaf in roots], allow_unused=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}
    by_name = dict(zip(names, gradients)) if case.options.get("train", True) else {}
    return Expected(
        [leaf.detach() for leaf in leaves],
        by_name,
        buffers,
        gradients[-1] if len(wanted) > len(names) and by_name else None,
    )


def simulated(plan: Any, made: dict[str, Any]) -> Any:
    """The step of a plan on all ranks."""
    return sbpc.simulate(plan, made["model"], (*made["args"], *made.get("targets", ())), made["kwargs"], seed=3)


def check_numbers(what: str, run: Any, wanted: Expected, half: bool, others: Callable[[], list[Expected]]) -> None:
    """Outputs, gradients and buffers are those of one device. others: what that gives with other rounding, asked
    where they are not: a value that this alone moves as far is worth no more."""
    found = Expected.of(run)
    demand(
        len(found.outputs) == len(wanted.outputs),
        f"outputs of {what}: {len(found.outputs)} and not {len(wanted.outputs)}",
    )
    for name, value in wanted.gradients.items():
        demand(name in found.gradients or value is None, f"gradient of {what}: {name} is absent")
        demand(
            (found.gradients.get(name) is None) == (value is None),
            f"gradient of {what}: {name} is {found.gradients.get(name)} and not {value}",
        )
    for name in wanted.buffers:
        demand(name in found.buffers, f"buffer of {what}: {name} is not told")
    gradients = [value for value in wanted.gradients.values() if value is not None]
    largest = max((float(value.abs().max()) for value in gradients), default=0.0)
    told = found.by_name()
    for name, value in wanted.by_name().items():
        if value is None:
            continue
        made = told[name]
        demand(bool(torch.isfinite(value.double()).all()), f"net of no finite numbers: {name}")
        demand(
            made.shape == value.shape and made.dtype == value.dtype,
            f"shape of {what}: {name} is {made.dtype} {tuple(made.shape)}",
        )
        # some are zero but for rounding
        least = max((0.1 if half else 1e-3) * largest * name.startswith("gradient"), 1e-30)
        error = relative_error(made, value, least)
        if error > (HALF_TOLERANCE if half else TOLERANCE):
            worth = max((relative_error(other.by_name()[name], value, least) for other in others()), default=0.0)
            demand(error <= SPREAD * worth, f"numbers of {what}: {name} is wrong by {error:.1e}, rounding {worth:.1e}")


def demand(holds: bool, what: str) -> None:
    """Raises Failure unless something holds."""
    if not holds:
        raise Failure(what)


def check_costs(what: str, plan: Any, run: Any) -> None:
    """Bytes that are sent, and memory, are as predicted."""
    cost, count = plan.cost, getattr(plan, "count", 1)
    for axis in {**cost.bytes_sent, **run.bytes_sent}:
        told, sent = cost.bytes_sent.get(axis, 0.0), run.bytes_sent.get(axis, 0.0)
        # a scalar that no ring can cut is predicted as if it were cut
        close = abs(told - sent) <= max(1e-3 * told, 8.0 * count)
        demand(close, f"bytes of {what}: {sent} along {axis}, predicted {told}")
    most, peak, slack = cost.memory["total"], run.peak_memory, 0.05 * run.peak_memory + 64
    # no program has the optimizer's state; without it another stage may hold most
    least = most - cost.memory["optimizer"]
    demand(
        least - slack <= peak <= slack + (most if getattr(plan, "axis", None) else least),
        f"memory of {what}: {peak}, predicted {least}",
    )


def check(case: Case) -> str:
    """Raises Failure if something is wrong with a case, or what is no SbpcError; returns the first line of one, or nothing."""
    torch.manual_seed(0)
    made, seed = built(source(case.net)), case.net.seed
    try:
        wanted = expected(case, made)
        plan = planned(case, made)
    except SbpcError as error:
        # one device runs it
        demand(not isinstance(error, CaptureError) or error.__cause__ is None, f"capture: {error}")
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    run = check_plan("the plan", plan, case, made, wanted, verify=seed % 4 == 1)
    if not {"inputs", "spread"} & set(case.options):
        gm = None if plan.loop is None else prepared(case, made).gm
        drawn = random_plan(plan, seed) if gm is None else random_loop(plan, gm, random.Random(seed))
        check_plan("a random plan", drawn, case, made, wanted, verify=seed % 4 == 3)
    return check_file(plan, run, made)


def rounded_otherwise(case: Case, made: dict[str, Any]) -> list[Expected]:
    """What one device gives with other rounding, where eager torch tells."""
    return [] if is_drawing(case.net) else [expected(case, made, way) for way in range(WAYS)]


def check_plan(what: str, plan: Any, case: Case, made: dict[str, Any], wanted: Expected, verify: bool) -> Any:
    """Checks one plan of a case, and returns its step. verify: takes longer than all else."""
    if verify:
        plan.verify()
    run = simulated(plan, made)
    check_numbers(what, run, wanted, case.net.half, lambda: rounded_otherwise(case, made))
    check_costs(what, plan, run)
    return run


def check_file(plan: Any, run: Any, made: dict[str, Any]) -> str:
    """A plan that is saved and loaded says, gives and costs the same; returns why it cannot be saved, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            plan.save(Path(folder) / "plan.sbpc")
        except PlanError as error:
            demand("a rule by sbpc.rule" in str(error), f"file: {error}")  # of an op that is in no file
            return f"file: {str(error).splitlines()[0]}"
        again = sbpc.load(Path(folder) / "plan.sbpc")
    demand(str(again) == str(plan), "text of the plan is another after loading")
    same = simulated(again, made)
    found, expected = ([*flatten(each.outputs, "")[0], *each.gradients.values()] for each in (same, run))
    demand(
        all(torch.equal(a, b) for a, b in zip(found, expected) if a is not None),
        "numbers of the plan are others after loading",
    )
    demand(
        same.bytes_sent == run.bytes_sent and again.cost.memory == plan.cost.memory,
        "costs of the plan are others after loading",
    )
    return ""


def digest(seed: int) -> str:
    """A digest of the plan of a number, or of its refusal."""
    case = draw_case(seed)
    try:
        plan = planned(case, built(source(case.net)))
        layouts = [each.layouts for each in plan.chunks] if plan.loop is not None else plan.layouts
        text = f"{plan} {layouts}"
    except SbpcError as error:
        text = str(error)
    return hashlib.sha256(text.encode()).hexdigest()


def elsewhere(seeds: Sequence[int]) -> list[str]:
    """Digests of plans that a process with another PYTHONHASHSEED makes."""
    command = [sys.executable, "-m", "tests.random_models", "--digests", *map(str, seeds)]
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    return subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": other}, check=True, capture_output=True, text=True
    ).stdout.split()


def outcome(case: Case) -> tuple[str, str]:
    """What a check gives: "" where all holds, "refused" with the first line of the error, or what fails, and all of it."""
    kind, text = result(case)
    known = (reason for reason, (fails, has) in BROKEN.items() if re.fullmatch(fails, kind) and has(case))
    reason = next(known, None)
    return ("left out", reason) if reason else (kind, text)


def result(case: Case) -> tuple[str, str]:
    """The same, whatever is known to be broken."""
    try:
        refused = check(case)
        return ("refused", re.sub(r"'[^']*'|%\S+|\d[\d,.]*", "..", refused)) if refused else ("", "")
    except Failure as found:
        return str(found).split(":")[0], str(found)
    except Exception as error:
        stack = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in stack if "/sbpc/" in frame.filename]
        if not frames and any(frame.filename == "net.py" for frame in stack):
            return "refused", "by eager torch"
        place = f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "outside of sbpc"
        return f"{type(error).__name__} in {place}", "".join(traceback.format_exception(error))


def smaller(case: Case) -> Iterator[Case]:
    """Cases that lack something of one."""
    net = case.net
    for at in range(len(net.layers)):
        yield replace(case, net=replace(net, layers=net.layers[:at] + net.layers[at + 1 :]))
    for name in case.options:
        yield replace(case, options={key: value for key, value in case.options.items() if key != name})
    for axis in case.mesh:
        rest = {key: value for key, value in case.mesh.items() if key != axis}
        if set(rest) - {"cluster"} and case.options.get("stages") != axis:
            yield replace(case, mesh=rest)
        if axis != "cluster" and case.mesh[axis] > 2:
            yield replace(case, mesh=case.mesh | {axis: 2})
    for name in net.done:
        yield replace(case, net=replace(net, done=tuple(each for each in net.done if each != name)))
    yield replace(case, share=None)
    yield replace(case, pins=0)
    for plain in ({"start": "x"}, {"given": INPUTS[0]}, {"end": Layer("square", 0)}):
        yield replace(case, net=replace(net, **plain))
    yield replace(case, net=replace(net, half=False), options={k: v for k, v in case.options.items() if k != "dtype"})
    for name in "BTCW":
        if net.sizes[name] > 2:
            yield replace(case, net=replace(net, sizes=net.sizes | {name: 2} | ({"H": 1} if name == "C" else {})))


def shrunk(case: Case, kind: str) -> Case:
    """The smallest case found that fails in the same way."""
    for other in smaller(case):
        if other != case and outcome(other)[0] == kind:
            return shrunk(other, kind)
    return case


def report(case: Case) -> str:
    """What fails of a case, as a smaller one."""
    small = shrunk(case, outcome(case)[0])
    kind, text = outcome(small)
    return f"# python -m tests.random_models {case.net.seed}: {kind}\n{small.text()}\n# " + text.strip().replace(
        "\n", "\n# "
    )


def main(words: Sequence[str]) -> int:
    """Prints the text of one case and what fails, as a smaller case; with a count, only what fails of so many cases."""
    if words[0] == "--digests":
        print("\n".join(digest(int(word)) for word in words[1:]))
        return 0
    first, count = int(words[0]), int(words[1]) if len(words) > 1 else 1
    if count == 1:
        print(draw_case(first).text())
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for case in map(draw_case, range(first, first + count)):
        kind, text = outcome(case)
        counts[kind, text if kind in HELD else ""] += 1
        if kind not in HELD:
            print(report(case), flush=True)
    for (kind, text), number in counts.most_common():
        print(f"# {number:6} {kind or 'hold'} {text}")
    return int(any(kind not in HELD for kind, _ in counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
