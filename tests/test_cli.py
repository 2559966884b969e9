"""The command line: what each command prints, and what it says of bad input."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import sbpc
from sbpc import Mesh
from sbpc.cli.main import main
from sbpc.mesh.cluster import CLUSTERS, Cluster
from sbpc.passes.pipeline import PASSES
from tests import models

TARGET = """
from pathlib import Path
import torch
from torch import nn
import sibling

HERE = Path(__file__).with_name("width.txt").read_text()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(int(HERE), 16), nn.Linear(16, int(HERE))
    def forward(self, x, scale=1.0):
        return (self.down(torch.relu(self.up(x))) * scale).square().sum()

def model():
    print("said by the target")
    return Model(), (torch.randn(8, int(HERE)),)

def with_kwargs():
    return Model(), (torch.randn(8, int(HERE)),), {"scale": 2.0}

def nothing():
    return 3

class Wrong(Model):
    def forward(self, x):
        return self.up(x.sum(1, keepdim=True))

def wrong():
    return Wrong(), (torch.randn(8, int(HERE)),)

def fails():
    raise ValueError("no data")

if __name__ == "__main__":
    raise SystemExit("a target is not run as a script")
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "width.txt").write_text("8")
    (tmp_path / "sibling.py").write_text("x = 1\n")
    path = tmp_path / f"target_of_{tmp_path.name}.py"  # a name of its own: modules are imported once
    path.write_text(TARGET)
    return str(path)


