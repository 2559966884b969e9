"""Define `sbpc demo`: plan, verify and train a small GPT on 4 processes, and the same model in one."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from sbpc.cli.demo_run import demo
from sbpc.cli.options import add_file
from sbpc.cli.output import print_json

NAME = "demo"
HELP = "plan, verify and train a small GPT on 4 processes, beside the same model on one"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--steps", type=int, default=50, help="how many steps (default: 50)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    add_file(parser, "--output", metavar="DIR", default="sbpc-demo", help="folder for its files (default: sbpc-demo)")


def run(options: argparse.Namespace) -> int:
    """Runs `sbpc demo`."""
    figures = demo(Path(options.output), options.steps, options.dtype, Console(stderr=options.json))
    if options.json:
        print_json(figures)
    return 0 if figures["equal"] else 1
