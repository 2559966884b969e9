"""`sbpc demo`: a small GPT planned, verified and trained on 4 processes, beside the same model on one."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from sbpc.cli.demo_run import demo
from sbpc.cli.options import file_name
from sbpc.cli.output import print_json

NAME = "demo"
HELP = "plan, verify and train a small GPT on 4 processes, beside the same model on one"


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--steps", type=int, default=50, help="how many steps (default: 50)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument(
        "--output", type=file_name, metavar="DIR", default="sbpc-demo", help="folder for its files (default: sbpc-demo)"
    )


def run(options: argparse.Namespace) -> int:
    """`sbpc demo`."""
    console = Console(stderr=options.json)
    found = demo(Path(options.output), options.steps, options.dtype, console)
    if options.json:
        print_json(found)
    return 0 if found["equal"] else 1
