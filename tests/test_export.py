"""Exported files: the programs of every rank run without planning and without the model's source; bad files are refused."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sbpc
from sbpc import Mesh, Plan
from sbpc.cli.main import main
from sbpc.cli.target import load_target
from sbpc.cli.train_loop import optimizer_of, train
from sbpc.errors import PlanError
from sbpc.graph.ports import PARAMETER
from sbpc.graph.pytree import flatten
from sbpc.plans.rank_programs import Programs
from sbpc.runtime.state.checkpoint import weights_in
from sbpc.runtime.state.weight_files import read_tensors, reader, save_tensors, save_weights, tree, weights_of
from tests import models
from tests.compare import eager, largest_error, relative_error
from tests.processes import command, run_ranks
from tests.test_plan import refused


def exported(path: Path, net: str, mesh: Mesh, **options: Any) -> tuple[nn.Module, Any, Plan, Plan]:
    """A model with its weights beside its exported plans for training and inference."""
    torch.manual_seed(0)
    model, args = getattr(models, net)(**options)
    train = sbpc.plan(model, args, mesh)
    inference = sbpc.plan(model.eval(), args, mesh, train=False)
    train.export(path, inference)
    save_weights(weights_of(model), path.with_suffix(".safetensors"))
    return model.train(), args, train, inference


def bare(found: Programs, weights: Path) -> nn.Module:
    """The module of an exported file on one device: names and tensors, nothing of the model's source."""
    tensors = read_tensors(weights)
    names = [port.name for port in found.shapes if port.kind == PARAMETER]
    return tree(tensors, found.ports.tied, names, found.ports.frozen)


def largest_error_bare(found: Programs, module: nn.Module, model: nn.Module, args: Any) -> float:
    """The largest error of the gradients of a module without source against the model."""
    run, (_, gradients) = sbpc.simulate(found, module, args), eager(model, args)
    assert run.gradients.keys() == gradients.keys()
    pairs = [(run.gradients[name], expected) for name, expected in gradients.items() if expected is not None]
    return max(relative_error(one, other) for one, other in pairs if one is not None)


@pytest.mark.parametrize(
    ("net", "mesh", "options"),
    [("gpt2", Mesh(x=2, y=2), {"layers": 1}), ("vgg", Mesh(x=3), {}), ("dict_output", Mesh(x=2), {})],
)
def test_programs_of_a_file_equal_one_device_without_the_source(
    tmp_path: Path, net: str, mesh: Mesh, options: Any
) -> None:
    torch.set_default_dtype(torch.float64)
    path = tmp_path / "model.sbpc"
    model, args, train, _ = exported(path, net, mesh, **options)
    found = sbpc.load_programs(path)
    assert [found.local_at(rank).code for rank in range(mesh.ranks)] == [
        train.local_at(rank).code for rank in range(mesh.ranks)
    ]
    assert largest_error(found, model, args) <= 1e-10
    assert largest_error_bare(found, bare(found, path.with_suffix(".safetensors")), model, args) <= 1e-10
    infer = sbpc.load_programs(path, "inference")
    assert not infer.options.train
    outputs = sbpc.simulate(infer, bare(infer, path.with_suffix(".safetensors")).eval(), args).outputs
    leaves, wanted = flatten(outputs, "outputs")[0], flatten(model.eval()(*args), "outputs")[0]
    assert all(torch.allclose(one, other, atol=1e-10) for one, other in zip(leaves, wanted, strict=True))


def test_names_in_other_scripts_are_exported(tmp_path: Path) -> None:
    model = nn.ModuleDict({"\u03b1_\u03b2": nn.Linear(4, 4, bias=False)})
    model.forward = lambda x: model["\u03b1_\u03b2"](x).square().mean()  # type: ignore[assignment]
    sbpc.plan(model, (torch.ones(4, 4),), Mesh(x=2)).export(tmp_path / "net")
    assert "\u03b1_\u03b2.weight" in [port.name for port in sbpc.load_programs(tmp_path / "net").shapes]


