"""What sbpc uses of torch's private parts, continued: what takes process groups, DTensors or a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from sbpc import _compat
from tests.processes import run_ranks

ROOT = Path(__file__).parent.parent
aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)


def whole_of_strided_shard(rank: int) -> list[float]:
    """On a mesh of 2 x 2 ranks a dim is cut over the inner axis first, each half then over the outer one."""
    mesh = init_device_mesh("cpu", (2, 2))
    local, placements = torch.tensor([[0.0, 2.0, 1.0, 3.0][rank]]), [_compat.StridedShard(0, split_factor=2), Shard(0)]
    return DTensor.from_local(local, mesh, placements).full_tensor().tolist()


def on_rank(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of the rank returns there."""
    return function(dist.get_rank(), *args)


def strided_shards_are_put_together() -> bool:
    return run_ranks(on_rank, 4, whole_of_strided_shard) == [[0.0, 1.0, 2.0, 3.0]] * 4


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def groups_in_turn(rank: int) -> tuple[int, float, list[list[int]]]:
    """How many threads a group has, the seconds that it waits, and what it gathers."""
    with _compat.gloo_in_turn():
        group = dist.new_group(timeout=torch.distributed.constants.default_pg_timeout)
    options = group._get_backend(torch.device("cpu")).options
    gathered = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(gathered, torch.tensor([rank]), group)
    return options._threads, options._timeout.total_seconds(), [each.tolist() for each in gathered]


def test_gloo_in_turn_makes_groups_of_one_thread_that_gather() -> None:
    assert run_ranks(on_rank, 2, groups_in_turn) == [(1, 1800.0, [[0], [1]])] * 2