def run(*arguments: str) -> int:
    return main([str(argument) for argument in arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that ends with 2, and leaves standard output empty."""
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


def test_plan_prints_layouts_collectives_and_the_number_of_verified_edges(target, capsys):
    assert run("plan", f"{target}:model", "--mesh", "data=2,tensor=2") == 0
    out = capsys.readouterr().out
    assert "Model on Mesh(data=2, tensor=2): 4 ranks" in out
    assert "up.weight" in out and "home layout" in out and "collectives" in out
    assert "verified" in out and "edges" in out


def test_plan_as_json_is_json_though_the_target_prints(target, capsys):
    assert run("plan", f"{target}:model", "--mesh", "data=2", "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "said by the target" in err
    assert found["mesh"] == {"data": 2} and found["verified_edges"] > 0 and found["flops"] < found["flops_one_device"]
    assert sum(row["bytes_sent"] for row in found["collectives"]) == sum(found["bytes_sent"].values()) > 0


def test_what_is_computed_again_is_told(tmp_path, capsys):
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def block(): return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))\n"
        "def net(): return nn.Sequential(block(), block()), (torch.randn(8, 8),)\n"
    )
    command = "plan", f"{tmp_path / 'net.py'}:net", "--mesh", "data=2", "--json"
    found = []
    for more in ((), ("--recompute", "full")):
        assert run(*command, *more) == 0
        found.append(json.loads(capsys.readouterr().out)["recompute_seconds"])
    assert found[0] == 0.0 < found[1]


def test_pins_are_kept(target, capsys):
    pins = "--pin", "up.weight=S(0)", "--pin", "down.weight=S(1)"
    assert run("plan", f"{target}:model", "--mesh", "tensor=2", *pins, "--json") == 0
    parameters = json.loads(capsys.readouterr().out)["parameters"]
    assert (parameters["up.weight"], parameters["down.weight"]) == ("[S(0)]", "[S(1)]")


def test_the_objective_and_the_number_of_micro_batches_are_options(target, capsys, tmp_path):
    import sbpc

    found = {}
    for objective in ("seconds", "serial"):
        asked = "--objective", objective, "--microbatches", "2", "--pin", "*=B", "--cluster", "h100"
        assert run("plan", f"{target}:model", "--mesh", "data=2", *asked, "--json", "-o", tmp_path / "plan.sbpc") == 0
        found[objective] = json.loads(capsys.readouterr().out)
        options = sbpc.load(tmp_path / "plan.sbpc").options
        assert (options.objective, options.microbatches) == (objective, 2)
    serial = found["serial"]
    assert serial["seconds"] == pytest.approx(serial["compute_seconds"] + serial["comm_seconds"])


def test_float64_doubles_the_bytes_of_parameters(target, capsys):
    sizes = []
    for dtype in ("float32", "float64"):
        assert run("plan", f"{target}:model", "--mesh", "data=1", "--dtype", dtype, "--json") == 0
        sizes.append(json.loads(capsys.readouterr().out)["memory"]["parameters"])
    assert sizes[1] == 2 * sizes[0]


def test_without_training_no_gradient_is_planned(target, capsys):
    assert run("plan", f"{target}:model", "--mesh", "data=2", "--no-train", "--json") == 0
    assert json.loads(capsys.readouterr().out)["memory"]["gradients"] == 0


def test_what_cannot_have_an_effect_is_refused(target, capsys):
    assert "--rank 1 is of no use with --stage boxed" in refused(
        capsys, "show", target, "--mesh", "data=2", "--rank", "1"
    )
    message = refused(capsys, "run", f"{target}:model", "--mesh", "data=2", "--check-nans", "--executor", "code")
    assert "--executor code with --check-nans" in message
    assert "plans the forward alone" in refused(capsys, "run", target, "--mesh", "data=2", "--no-train")


def test_a_cluster_may_be_a_file(target, capsys, tmp_path):
    import sbpc

    file = tmp_path / "cluster.json"
    figures = sbpc.Mesh(data=2, cluster="h100").cluster
    figures.save(file)
    assert run("plan", f"{target}:model", "--mesh", "data=2", "--cluster", file, "--json") == 0
    assert json.loads(capsys.readouterr().out)["cluster"] == "h100"


def test_dump_writes_the_graph_after_every_pass(target, capsys, tmp_path):
    assert run("plan", f"{target}:model", "--mesh", "data=2", "--dump", tmp_path / "dump") == 0
    names = [path.stem.split("_", 1)[1] for path in sorted((tmp_path / "dump").iterdir())]
    assert names == ["capture", "normalize", "decompose", "lift", "annotate", "assign", "box", "schedule", "localize"]


def test_dump_has_what_is_computed_again_halves_and_panels_where_they_run_in_the_order_of_the_list(tmp_path):
    model, args = models.gpt2(batch=8, layers=2)
    cases = [
        (
            Mesh(data=2, tensor=2, cluster="h100"),
            {"recompute": "full", "panels": 2, "microbatches": 2, "inputs": ["S(0)@data"] * 2},
            {"recompute", "microbatches"},
        ),
        (Mesh(tensor=2, cluster="ethernet"), {"panels": 4, "pin": {"*up.weight": "S(0)"}}, {"panels"}),
    ]
    for at, (mesh, options, more) in enumerate(cases):
        sbpc.plan(model, args, mesh, dump=tmp_path / str(at), **options)
        names = [path.stem.split("_", 1)[1] for path in sorted((tmp_path / str(at)).iterdir())]
        assert names == [name for name in PASSES if name in names] and more <= set(names), names


def test_dump_of_a_pipeline_has_the_loop_and_each_chunk(target, capsys, tmp_path):
    asked = "--mesh", "pipe=2", "--stages", "pipe", "--microbatches", "2", "--objective", "serial"
    assert run("plan", f"{target}:model", *asked, "--dump", tmp_path / "dump") == 0
    names = [path.stem.split("_", 1)[1] for path in sorted((tmp_path / "dump").iterdir())]
    assert names[5:] == [
        "loop",
        *(f"chunk{at}_{name}" for at in range(2) for name in ("cut", "assign", "box", "localize")),
    ]
    assert all((tmp_path / "dump" / f"{at:02}_{name}.txt").read_text() for at, name in enumerate(names))


def test_a_saved_plan_is_shown_as_its_target_is(target, capsys, tmp_path):
    file = tmp_path / "plan.sbpc"
    assert run("plan", f"{target}:model", "--mesh", "data=2", "-o", file) == 0
    capsys.readouterr()
    for stage in ("annotated", "boxed", "local"):
        assert run("show", file, "--stage", stage) == 0
        saved = capsys.readouterr().out
        assert run("show", f"{target}:model", "--mesh", "data=2", "--stage", stage) == 0
        assert capsys.readouterr().out.replace("said by the target\n", "") == saved
        assert "up.weight" in saved


def test_show_as_json_lists_every_value(target, capsys):
    assert run("show", f"{target}:model", "--mesh", "data=2,tensor=2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    first = found["values"][0]
    assert found["axes"] == ["data", "tensor"]
    assert (first["name"], first["type"], first["section"]) == ("up.weight", "f32[16, 8]", "stored")
    assert all(value["bytes_sent"] > 0 for value in found["values"] if value["kind"] == "boxing")


def test_show_draws_a_picture_into_a_file(target, capsys, tmp_path):
    assert run("show", f"{target}:model", "--mesh", "data=2", "--svg", tmp_path / "graph.svg") == 0
    assert (tmp_path / "graph.svg").read_text().startswith("<svg")


def test_keyword_arguments_of_a_target_are_planned(target, capsys):
    assert run("plan", f"{target}:with_kwargs", "--mesh", "data=2") == 0


def test_a_file_of_a_package_is_imported_as_part_of_it(capsys):
    path = Path(__file__).with_name("models.py")
    assert run("plan", f"{path}:mlp", "--mesh", "data=2") == 0
    assert sys.modules["tests.models"].__file__ == str(path)


def test_bad_targets_are_explained(target, capsys, tmp_path):
    mesh = "--mesh", "data=2"
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    lacks = tmp_path / "lacks.py"
    lacks.write_text("import no_such_module\n")
    assert "is not a target, as in" in refused(capsys, "plan", target, *mesh)
    assert "there is no file" in refused(capsys, "plan", "nowhere.py:model", *mesh)
    assert "no function 'mode'\n  It has model" in refused(capsys, "plan", f"{target}:mode", *mesh)
    assert "returns (int)" in refused(capsys, "plan", f"{target}:nothing", *mesh)
    assert "SyntaxError" in refused(capsys, "plan", f"{broken}:f", *mesh)
    assert "ModuleNotFoundError: No module named 'no_such_module'" in refused(capsys, "plan", f"{lacks}:f", *mesh)
    message = refused(capsys, "plan", f"{target}:fails", *mesh)
    assert 'ValueError: no data\n  File "' in message and 'raise ValueError("no data")' in message


def test_bad_options_are_explained(target, capsys, tmp_path):
    name, mesh = f"{target}:model", ("--mesh", "data=2")
    assert "there is no mesh" in refused(capsys, "plan", name)
    assert "no cluster is called 'moon.json', and there is no such file\n" in refused(
        capsys, "plan", name, *mesh, "--cluster", "moon.json"
    )
    assert "no axis can have one of the names cluster" in refused(capsys, "plan", name, "--mesh", "cluster=2")
    assert "names no layout" in refused(capsys, "plan", name, *mesh, "--pin", "up.weight")
    assert "is given as 'S(0)' and as 'B'" in refused(capsys, "plan", name, *mesh, "--pin", "x=S(0)", "--pin", "x=B")
    for command in (("plan", "-o"), ("show", "--svg")):
        for place, why in ((tmp_path / "no" / "file", "there is no folder"), (tmp_path, "it is a folder")):
            message = refused(capsys, command[0], name, *mesh, command[1], place)
            assert f"cannot write {place}: {why}" in message
    for dump in (target, Path(target) / "dump"):
        message = refused(capsys, "plan", name, *mesh, "--dump", dump)
        assert f"cannot make the folder {dump}: " in message and "said by the target" not in message


def test_what_show_cannot_find_is_named(target, capsys, tmp_path):
    for mesh in ((), ("--mesh", "data=2")):
        for missing in ("nofile.sbpc", "nofile.py", "nofile.py:model", "nofile", ""):
            file = missing.removesuffix(":model")
            assert f"there is no file {file!r}\n" in refused(capsys, "show", missing, *mesh)
        (tmp_path / "dir.py").mkdir(exist_ok=True)
        for folder in (tmp_path / "dir.py", f"{tmp_path / 'dir.py'}:model"):
            assert "dir.py' is a folder\n" in refused(capsys, "show", folder, *mesh)
        assert f"is not a target, as in {target}:function" in refused(capsys, "show", target, *mesh)


def test_a_plan_that_is_made_takes_no_options_of_planning(target, capsys, tmp_path):
    file, name = tmp_path / "plan.sbpc", f"{target}:model"
    assert run("plan", name, "--mesh", "data=2", "-o", file) == 0
    capsys.readouterr()
    assert "plan.sbpc is a plan: --mesh cannot change it" in refused(capsys, "show", file, "--mesh", "a=3")
    others = (
        "--pin",
        "x=B",
        "--no-train",
        "--memory",
        "1G",
        "--cluster",
        "h100",
        "--dump",
        tmp_path / "dump",
        "--objective",
        "bytes",
        "--microbatches",
        "2",
    )
    message = refused(capsys, "show", file, *others, "--dtype", "float64")
    assert "--cluster, --no-train, --memory, --pin, --objective, --microbatches, --dump, --dtype cannot" in message
    assert "--mesh cannot change it" in refused(capsys, "run", name, "--plan", file, "--mesh", "data=2")
    assert not (tmp_path / "dump").exists()


def test_an_error_of_the_models_own_code_is_shown_as_an_error_of_the_user(target, capsys):
    message = refused(capsys, "plan", f"{target}:wrong", "--mesh", "data=2")
    assert "sbpc: CaptureError: " in message and "Traceback" not in message and "fake_tensor.py" not in message
    assert "return self.up(x.sum(1, keepdim=True))" in message


def test_a_file_that_is_no_plan_is_refused(capsys, tmp_path):
    file = tmp_path / "text.sbpc"
    file.write_text("hello")
    assert "is no plan" in refused(capsys, "show", file)


def test_clusters_are_listed_with_what_their_figures_are_from(capsys, tmp_path):
    sbpc.Mesh(data=2, cluster="h100").cluster.save(tmp_path / "mine.json")
    assert run("clusters") == 0
    told = capsys.readouterr().out
    assert all(name in told for name in CLUSTERS) and "data sheet: NVIDIA DGX H100" in told
    heads, *rows = told.split("\n\n")[0].splitlines()  # no cell is cut or broken, however narrow the terminal
    assert heads.startswith("cluster") and [row.split()[0] for row in rows] == list(CLUSTERS)
    assert run("clusters", "a100", str(tmp_path / "mine.json"), "--json") == 0
    found = [Cluster.of(each, "printed") for each in json.loads(capsys.readouterr().out)]
    assert found == [CLUSTERS["a100"], CLUSTERS["h100"]]
    assert "no cluster is called 'z100'" in refused(capsys, "clusters", "z100")


def test_wrong_arguments_end_with_2(capsys):
    for arguments in (
        (),
        ("plan",),
        ("fly",),
        ("plan", "x.py:f", "--mesh", "data=2,data=2"),
        ("plan", "x.py:f", "--microbatches", "0"),
        ("plan", "x.py:f", "--objective", "speed"),
        *(("plan", "x.py:f", "--memory", memory) for memory in ("much", "nan", "-1", "inf", "")),
        *(("run", "x.py:f", "--lr", lr) for lr in ("fast", "nan", "-0.1", "inf", "")),
        ("plan", "x.py:f", "-o", ""),
        ("plan", "x.py:f", "--dump", ""),
        ("plan", "x.py:f", "--cluster", ""),
        ("show", "x.py:f", "--svg", ""),
        *(("sweep", "x.py:f", "--devices", "2", "--top", top) for top in ("0", "-1", "2.5", "all")),
        ("profile", "--ranks", "0"),
        ("run", "x.py:f", "--plan", ""),
    ):
        with pytest.raises(SystemExit) as ended:
            run(*arguments)
        assert ended.value.code == 2


def test_verbose_logs_what_is_done(target, capsys, caplog):
    with caplog.at_level(logging.INFO, "sbpc"):
        assert run("plan", f"{target}:model", "--mesh", "data=2", "--verbose") == 0
    assert any(record.name == "sbpc" and "assign" in record.getMessage() for record in caplog.records)


def test_the_module_is_the_command_and_a_closed_pipe_is_no_error(target):
    command = f"{sys.executable} -m sbpc show '{target}:model' --mesh data=2 | head -1"
    found = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout.count("\n")) == (0, 1)
    assert "Traceback" not in found.stderr and "Broken" not in found.stderr


def test_a_run_without_a_loss_is_refused_before_ranks_start(tmp_path, capsys, monkeypatch):
    path = tmp_path / f"results_of_{tmp_path.name}.py"
    path.write_text("import torch\n\ndef linear():\n    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)\n")
    monkeypatch.setattr("sbpc.cli.commands.run.launch", lambda *_: pytest.fail("ranks were started"))
    assert "with gradients, (2, 4), none a loss" in refused(capsys, "run", f"{path}:linear", "--mesh", "data=2")
