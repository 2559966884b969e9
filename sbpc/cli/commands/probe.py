"""`sbpc probe`: look for rules of the ops that have none, and write them to a file that a person is to review."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.fx.node import map_aggregate, map_arg

from sbpc._compat import OpOverload
from sbpc.api.planning import prepare
from sbpc.cli.options import add_step, file_name, target_of
from sbpc.cli.output import check_file, print_json, quiet
from sbpc.cli.target import import_file
from sbpc.errors import RuleError, SbpcError
from sbpc.graph.operands import named_arguments
from sbpc.plans.measure import lacks_rule
from sbpc.rules.proof.probe import Probe, name_of, probe_call
from sbpc.rules.proof.prove import short
from sbpc.rules.proof.rule_files import add_entries
from sbpc.rules.proof.small_calls import Drawn, SmallCall, small_calls
from sbpc.rules.proof.user_rules import resolve
from sbpc.rules.registry import applied

NAME = "probe"
HELP = "look for rules of ops that have none, by running them on shards"
TENSOR = re.compile(r"(\w+)\[([\d\s,]*)\]")


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "target", nargs="?", metavar="TARGET", help="file.py:function; with --args the file.py that registers the op, if any"
    )
    parser.add_argument("--op", action="append", default=[], metavar="NS::NAME", help="this op alone; may be given again")
    parser.add_argument("--args", metavar="ARGS", help="of the op, as in 'float64[4, 5], float64[5], dim=1'")
    parser.add_argument("-o", "--output", type=file_name, metavar="FILE", help="add what is found to this file of rules")
    add_step(parser)


@dataclass
class Row:
    """An op: in how many calls it has no rule, and what was found for some of them."""

    op: OpOverload
    calls: int = 0
    found: list[Probe] = field(default_factory=list)
    seen: dict[str, None] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def run(options: argparse.Namespace) -> int:
    """`sbpc probe`."""
    check_file(options.output)
    with quiet(options):
        rows = of_call(options) if options.args is not None else of_target(options)
        found = [entry for row in rows for entry in entries(row)]
        added = add_entries(options.output, found) if options.output else 0
    if options.json:
        print_json({"ops": [row_json(row) for row in rows], "file": options.output, "added": added})
        return 0
    if rows:
        Console(soft_wrap=True).print(table(rows))
    else:
        print("every op of the model has a rule")
    for entry in () if options.output else found:
        print(f"\n{entry}")
    if options.output:
        todo = "review them, and give the file to --rules or sbpc.load_rules" if added else "there is no more than it holds"
        print(f"written   {options.output}: {added} added; {todo}")
    return 0


def of_call(options: argparse.Namespace) -> list[Row]:
    """The one op that --op and --args describe."""
    if len(options.op) != 1:
        raise SbpcError("--args are those of one op\n  Name it with --op, once.")
    if options.target is not None:
        import_file(Path(options.target.partition(":")[0]).resolve())
    op = resolve(options.op[0])
    return [Row(op, 1, [probe_call(op, [parse_arguments(options.args)])])]


def of_target(options: argparse.Namespace) -> list[Row]:
    """The ops of the target that have no rule, or those of them that --op names."""
    if options.target is None:
        raise SbpcError("there is nothing to probe\n  Give a target, file.py:function, or --op with --args.")
    built = target_of(options, options.target)
    named = [resolve(op) for op in options.op]
    gm = prepare(built.model, built.args, kwargs=built.kwargs, dtype=built.dtype, train=not options.no_train).gm
    rows: dict[OpOverload, Row] = {}
    for node in gm.graph.nodes:
        if lacks_rule(node) and isinstance(node.target, OpOverload) and (not named or node.target in named):
            row = rows.setdefault(node.target, Row(node.target))
            row.calls += 1
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            probe_node(row, args, kwargs, node.meta["val"])
    absent = [str(op) for op in named if op not in rows]
    if absent:
        raise SbpcError(f"no call of {absent[0]} in the model lacks a rule\n  Remove --op to probe those that do.")
    return list(rows.values())


def probe_node(row: Row, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> None:
    """Probe a call of a model, unless one like it has been."""
    named = named_arguments(row.op, args, kwargs)
    key = repr([kind(value) for value in named.values()])
    if key in row.seen or any(fits_call(one, named, outputs) for one in row.found):
        return
    row.seen[key] = None
    try:
        calls = small_calls(args, kwargs)
        if not calls:
            raise RuleError(f"{row.op} has no call that is small enough\n  Give --args.")
        found = probe_call(row.op, calls)
    except RuleError as error:
        row.errors += [text for text in [str(error).splitlines()[0]] if text not in row.errors]
        return
    if found.rule is not None and not fits_call(found, named, outputs):
        found = replace(found, remarks=(*found.remarks, "the rule does not fit the call in the model, whose sizes are others"))
    row.found.append(found)


def kind(value: Any) -> Any:
    """An argument without its sizes."""
    if isinstance(value, Tensor):
        return str(value.dtype), [size == 1 for size in value.shape]
    return [kind(item) for item in value] if isinstance(value, (list, tuple)) else value


def fits_call(found: Probe, named: Mapping[str, Any], outputs: Any) -> bool:
    """Whether a rule that was found says something of a call."""
    try:
        return found.rule is not None and applied(found.op, found.rule, named, outputs) is not None
    except RuleError:
        return False


# --- the arguments of a call as text ----------------------------------------------------------------------------------
def parse_arguments(text: str) -> SmallCall:
    """The call that a text describes, its tensors of random numbers: types and sizes as in 'float64[4, 5]'.

    Raises SbpcError for what is no argument.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for part in parts(text):
        name, equals, value = part.partition("=")
        if equals and name.strip().isidentifier():
            kwargs[name.strip()] = parse_argument(value.strip())
        else:
            args.append(parse_argument(part))
    return SmallCall(*map_aggregate((tuple(args), kwargs), Drawn({}, {}, 2)))


