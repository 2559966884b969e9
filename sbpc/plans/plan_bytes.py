"""Writes the JSON of a plan to a file with a checksum, and reads it. Nothing that is read has been believed yet: see
`plan_file`."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sbpc.errors import PlanError, read_json, shown
from sbpc.plans.file_graph import may_call
from sbpc.plans.file_schema import misfit

FORMAT = "sbpc plan"
VERSION = 3
NAMESPACES = ("aten", "prims", "sbpc")


def write(content: dict[str, Any], path: Path) -> None:
    """Writes a file's content. A temporary file is moved into place, so that a reader never sees half a plan.

    Raises PlanError for what `read` would refuse, such as a parameter with a line end in its name, or an op that it
    may not call.
    """
    for call in calls_in(content):
        space, *names = call["target"].split(".")
        if space in NAMESPACES and not may_call(functools.reduce(getattr, names, getattr(torch.ops, space))):
            what = (
                f"a file may not call {call['target']}, as %{call['name']} does in {call.get('module') or 'the model'}"
            )
            raise PlanError(f"{what}\n  Give the op a rule by sbpc.rule, there where the file is read, too.")
    body = json.dumps(content, separators=(",", ":"), sort_keys=True)
    try:
        wrong = misfit(read_json(body))
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
        temporary = path.with_name(path.name + ".part")
        temporary.write_text(json.dumps({"format": FORMAT, "version": VERSION, "sha256": digest}) + "\n" + body + "\n")
        temporary.replace(path)
    except OSError as error:
        raise PlanError(f"the plan cannot be written: {error}\n  Name a file in a folder that exists.") from error


def calls_in(content: Any) -> Iterator[dict[str, Any]]:
    """Yields the calls of all graphs in a file's content."""
    if isinstance(content, dict) and content.get("op") == "call_function":
        yield content
    elif isinstance(content, (dict, list)):
        for item in content.values() if isinstance(content, dict) else content:
            yield from calls_in(item)


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
    if head.get("version") != VERSION:
        raise PlanError(f"{path} has version {shown(head.get('version'))}, this sbpc reads {VERSION}\n  Plan anew.")
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
    return content
