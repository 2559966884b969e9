"""The pages of the API and of the command line, from docstrings as they are at run time: that of `sbpc.plan` is made of
the options, which readers of source files do not see."""

from __future__ import annotations

import argparse
import functools
import inspect
import operator
import re
from collections.abc import Iterator
from typing import Any

import sbpc
from sbpc import errors
from sbpc.cli.main import parser
from sbpc.runtime.accumulate import NO_SYNC, ZERO_GRAD
from sbpc.runtime.state.members import CLIP
from sbpc.runtime.step_function import STEP

PAGES = {
    "planning": ("Planning", ["plan", "baseline", "sweep", "Plan"]),
    "running": ("Running", ["parallelize", "start", "stop", "simulate", "Checkpoints", "integrations.hf"]),
    "files": ("Files", ["load", "load_module", "load_programs"]),
    "meshes": ("Meshes and layouts", ["Mesh", "Cluster", "Layout", "S", "B", "P", "Partial"]),
    "rules": ("Rules", ["rule", "probe", "load_rules"]),
    "errors": ("Errors", ["SbpcError"]),
}
MODULE = {"step": STEP, "no_sync": NO_SYNC, "zero_grad": ZERO_GRAD, "clip_grad_norm_": CLIP}
TERM = re.compile(r"(\S.*?) {2,}(?=\S)")


def api_pages() -> dict[str, tuple[str, str]]:
    """Returns the pages by name, with their titles. Public names of no other page are on "Running"."""
    PAGES["running"][1].extend(sorted(set(sbpc.__all__).difference(*(names for _, names in PAGES.values()))))
    found = {}
    for page, (title, names) in PAGES.items():
        parts = [f"# {title}\n", *(part for name in names for part in entry(name, operator.attrgetter(name)(sbpc)))]
        if page == "running":
            parts += ["## What a parallel module has { #module }\n"]
            parts += [f"### module.{name} {{ #module.{name} }}\n\n{markdown(doc)}" for name, doc in MODULE.items()]
        if page == "errors":
            kinds = [
                each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, sbpc.SbpcError)
            ]
            parts += [f"### {each.__name__}\n\n{markdown(inspect.getdoc(each))}" for each in kinds[1:]]
        found[page] = title, "\n".join(parts)
    return found


def entry(name: str, value: Any) -> Iterator[str]:
    """Yields the texts of a public name, then of the members that its docstring or another one speaks of."""
    yield f"## sbpc.{name} {{ #{name} }}\n\n{signature(name, value)}{markdown(inspect.getdoc(value))}"
    kinds = [kind for kind in getattr(value, "__mro__", ()) if kind.__module__.startswith("sbpc.")]
    for member in dict.fromkeys(member for kind in kinds for member in vars(kind) if value is not sbpc.SbpcError):
        found = inspect.getattr_static(value, member)
        doc = inspect.getdoc(getattr(found, "__func__", found))
        if not member.startswith("_") and doc and told(member) and not isinstance(found, (int, float, str, tuple)):
            call = getattr(found, "__func__", found)
            yield f"### {name}.{member} {{ #{name}.{member} }}\n\n{signature(member, call)}{markdown(doc)}"


@functools.cache
def told(member: str) -> bool:
    """Returns whether README, an example or a public docstring uses a member."""
    from build import ROOT

    files = [ROOT / "README.md", *(ROOT / "examples").glob("*.py")]
    texts = [file.read_text() for file in files] + [inspect.getdoc(getattr(sbpc, name)) or "" for name in sbpc.__all__]
    return re.search(rf"\.{member}\b|`{member}`", "\n".join(texts)) is not None


def signature(name: str, value: Any) -> str:
    """Returns the call of a function or a class as a block of Python; nothing of a property."""
    if not callable(value) or isinstance(value, sbpc.Partial):
        return ""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters, starred = [], False
    for each in found.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not starred:
            parameters.append("*")
        starred |= each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        if each.name not in ("self", "cls"):
            kind = "" if each.annotation is each.empty else f": {each.annotation}"
            default = "" if each.default is each.empty else f" = {each.default!r}"
            parameters.append(
                {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "") + each.name + kind + default
            )
    line = f"{name}({', '.join(parameters)})"
    if len(line) > 90:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in parameters) + ")"
    returns = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
    return f"```python\n{line}{returns}\n```\n\n"


def markdown(doc: str | None) -> str:
    """Returns a docstring as Markdown: its columns of names and what they mean are a list of definitions, its examples
    and what is set in are code."""
    lines, found = (doc or "").splitlines(), [""]
    kind, depth = "text", 0  # of the lines before; the column in which definitions stand
    for at, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        after = next((each for each in lines[at + 1 : at + 2] if each.strip()), "")
        hangs = len(after) - len(after.lstrip()) >= 9  # the next line goes on in the column of definitions
        if not line.strip():
            if (
                kind == "code"
                and len(lines[at + 1]) - len(lines[at + 1].lstrip()) <= depth
                and not lines[at + 1].startswith("    ")
            ):
                found.append("```")
                kind = "text"
            found.append("")
        elif kind == "code":
            found.append(line)
        elif line.startswith(">>> ") or (kind == "text" and indent >= 4 and not lines[at - 1].strip()):
            found += ["```python", line]
            kind = "code"
        elif indent == 0 and (TERM.match(line) or hangs):
            term = TERM.match(line)
            name, rest = (term[1], line[term.end() :]) if term else line.split(" ", 1)
            found += ["", f"`{name}`", f":   {rest}"]
            kind, depth = "term", (term.end() if term else 11)
        elif kind == "term" and indent >= depth:
            inner = indent > depth + 2
            found.append(f"    {'    ' if inner else ''}{line.strip()}")
        elif kind == "term" and indent:
            found.append(f"    {line.strip()}")
        else:
            found += [*([""] if kind == "term" and found[-1] else []), line]
            kind = "text"
    found += ["```"] if kind == "code" else []
    return linked("\n".join(found)) + "\n\n"


def linked(text: str) -> str:
    """Links what a docstring says of the API and of files, outside of blocks of code."""
    where = {name: page for page, (_, names) in PAGES.items() for name in names}

    def of_name(found: re.Match[str]) -> str:
        page = where.get(found[1])
        return f"[{found[0]}](site:api/{page}.md#{found[1]})" if page else found[0]

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    for at in range(0, len(parts), 2):
        parts[at] = re.sub(r"(`[^`]*`)|([*<])", lambda found: found[1] or f"\\{found[2]}", parts[at])
        parts[at] = re.sub(r"`sbpc\.(\w+)`", of_name, parts[at])
        parts[at] = re.sub(r"(?<![\w/])((?:examples|tests|sbpc)/[\w/]+\.py)", r"[\1](\1)", parts[at])
    return "".join(parts)


def command_page() -> str:
    """Returns what `--help` says of every command."""
    whole = parser()
    (commands,) = (each for each in whole._actions if isinstance(each, argparse._SubParsersAction))
    parts = ["# Command line\n", f"```text\n{whole.format_help()}```\n"]
    parts += [f"## sbpc {name}\n\n```text\n{each.format_help()}```\n" for name, each in commands.choices.items()]
    return "\n".join(parts)
