"""Run the command line. Each command has its file in `sbpc/cli/commands`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from sbpc.cli.commands import clusters, convert, demo, diff, explain, export, plan, probe, profile, run, show, sweep
from sbpc.cli.target import USAGE
from sbpc.errors import SbpcError
from sbpc.runtime.start.launch import RankError

COMMANDS = (plan, show, explain, diff, run, export, convert, sweep, clusters, probe, profile, demo)
EPILOG = f"""{USAGE}

  sbpc plan  train.py:model --mesh data=2,tensor=2
  sbpc show  train.py:model --mesh data=2,tensor=2 --stage boxed --svg graph.svg
  sbpc explain train.py:model up.weight --mesh data=2,tensor=2
  sbpc diff  before.sbpc after.sbpc
  sbpc run   train.py:model --mesh data=2,tensor=2 --steps 100
  torchrun --nproc-per-node 4 -m sbpc run train.py:model --mesh data=2,tensor=2
  sbpc export train.py:model --mesh data=2,tensor=2 -o model.sbpc
  sbpc run   model.sbpc --steps 100 --checkpoint checkpoints
  sbpc convert checkpoints -o weights.safetensors
  sbpc sweep train.py:model --devices 64 --cluster h100
  sbpc probe train.py:model -o rules.txt
  sbpc clusters
  sbpc profile -o cluster.json

Exit codes: 0 all is well, 1 the plans that `diff` compares differ,
2 something of yours is to be mended (the message says what), 130 interrupted.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    options = parser().parse_args(arguments)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("sbpc").setLevel(logging.INFO if options.verbose else logging.WARNING)
    if not options.verbose:  # torch logs an op's error with a traceback of its own, before it raises it
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        code: int = options.run(options)
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
    """Returns the parser of all commands."""
    raw = argparse.RawDescriptionHelpFormatter
    about = "A model written for one device in, the program of every rank of a device mesh out."
    top = argparse.ArgumentParser("sbpc", description=about, epilog=EPILOG, formatter_class=raw)
    top.add_argument("--version", action="version", version=f"sbpc {version('sbpc')}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON, and nothing else, on standard output")
    common.add_argument("-v", "--verbose", action="store_true", help="log what is being done")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        texts = {"help": command.HELP, "description": command.HELP, "epilog": USAGE}
        made = commands.add_parser(command.NAME, parents=[common], formatter_class=raw, **texts)
        made.set_defaults(run=command.run)
        command.add(made)
    return top
