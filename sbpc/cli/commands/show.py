"""Define `sbpc show`: print or draw the graph of a plan at one stage."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch.fx import GraphModule

from sbpc.cli.options import add_file, add_planning, plan_at
from sbpc.cli.output import check_file, print_json, quiet, write
from sbpc.errors import SbpcError
from sbpc.inspect.graph_rows import graph_rows
from sbpc.inspect.graph_text import graph_text
from sbpc.inspect.picture import graph_svg
from sbpc.inspect.python_text import python_text
from sbpc.plans.plan import Plan

STAGES = ("annotated", "boxed", "local")

NAME = "show"
HELP = "print the graph of a plan at one stage, or draw it"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    target = "file.py:function, or a file that `sbpc plan -o` wrote"
    parser.add_argument("target", metavar="TARGET_OR_PLAN", help=target)
    add_planning(parser)
    parser.add_argument("--stage", choices=STAGES, default="boxed", help="which graph (default: boxed)")
    parser.add_argument("--rank", type=int, default=0, help="whose program, for --stage local (default: 0)")
    parser.add_argument("--python", action="store_true", help="print it as Python that runs, with what each line makes beside it")
    add_file(parser, "--svg", help="draw it into this file instead of printing it")
    add_file(parser, "--html", help="write one page about the whole plan into this file instead, which loads nothing")
    add_file(parser, "--trace", help="with --html: draw the step that `sbpc run --trace` measured below the predicted one")


def run(options: argparse.Namespace) -> int:
    """Runs `sbpc show`."""
    check_file(options.svg)
    check_file(options.html)
    if options.rank and options.stage != "local":
        raise SbpcError(
            f"--rank {options.rank} is of no use with --stage {options.stage}\n  Add --stage local, or remove it."
        )
    if options.trace and not options.html:
        raise SbpcError("--trace is of no use without --html\n  Add --html FILE, or remove it.")
    with quiet(options):
        plan = plan_at(options, options.target)
        gm = graph_at(plan, options)
        if options.svg:
            draw(plan, gm, options)
        if options.html:
            plan.save_page(options.html, trace=options.trace)
    if options.json:
        rows = [row.as_json() for row in graph_rows(gm, plan.mesh)]
        print_json({"stage": options.stage, "axes": list(plan.mesh.axes), "values": rows, "svg": options.svg, "html": options.html})
    elif options.svg or options.html:
        print(f"written   {', '.join(file for file in (options.svg, options.html) if file)}")
    elif options.python:
        print(python_text(gm, plan.mesh, title_of(plan, options)), end="")
    else:
        print(graph_text(gm, plan.mesh), end="")
    return 0


def graph_at(plan: Plan, options: argparse.Namespace) -> GraphModule:
    """Returns the graph of the stage that the options name."""
    if options.stage == "local":
        return plan.local_at(options.rank)
    return plan.graph if options.stage == "annotated" else plan.boxed


def draw(plan: Plan, gm: GraphModule, options: argparse.Namespace) -> None:
    """Draws a graph into the file that the options name."""
    svg = graph_svg(gm, plan.mesh, title_of(plan, options))
    write(options.svg, lambda file: Path(file).write_text(svg))


def title_of(plan: Plan, options: argparse.Namespace) -> str:
    """Returns what the graph is that the options name."""
    place = f", rank {options.rank}" if options.stage == "local" else ""
    return f"{plan.options.get('model', 'model')} on {plan.mesh}: {options.stage} graph{place}"
