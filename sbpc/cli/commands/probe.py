"""Define `sbpc probe`: look for rules of the ops that have none, and write them to a file for a person to review."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate, map_arg

from sbpc._compat import OpOverload
from sbpc.api.task import prepare
from sbpc.cli.options import add_file, add_step, target_of
from sbpc.cli.output import check_file, print_json, quiet
from sbpc.cli.target import import_file
from sbpc.errors import RuleError, SbpcError
from sbpc.graph.operands import named_arguments
from sbpc.inspect.tables import Table
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
    """Adds the options of the command."""
    target = "file.py:function; with --args the file.py that registers the op, if any"
    parser.add_argument("target", nargs="?", metavar="TARGET", help=target)
    op = "this op alone; may be given again"
    parser.add_argument("--op", action="append", default=[], metavar="NS::NAME", help=op)
    parser.add_argument("--args", metavar="ARGS", help="of the op, as in 'float64[4, 5], float64[5], dim=1'")
    add_file(parser, "-o", "--output", help="add what is found to this file of rules")
    add_step(parser)


@dataclass
class ProbedOp:
    """An op without a rule in some calls. calls: how many. probes: of calls that differ. seen: the kinds of these
    calls."""

    op: OpOverload
    calls: int = 0
    probes: list[Probe] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)


def run(options: argparse.Namespace) -> int:
    """Runs `sbpc probe`."""
    check_file(options.output)
    with quiet(options):
        rows = of_call(options) if options.args is not None else of_target(options)
        texts = [text for row in rows for text in entries(row)]
        added = add_entries(options.output, texts) if options.output else 0
    if options.json:
        print_json({"ops": [row_json(row) for row in rows], "file": options.output, "added": added})
        return 0
    if rows:
        print(*table(rows).lines(), sep="\n")
    else:
        print("every op of the model has a rule")
    for text in () if options.output else texts:
        print(f"\n{text}")
    if options.output:
        review = "review them, and give the file to --rules or sbpc.load_rules"
        print(f"written   {options.output}: {added} added; {review if added else 'there is no more than it holds'}")
    return 0


def of_call(options: argparse.Namespace) -> list[ProbedOp]:
    """Probes the one call that --op and --args describe."""
    if len(options.op) != 1:
        raise SbpcError("--args are those of one op\n  Name it with --op, once.")
    if options.target is not None:
        import_file(Path(options.target.partition(":")[0]).resolve())
    op = resolve(options.op[0])
    return [ProbedOp(op, 1, [probe_call(op, [parse_arguments(options.args)])])]


def of_target(options: argparse.Namespace) -> list[ProbedOp]:
    """Probes the ops of the target that have no rule, or those of them that --op names."""
    if options.target is None:
        raise SbpcError("there is nothing to probe\n  Give a target, file.py:function, or --op with --args.")
    built = target_of(options, options.target)
    named = [resolve(op) for op in options.op]
    gm = prepare(built.model, built.args, kwargs=built.kwargs, dtype=built.dtype, train=not options.no_train).gm
    rows: dict[OpOverload, ProbedOp] = {}
    for node in gm.graph.nodes:
        if lacks_rule(node) and isinstance(node.target, OpOverload) and (not named or node.target in named):
            row = rows.setdefault(node.target, ProbedOp(node.target))
            row.calls += 1
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            probe_node(row, args, kwargs, node.meta["val"])
    absent = [str(op) for op in named if op not in rows]
    if absent:
        raise SbpcError(f"no call of {absent[0]} in the model lacks a rule\n  Remove --op to probe those that do.")
    return list(rows.values())


def probe_node(row: ProbedOp, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> None:
    """Probes a call of a model, unless one of its kind was probed before."""
    named = named_arguments(row.op, args, kwargs)
    key = repr([kind(value) for value in named.values()])
    if key in row.seen or any(fits_call(one, named, outputs) for one in row.probes):
        return
    row.seen.add(key)
    try:
        calls = small_calls(args, kwargs)
        if not calls:
            raise RuleError(f"{row.op} has no call that is small enough\n  Give --args.")
        probe = probe_call(row.op, calls)
    except RuleError as error:
        text = str(error).splitlines()[0]
        row.errors += [text] if text not in row.errors else []
        return
    if probe.rule is not None and not fits_call(probe, named, outputs):
        remark = "the rule does not fit the call in the model, whose sizes are others"
        probe = replace(probe, remarks=(*probe.remarks, remark))
    row.probes.append(probe)


def kind(value: Any) -> Any:
    """Returns an argument without its sizes."""
    if isinstance(value, Tensor):
        return str(value.dtype), [size == 1 for size in value.shape]
    return [kind(item) for item in value] if isinstance(value, (list, tuple)) else value


def fits_call(probe: Probe, named: Mapping[str, Any], outputs: Any) -> bool:
    """Returns whether the rule of a probe, if it has one, applies to a call."""
    try:
        return probe.rule is not None and applied(probe.op, probe.rule, named, outputs) is not None
    except RuleError:
        return False


# --- the arguments of a call as text ----------------------------------------------------------------------------------
def parse_arguments(text: str) -> SmallCall:
    """Returns the call that a text describes. A tensor is a type and sizes, as in 'float64[4, 5]', and holds random
    numbers.

    Raises SbpcError for what is no argument.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in split_arguments(text):
        name, equals, value = argument.partition("=")
        if equals and name.strip().isidentifier():
            kwargs[name.strip()] = parse_argument(value.strip())
        else:
            args.append(parse_argument(argument))
    return SmallCall(*map_aggregate((tuple(args), kwargs), Drawn({}, {}, 2)))


