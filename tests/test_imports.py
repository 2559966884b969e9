"""Imports go down only, and everything private of torch is imported in one file."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest

import sbpc

ROOT = Path(__file__).parent.parent
FLOORS = (  # from the ground up: a room imports from floors below its own, never from a room beside it
    ("errors", "_compat", "solver"),
    ("mesh", "graph"),
    ("rules", "boxing"),
    ("plans",),
    ("inspect",),
    ("passes", "runtime"),
    ("api",),
    ("integrations",),
    ("",),  # the package itself: the names that `import sbpc` gives
    ("cli",),
    ("__main__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
PRIVATE = ("torch._", "torch.fx.experimental", "torch.testing._internal")


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """What a file is made of."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """The modules that a file imports, and whether only for types."""
    blocks = [node for node in nodes(path) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    typed = {node for block in blocks for node in ast.walk(block)}
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in typed) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found += [(name, node in typed) for name in names]
    return found


@functools.cache
def files() -> list[tuple[str, Path]]:
    """Every source file of the package under its dotted name below sbpc."""
    found = []
    for folder, prefix in ((ROOT / "sbpc", ""), (ROOT / "passes", "passes."), (ROOT / "runtime", "runtime.")):
        for path in sorted(folder.rglob("*.py")):
            if prefix == "" and path.relative_to(folder).parts[0] in ("passes", "runtime"):
                continue
            name = prefix + ".".join(path.relative_to(folder).with_suffix("").parts)
            found.append((name.removesuffix("__init__").removesuffix("."), path))
    return found


def room_of(module: str) -> str:
    """The room of a dotted name below sbpc."""
    return module.split(".")[0]


def test_imports_go_down_only() -> None:
    wrong = []
    for name, path in files():
        own = room_of(name)
        assert own in FLOOR, f"{name} stands on no floor: put its room into FLOORS"
        for module, typed in imports(path):
            head, _, rest = module.partition(".")
            other = room_of(rest)
            if (
                head != "sbpc"
                or typed
                or not rest
                or other == own
                or (other not in FLOOR and own in ("cli", "__main__"))
            ):
                continue
            if other not in FLOOR or FLOOR[other] >= FLOOR[own]:
                wrong.append(f"{name} imports {module}")
    assert not wrong, wrong


def test_files_of_a_room_do_not_import_each_other_in_circles() -> None:
    modules = {name for name, _ in files()}
    graph = nx.DiGraph()
    for name, path in files():
        graph.add_edges_from(
            (name, module.removeprefix("sbpc."))
            for module, _ in imports(path)
            if module.removeprefix("sbpc.") in modules
        )
    circles = [sorted(each) for each in nx.strongly_connected_components(graph) if len(each) > 1]
    assert not circles, circles


def test_a_room_says_what_it_is_for() -> None:
    rooms: dict[Path, list[Path]] = {}
    for _, path in files():
        rooms.setdefault(path.parent, []).append(path)
    assert sorted(path.name for path in rooms[ROOT / "sbpc"]) == [
        "__init__.py",
        "__main__.py",
        "_compat.py",
        "errors.py",
    ]
    silent = [str(room) for room in rooms if not ast.get_docstring(ast.parse((room / "__init__.py").read_text()))]
    assert not silent, silent


def test_every_room_and_template_is_in_the_wheel() -> None:
    tomllib = pytest.importorskip("tomllib", reason="it came with Python 3.11")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = {f"sbpc.{name}".removesuffix(".") for name, path in files() if path.name == "__init__.py"}
    assert set(settings["packages"]) == rooms
    data = {
        path
        for room, names in settings["package-data"].items()
        for name in names
        for path in (ROOT / room.replace(".", "/")).glob(name)
    }
    here = ROOT / "sbpc"
    assert data == {*here.rglob("*.j2"), *here.rglob("*.json"), here / "py.typed"}


def test_importing_the_package_loads_nothing_and_every_public_name_is_there() -> None:
    """So `import sbpc` takes no time beside `import torch`; the first name that is used takes some."""
    code = "import sys, sbpc; print([name for name in sys.modules if name.startswith(('sbpc.', 'torch', 'sympy'))], set(sbpc.__all__) <= set(dir(sbpc)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[] True\n"
    )
    assert sorted(name for names in sbpc.FILES.values() for name in names) == sorted(sbpc.__all__)
    assert {room.split(".")[0] for room, _ in files()} - {"", "__main__", "_compat"} == set(sbpc.ROOMS)
    for name in (*sbpc.__all__, *sbpc.ROOMS):
        assert getattr(sbpc, name) is not None
    with pytest.raises(AttributeError, match="module 'sbpc' has no attribute 'Plans'"):
        sbpc.Plans  # type: ignore[attr-defined]  # noqa: B018


def test_passes_share_only_the_pipeline_and_verify() -> None:
    """A pass is a file or a room of `passes`; the pipeline calls them, `verify` checks them, and none imports another."""
    # The layout problem is solved again: for a limit, to explain, and on an axis of copies, whose graph is annotated
    # anew;
    # stages cut the body of a loop, and parameters of it over more axes.
    below = {
        "memory": {"assign"}, "explain": {"assign", "annotate"}, "loop": {"annotate", "assign", "box", "schedule"},
        "stages": {"annotate", "assign", "loop"}, "panels": {"annotate", "schedule"},
    }  # fmt: skip
    wrong = []
    for name, path in files():
        if not name.startswith("passes.") or name == "passes.pipeline":
            continue
        own = name.split(".")[1]
        for module, _ in imports(path):
            if module.startswith("sbpc.passes.") and module.split(".")[2] not in {own, "verify"} | below.get(
                own, set()
            ):
                wrong.append(f"{name} imports {module}")
    assert not wrong, wrong


def test_private_names_of_torch_are_imported_in_one_file() -> None:
    wrong = [
        f"{name} imports {module}"
        for name, path in files()
        for module, _ in imports(path)
        if name != "_compat" and (module.startswith(PRIVATE) or (module.startswith("torch.") and "._" in module))
    ]
    assert not wrong, wrong


# Of an op: its schema, as torch documents operators by it; the others have no public counterpart.
KNOWN = {"_schema", "_overloadname", "_cdata", "_sequence_nr"}
PYTHONS = {"_exit", "_fields", "_getframe", "_make"}  # of os, of named tuples, of sys
TRAINERS = {
    "_get_dataloader",
    "_get_num_items_in_batch",
    "_load_rng_state",
    "_prepare_inputs",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
    "_train_batch_size",
}  # what subclasses of transformers.Trainer override
OPS = ("aten._", "torch.ops.")  # names of ops, which are public


def test_no_more_private_attributes_of_torch_are_used_elsewhere() -> None:
    wrong = []
    for name, path in files():
        for node in nodes(path) if name != "_compat" else ():
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            text = ast.unparse(node)
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            known = KNOWN | PYTHONS | (TRAINERS if room_of(name) == "integrations" else set())
            if not own and node.attr not in known and not text.startswith(OPS):
                wrong.append(f"{name}, line {node.lineno}: {text}")
    assert not wrong, wrong


def test_no_file_is_longer_than_400_lines() -> None:
    long = [f"{name}: {count}" for name, path in files() if (count := len(path.read_text().splitlines())) > 400]
    assert not long, long


def test_the_rules_of_all_families_together_stay_under_1500_lines() -> None:
    """A file that fills the table of rules, or names what an op is taken apart into, is one of a family's."""
    folder = ROOT / "sbpc" / "rules" / "ops"
    filled = {path.stem: path.read_text() for path in sorted(folder.glob("*.py"))}
    fills = re.compile(r"\n(    )?rule\(|\n    decomposition\(")
    families = {name: len(text.splitlines()) for name, text in filled.items() if fills.search(text)}
    assert {"attention", "conv", "decompositions", "matmul", "norm", "pointwise", "views"} <= set(families)
    assert sum(families.values()) < 1500, families
