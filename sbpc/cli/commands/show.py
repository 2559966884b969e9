"""`sbpc show`: print or draw the graph of a plan at one stage."""

from __future__ import annotations

import argparse
from pathlib import Path

from sbpc.api.planning import load
from sbpc.cli.options import add_planning, file_name, is_plan, plan_of, register, without_planning
from sbpc.cli.output import check_file, print_json, quiet, write
from sbpc.errors import SbpcError
from sbpc.inspect.graph_rows import graph_rows
from sbpc.inspect.graph_text import graph_text
from sbpc.inspect.picture import graph_svg

STAGES = ("annotated", "boxed", "local")

NAME = "show"
HELP = "print the graph of a plan at one stage, or draw it"


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "target", metavar="TARGET_OR_PLAN", help="file.py:function, or a file that `sbpc plan -o` wrote"
    )
    add_planning(parser)
    parser.add_argument("--stage", choices=STAGES, default="boxed", help="which graph (default: boxed)")
    parser.add_argument("--rank", type=int, default=0, help="whose program, for --stage local (default: 0)")
    parser.add_argument("--svg", type=file_name, metavar="FILE", help="draw it into this file instead of printing it")


def run(options: argparse.Namespace) -> int:
    """`sbpc show`."""
    check_file(options.svg)
    if options.rank and options.stage != "local":
        raise SbpcError(
            f"--rank {options.rank} is of no use with --stage {options.stage}\n  Add --stage local, or remove it."
        )
    with quiet(options):
        if is_plan(options.target):
            without_planning(options, options.target, "dtype")
            register(options)
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
