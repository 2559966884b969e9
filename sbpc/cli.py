"""The command line: `sbpc plan`, `show`, `run` and `demo`."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from sbpc.api import load, plan
from sbpc.cluster import CLUSTERS, Cluster
from sbpc.cost import OPTIMIZER_STATE
from sbpc.errors import MeshError, PinError, PlanError, SbpcError
from sbpc.graphtext import graph_text
from sbpc.mesh import Mesh
from sbpc.picture import graph_rows, graph_svg
from sbpc.plan import Plan
from sbpc.report import plan_json, print_plan
from sbpc.runtime import groups
from sbpc.runtime.launch import RankError, as_rank, launch
from sbpc.runtime.module import parallelize
from sbpc.target import DTYPES, USAGE, Target, load_target, split_target
from sbpc.train import OPTIMIZERS, optimizer_of, train

STAGES = ("annotated", "boxed", "local")
PLANNING = ("mesh", "cluster", "pin", "no_train", "memory", "dump")  # of no use with a plan that is made
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
EPILOG = f"""{USAGE}

  sbpc plan  train.py:model --mesh data=2,tensor=2
  sbpc show  train.py:model --mesh data=2,tensor=2 --stage boxed --svg graph.svg
  sbpc run   train.py:model --mesh data=2,tensor=2 --steps 100
  torchrun --nproc-per-node 4 -m sbpc run train.py:model --mesh data=2,tensor=2

Exit codes: 0 all is well, 2 something of yours is to be mended (the message says what), 130 interrupted.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    options = parser().parse_args(arguments)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("sbpc").setLevel(logging.INFO if options.verbose else logging.WARNING)
    if not options.verbose:  # torch logs an op's error with a traceback of its own, before it raises it
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except RankError as error:
        print(f"sbpc: {error}", file=sys.stderr)
        return error.code if error.code > 0 else 128 - error.code
    except SbpcError as error:
        print(f"sbpc: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sbpc: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `sbpc show ... | head`: what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    raw = argparse.RawDescriptionHelpFormatter
    about = "A model written for one device in, the program of every rank of a device mesh out."
    top = argparse.ArgumentParser("sbpc", description=about, epilog=EPILOG, formatter_class=raw)
    top.add_argument("--version", action="version", version=f"sbpc {version('sbpc')}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON, and nothing else, on standard output")
    common.add_argument("-v", "--verbose", action="store_true", help="log what is being done")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, parents=[common], help=text, description=text, epilog=USAGE, formatter_class=raw
        )
        made.set_defaults(command=function)
        return made

    one = command("plan", plan_command, "plan a model and print layouts, collectives, seconds and memory")
    one.add_argument("target", metavar="TARGET", help="file.py:function")
    add_planning(one)
    one.add_argument("-o", "--output", type=file_name, metavar="FILE", help="write the plan to this file (*.sbpc)")
    one = command("show", show_command, "print the graph of a plan at one stage, or draw it")
    one.add_argument("target", metavar="TARGET_OR_PLAN", help="file.py:function, or a file that `sbpc plan -o` wrote")
    add_planning(one)
    one.add_argument("--stage", choices=STAGES, default="boxed", help="which graph (default: boxed)")
    one.add_argument("--rank", type=int, default=0, help="whose program, for --stage local (default: 0)")
    one.add_argument("--svg", type=file_name, metavar="FILE", help="draw it into this file instead of printing it")
    one = command(
        "run", run_command, "train a model: under torchrun as its rank, else on ranks started on this machine"
    )
    one.add_argument("target", metavar="TARGET", help="file.py:function")
    add_planning(one)
    one.add_argument("--plan", type=file_name, metavar="FILE", help="run this plan instead of planning")
    one.add_argument(
        "--steps", type=int, default=10, help="how many steps, all on the arguments of the target (default: 10)"
    )
    one.add_argument("--lr", type=rate, default=1e-3, help="learning rate (default: 0.001)")
    one = command(
        "demo", demo_command, "plan, verify and train a small GPT on 4 processes, beside the same model on one"
    )
    one.add_argument("--steps", type=int, default=50, help="how many steps (default: 50)")
    one.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    one.add_argument(
        "--output", type=file_name, metavar="DIR", default="sbpc-demo", help="folder for its files (default: sbpc-demo)"
    )
    return top


def add_planning(one: argparse.ArgumentParser) -> None:
    """The options of everything that plans."""
    one.add_argument(
        "--mesh", type=mesh_axes, metavar="AXIS=SIZE,...", help="as in data=2,tensor=2, outermost axis first"
    )
    one.add_argument(
        "--cluster",
        type=file_name,
        metavar="NAME_OR_FILE",
        help=f"{', '.join(CLUSTERS)}, or a file of figures (default: ideal)",
    )
    one.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="NAME=LAYOUT",
        help="as in '*.up.weight=S(0)@tensor'; may be given again",
    )
    one.add_argument("--no-train", action="store_true", help="plan the forward alone")
    names = [name for name in OPTIMIZER_STATE if name is not None]
    one.add_argument(
        "--optimizer", choices=names, default="adamw", help="whose state is counted, and used (default: adamw)"
    )
    one.add_argument("--memory", type=quantity, metavar="BYTES", help="what a rank may take at its peak, as in 80G")
    one.add_argument(
        "--dtype", choices=DTYPES, help="float32, float64 cast the model; bfloat16, float16 autocast its ops"
    )
    one.add_argument("--dump", type=file_name, metavar="DIR", help="write the graph after every pass into this folder")


