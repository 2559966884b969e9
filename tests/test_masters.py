"""Parameters held in 16 bits have masters in float32 at their homes, which optimizers step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.cli.main import main
from sbpc.errors import CheckpointError, PlanError, SbpcError
from sbpc.graph.ports import PARAMETER
from sbpc.runtime.state.weight_files import read_weights, save_weights, weights_of
from tests import models
from tests.gradient_errors import HALF, error
from tests.processes import run_ranks
from tests.test_reduce import Net

WIDE = torch.float32


def made(rows: int = 128, dtype: torch.dtype = HALF) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model that is held in 16 bits, and a batch."""
    torch.manual_seed(0)
    return Net().to(dtype), (torch.randn(rows, 32, dtype=dtype), torch.randn(rows, 32, dtype=dtype))


def stored(plan: Any) -> dict[str, torch.dtype]:
    """The types in which a plan stores parameters."""
    return {port.name: value.dtype for port, value in plan.shapes.items() if port.kind == PARAMETER}


def test_masters_are_there_where_an_optimizer_trains_what_is_held_in_16_bits() -> None:
    model, args = made()
    model.up.bias.requires_grad_(False)  # type: ignore[union-attr]
    mesh, trained = Mesh(d=2), {name for name, p in model.named_parameters() if p.requires_grad}
    plan = sbpc.plan(model, args, mesh)
    assert plan.options.masters and plan.ports.masters == dict.fromkeys(trained, "bfloat16")
    assert stored(plan) == {name: WIDE if name in trained else HALF for name, _ in model.named_parameters()}
    others = {"masters": False}, {"optimizer": None}, {"train": False}
    for plan in (*(sbpc.plan(model, args, mesh, **each) for each in others), sbpc.plan(Net(), made(8, WIDE)[1], mesh)):
        assert plan.options.masters is False and plan.ports.masters == {}
    assert sbpc.plan(model, args, mesh, optimizer=None, masters=True).ports.masters


PLANS: dict[str, dict[str, Any]] = {
    "data": {"axes": {"d": 4}, "pin": {"up.weight": "S(0)@d"}},
    "tensor": {"axes": {"d": 2, "t": 2}},
    "exchange": {"axes": {"d": 4}, "reduce": "exchange"},
    "as computed": {"axes": {"d": 4}, "reduce": "as computed"},
    "in micro-batches": {"axes": {"d": 2}, "microbatches": 8},
    "in stages": {"axes": {"p": 2, "d": 2}, "stages": "p", "microbatches": 8},
}


@pytest.mark.parametrize("name", PLANS)
def test_masters_are_counted_simulated_saved_and_verified(name: str, tmp_path: Path) -> None:
    model, args = made()
    axes, more = PLANS[name]["axes"], {key: value for key, value in PLANS[name].items() if key != "axes"}
    one = error(sbpc.plan(model, args, Mesh(d=1)), model, args)
    plan = sbpc.plan(model, args, Mesh(**axes), **more)
    plan.save(tmp_path / "plan.sbpc")
    loaded = sbpc.load(tmp_path / "plan.sbpc")
    assert loaded.ports.masters == plan.ports.masters and loaded.options.masters
    for each in (plan, loaded):
        each.verify()
        run = sbpc.simulate(each, model, args)
        assert run.bytes_sent == each.cost.bytes_sent == plan.cost.bytes_sent
        assert run.peak_memory <= each.cost.memory["total"] == plan.cost.memory["total"]
        assert {gradient.dtype for gradient in run.gradients.values() if gradient is not None} == {WIDE}
    bare = sbpc.plan(model, args, Mesh(**axes), **more, masters=False)
    found, without = error(plan, model, args), error(bare, model, args)
    assert found <= without and found < (1.05 if more.get("reduce") is None else 1.5) * one
    assert "masters" in plan.diff(bare).asked
    symbols = {plan.cost.symbols[symbol]: value for symbol, value in plan.cost.numbers.items()}
    for axis, each in plan.cost.bytes_expr.items():
        assert float(each.xreplace(symbols)) == run.bytes_sent[axis]


