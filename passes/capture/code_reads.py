"""Reads from the code of a function which globals it loads and which names it uses, without running it."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from sbpc.passes.capture.source_lines import lines_text

CACHE, EXTENDED = dis.opmap.get("CACHE", -1), dis.EXTENDED_ARG
GLOBALS, ATTRIBUTES = (
    {dis.opmap[name]: name_at for name, name_at in table.items() if name in dis.opmap}
    # by op, by how many bits its argument is shifted: the lowest says what else the op does
    for table in (
        {"LOAD_GLOBAL": int(sys.version_info >= (3, 11)), "STORE_GLOBAL": 0, "LOAD_NAME": 0},
        {"LOAD_ATTR": int(sys.version_info >= (3, 12)), "LOAD_METHOD": 0},
    )
)
INSIDE: dict[type, str] = {  # where a function is in what holds one
    staticmethod: "__func__", classmethod: "__func__", MethodType: "__func__", property: "fget",
    functools.cached_property: "func", functools.partial: "func", type(functools.lru_cache(len)): "__wrapped__",
}  # fmt: skip


@functools.lru_cache(maxsize=1 << 12)
def chains(code: CodeType) -> list[tuple[str, ...]]:
    """Returns the globals that a code loads or sets, each with the attributes that are read from it at once:
    `cfg.rope.beta`."""
    found: dict[tuple[str, ...], None] = {}
    argument, chain = 0, tuple[str, ...]()
    for op, low in zip(code.co_code[::2], code.co_code[1::2]):
        argument = argument << 8 | low
        if op in (CACHE, EXTENDED):
            argument *= op == EXTENDED
            continue
        if op in ATTRIBUTES and chain:
            chain = (*chain, code.co_names[argument >> ATTRIBUTES[op]])
        else:
            found |= {chain: None} if chain else {}
            chain = (code.co_names[argument >> GLOBALS[op]],) if op in GLOBALS else ()
        argument = 0
    return [*found, *(chain for inner in inner_codes(code) for chain in chains(inner))]


@functools.lru_cache(maxsize=1 << 12)
def names_in(code: CodeType) -> frozenset[str]:
    """Returns the names and the texts in a code, and so of all attributes that it may read, unless it computes their
    names."""
    names = {*code.co_names, *(text for text in code.co_consts if isinstance(text, str))}
    return frozenset(names.union(*map(names_in, inner_codes(code))))


def inner_codes(code: CodeType) -> Iterator[CodeType]:
    """Yields the codes of the functions that a code makes."""
    return (each for each in code.co_consts if isinstance(each, CodeType))


def function_in(value: Any) -> FunctionType | None:
    """Returns the function that a method, a property, a partial function or the like calls."""
    while type(value) in INSIDE:
        value = getattr(value, INSIDE[type(value)])
    return value if isinstance(value, FunctionType) else None


def line_of(functions: Iterable[FunctionType], *names: str) -> str:
    """Returns the line of the first of some functions that sets one of some names, or else reads it; "" if none
    does."""
    found = ""
    codes = [
        (function, code) for function in functions for code in (function.__code__, *inner_codes(function.__code__))
    ]
    for _, code in codes:
        number = code.co_firstlineno
        for each in dis.get_instructions(code):
            number = each.starts_line if type(each.starts_line) is int else getattr(each, "line_number", None) or number
            if each.argval in names and each.opname.startswith(("STORE", "LOAD")):
                text = lines_text((code.co_filename, number, code.co_name))
                if each.opname.startswith("STORE"):
                    return text
                found = found or text
    return found