def parse_argument(text: str) -> Any:
    """One argument: a tensor on the meta device, a list, or a Python constant."""
    found = TENSOR.fullmatch(text)
    dtype = getattr(torch, found[1], None) if found else None
    if found and isinstance(dtype, torch.dtype):
        return torch.empty([int(size) for size in found[2].split(",") if size.strip()], dtype=dtype, device="meta")
    if text.startswith("[") and text.endswith("]"):
        return [parse_argument(part) for part in parts(text[1:-1])]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise SbpcError(f"--args: {text!r} is no argument\n  Write them as in 'float64[4, 5], int64[3], 1, scale=2.0'.") from None


def parts(text: str) -> list[str]:
    """What stands between commas outside of brackets.

    >>> parts("float64[4, 5], [1, 2], dim=1")
    ['float64[4, 5]', '[1, 2]', 'dim=1']
    """
    found, depth = [""], 0
    for letter in text:
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found if part.strip()]


# --- what is told -----------------------------------------------------------------------------------------------------
def entries(row: Row) -> list[str]:
    """What goes into the file."""
    return [*map(str, row.found), *(f"# {name_of(row.op)}, not probed: {error}" for error in row.errors)]


def table(rows: Sequence[Row]) -> Table:
    """A row for every rule that was found, or why there is none."""
    made = Table(box=None, pad_edge=False)
    for title in ("op", "calls", "valid", "rule"):
        made.add_column(title, justify="right" if title in ("calls", "valid") else "left", overflow="fold")
    for row in rows:
        told = [(str(one.valid), one.rule or "none: it stays whole") for one in row.found] + [("", error) for error in row.errors]
        for at, (valid, text) in enumerate(told):
            made.add_row(*((name_of(row.op), str(row.calls)) if at == 0 else ("", "")), valid, Text(text))
    return made


def row_json(row: Row) -> dict[str, Any]:
    """One op as JSON values."""
    found = [
        {"rule": one.rule, "seen": one.seen, "valid": one.valid, "tried": one.tried, "remarks": one.remarks,
         "left_out": {short(signature): why for signature, why in one.left_out}}
        for one in row.found
    ]  # fmt: skip
    return {"op": name_of(row.op), "calls": row.calls, "found": found, "errors": row.errors}
