"""Define `sbpc explain`: tell why a parameter or a value has its layout."""

from __future__ import annotations

import argparse

from sbpc.cli.options import add_planning, plan_at
from sbpc.cli.output import print_json, quiet

NAME = "explain"
HELP = "tell why a parameter or a value is laid out as it is, and what other layouts would cost"
NAMED = "a parameter, or a value by the name that `sbpc show` prints; of a pattern such as '*.up.weight' the first"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    target = "file.py:function, or a file that `sbpc plan -o` wrote"
    parser.add_argument("target", metavar="TARGET_OR_PLAN", help=target)
    parser.add_argument("name", metavar="NAME", help=NAMED)
    add_planning(parser)


def run(options: argparse.Namespace) -> int:
    """Runs `sbpc explain`."""
    with quiet(options):
        explanation = plan_at(options, options.target).explain(options.name)
        text = str(explanation)
    if options.json:
        print_json(explanation.as_json())
    else:
        print(text, end="")
    return 0