def test_masters_are_cast_at_home_and_gathered_in_16_bits() -> None:
    model, args = made()
    for masters in (True, False):
        plan = sbpc.baseline("fsdp", model, args, Mesh(d=4), masters=masters, reduce="as computed")
        steps = [node for node in plan.boxed.graph.nodes if "step" in node.meta]
        gathered = [node.meta["val"].dtype for node in steps if node.meta["step"].collective == "all_gather"]
        assert len(gathered) >= 2 and set(gathered) == {HALF}
        assert plan.cost.memory["parameters"] == sum(p.numel() for p in model.parameters()) * (4 if masters else 2) / 4
        assert plan.cost.memory["optimizer"] == 2 * plan.cost.memory["parameters"]


def test_what_needs_no_masters_is_refused_them() -> None:
    _, args = made(8, WIDE)
    with pytest.raises(
        PlanError, match="masters=True, and no parameter that is trained is held in bfloat16 or float16"
    ):
        sbpc.plan(Net(), args, Mesh(d=2), masters=True)
    with pytest.raises(SbpcError, match="masters is 'yes'"):
        sbpc.plan(Net(), args, Mesh(d=2), masters="yes")


# --- training on real ranks -------------------------------------------------------------------------------------------
def gpt(dtype: torch.dtype) -> nn.Module:
    """A small GPT with a tied head."""
    torch.manual_seed(0)
    return models.gpt2(batch=8, seq=16, vocab=32, width=32, heads=4)[0].to(dtype)


