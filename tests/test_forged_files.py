"""Files of strangers: whatever they hold, nothing of theirs runs, nothing loads wrong, nothing hangs, no text gets out of its line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import MeshError, PlanError, RuleError, read_json
from sbpc.plans.file_schema import misfit
from sbpc.runtime.state.checkpoint import Checkpoints
from sbpc.runtime.state.weight_files import save_tensors
from tests.forging import (
    body_of,
    everywhere,
    model_of,
    optimizer_of,
    other_checkpoints,
    others_of,
    outcomes,
    printed,
    sealed,
    texts_in,
)
from tests.processes import run_ranks
from tests.test_plan import refused

FILES = (
    "mlp-plan.sbpc",
    "gpt2-plan.sbpc",
    "mlp-staged.sbpc",
    "vgg-exported.sbpc",
    "mlp-exported.sbpc",
    "h100-cluster.json",
    "op-rules.txt",
    "two-weights.safetensors",
    "tied-checkpoint",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for files of every kind."""
    return tmp_path_factory.mktemp("files")


def written(path: Path) -> Path:
    """A file as sbpc writes it, of the model and the kind that its name tells."""
    name, kind = path.stem.split("-")
    if path.exists():
        return path
    if kind == "cluster":
        Mesh(x=2, cluster=name).cluster.save(path)
    elif kind == "checkpoint":
        assert run_ranks(keep, 2, str(path), sbpc.plan(*model_of(name), Mesh(x=2), pin={"table.weight": "S(0)@x"})) == [
            None,
            None,
        ]
    elif kind == "weights":
        save_tensors({"one": torch.ones(2, 3), "two": torch.zeros(4, dtype=torch.int64)}, path)
    elif kind == "rules":
        path.write_text(
            "forged::op  b d, d -> b d ; lin(0) ; when(not flag and d > 1)  # seen\nforged::other  *a -> *a\n"
        )
    else:
        model, args = model_of(name)
        pipe: dict[str, Any] = {"stages": "pipe", "microbatches": 4} if kind == "staged" else {}
        plan = sbpc.plan(model, args, Mesh(pipe=2, x=2) if pipe else Mesh(x=2), **pipe)
        plan.export(path) if kind == "exported" else plan.save(path)
    return path


def keep(folder: str, plan: sbpc.Plan) -> None:
    """On a rank: train two steps, and save a checkpoint after each."""
    model, args = model_of("tied")
    module, checkpoints = sbpc.parallelize(model, plan), Checkpoints(folder)
    optimizer = optimizer_of(module)
    for step in (1, 2):
        module(*args).backward()
        optimizer.step()
        checkpoints.save(step, module, optimizer, extra={"epoch": step, "seen": (1.5, [None], torch.float32)})
    checkpoints.wait()


def tried(folder: Path, name: str, count: int, seed: int) -> Counter[str]:
    """How many forged copies of a file are refused and loaded; nothing else may come of them."""
    source, paths = written(folder / name), []
    if source.is_dir():
        paths += other_checkpoints(source, count, seed)
    for number, data in enumerate(() if source.is_dir() else others_of(source, count, seed)):
        paths.append(source.with_stem(f"{source.stem}-{number}"))
        paths[-1].write_bytes(data)
    kind = source.stem.split("-")[1]
    found = outcomes(paths, "plan" if kind == "staged" else kind)
    wrong = [f"{path.name}: {told}" for path, told in zip(paths, found) if told.startswith("WRONG")]
    assert not wrong, "\n".join(wrong[:5])
    return Counter(found)


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("gpt2")])
def test_a_forged_file_is_refused_or_means_what_it_says(folder: Path, name: str) -> None:
    assert tried(folder, name, 8, seed=0)["refused"] >= 1