def test_gloo_in_turn_takes_options_that_a_later_torch_gives(tmp_path: Path) -> None:
    """Torch 2.14 gave a new one, and every run died."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    with _compat.gloo_in_turn():
        made: Any = dist.distributed_c10d.ProcessGroupGloo
        options = made(
            store, 0, 1, timeout=torch.distributed.constants.default_pg_timeout, group_name="known", unheard_of=1
        ).options
    assert (options._threads, options.group_name) == (1, "known")


def test_gloo_in_turn_leaves_torchs_groups_as_they_were() -> None:
    before = dist.distributed_c10d.ProcessGroupGloo
    with _compat.gloo_in_turn():
        assert dist.distributed_c10d.ProcessGroupGloo is not before
    assert dist.distributed_c10d.ProcessGroupGloo is before


def reduced_by_name(rank: int) -> tuple[list[float], bool]:
    """A sum over a group by its name; whether the name is unknown after it has been freed."""
    _compat.register_process_group("sbpc_test", dist.group.WORLD)
    functional = torch.ops._c10d_functional
    found = functional.wait_tensor(functional.all_reduce(torch.full((2,), rank + 1.0), "sum", "sbpc_test")).tolist()
    _compat.unregister_process_group("sbpc_test")
    with contextlib.suppress(RuntimeError):
        functional.all_reduce(torch.ones(2), "sum", "sbpc_test")
        return found, False
    return found, True


@pytest.fixture(scope="module")
def by_name() -> list[Any]:
    return run_ranks(on_rank, 2, reduced_by_name)


def test_register_process_group_binds_a_name_that_collectives_use(by_name: list[Any]) -> None:
    assert [found for found, _ in by_name] == [[3.0, 3.0]] * 2


def test_unregister_process_group_frees_the_name(by_name: list[Any]) -> None:
    assert [freed for _, freed in by_name] == [True] * 2


def printed(code: str, **environment: str) -> str:
    """What a Python of its own prints, on both streams."""
    about = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=about, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


CUSTOM = """
import sys, torch
from sbpc import _compat
@torch.library.custom_op("sbpc_test_compat::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x
loaded = lambda: {name for name in sys.modules if name.startswith("torch._dynamo")}
assert not loaded()
_compat.load_custom_ops()
before = loaded()
assert before and twice(torch.ones(2)).tolist() == [2, 2] and loaded() == before
"""


def test_load_custom_ops_leaves_the_first_call_nothing_to_import() -> None:
    assert printed(CUSTOM, RANK="1") == ""


def test_local_of_a_dtensor_is_its_shard_itself(mesh: Any) -> None:
    shard = X.clone()
    tensor = DTensor.from_local(shard, mesh, [Shard(0)]).requires_grad_()
    assert _compat.storage_of(_compat.local_of(tensor)) == _compat.storage_of(shard)
    assert _compat.local_of(tensor).grad_fn is None and _compat.local_of(X) is X


def test_fsdp_param_is_made_of_each_parameter_and_gets_it_first(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, given = _compat.fsdp_param(), list[Any]()
    construct = cls.__init__  # type: ignore[misc]
    monkeypatch.setattr(
        cls, "__init__", lambda self, first, *more: (given.append(first), construct(self, first, *more))[1]
    )
    module = torch.nn.Linear(3, 2)
    parameters = list(module.parameters())
    fully_shard(module, mesh=mesh)
    assert len(given) == 2 and all(one is two for one, two in zip(given, parameters))


def test_with_local_makes_a_dtensor_of_the_same_layout(mesh: Any) -> None:
    like = DTensor.from_local(X, mesh, [Shard(1)])
    made = _compat.with_local(like, X.T.clone().T + 1)
    assert made.placements == (Shard(1),) and made.device_mesh is mesh and torch.equal(made.full_tensor(), X + 1)
    assert made.to_local().is_contiguous() and _compat.with_local(X, X) is X


def test_hold_gives_a_dtensor_another_shard_and_leaves_what_was_saved_of_the_one_before(mesh: Any) -> None:
    tensor = DTensor.from_local(X.clone(), mesh, [Shard(0)])
    before = tensor.to_local()
    _compat.hold(tensor, X + 1)
    assert torch.equal(tensor.full_tensor(), X + 1) and torch.equal(before, X)


def test_loses_writes_tells_views_of_a_shard_from_copies(mesh: Any) -> None:
    whole, split = (DTensor.from_local(torch.ones(4, 3), mesh, [each]) for each in (Replicate(), Shard(0)))
    assert not any(map(_compat.loses_writes, (whole, split, whole[1], split[:, 1], split + 1, X[0])))
    for view in (whole[1], split[1], split[1:3], split.flatten()):
        before, lost = split.to_local().clone() + whole.to_local(), _compat.loses_writes(view)
        view.mul_(2)
        assert lost == torch.equal(before, split.to_local() + whole.to_local())


def test_detached_is_a_dtensor_that_shares_the_shard(mesh: Any) -> None:
    tensor = DTensor.from_local(X.clone(), mesh, [Shard(0)]).requires_grad_()
    made = _compat.detached(aten.detach.default, (tensor,), {})
    assert not made.requires_grad and made.placements == tensor.placements
    assert _compat.storage_of(made.to_local()) == _compat.storage_of(tensor.to_local())


def test_on_dtensors_has_torch_call_the_handler(mesh: Any) -> None:
    tensor, calls = DTensor.from_local(X, mesh, [Shard(0)]), list[Any]()
    _compat.on_dtensors(
        aten.erfinv.default, lambda op, args, kwargs: calls.append((op, args[0] is tensor, kwargs)) or tensor
    )
    try:
        assert torch.erfinv(tensor) is tensor and calls == [(aten.erfinv.default, True, {})]
        assert torch.erfinv(X[0, :1]) == 0 and len(calls) == 1
    finally:
        del DTensor._op_dispatcher._custom_op_handlers[aten.erfinv.default]


def test_as_torch_does_leaves_a_handler_out_and_puts_it_back(mesh: Any) -> None:
    tensor, handlers = DTensor.from_local(X, mesh, [Shard(0)]), DTensor._op_dispatcher._custom_op_handlers
    _compat.on_dtensors(aten.neg.default, _compat.as_torch_does)
    try:
        assert torch.equal((-tensor).to_local(), -X) and handlers[aten.neg.default] is _compat.as_torch_does
    finally:
        del handlers[aten.neg.default]


def test_mixed_is_what_torch_says_of_a_dtensor_and_another_tensor(mesh: Any) -> None:
    with pytest.raises(RuntimeError, match=_compat.MIXED):
        DTensor.from_local(X, mesh, [Shard(0)]).add_(X)


def test_on_steps_wraps_the_steps_of_classes_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(torch.optim.SGD):
        def step(self, closure: Any = None) -> str:
            return "step"

    monkeypatch.setattr(
        torch.optim.Optimizer, "profile_hook_step", staticmethod(torch.optim.Optimizer.profile_hook_step)
    )
    _compat.on_steps(lambda step: lambda *args: f"wrapped {step(*args)}")
    assert Later([torch.ones(2)]).step() == "wrapped step"


def test_default_store_holds_what_ranks_tell_each_other(mesh: Any) -> None:
    store = _compat.default_store()
    store.set("sbpc/test", "told")
    assert store.get("sbpc/test") == b"told"


def test_tried_is_what_the_readme_promises_of_torch() -> None:
    """And the Makefile and pyproject.toml promise the same of Python."""
    project, readme, make = ((ROOT / name).read_text() for name in ("pyproject.toml", "README.md", "Makefile"))
    (pinned,), (oldest,) = (re.findall(rf'"torch{mark}(2\.\d+)', project) for mark in ("==", ">="))
    newest = ".".join(map(str, _compat.TRIED))
    assert (
        f"torch may be any of {oldest} to {newest}" in readme and int(oldest[2:]) <= int(pinned[2:]) <= _compat.TRIED[1]
    )
    ((first, end),) = re.findall(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', project)
    last = int(end) - 1
    assert f"python3 (3.{first} to 3.{last})" in readme and f"needs Python 3.{first} to 3.{last}, " in make
    assert f"(3, {first}) <= sys.version_info[:2] <= (3, {last})" in make


WARNED = """
import os, sys, torch
torch.__version__ = "99.0.1+cpu"
for rank in "10":
    os.environ["RANK"] = rank
    import sbpc._compat, sbpc.graph.rewrite
    print("rank", rank, "has it", file=sys.stderr)
    del sys.modules["sbpc._compat"]
"""


ARTIFACT = "from sbpc._compat import trace_artifact; trace_artifact('note', 'string', lambda: print('made') or 'a payload of ours')"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """What one start of Python prints, of an untried torch and with a trace, and the trace."""
    folder = tmp_path_factory.mktemp("trace")
    lines = printed(WARNED + ARTIFACT, TORCH_TRACE=str(folder)).splitlines()
    (log,) = folder.iterdir()
    return lines, log.read_text()


def test_untried_torch_is_told_once_and_by_the_first_rank(told: tuple[list[str], str]) -> None:
    newest = ".".join(map(str, _compat.TRIED))
    for version in ("2.11.0", "2.9.1", f"{newest}.0+cpu", f"{newest}.7", f"{newest}.0a0+git1234", "unknown"):
        assert _compat.untried(version) == ""
    for version in ("2.99.0", "2.99.0a0+git1234", "2.99.0.dev20270101+cu130", "3.0.0+cpu"):
        assert _compat.untried(version).startswith(f"torch {version} is newer than {newest}, ")
    assert told[0][:3] == ["rank 1 has it", _compat.untried("99.0.1+cpu"), "rank 0 has it"]


def test_trace_artifact_writes_only_where_there_is_a_trace(told: tuple[list[str], str]) -> None:
    _compat.trace_artifact("note", "string", lambda: pytest.fail("made without a trace"))
    assert told[0][-1] == "made" and '"name": "note"' in told[1] and "a payload of ours" in told[1]
