"""Imports go down only, and everything private of torch is imported in one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEVELS = (
    ("errors", "kinds", "_compat", "bounds", "repeats", "nodes", "totals", "uncollected"),
    ("states", "ports", "random", "cluster", "frames", "writer"),
    ("layout", "structure"),
    ("mesh", "codes"),
    ("steps", "stepgraph"),
    ("boxing", "lowering", "rules", "solver", "pins"),
    ("choices", "cost", "program", "writer"),
    ("memory",),
    ("formulas", "measure", "pairs", "graphtext", "rows", "tables"),
    ("experts", "picture"),
    ("codec", "report"),
    ("programs",),
    ("plan",),
    ("page", "moments"),
    ("passes",),
    ("runtime",),
    ("api", "exported"),
    ("sweep",),
    ("backend",),
    ("",),  # the package itself
    ("target", "train"),
    ("demo",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
PRIVATE = ("torch._", "torch.fx.experimental", "torch.testing._internal")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The modules that a file imports, and whether only for types."""
    tree = ast.parse(path.read_text())
    typed = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in typed
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node in typed
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node in typed


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


def test_imports_go_down_only() -> None:
    wrong = []
    for name, path in files():
        own = name.split(".")[0]
        assert own in LEVEL, f"{name} has no level: put it into LEVELS"
        for module, typed in imports(path):
            parts = module.split(".")
            if parts[0] != "sbpc" or typed or module == "sbpc":
                continue
            other = parts[1]
            if other in LEVEL and LEVEL[other] > LEVEL[own]:
                wrong.append(f"{name} imports {module}")
    assert not wrong, wrong


def test_passes_share_only_the_pipeline_and_verify() -> None:
    wrong = []
    helpers = {"draws", "joint", "lists", "tracer", "program"} | {"assign", "prices", "found", "held", "mend", "shortage", "splice"}  # what memory searches
    for name, path in files():
        if not name.startswith("passes.") or name == "passes.pipeline":
            continue
        for module, _ in imports(path):
            if module.startswith("sbpc.passes.") and module.split(".")[2] not in {"verify", *helpers}:
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
PYTHONS = {"_exit", "_fields", "_getframe"}  # of os, of named tuples, of sys
OPS = ("aten._", "torch.ops.")  # names of ops, which are public


def test_no_more_private_attributes_of_torch_are_used_elsewhere() -> None:
    wrong = []
    for name, path in files():
        for node in ast.walk(ast.parse(path.read_text())) if name != "_compat" else ():
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            text = ast.unparse(node)
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and node.attr not in KNOWN | PYTHONS and not text.startswith(OPS):
                wrong.append(f"{name}, line {node.lineno}: {text}")
    assert not wrong, wrong


def test_no_file_is_longer_than_400_lines() -> None:
    long = [f"{name}: {count}" for name, path in files() if (count := len(path.read_text().splitlines())) > 400]
    assert not long, long


def test_the_rules_of_all_families_together_stay_under_1500_lines() -> None:
    """A file that fills the table of rules, or names what an op is taken apart into, is one of a family's."""
    folder = ROOT / "sbpc" / "rules"
    filled = {path.stem: path.read_text() for path in sorted(folder.glob("*.py"))}
    families = {
        name: len(text.splitlines())
        for name, text in filled.items()
        if "\nrule(" in text or "\n    rule(" in text or "\n    decomposition(" in text
    }
    assert {"attention", "conv", "decompositions", "matmul", "norm", "pointwise", "views"} <= set(families)
    assert sum(families.values()) < 1500, families
