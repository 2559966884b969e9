"""Define `sbpc plan`: plan a model and print the plan."""

from __future__ import annotations

import argparse

from sbpc.cli.options import add_file, add_planning, plan_of
from sbpc.cli.output import check_file, print_json, quiet, write
from sbpc.inspect.report import plan_json

NAME = "plan"
HELP = "plan a model and print layouts, collectives, seconds and memory"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("target", metavar="TARGET", help="file.py:function")
    add_planning(parser)
    add_file(parser, "-o", "--output", help="write the plan to this file (*.sbpc)")


def run(options: argparse.Namespace) -> int:
    """Runs `sbpc plan`."""
    check_file(options.output)
    with quiet(options):
        plan, _ = plan_of(options, options.target)
        edges = plan.verify()
        if options.output:
            write(options.output, plan.save)
    if options.json:
        print_json(plan_json(plan) | {"verified_edges": edges, "file": options.output})
        return 0
    print(plan)
    print(f"verified  {edges:,} edges")
    if options.output:
        print(f"written   {options.output}")
    return 0