def mesh_axes(text: str) -> dict[str, int]:
    """`data=2,tensor=2` as a dict."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not name.isidentifier() or not equals or not size.isdigit() or name in axes:
            raise argparse.ArgumentTypeError(
                f"{part.strip()!r} in {text!r}: axes are given once each, as in data=2,tensor=2"
            )
        axes[name] = int(size)
    return axes


def quantity(text: str) -> float:
    """A number of bytes with a decimal prefix: 80G."""
    prefix = text[-1:] if text[-1:] in UNITS else ""
    with contextlib.suppress(ValueError):
        if 0 <= (found := float(text.removesuffix(prefix)) * UNITS[prefix]) < math.inf:
            return found
    raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, as in 80G")


def rate(text: str) -> float:
    """A learning rate."""
    with contextlib.suppress(ValueError):
        if 0 <= (found := float(text)) < math.inf:
            return found
    raise argparse.ArgumentTypeError(f"{text!r} is no learning rate, as in 0.001")


def file_name(text: str) -> str:
    """The name of a file or a folder, as it is given."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def mesh_of(options: argparse.Namespace) -> Mesh:
    """The mesh that the options describe."""
    if options.mesh is None:
        raise MeshError("there is no mesh\n  Give one, as in --mesh data=2,tensor=2.")
    cluster = options.cluster
    known = cluster is None or cluster in CLUSTERS or not Path(cluster).exists()
    try:
        return Mesh(cluster=cluster if known else Cluster.load(cluster), **options.mesh)
    except TypeError:  # an axis called "cluster" or "self"
        raise MeshError(f"no axis can have one of the names {', '.join(options.mesh)}\n  Call it otherwise.") from None


def pins_of(options: argparse.Namespace) -> dict[str, str]:
    """The pins by pattern."""
    pins: dict[str, str] = {}
    for text in options.pin:
        name, equals, layout = text.partition("=")
        if not equals:
            raise PinError(f"--pin {text!r} names no layout\n  A pin is NAME=LAYOUT, as in '*.up.weight=S(0)@tensor'.")
        if pins.setdefault(name, layout) != layout:
            raise PinError(f"--pin {name!r} is given as {pins[name]!r} and as {layout!r}\n  Remove one of them.")
    return pins


def make_folder(path: str) -> None:
    """Make the folder for a dump, before anything is planned. Raises SbpcError if that is not possible."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SbpcError(f"cannot make the folder {path}: {error.strerror}\n  Name another for --dump.") from error


def without_planning(options: argparse.Namespace, file: str, *unused: str) -> None:
    """Refuse options that would be of no use with the plan in a file."""
    given = [f"--{option.replace('_', '-')}" for option in (*PLANNING, *unused) if getattr(options, option)]
    if given:
        raise SbpcError(f"{file} is a plan: {', '.join(given)} cannot change it\n  Remove what is for planning.")


def plan_of(options: argparse.Namespace, target: str) -> tuple[Plan, Target]:
    """The plan that the options ask for, and the target; what is wrong with options is said before that is built."""
    split_target(target)
    mesh, pins = mesh_of(options), pins_of(options)
    if options.dump:
        make_folder(options.dump)
    built = load_target(target, options.dtype)
    about: dict[str, Any] = {"train": not options.no_train, "optimizer": options.optimizer, "memory": options.memory}
    about |= {"dtype": built.dtype, "pin": pins, "dump": options.dump}
    return plan(built.model, built.args, mesh, kwargs=built.kwargs, **about), built


@contextlib.contextmanager
def quiet(options: argparse.Namespace) -> Iterator[None]:
    """With --json: what a target prints goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        yield


def print_json(value: Any) -> None:
    """One JSON value on standard output; infinite and undefined numbers are null."""
    print(json.dumps(finite(value), indent=2, allow_nan=False))


