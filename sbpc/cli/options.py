"""Define the options that commands share, and make the plan that they ask for."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sbpc.api.loading import load
from sbpc.api.planning import plan
from sbpc.cli.progress import progress
from sbpc.cli.target import DTYPES, Target, import_file, load_target, split_target
from sbpc.errors import MeshError, PinError, PlanError, SbpcError
from sbpc.mesh.cluster import CLUSTERS, Cluster
from sbpc.mesh.mesh import Mesh
from sbpc.plans.options import GATHERED, OBJECTIVES, OPTIMIZER_STATE, OVERFLOWS, RECOMPUTE, REDUCTIONS
from sbpc.plans.staged.schedules import INTERLEAVED, SCHEDULES, USUAL
from sbpc.rules.proof.rule_files import load_rules

UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def add_file(parser: Any, *names: str, help: str, metavar: str = "FILE", **more: Any) -> None:
    """Adds an option that takes the name of a file or a folder."""
    parser.add_argument(*names, type=file_name, metavar=metavar, help=help, **more)


def add_planning(parser: argparse.ArgumentParser, mesh: bool = True) -> None:
    """Adds the options of everything that plans; without `mesh` those of what plans on many meshes."""
    if mesh:
        add_mesh(parser)
    known = f"{', '.join(CLUSTERS)}, or a file of figures (default: ideal)"
    add_file(parser, "--cluster", metavar="NAME_OR_FILE", help=known)
    names = [name for name in OPTIMIZER_STATE if name is not None]
    whose = "whose state is counted, and used (default: adamw)"
    parser.add_argument("--optimizer", choices=names, default="adamw", help=whose)
    parser.add_argument("--memory", type=quantity, metavar="BYTES", help="what a rank may take at its peak, as in 80G")
    add_step(parser)


def add_step(parser: argparse.ArgumentParser) -> None:
    """Adds the options of everything that captures a step."""
    parser.add_argument("--no-train", action="store_true", help="plan the forward alone")
    types = "float32, float64 cast the model; bfloat16, float16 autocast its ops"
    parser.add_argument("--dtype", choices=DTYPES, help=types)
    rules = "reviewed rules of ops that have none, as `sbpc probe` writes them; may be given again"
    add_file(parser, "--rules", action="append", default=[], help=rules)


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Adds the options of what plans on one mesh."""
    axes = "as in data=2,tensor=2, outermost axis first"
    parser.add_argument("--mesh", type=mesh_axes, metavar="AXIS=SIZE,...", help=axes)
    for name, more in ON_A_MESH.items():
        parser.add_argument(f"--{name}", **more)
    add_file(parser, "--dump", metavar="DIR", help="write the graph after every pass into this folder")


def mesh_axes(text: str) -> dict[str, int]:
    """Returns `data=2,tensor=2` as a dict."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not name.isidentifier() or not equals or not size.isdigit() or name in axes:
            what = f"{part.strip()!r} in {text!r}: axes are given once each, as in data=2,tensor=2"
            raise argparse.ArgumentTypeError(what)
        axes[name] = int(size)
    return axes


def number(convert: Callable[[str], Any], fits: Callable[[Any], bool], what: str) -> Callable[[str], Any]:
    """Returns the type of an option that is a number."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if fits(value := convert(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")

    return parse


def with_unit(text: str) -> float:
    """Returns a number with a decimal prefix: 80G."""
    prefix = text[-1:] if text[-1:] in UNITS else ""
    return float(text.removesuffix(prefix)) * UNITS[prefix]


positive = number(int, lambda count: count > 0, "integer from 1 on")
quantity = number(with_unit, lambda size: 0 <= size < math.inf, "number of bytes, as in 80G")
rate = number(float, lambda rate: 0 <= rate < math.inf, "learning rate, as in 0.001")
multiple = number(float, lambda times: 1 <= times < math.inf, "multiple of the mean, as in 1.25")
seconds = number(float, lambda wait: 0 < wait < math.inf, "number of seconds, as in 60")


ON_A_MESH: dict[str, dict[str, Any]] = {  # keywords of `sbpc.plan` for one mesh, with what argparse makes of each
    "pin": {
        "action": "append",
        "default": [],
        "metavar": "NAME=LAYOUT",
        "help": "as in '*.up.weight=S(0)@tensor'; may be given again",
    },
    "objective": {
        "choices": OBJECTIVES,
        "help": "what is to be least: seconds, where collectives run beside computing (the default); serial, where "
        "they do not; or bytes",
    },
    "microbatches": {
        "type": positive,
        "metavar": "N",
        "help": "run the step in this many parts of the batch (default: 2 where that is faster, else 1)",
    },
    "panels": {
        "type": positive,
        "metavar": "N",
        "help": "cut products next to a collective into this many parts (default: 2, 4 or 8 where that is faster, "
        "else 1)",
    },
    "slices": {
        "type": positive,
        "metavar": "N",
        "help": "run the last product and the loss on this many parts of the positions, one after the other (default: "
        "1, or as many as a tight --memory asks for)",
    },
    "recompute": {
        "choices": RECOMPUTE,
        "help": "what a backward computes again instead of having it kept (default: none)",
    },
    "reduce": {
        "choices": REDUCTIONS,
        "help": "how gradients are summed over ranks, or in which 8 bits they cross slow links (default: float32)",
    },
    "gather": {"choices": GATHERED, "help": "in which 8 bits parameters cross slow links (default: as stored)"},
    "capacity": {
        "type": multiple,
        "metavar": "TIMES",
        "help": "rows of experts that a rank has at most, times the mean (default: any)",
    },
    "overflow": {"choices": OVERFLOWS, "help": "what is done with rows beyond --capacity (default: error)"},
    "routing": {
        "type": multiple,
        "metavar": "TIMES",
        "help": "rows of experts of the busiest rank that prices expect, times the mean (default: 1); `sbpc run "
        "--trace` tells it",
    },
    "loss": {"metavar": "NAME", "help": "the result to train on, by its key, field or place (default: see sbpc.plan)"},
    "masters": {
        "action": argparse.BooleanOptionalAction,
        "help": "store parameters that are held in 16 bits in float32 (default: if they are trained by an optimizer)",
    },
    "stages": {"metavar": "AXIS", "help": "cut the model into stages of a pipeline along this axis of the mesh"},
    "schedule": {
        "metavar": "NAME",
        "help": f"the order in which stages, or a loop, work: {', '.join(SCHEDULES)} (default: {USUAL}, of a loop "
        "without stages also breadth-first, where that is faster); "
        f"{INTERLEAVED}:3: 3 chunks on each",
    },
}
PLANNING = ("mesh", "cluster", "no_train", "memory", *ON_A_MESH, "dump")  # options that cannot change a finished plan


