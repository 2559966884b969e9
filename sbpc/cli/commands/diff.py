"""Define `sbpc diff`: tell what differs between two plans of one model."""

from __future__ import annotations

import argparse

from sbpc.api.loading import load
from sbpc.cli.options import add_file, is_plan, register
from sbpc.cli.output import print_json, quiet
from sbpc.errors import PlanError

NAME = "diff"
HELP = "tell what differs between two plans of one model; the exit code is 1 where anything does"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("plans", metavar="PLAN", nargs=2, help="a file that `sbpc plan -o` wrote")
    rules = "reviewed rules of ops that have none, as `sbpc probe` writes them; may be given again"
    add_file(parser, "--rules", action="append", default=[], help=rules)


def run(options: argparse.Namespace) -> int:
    """Runs `sbpc diff`. Returns 0 if the plans are the same, 1 if they differ."""
    register(options)
    for file in options.plans:
        if not is_plan(file):
            raise PlanError(f"{file!r} is no file of a plan\n  Write one with `sbpc plan -o FILE`.")
    with quiet(options):
        one, other = map(load, options.plans)
        found = one.diff(other)
    if options.json:
        print_json(found.as_json())
    else:
        print(found, end="")
    return int(bool(found))