@pytest.mark.prove
@pytest.mark.parametrize("name", FILES)
def test_a_thousand_forged_files_are_refused_or_mean_what_they_say(folder: Path, name: str) -> None:
    found = tried(folder, name, 1000 // len(FILES) + 1, seed=1)
    assert min(found["refused"], found["loaded"]) >= 5, found


@pytest.mark.parametrize("name", ["mlp-staged.sbpc", "mlp-exported.sbpc"])
def test_no_text_of_a_file_may_hold_what_ends_its_line(folder: Path, name: str) -> None:
    """But that of a stack trace, which has lines."""
    body = body_of(written(folder / name))
    for old in sorted(set(texts_in(body))):
        wrong = misfit(read_json(json.dumps(everywhere(body, old, f"{old}\nx"))))
        assert wrong or 'File "' in old, old
    (folder / "bad").write_bytes(sealed(everywhere(body, "ups.0.weight", "w\n): pass\nimport os\ndef f(\n  q, #")))
    assert "w\\n): pass" in refused(PlanError, lambda: sbpc.load(folder / "bad"))


def test_a_name_with_a_line_end_stays_in_its_comment_and_is_not_written(tmp_path: Path) -> None:
    model = nn.Linear(4, 4, bias=False)
    model.register_parameter("w\nimport os\x1b[2J", nn.Parameter(torch.ones(4)))

    def forward(x: Tensor) -> Tensor:
        return nn.functional.linear(x, model.weight) * model.get_parameter("w\nimport os\x1b[2J")

    model.forward = forward  # type: ignore[method-assign]
    plan = sbpc.plan(model, (torch.ones(4, 4),), Mesh(x=2), train=False)
    from sbpc.inspect.python_text import python_text

    assert not any(line.startswith("import os") for line in python_text(plan.boxed, plan.mesh, "it\nends").splitlines())
    assert "Give what bears this name another one" in refused(PlanError, lambda: plan.save(tmp_path / "plan"))


class Chain(nn.Module):
    """Ops of which a forged file makes others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(4), nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(nn.functional.max_pool2d((x * self.scale).relu(), 2)).square().mean()


def call(body: dict[str, Any], target: str) -> dict[str, Any]:
    """The first call of an op."""
    found: dict[str, Any] = next(
        node for node in body["chunks"][0]["graph"] if node["target"].startswith(f"aten.{target}")
    )
    return found


def filled(body: dict[str, Any]) -> None:
    """The indices of the pooling's backward are far outside."""
    back = call(body, "max_pool2d_with_indices_backward")
    shape = [*back["val"][1][:2], 4, 4]
    full = {
        **back,
        "name": "full",
        "target": "aten.full.default",
        "args": [shape, 10**12],
        "val": ["int64", shape, [1, 1, 1, 1]],
    }
    full["kwargs"] = {"dict": {"dtype": {"torch": "int64"}}}
    back["args"][-1] = {"node": "full"}
    body["chunks"][0]["graph"].insert(body["chunks"][0]["graph"].index(back), full)


OUTSIDE: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("strides without a check", lambda body: call(body, "relu").update(
        target="aten._reshape_alias.default", args=[call(body, "relu")["args"][0], [2, 3, 8, 8], [10**9, 1, 1, 1]]), "no op that a plan may call"),
    ("strides over the end", lambda body: call(body, "relu").update(
        target="aten.as_strided.default", args=[call(body, "relu")["args"][0], [2, 3, 8, 8], [192, 64, 8, 1], 1]), "reads memory outside"),
    ("fewer means than rows", lambda body: call(body, "native_layer_norm_backward")["args"].__setitem__(3, {"node": "tangent_0"}), "does not fit"),
    ("indices outside", filled, "its indices are not those of a pooling"),
    ("a shape that is not so", lambda body: call(body, "relu").update(val=["float32", [2, 3, 8, 9], [1, 1, 1, 1]]), "float32[2, 3, 8, 8]"),
    ("a type that is not so", lambda body: call(body, "relu").update(val=["float64", [2, 3, 8, 8], [1, 1, 1, 1]]), "float64[2, 3, 8, 8]"),
    ("an internal op", lambda body: call(body, "relu").update(target="aten._lazy_clone.default"), "no op that a plan may call"),
    ("a name of Python's", lambda body: body.update(everywhere(body, "relu", "torch")), "a node is called 'torch'"),
    ("one output twice", lambda body: body["chunks"][0]["ports"]["outputs"].append(body["ports"]["outputs"][0]), "two outputs are one"),
]  # fmt: skip


def test_a_file_cannot_call_what_reads_outside_its_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sbpc.plan(Chain(), (torch.ones(2, 3, 8, 8),), Mesh(x=2)).save(tmp_path / "plan")
    whole = body_of(tmp_path / "plan")
    sbpc.load(tmp_path / "plan").verify()
    for what, change, said in OUTSIDE:
        body = json.loads(json.dumps(whole))
        change(body)
        (tmp_path / "bad").write_bytes(sealed(body))
        assert said in refused(PlanError, lambda: sbpc.load(tmp_path / "bad")), what


@dataclass
class Busy:
    loss: Tensor

    def __post_init__(self) -> None:
        raise AssertionError("code of a class that a file names runs")