def file_name(text: str) -> str:
    """Returns the name of a file or a folder as it is given."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def mesh_of(options: argparse.Namespace) -> Mesh:
    """Returns the mesh that the options describe."""
    if options.mesh is None:
        raise MeshError("there is no mesh\n  Give one, as in --mesh data=2,tensor=2.")
    try:
        return Mesh(cluster=cluster_of(options), **options.mesh)
    except TypeError:  # an axis called "cluster" or "self"
        raise MeshError(f"no axis can have one of the names {', '.join(options.mesh)}\n  Call it otherwise.") from None


def cluster_of(options: argparse.Namespace) -> Cluster | str | None:
    """Returns the cluster that the options name, or the one in the file that they name."""
    name: str | None = options.cluster
    return name if name is None or name in CLUSTERS else cluster_at(name)


def cluster_at(name: str) -> Cluster:
    """Returns the cluster of this name, or the one in the file of this name."""
    if name in CLUSTERS:
        return CLUSTERS[name]
    if not Path(name).exists():
        raise MeshError(
            f"no cluster is called {name!r}, and there is no such file\n"
            f"  Known are {', '.join(CLUSTERS)}; `sbpc profile -o` and Cluster.save write files of others."
        )
    return Cluster.load(name)


def pins_of(options: argparse.Namespace) -> dict[str, str]:
    """Returns the pins by pattern."""
    pins: dict[str, str] = {}
    for text in options.pin:
        name, equals, layout = text.partition("=")
        if not equals:
            raise PinError(f"--pin {text!r} names no layout\n  A pin is NAME=LAYOUT, as in '*.up.weight=S(0)@tensor'.")
        if pins.setdefault(name, layout) != layout:
            raise PinError(f"--pin {name!r} is given as {pins[name]!r} and as {layout!r}\n  Remove one of them.")
    return pins


def make_folder(path: str) -> None:
    """Makes the folder for a dump, before anything is planned. Raises SbpcError if that is not possible."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SbpcError(f"cannot make the folder {path}: {error.strerror}\n  Name another for --dump.") from error


def without_planning(options: argparse.Namespace, file: str, *unused: str) -> None:
    """Raises SbpcError for options that cannot change the plan in a file."""
    given = [f"--{option.replace('_', '-')}" for option in (*PLANNING, *unused) if getattr(options, option)]
    if given:
        raise SbpcError(f"{file} is a plan: {', '.join(given)} cannot change it\n  Remove what is for planning.")


def plan_of(options: argparse.Namespace, target: str) -> tuple[Any, Target]:
    """Returns the plan that the options ask for, and the target, which is built only if the options are right."""
    split_target(target)
    mesh = mesh_of(options)
    asked = {name: getattr(options, name) for name in ("optimizer", "memory", *ON_A_MESH)} | {"pin": pins_of(options)}
    if options.dump:
        make_folder(options.dump)
    built = target_of(options, target)
    asked = {name: value for name, value in asked.items() if value is not None}
    about = {"kwargs": built.kwargs, "train": not options.no_train, "dtype": built.dtype, "dump": options.dump}
    with progress():
        return plan(built.model, built.args, mesh, **about, **asked), built


def target_of(options: argparse.Namespace, target: str) -> Target:
    """Registers the rules that the options name and returns the target."""
    register(options, target)
    return load_target(target, options.dtype)


def register(options: argparse.Namespace, target: str | None = None) -> None:
    """Registers the rules that the options name, after the target's file, whose import registers the ops of these
    rules."""
    if target is not None:
        import_file(split_target(target)[0])
    for file in options.rules:
        load_rules(file)


def is_plan(text: str) -> bool:
    """Returns whether a text names the file of a plan, and no target. Raises PlanError if that file does not exist."""
    if text.endswith(".sbpc") and not Path(text).exists():
        raise PlanError(f"there is no file {text!r}\n  Name one that `sbpc plan -o` wrote, or a target.")
    return Path(text).is_file() and not text.endswith(".py")


def plan_at(options: argparse.Namespace, text: str) -> Any:
    """Returns the plan in a file, or the plan of a target that the options ask for."""
    if not is_plan(text):
        return plan_of(options, text)[0]
    without_planning(options, text, "dtype")
    register(options)
    return load(text)