def finite(value: Any) -> Any:
    """The value with null for every number that JSON does not know."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plan_command(options: argparse.Namespace) -> int:
    """`sbpc plan`."""
    check_file(options.output)
    with quiet(options):
        found, _ = plan_of(options, options.target)
        edges = found.verify()
        if options.output:
            write(options.output, found.save)
    if options.json:
        print_json(plan_json(found) | {"verified_edges": edges, "file": options.output})
        return 0
    print_plan(found, Console())
    print(f"verified  {edges:,} edges")
    if options.output:
        print(f"written   {options.output}")
    return 0


def check_file(file: str | None) -> None:
    """Refuse a file that cannot be written, before anything is planned."""
    if file and Path(file).is_dir():
        raise SbpcError(f"cannot write {file}: it is a folder\n  Name a file in it.")
    if file and not Path(file).parent.is_dir():
        raise SbpcError(f"cannot write {file}: there is no folder {Path(file).parent}\n  Make it, or name another.")


def write(file: str, save: Any) -> None:
    """Write a file. Raises SbpcError if that is not possible."""
    try:
        save(file)
    except OSError as error:
        raise SbpcError(f"cannot write {file}: {error.strerror}\n  Name a file that may be written to.") from error


def is_plan(text: str) -> bool:
    """Whether the file of a plan is named, and no target. Raises PlanError if it does not exist."""
    if text.endswith(".sbpc") and not Path(text).exists():
        raise PlanError(f"there is no file {text!r}\n  Name one that `sbpc plan -o` wrote, or a target.")
    return Path(text).is_file() and not text.endswith(".py")


def show_command(options: argparse.Namespace) -> int:
    """`sbpc show`."""
    check_file(options.svg)
    with quiet(options):
        if is_plan(options.target):
            without_planning(options, options.target, "dtype")
            found = load(options.target)
        else:
            found, _ = plan_of(options, options.target)
        gm = {
            "annotated": lambda: found.graph,
            "boxed": lambda: found.boxed,
            "local": lambda: found.local_at(options.rank),
        }[options.stage]()
        if options.svg:
            title = f"{found.options.get('model', 'model')} on {found.mesh}"
            place = f", rank {options.rank}" if options.stage == "local" else ""
            drawn = graph_svg(gm, found.mesh, f"{title}: {options.stage} graph{place}")
            write(options.svg, lambda file: Path(file).write_text(drawn))
    if options.json:
        rows = [row.as_json() for row in graph_rows(gm, found.mesh)]
        print_json({"stage": options.stage, "axes": list(found.mesh.axes), "values": rows, "svg": options.svg})
    elif options.svg:
        print(f"written   {options.svg}")
    else:
        print(graph_text(gm, found.mesh), end="")
    return 0


def run_command(options: argparse.Namespace) -> int:
    """`sbpc run`: as a rank where a launcher has set RANK, else as the launcher."""
    if options.steps < 1:
        raise SbpcError(f"--steps {options.steps}\n  Train one step at least.")
    if options.optimizer not in OPTIMIZERS:
        raise SbpcError(f"cannot train with {options.optimizer!r}\n  Known are {', '.join(OPTIMIZERS)}.")
    if options.plan:
        without_planning(options, options.plan)
    if "RANK" in os.environ:
        with as_rank():
            return run_rank(options)
    with quiet(options):
        found = load(options.plan) if options.plan else plan_of(options, options.target)[0]
        if not options.json:
            print_plan(found, Console())
            sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="sbpc-run-") as folder:
        file = Path(folder, "plan.sbpc")
        found.save(file)
        arguments = ["-m", "sbpc", "run", options.target, "--plan", str(file)]
        arguments += ["--steps", str(options.steps), "--lr", str(options.lr)]
        arguments += ["--optimizer", options.optimizer, *(["--dtype", options.dtype] if options.dtype else [])]
        launch(arguments + ["--json"] * options.json + ["--verbose"] * options.verbose, found.mesh.ranks)
    return 0


def run_rank(options: argparse.Namespace) -> int:
    """Train as one rank of those that torchrun or `launch` has started."""
    with quiet(options):
        if options.plan:
            found, target = load(options.plan), load_target(options.target, options.dtype)
        else:
            found, target = plan_of(options, options.target)
        if not found.options["train"]:
            raise SbpcError("the plan is for the forward alone\n  Plan without --no-train.")
        model = parallelize(target.model, found)
        first = os.environ["RANK"] == "0"
        start = time.perf_counter()

        def tell(step: int, loss: float) -> None:
            if first and not options.json:
                print(f"step {step:4d}  loss {loss:.6f}", flush=True)

        batches = [(target.args, target.kwargs)] * options.steps
        losses = train(model, batches, optimizer_of(options.optimizer, model, options.lr), tell)
        seconds = time.perf_counter() - start
        groups.stop()
    if first and options.json:
        mesh = dict(zip(found.mesh.axes, found.mesh.sizes))
        print_json({"mesh": mesh, "losses": losses, "seconds": seconds, "seconds_per_step": seconds / options.steps})
    elif first:
        print(f"{options.steps} steps in {seconds:.1f} s on {found.mesh.ranks} ranks")
    return 0


def demo_command(options: argparse.Namespace) -> int:
    """`sbpc demo`."""
    from sbpc.demo import demo

    console = Console(stderr=options.json)
    found = demo(Path(options.output), options.steps, options.dtype, console)
    if options.json:
        print_json(found)
    return 0 if found["equal"] else 1