def parse_argument(text: str) -> Any:
    """Returns one argument: a tensor on the meta device, a list, or a Python constant."""
    tensor = TENSOR.fullmatch(text)
    dtype = getattr(torch, tensor[1], None) if tensor else None
    if tensor and isinstance(dtype, torch.dtype):
        return torch.empty([int(size) for size in tensor[2].split(",") if size.strip()], dtype=dtype, device="meta")
    if text.startswith("[") and text.endswith("]"):
        return [parse_argument(item) for item in split_arguments(text[1:-1])]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise SbpcError(
            f"--args: {text!r} is no argument\n  Write them as in 'float64[4, 5], int64[3], 1, scale=2.0'."
        ) from None


def split_arguments(text: str) -> list[str]:
    """Splits a text at the commas outside of brackets.

    >>> split_arguments("float64[4, 5], [1, 2], dim=1")
    ['float64[4, 5]', '[1, 2]', 'dim=1']
    """
    pieces, depth = [""], 0
    for letter in text:
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return [piece.strip() for piece in pieces if piece.strip()]


# --- the output -------------------------------------------------------------------------------------------------------
def entries(row: ProbedOp) -> list[str]:
    """Returns the texts about an op that go into the file of rules."""
    return [*map(str, row.probes), *(f"# {name_of(row.op)}, not probed: {error}" for error in row.errors)]


def table(rows: Sequence[ProbedOp]) -> Table:
    """Returns a table with a row for every rule that was found, or the reason why there is none."""
    texts = []
    for row in rows:
        lines = [(str(one.valid), one.rule or "none: it stays whole") for one in row.probes]
        for at, (valid, text) in enumerate([*lines, *(("", error) for error in row.errors)]):
            texts.append((*((name_of(row.op), str(row.calls)) if at == 0 else ("", "")), valid, text))
    return Table("", ("op", "calls", "valid", "rule"), texts, left=("op", "rule"))


def row_json(row: ProbedOp) -> dict[str, Any]:
    """Returns an op and its probes as JSON values."""
    probes = [
        {
            "rule": one.rule,
            "seen": one.seen,
            "valid": one.valid,
            "tried": one.tried,
            "remarks": one.remarks,
            "left_out": {short(signature): why for signature, why in one.left_out},
        }
        for one in row.probes
    ]
    return {"op": name_of(row.op), "calls": row.calls, "found": probes, "errors": row.errors}
