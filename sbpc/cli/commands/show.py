"""Define `sbpc show`: print or draw the graph of a plan at one stage."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from sbpc.cli.options import add_file, add_planning, plan_at
from sbpc.cli.output import check_file, print_json, quiet, write
from sbpc.errors import PlanError, SbpcError
from sbpc.inspect.graph_rows import graph_rows
from sbpc.inspect.graph_text import graph_text
from sbpc.inspect.picture import graph_svg
from sbpc.inspect.python_text import python_text
from sbpc.mesh.mesh import Mesh
from sbpc.plans.plan import Plan
from sbpc.plans.staged.stage_parts import PARTS

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
    parser.add_argument(
        "--python", action="store_true", help="print it as Python that runs, with what each line makes beside it"
    )
    add_file(parser, "--svg", help="draw it into this file instead of printing it")
    add_file(parser, "--html", help="write one page about the whole plan into this file instead, which loads nothing")
    add_file(
        parser, "--trace", help="with --html: draw the step that `sbpc run --trace` measured below the predicted one"
    )


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
        graphs = graphs_at(plan, options)
        if options.svg:
            draw(graphs, options)
        if options.html:
            plan.save_page(options.html, trace=options.trace)
    if options.json:
        shown = [{"values": [row.as_json() for row in graph_rows(gm, mesh)]} for _, gm, mesh in graphs]
        values = {"chunks": shown} if plan.loop is not None else shown[0]
        print_json(
            {"stage": options.stage, "axes": list(plan.mesh.axes), **values, "svg": options.svg, "html": options.html}
        )
    elif options.svg or options.html:
        print(f"written   {', '.join(file for file in (options.svg, options.html) if file)}")
    else:
        text = (
            python_text
            if options.python
            else titled_text
            if len(graphs) > 1
            else (lambda gm, mesh, _: graph_text(gm, mesh))
        )
        for title, gm, mesh in graphs:
            print(text(gm, mesh, title), end="")
    return 0


Titled = tuple[str, GraphModule, Mesh]


def graphs_at(plan: Any, options: argparse.Namespace) -> list[Titled]:
    """Returns the graph of the stage that the options name, with its title and mesh; for a plan with stages one of
    every chunk."""
    title = title_of(plan, options)
    if not 0 <= options.rank < plan.mesh.ranks:
        raise PlanError(
            f"rank {options.rank} of a mesh of {plan.mesh.ranks} ranks\n  Ranks are 0 to {plan.mesh.ranks - 1}."
        )
    stage = plan.stage_of(options.rank)
    place = plan.ranks_of(stage).index(options.rank)
    return [
        (
            title if plan.loop is None else f"{title}, chunk {at} on stage {owner}",
            graph_at(plan, at, options.stage, place),
            plan.inner,
        )
        for at, owner in enumerate(plan.owners)
        if options.stage != "local" or owner == stage
    ]


def graph_at(plan: Plan, chunk: int, stage: str, rank: int) -> GraphModule:
    """Returns the graph of a chunk at a stage, for "local" that of a rank."""
    if stage == "local":
        return plan.programs[chunk].local_at(PARTS, True, rank)
    return plan.chunks[chunk].graph if stage == "annotated" else plan.programs[chunk].program(PARTS).gm


def titled_text(gm: GraphModule, mesh: Mesh, title: str) -> str:
    """Returns the text of a graph below its title."""
    return f"{title}\n{graph_text(gm, mesh)}\n"


def draw(graphs: list[Titled], options: argparse.Namespace) -> None:
    """Draws a graph into the file that the options name."""
    if len(graphs) > 1:
        raise SbpcError(
            f"--svg draws one graph, and there are {len(graphs)} chunks\n  Write the page of the plan: --html FILE."
        )
    svg = graph_svg(graphs[0][1], graphs[0][2], graphs[0][0])
    write(options.svg, lambda file: Path(file).write_text(svg))


def title_of(plan: Any, options: argparse.Namespace) -> str:
    """Returns what the graph is that the options name."""
    place = f", rank {options.rank}" if options.stage == "local" else ""
    return f"{plan.options.model} on {plan.mesh}: {options.stage} graph{place}"