def test_ranks_of_unequal_shards_have_programs_of_their_own(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    path = tmp_path / "model.sbpc"
    model, args, train, _ = exported(path, "mlp", Mesh(x=4, y=2), batch=10, width=6, hidden=7)
    found = sbpc.load_programs(path)
    assert 1 < len(found.kinds["joint"]) <= 8 and {len(set(found.ranks))} == {*map(len, found.kinds.values())}
    assert all(found.local_at(rank).code == train.local_at(rank).code for rank in range(8))
    assert largest_error_bare(found, bare(found, path.with_suffix(".safetensors")), model, args) <= 1e-10


def test_a_mesh_of_1024_ranks_is_exported(tmp_path: Path) -> None:
    path = tmp_path / "model.sbpc"
    with torch.device("meta"):
        model, args = models.mlp(batch=1024, width=512, hidden=2050, layers=2)
    sbpc.plan(model, args, Mesh(data=32, tensor=32)).export(path)
    found = sbpc.load_programs(path)
    assert len(found.ranks) == 1024 and found.mesh.ranks == 1024
    refused(PlanError, lambda: sbpc.load_programs(path, "inference"))


class Evil:
    """A pickle that would end the test run."""

    def __reduce__(self) -> Any:
        return eval, ("__import__('os').abort()",)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported file with several programs."""
    path = tmp_path_factory.mktemp("exported") / "model.sbpc"
    exported(path, "mlp", Mesh(x=2, y=2), batch=10, width=6, hidden=7)
    return path


def test_200_damaged_files_and_a_pickle_are_refused(file: Path, tmp_path: Path) -> None:
    data, broken = file.read_bytes(), tmp_path / "model.sbpc"
    draw = random.Random(0)
    lines = data.split(b"\n")

    def swapped() -> bytes:
        first, second = sorted(draw.sample(range(len(data)), 2))
        size = draw.randrange(1, 1 + min(second - first, len(data) - second, 64))
        one, other = data[first : first + size], data[second : second + size]
        return data[:first] + other + data[first + size : second] + one + data[second + size :]

    def flipped() -> bytes:
        at = draw.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]

    def of_version() -> bytes:
        head = json.loads(lines[0]) | {"version": draw.choice([0, 2, 99, -1, "1", None, [1]])}
        return json.dumps(head).encode() + b"\n" + lines[1] + b"\n"

    def of_mesh() -> bytes:
        return data.replace(b'"mesh":[["x",2]', b'"mesh":[["x",%d]' % draw.choice([1, 3, 4, 1000]))

    kinds = [lambda: data[: draw.randrange(len(data))], flipped, swapped, of_version, of_mesh]
    counted = 0
    while counted < 200:
        changed = kinds[counted % len(kinds)]()
        if changed != data:
            broken.write_bytes(changed)
            refused(PlanError, lambda: sbpc.load_programs(broken))
            counted += 1
    for malicious in (pickle.dumps(Evil()), pickle.dumps(Evil(), 0)):
        broken.write_bytes(malicious)
        refused(PlanError, lambda: sbpc.load_programs(broken))
        refused(PlanError, lambda: sbpc.load(broken))
        refused(PlanError, lambda: read_tensors(broken))


def nodes(body: dict[str, Any], target: str) -> list[dict[str, Any]]:
    """The nodes of the first program that call a target."""
    return [node for node in body["programs"]["joint"][0]["graph"] if node["target"].startswith(target)]


def swap(items: list[Any], one: int, other: int) -> None:
    """Swap two entries."""
    items[one], items[other] = items[other], items[one]


def swap_unlike(items: list[Any]) -> None:
    """Swap the first node and the next one of another shape."""
    swap(items, 0, next(at for at, item in enumerate(items) if item["val"] != items[0]["val"]))


def swap_unequal(items: list[Any]) -> None:
    """Swap the first entry and the next one that is another."""
    swap(items, 0, next(at for at, item in enumerate(items) if item != items[0]))


C10D = "_c10d_functional."
FORGED: list[tuple[str, Any]] = [
    ("a larger mesh", lambda body: body["mesh"][0].__setitem__(1, 4)),
    ("a smaller mesh", lambda body: body["mesh"][0].__setitem__(1, 1)),
    ("axes in another order", lambda body: body["mesh"].reverse()),
    ("programs swapped", lambda body: swap(body["programs"]["joint"], 0, 1)),
    ("programs of ranks swapped", lambda body: swap(body["ranks"], 0, 3)),
    ("a rank too few", lambda body: body["ranks"].pop()),
    ("a program that there is not", lambda body: body["ranks"].__setitem__(0, 99)),
    ("a program too many", lambda body: body["programs"]["joint"].append(body["programs"]["joint"][0])),
    ("shapes swapped", lambda body: swap(body["inputs"], 0, 2)),
    ("layouts swapped", lambda body: swap_unequal(body["given"])),
    ("an unknown layout", lambda body: body["given"].__setitem__(0, "[S(7), B]")),
    ("a partial layout", lambda body: body["given"].__setitem__(0, "[P, B]")),
    ("a gradient from elsewhere", lambda body: body["left"].reverse()),
    ("placeholders swapped", lambda body: swap(body["programs"]["joint"][0]["graph"], 0, 2)),
    ("ports swapped", lambda body: swap(body["ports"]["inputs"], 0, 2)),
    ("a node after its use", lambda body: body["programs"]["joint"][0]["graph"].reverse()),
    ("another group", lambda body: nodes(body, C10D + "all")[0]["args"].__setitem__(-1, "sbpc::x=9::x")),
    ("a collective less", lambda body: drop_collective(body)),
    ("an op that is none", lambda body: nodes(body, "aten.")[0].update(target="os.system.default")),
    ("a collective that is none", lambda body: nodes(body, C10D)[0].update(target=C10D + "broadcast_.default")),
    ("code in a placeholder", lambda body: body["programs"]["joint"][0]["graph"][0].update(target="x=exec('1')")),
    ("a shape that is not so", lambda body: nodes(body, "aten.mm")[0]["val"].__setitem__(1, [3, 3])),
    ("a pickle for a program", lambda body: body["programs"]["joint"].__setitem__(0, pickle.dumps(Evil(), 0).decode())),
    ("a program less", lambda body: body["programs"].pop("ending")),
    ("a program of no name", lambda body: body["programs"].update(other=body["programs"]["ending"])),
    ("a backward that reads other saved values", lambda body: swap_unlike(body["programs"]["backward"][0]["graph"])),
    ("a forward that saves less", lambda body: body["programs"]["forward"][0]["graph"][-1]["args"].pop()),
    ("another forward", lambda body: body["programs"].update(forward=body["programs"]["joint"])),
    ("a trace that there is not", lambda body: body["traces"].clear()),
    ("results behind gradients", lambda body: body["ports"]["outputs"].reverse()),
    ("steps of no name", lambda body: body["steps"].update(other=body["steps"].pop("inference"))),
]


def drop_collective(body: dict[str, Any]) -> None:
    """One program leaves out a collective that the others run."""
    graph = body["programs"]["joint"][0]["graph"]
    at = next(at for at, node in enumerate(graph) if node["target"].startswith(C10D + "all_reduce"))
    graph[at].update(target="aten.clone.default", args=graph[at]["args"][:1])


def test_exported_file_with_a_good_checksum_and_bad_content_is_refused(file: Path, tmp_path: Path) -> None:
    head, whole = file.read_text().splitlines()
    broken = tmp_path / "model.sbpc"
    for what, change in FORGED:
        body = json.loads(whole)
        change(body)
        text = json.dumps(body)
        digest = hashlib.sha256(text.encode()).hexdigest()
        broken.write_text(json.dumps(json.loads(head) | {"sha256": digest}) + "\n" + text + "\n")
        with pytest.raises(PlanError):
            print(what, "is taken:", sbpc.load_programs(broken))


def test_indices_that_the_forward_has_not_pooled_are_refused_in_the_backward(tmp_path: Path) -> None:
    path = tmp_path / "model.sbpc"
    exported(path, "vgg", Mesh(x=2))
    head, whole = path.read_text().splitlines()
    body = json.loads(whole)
    forward = body["programs"]["forward"][0]["graph"]
    index = next(node for node in forward if node["val"] and node["val"][0] == "int64" and node["target"] == "getitem")
    assert {"node": index["name"]} in forward[-1]["args"]
    sbpc.load_programs(path)
    other = {
        **index,
        "name": "indices",
        "target": "aten.zeros.default",
        "args": [index["val"][1]],
        "kwargs": {"dict": {"dtype": {"torch": "int64"}}},
    }
    other.pop("part", None)
    forward[-1]["args"] = [
        {"node": "indices"} if arg == {"node": index["name"]} else arg for arg in forward[-1]["args"]
    ]
    forward[forward.index(index)] = other
    text = json.dumps(body)
    path.write_text(
        json.dumps(json.loads(head) | {"sha256": hashlib.sha256(text.encode()).hexdigest()}) + "\n" + text + "\n"
    )
    assert "its indices are not those of a pooling" in refused(PlanError, lambda: sbpc.load_programs(path))


def test_weights_of_another_model_are_refused(file: Path, tmp_path: Path) -> None:
    found, weights = sbpc.load_programs(file), tmp_path / "weights.safetensors"
    values = {port.name: value for port, value in found.shapes.items() if port.kind == PARAMETER}
    right = {name: torch.zeros(value.shape) for name, value in values.items()}
    name = next(iter(right))
    for wrong, message in (
        (right | {name: torch.zeros(3)}, f"{name} is [3] in"),
        ({key: value for key, value in right.items() if key != name}, f"lacks {name}"),
    ):
        save_tensors(wrong, weights)
        assert message in refused(PlanError, lambda: reader(weights, values))
    save_tensors(right | {name: right[name].double()}, weights)
    assert "torch.float64" in refused(PlanError, lambda: reader(weights, values)(name))


MLP = f"{Path(__file__).with_name('models.py')}:mlp"


def test_the_command_line_exports_trains_goes_on_and_infers_from_files_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, folder, out = tmp_path / "m.sbpc", tmp_path / "saved", tmp_path / "out.safetensors"
    target = load_target(MLP)
    model, args = target.model, target.args
    losses = train(model, [(args, {})] * 5, optimizer_of("adamw", model, 1e-3))
    assert main(["export", MLP, "--mesh", "x=2", "-o", str(file), "--json"]) == 0
    written = json.loads(capfd.readouterr().out)
    assert written["ranks"] == 2 and written["programs"] == {"train": 1, "inference": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.inputs.safetensors", "m.safetensors", "m.sbpc"]
    saved = ["--checkpoint", str(folder), "--every", "2", "--steps"]
    assert main(["run", str(file), "--json", *saved, "3"]) == 0
    found = [
        json.loads(printed)
        for printed in (capfd.readouterr().out, run_ranks(command, 2, "run", str(file), "--json", *saved, "5")[0])
    ]
    assert [run["start"] for run in found] == [0, 3]
    assert found[0]["losses"] + found[1]["losses"] == pytest.approx(losses, rel=1e-5)
    save_tensors(weights_in(folder).state_dict(), tmp_path / "trained.safetensors")
    weights = ["--weights", str(tmp_path / "trained.safetensors"), "--output", str(out)]
    assert json.loads(run_ranks(command, 2, "run", str(file), "--infer", "--json", *weights)[0])["output"] == str(out)
    assert read_tensors(out)["0"].item() == pytest.approx(model(*args).item(), rel=1e-5)


def test_options_that_do_not_fit_are_refused_before_ranks_start(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["run", str(file), "--mesh", "x=2"], "--mesh cannot change it"),
        (["run", MLP, "--infer"], "--infer is of use with exported files alone"),
        (["run", str(file), "--every", "0"], "Give 1 at least"),
        (["export", MLP, "--mesh", "x=2", "-o", "no/where.sbpc"], "there is no folder"),
        (["export", MLP, "--mesh", "x=2", "-o", str(tmp_path / "m.safetensors")], "is where the weights would lie"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