def texts(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches to learn from: each token follows from the one before, but for one in ten."""
    rolls = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = [torch.randint(32, (8,), generator=rolls)]
        for _ in range(16):
            follows = torch.rand(8, generator=rolls) > 0.1
            tokens.append(torch.where(follows, (3 * tokens[-1] + 1) % 32, torch.randint(32, (8,), generator=rolls)))
        yield torch.stack(tokens[:-1], 1), torch.stack(tokens[1:], 1)


def losses(steps: int, parameters: Any, step: Callable[..., Tensor], after: Callable[[], Any] = list) -> list[float]:
    """The losses of some steps of AdamW. step: leaves gradients. after: what an update is followed by."""
    optimizer, found = torch.optim.AdamW(parameters), []
    for batch in texts(steps):
        optimizer.zero_grad()
        found.append(float(step(*batch).detach()))
        optimizer.step()
        after()
    return found


def alone(steps: int, model: nn.Module) -> list[float]:
    """The losses of a model on one device."""

    def step(*batch: Tensor) -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        return loss

    return losses(steps, model.parameters(), step)


def by_torch(steps: int, model: nn.Module) -> list[float]:
    """The losses of a model of 16 bits whose float32 copies are stepped."""
    masters = [p.detach().float() for p in model.parameters()]

    def step(*batch: Tensor) -> Tensor:
        loss: Tensor = model(*batch)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for master, gradient in zip(masters, gradients):
            master.grad = gradient.float()
        return loss

    @torch.no_grad()
    def after() -> None:
        for master, p in zip(masters, model.parameters()):
            p.copy_(master)

    return losses(steps, masters, step, after)


def on_ranks(steps: int, plan: Any) -> list[float]:
    """The losses on the ranks of a plan."""
    module: Any = sbpc.parallelize(gpt(HALF), plan)
    return losses(steps, module.parameters(), module.step)


def off(found: list[float], wanted: list[float]) -> float:
    """How far losses are from others, in the second half of the steps."""
    half = len(found) // 2
    return sum(abs(one - other) for one, other in zip(found[half:], wanted[half:])) / half


@pytest.mark.parametrize("steps", [24, pytest.param(200, marks=pytest.mark.prove)])
def test_a_model_with_masters_is_trained_as_torch_does_with_masters(steps: int) -> None:
    plan = sbpc.plan(gpt(HALF), next(texts(1)), Mesh(d=2))
    found, bare = run_ranks(on_ranks, 2, steps, plan)[0], alone(steps, gpt(HALF))
    exact, known = alone(steps, gpt(WIDE)), by_torch(steps, gpt(HALF))
    assert off(found, known) < 2 * off(known, exact) + 0.01
    assert 10 * off(found, exact) < off(bare, exact)


def stated(plan: sbpc.Plan, test: sbpc.Plan, folder: str) -> Any:
    """On a rank: what a module with masters says of its state."""
    model, args = made()
    module: Any = sbpc.parallelize(model, plan, evaluate=test)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        with module.no_sync():
            module.step(*args)
        module.step(*args)
        optimizer.step()
    state, masters = module.state_dict(), {name: p.detach().clone() for name, p in module.named_parameters()}
    kinds = {each.dtype for p in module.parameters() for each in (p, p.grad, optimizer.state[p]["exp_avg"])}
    assert kinds == {WIDE} and {each.dtype for each in state.values()} == {HALF}
    assert {each.dtype for each in module.state_dict(keep_vars=True).values()} == {WIDE}
    whole = {name: each.full_tensor() for name, each in state.items()}
    one = Net().to(HALF)
    one.load_state_dict(whole)
    results = [module.eval()(*args), module.train()(*args), copy.deepcopy(module)(*args)]
    assert all(abs(float(each - one(*args))) < 0.02 for each in results)

    def unlike(module: nn.Module) -> bool:
        return any(
            not torch.equal(masters[name].full_tensor(), p.full_tensor()) for name, p in module.named_parameters()
        )

    checkpoints = sbpc.Checkpoints(folder)
    checkpoints.save(1, module, optimizer)
    checkpoints.wait()
    found = []
    for given, assign in ((whole, False), (state, True), (masters, False)):
        other = copy.deepcopy(module)
        other.load_state_dict(given, assign=assign)
        other.step(*args)
        found.append(unlike(other))
    module.load_state_dict(whole)
    checkpoints.load(module, optimizer)
    return [*found, unlike(module)]


def test_state_dicts_are_in_the_types_of_the_model_and_checkpoints_hold_masters(tmp_path: Path) -> None:
    model, args = made()
    plan = sbpc.plan(model, args, Mesh(d=2), pin={"up.weight": "S(0)"})
    test = sbpc.plan(model.eval(), args, Mesh(d=2), train=False, pin=plan.parameters)
    assert test.ports.masters == {}
    assert run_ranks(stated, 2, plan, test, str(tmp_path)) == [[True, True, False, False]] * 2


def build() -> nn.Module:
    """A model that is made in bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(HALF)
    try:
        return Net()
    finally:
        torch.set_default_dtype(before)


def started(plan: sbpc.Plan) -> list[bool]:
    """On a rank: whether masters are what a constructor makes, and what a source of float32 weights gives."""
    torch.manual_seed(0)
    model = build()
    with torch.device("meta"):
        meta = build()
    torch.manual_seed(0)
    wide = {name: p.detach().float() + 1e-6 for name, p in model.named_parameters()}
    modules = sbpc.parallelize(meta, plan, init=build), sbpc.parallelize(meta, plan, weights=wide.__getitem__)
    wanted: tuple[dict[str, Tensor], ...] = (dict(model.named_parameters()), wide)
    pairs = zip(modules, wanted)
    return [
        all(torch.equal(p.full_tensor(), known[name].float()) for name, p in each.named_parameters())  # type: ignore[operator]
        for each, known in pairs
    ]


def test_masters_begin_as_what_a_constructor_makes_in_16_bits_or_as_weights_in_float32() -> None:
    model, args = made(16)
    assert run_ranks(started, 2, sbpc.plan(model, args, Mesh(d=2), pin={"*": "S(0)"})) == [[True, True]] * 2


def moved(plan: sbpc.Plan, bare: sbpc.Plan, folder: str) -> Any:
    """On a rank: what a checkpoint of a model without masters is to one with masters, and the other way round."""
    model, args = made(16)
    modules: Any = [sbpc.parallelize(model, each) for each in (bare, plan)]
    optimizers = [torch.optim.AdamW(each.parameters()) for each in modules]
    modules[0].step(*args)
    optimizers[0].step()
    checkpoints = [sbpc.Checkpoints(f"{folder}/{at}", asynchronous=False) for at in range(2)]
    checkpoints[0].save(1, modules[0], optimizers[0])
    with pytest.raises(
        CheckpointError, match=r"saved without float32 masters.*\n.*masters=False, or load the model alone"
    ):
        checkpoints[0].load(modules[1], optimizers[1])
    checkpoints[0].load(modules[1])
    pairs = zip(modules[0].parameters(), modules[1].parameters())
    assert all(torch.equal(one.full_tensor().float(), other.full_tensor()) for one, other in pairs)
    modules[1].step(*args)
    optimizers[1].step()
    checkpoints[1].save(2, modules[1], optimizers[1])
    with pytest.raises(CheckpointError, match=r"is bfloat16 .* has float32"):
        checkpoints[1].load(modules[0])
    with pytest.raises(PlanError, match=r"masters of parameters, another has none.*\n.*masters=True"):
        sbpc.parallelize(model, plan, also=[bare])
    return {name: each.full_tensor() for name, each in modules[1].state_dict().items()}


def test_weights_of_16_bits_load_into_masters_and_checkpoints_are_converted_to_these(tmp_path: Path) -> None:
    model, args = made(16)
    plan, bare = (sbpc.plan(model, args, Mesh(d=2), pin={"*": "S(0)"}, masters=each) for each in (True, False))
    state = run_ranks(moved, 2, plan, bare, str(tmp_path))[0]
    for name in ("weights.pt", "weights.safetensors"):
        assert main(["convert", str(tmp_path / "1"), "-o", str(tmp_path / name)]) == 0
        written = read_weights(tmp_path / name).tensors if "safe" in name else torch.load(tmp_path / name)
        assert written.keys() == state.keys() and all(torch.equal(written[key], state[key]) for key in state)
        assert {each.dtype for each in written.values()} == {HALF}


def from_file(file: str, dtype: torch.dtype) -> Any:
    """On a rank: the parameters of an exported program with weights of a type."""
    model, _ = made()
    weights = weights_of(model.to(dtype))
    save_weights(weights, f"{file}.safetensors") if dist.get_rank() == 0 else None
    dist.barrier()
    return [
        {name: p.full_tensor().detach() for name, p in sbpc.load_module(file, weights=each).named_parameters()}
        for each in (f"{file}.safetensors", "zeros")
    ]


def test_exported_programs_have_masters_and_take_weights_of_either_type(tmp_path: Path) -> None:
    model, args = made(16)
    plan, file = sbpc.plan(model, args, Mesh(d=2)), tmp_path / "model.sbpc"
    plan.export(file, sbpc.plan(model, args, Mesh(d=2), train=False, pin=plan.parameters))
    programs = sbpc.load_programs(file)
    runs = [sbpc.simulate(each, model, args) for each in (plan, programs)]
    for name, gradient in runs[0].gradients.items():
        assert gradient is not None and gradient.dtype == WIDE and torch.equal(gradient, runs[1].gradients[name])
    for dtype in (HALF, WIDE):
        loaded, zeros = run_ranks(from_file, 2, str(file), dtype)[0]
        assert {each.dtype for each in (*loaded.values(), *zeros.values())} == {WIDE}
        assert all(torch.equal(loaded[name], p.float()) for name, p in model.named_parameters())


class Scaled(Net):
    """A model whose loss is multiplied by an argument."""

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, y).float() * scale