def test_a_file_makes_no_object_whose_class_does_more_than_to_hold_its_fields(tmp_path: Path) -> None:
    model, args = model_of("mlp")
    sbpc.plan(model, args, Mesh(x=2)).save(tmp_path / "plan")
    body = body_of(tmp_path / "plan")
    body["ports"]["results"] = body["chunks"][0]["ports"]["results"] = [
        "dataclass",
        f"{__name__}:Busy",
        [["loss", ["tensor", 0]]],
    ]
    (tmp_path / "bad").write_bytes(sealed(body))
    assert "does more than to hold its fields" in refused(PlanError, lambda: sbpc.load(tmp_path / "bad"))


def test_json_is_read_as_sbpc_writes_it() -> None:
    for text in (
        "[" * 101 + "]" * 101,
        "[" * 10**6,
        "[1" + "0" * 5000 + "]",
        f"[{1 << 63}]",
        '["\\u001b"]',
        '{"\\u202e": 1}',
        "{",
    ):
        with pytest.raises(ValueError):
            read_json(text)
    assert read_json('[{"a": ["line\\nend", 1.5, true, null, -9223372036854775808]}]') == [
        {"a": ["line\nend", 1.5, True, None, -(1 << 63)]}
    ]


def test_files_of_clusters_and_rules_hold_no_controls(tmp_path: Path) -> None:
    figures = Mesh(x=2, cluster="h100").cluster.figures()
    (tmp_path / "cluster.json").write_text(json.dumps(figures | {"name": "a\x1b[2J"}))
    refused(MeshError, lambda: sbpc.Cluster.load(tmp_path / "cluster.json"))
    (tmp_path / "rules.txt").write_text("forged::op\x1b[2J *a -> *a\n")
    assert "\x1b" not in refused(RuleError, lambda: sbpc.load_rules(tmp_path / "rules.txt"))
    assert "\x1b" not in printed("plan", f"{tmp_path}/none\x1b[2J.py:f", "--mesh", "x=2")
    (tmp_path / "rules.txt").write_text(f"forged::op *a -> *a ; when({'not ' * 20000}x)\n")
    refused(RuleError, lambda: sbpc.load_rules(tmp_path / "rules.txt"))


def test_a_plan_with_an_op_that_no_file_may_call_is_not_written(tmp_path: Path) -> None:
    bag = nn.EmbeddingBag(10, 4, mode="max")
    plan = sbpc.plan(bag, (torch.zeros(4, 3, dtype=torch.int64),), Mesh(x=2), train=False)
    message = refused(PlanError, lambda: plan.save(tmp_path / "plan"))
    assert (
        message.startswith("a file may not call aten._embedding_bag") and "Give the op a rule by sbpc.rule" in message
    )


class Placing(nn.Module):
    """Calls that the rules of their ops do not fit."""

    def forward(self, x: Tensor, mask: Tensor, at: Tensor) -> Tensor:
        x = x.index_put((mask,), x.new_tensor(0.5)).scatter(1, at, x.new_ones(x.shape)).scatter_add(1, at, x.detach())
        return x * torch.histc(x.detach(), 4) + x.sum().gather(0, at[0, 0]) + x.index_select(0, at[0, 0])


def test_a_call_that_the_rule_of_its_op_does_not_fit_is_read_back(tmp_path: Path) -> None:
    args = torch.randn(4, 4, requires_grad=True), torch.ones(4).bool(), torch.tensor([[0, 1]])
    plan = sbpc.plan(Placing(), args, Mesh(x=2))
    plan.save(tmp_path / "plan")
    calls = [node for node in plan.annotated.graph.nodes if node.op == "call_function"]
    unfit = {str(node.target.__name__).split(".")[0] for node in calls if "match" not in node.meta}
    assert unfit >= {"index_put", "scatter", "scatter_add", "histc", "gather", "index_add"}
    assert str(sbpc.load(tmp_path / "plan")) == str(plan)


def test_a_file_that_lacks_the_layout_of_an_output_is_refused(tmp_path: Path) -> None:
    sbpc.plan(nn.Linear(4, 4), (torch.ones(4, 4),), Mesh(x=2)).save(tmp_path / "plan")
    body = body_of(tmp_path / "plan")
    (chunk,) = body["chunks"]
    left = chunk["outputs"]
    for at, _ in enumerate(left):
        for outputs in (left[:at] + left[at + 1 :], [*left[:at], None, *left[at + 1 :]]):
            (tmp_path / "bad").write_bytes(sealed(body | {"chunks": [chunk | {"outputs": outputs}]}))
            refused(PlanError, lambda: sbpc.load(tmp_path / "bad"))
