"""Writes the JSON of a plan to a file with a checksum, and reads it. Nothing that is read has been believed yet: see
`plan_file`."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sbpc.errors import PlanError, read_json, shown
from sbpc.plans.file_graph import may_call
from sbpc.plans.file_schema import misfit
from sbpc.rules.registry import TABLE

FORMAT = "sbpc plan"
VERSION, FIRST = 5, 4  # that are written, and the first that are read: without the orders of programs
NAMESPACES = ("aten", "prims", "sbpc")
TRACE, TRACES = "stack_trace", "traces"  # of a node, the number of its lines of the source among those of the file
PARTS = frozenset({"chunks", "loop", "before", "after", "programs", "steps"})  # where a file has graphs


def write(content: dict[str, Any], path: Path, checked: bool = True) -> None:
    """Writes a file's content. A temporary file is moved into place, so that a reader never sees half a plan.

    checked: whether it is read once before, as `read` does.
    Raises PlanError for what `read` would refuse, such as a parameter with a line end in its name, or an op that it
    may not call.
    """
    ruled = {*map(str, TABLE)}
    for call in nodes_in(content):
        space, *names = call["target"].split(".")
        called = call["op"] == "call_function" and space not in ("getitem", "_c10d_functional")
        known = space in NAMESPACES or call["target"] in ruled
        if called and not (known and may_call(functools.reduce(getattr, names, getattr(torch.ops, space)))):
            what = (
                f"a file may not call {call['target']}, as %{call['name']} does in {call.get('module') or 'the model'}"
            )
            raise PlanError(f"{what}\n  Give the op a rule by sbpc.rule, there where the file is read, too.")
    number_traces(content)
    body = json.dumps(content, separators=(",", ":"), sort_keys=True)
    try:
        wrong = misfit(read_json(body)) if checked else None
    except ValueError as error:
        wrong = str(error)
    if wrong is not None:
        raise PlanError(
            f"the plan cannot be written: {wrong.removeprefix('.')}\n  Give what bears this name another one."
        )
    digest = hashlib.sha256(body.encode()).hexdigest()
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory")
        temporary = path.with_name(f"{path.name}.{os.getpid()}.part")  # other ranks may write the same file
        temporary.write_text(json.dumps({"format": FORMAT, "version": VERSION, "sha256": digest}) + "\n" + body + "\n")
        temporary.replace(path)
    except OSError as error:
        raise PlanError(f"the plan cannot be written: {error}\n  Name a file in a folder that exists.") from error


def number_traces(content: dict[str, Any]) -> None:
    """Puts the lines of the source, which many nodes share, into a list, and their numbers into the nodes."""
    traces = dict[str, int]()
    for node in nodes_in(content):
        if TRACE in node:
            node[TRACE] = traces.setdefault(node[TRACE], len(traces))
    content[TRACES] = list(traces)


def nodes_in(content: Any) -> Iterator[dict[str, Any]]:
    """Yields the nodes of all graphs in a file's content."""
    if isinstance(content, list):
        for item in content:
            yield from nodes_in(item)
    elif content is not None:
        yield from content.get("graph", ())
        for key, item in content.items():
            if key in PARTS:
                yield from nodes_in(list(item.values()) if key in ("programs", "steps") else item)


def read(path: Path) -> dict[str, Any]:
    """Returns the body of a plan's file. Raises PlanError if it is no plan, is damaged, or is of another version."""
    no_plan, todo = f"{path} is no plan", "\n  Write one with plan.save."
    try:
        first, _, body = path.read_bytes().decode().partition("\n")
        head = read_json(first)
    except (OSError, ValueError) as error:
        raise PlanError(f"{no_plan}: {error}{todo}") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise PlanError(no_plan + todo)
    if type(version := head.get("version")) is not int or not FIRST <= version <= VERSION:
        raise PlanError(f"{path} has version {shown(version)}, this sbpc reads {FIRST} to {VERSION}\n  Plan anew.")
    if not body.endswith("\n") or hashlib.sha256(body[:-1].encode()).hexdigest() != head.get("sha256"):
        raise PlanError(f"{path} is damaged: its checksum does not match\n  Copy it again, or plan anew.")
    try:
        content = read_json(body)
    except ValueError as error:
        raise PlanError(f"{no_plan}: {error}{todo}") from error
    if not isinstance(content, dict):
        raise PlanError(no_plan + todo)
    wrong = misfit(content)
    if wrong is not None:
        raise PlanError(f"{path}: {wrong.removeprefix('.')}\n  Plan anew with this version of sbpc and torch.")
    traces = content[TRACES]
    for node in nodes_in(content):
        if TRACE in node:
            if not 0 <= node[TRACE] < len(traces):
                raise PlanError(f"{path}: a node has no lines of the source\n  Plan anew.")
            node[TRACE] = traces[node[TRACE]]
    return content