def scaled(plans: list[sbpc.Plan]) -> Any:
    """On a rank: by plan the losses of steps of a gradient scaler, of which the second is infinite on the last rank."""
    found, last = [], dist.get_world_size() - 1
    for plan in plans:
        args, scaler = made(16, torch.float16)[1], torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
        torch.manual_seed(0)
        module: Any = sbpc.parallelize(Scaled().half(), plan)
        optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.5), list[float]()
        for step in range(4):
            optimizer.zero_grad()
            scale = scaler.scale(torch.ones(()))
            losses.append(float(module.step(*args, scale) / scale))
            if step == 1 and dist.get_rank() == last:
                next(p.grad for p in module.parameters() if p.grad is not None).to_local().fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
        found.append([*losses, scaler.get_scale()])
    return found


def test_a_gradient_scaler_skips_on_all_ranks_and_stages_and_steps_masters_of_float16() -> None:
    args = (*made(16, torch.float16)[1], torch.ones(()))
    ways: list[dict[str, Any]] = [{}, {"pin": {"*": "S(0)"}}, {"stages": "d", "microbatches": 2}]
    torch.manual_seed(0)
    model = Scaled().half()
    of_ranks = run_ranks(scaled, 2, [sbpc.plan(model, args, Mesh(d=2), **way) for way in ways])
    assert all(isinstance(each, list) for each in of_ranks), of_ranks
    wanted = losses_alone(model.float(), [each.float() for each in args])
    for found in (each for rank in of_ranks for each in rank):
        *losses, scale = found
        assert scale == 2.0**11 and losses[1] == losses[2]  # the second update is left out
        assert [losses[0], losses[1], losses[3]] == pytest.approx(wanted, rel=2e-3) and losses[3] < losses[1] < losses[
            0
        ]


def losses_alone(model: nn.Module, args: list[Tensor]) -> list[float]:
    """The losses of three steps of SGD on one device."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), list[float]()
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(*args)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found
