"""Gradients of 16 bits are summed in float32: on any number of ranks their error is that of one device."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import sbpc
from sbpc import Mesh, Plan
from sbpc.errors import PlanError, SbpcError, VerifyError
from sbpc.graph.operands import operands
from sbpc.mesh.cluster import CLUSTERS, Rate
from sbpc.mesh.states import P
from sbpc.passes.verify import adds_up, verify_sums
from sbpc.plans.measure import layout_at
from sbpc.rules.sum_types import begins_sums, narrows
from sbpc.runtime.device_kernels import placed
from tests import hf_models, models
from tests.gradient_errors import HALF, error, of_half, relative
from tests.processes import run_ranks
from tests.random_plans import random_plan
from tests.test_mixture import Mixture

SLOW = (Rate("all_to_all", efficiency=0.1),)  # so that sums in float32 are faster


class Net(nn.Module):
    """Products, biases and a norm, and a matrix that is read twice, whose gradient is a sum of two."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, 2 * width),
            nn.LayerNorm(2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.norm(self.up(x))))
        return F.mse_loss(F.linear(F.linear(x, self.up.weight), self.down.weight), y)


def made(held: bool, rows: int = 128) -> tuple[nn.Module, tuple[Tensor, Tensor], dict[str, Any]]:
    """The model, a batch, and options."""
    return of_half(lambda: (Net(), (torch.randn(rows, 32), torch.randn(rows, 32))), held)


@pytest.mark.parametrize("held", [False, True])
def test_the_error_of_gradients_does_not_grow_with_the_ranks(held: bool) -> None:
    model, args, options = made(held)

    def errors(reduce: str, *ranks: int) -> list[float]:
        plans = [sbpc.baseline("data", model, args, Mesh(d=p), **options, reduce=reduce) for p in ranks]
        return [error(plan, model, args) for plan in plans]

    one, *more = errors("float32", 1, 2, 16)
    assert max(more) < 1.05 * one
    few, many = errors("exchange", 2, 16)  # which rounds the sum once more
    assert many < 1.05 * few < 1.2 * one
    assert errors("as computed", 16)[0] > 1.3 * one


@pytest.mark.prove
@pytest.mark.parametrize("options", [{"dtype": HALF}, {"masters": True}, {"masters": False}])
def test_the_error_of_gradients_is_that_of_one_device_on_256_ranks(options: dict[str, Any]) -> None:
    model, args, _ = made(options.get("dtype") is None, rows=1024)
    errors: dict[str, list[float]] = {}
    for reduce, ranks in itertools.product(("float32", "exchange", "as computed"), (1, 16, 64, 256)):
        plan = sbpc.baseline("data", model, args, Mesh(d=ranks), **options, reduce=reduce, objective="serial")
        errors.setdefault(reduce, []).append(error(plan, model, args))
    one = errors["float32"][0]
    assert max(errors["float32"]) < (1.1 if options.get("masters") is False else 1.05) * one  # rounded once more
    assert max(errors["exchange"]) < 1.1 * one
    assert errors["as computed"][-1] > 4 * one


class Llama(nn.Module):
    """A small one of `transformers`, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.llama, _ = hf_models.llama("sdpa", 1)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.llama(input_ids=tokens, labels=tokens).loss
        return loss


DEEP: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt2": functools.partial(models.gpt2, batch=64, seq=8, vocab=64, width=32, heads=8),
    "gpt2, many rows": functools.partial(models.gpt2, batch=256, seq=8, vocab=64, width=32, heads=8),
    "llama": lambda: (Llama(), (torch.randint(0, hf_models.VOCAB, (64, 12)),)),
    "conv-net": functools.partial(models.resnet, batch=64, channels=8),
    "mixture": lambda: (Mixture(16, 32, 8, 2, 4), (torch.randn(64, 8, 16),)),
}
MEGATRON, SEQUENCE = "megatron", "megatron+sp"
MICRO, STAGES = {"microbatches": 8}, {"microbatches": 8, "stages": "p"}
SPLITS: dict[str, tuple[str, str | None, dict[str, Any], tuple[dict[str, int], ...]]] = {
    "gpt2, data": ("gpt2", "data", {}, ({"d": 2}, {"d": 16}, {"d": 64}, {"d": 4, "e": 4})),
    "gpt2, many ranks": ("gpt2, many rows", "data", {}, ({"d": 1}, {"d": 16}, {"d": 64}, {"d": 256})),
    "gpt2, tensor": ("gpt2, many rows", MEGATRON, {}, ({"d": 2, "t": 2}, {"d": 2, "t": 8}, {"d": 8, "t": 8})),
    "gpt2, sequence": ("gpt2, many rows", SEQUENCE, {}, ({"d": 2, "t": 2}, {"d": 2, "t": 8}, {"d": 8, "t": 8})),
    "gpt2, micro-batches": ("gpt2, many rows", "data", MICRO, ({"d": 2}, {"d": 16})),
    "gpt2, stages": ("gpt2, many rows", "data", STAGES, ({"p": 2, "d": 2}, {"p": 2, "d": 16})),
    "llama, data": ("llama", "data", {}, ({"d": 2}, {"d": 16}, {"d": 64})),
    "llama, tensor": ("llama", MEGATRON, {}, ({"d": 2, "t": 2}, {"d": 8, "t": 4})),
    "conv-net, data": ("conv-net", "data", {}, ({"d": 2}, {"d": 16}, {"d": 64})),
    "mixture, data": ("mixture", "data", {}, ({"d": 2}, {"d": 16}, {"d": 64})),
    "mixture, experts": (
        "mixture",
        None,
        {"pin": {"up": "S(0)@e", "down": "S(0)@e"}},
        ({"d": 2, "e": 2}, {"d": 8, "e": 8}),
    ),
}


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_the_error_of_gradients_does_not_grow_with_the_ranks_however_they_are_split(split: str, held: bool) -> None:
    name, scheme, more, meshes = SPLITS[split]
    model, args, options = of_half(DEEP[name], held)
    one = error(sbpc.plan(model, args, Mesh(d=1), **options), model, args)
    for reduce in ("float32", "exchange"):
        errors = []
        for axes in meshes:
            asked = options | more | {"reduce": reduce}
            plan = (
                sbpc.baseline(scheme, model, args, Mesh(**axes), **asked)
                if scheme
                else sbpc.plan(model, args, Mesh(**axes), **asked)
            )
            plan.verify()
            errors.append(error(plan, model, args))
        assert max(errors) < 1.05 * errors[0], (reduce, errors)
        assert errors[0] < (1.05 if reduce == "float32" else 1.1) * one, (reduce, errors, one)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("reduce", ["float32", "exchange"])
@pytest.mark.parametrize("axes", [{"d": 4}, {"d": 2, "t": 2}])
def test_sums_are_counted_simulated_saved_and_verified(
    held: bool, axes: dict[str, int], reduce: str, tmp_path: Path
) -> None:
    model, args, options = made(held)
    plan = sbpc.plan(model, args, Mesh(**axes), **options, reduce=reduce)
    kinds = {node.meta["step"].collective for node in plan.boxed.graph.nodes if "step" in node.meta}
    assert ("exchange" in kinds) == (reduce == "exchange")
    plan.verify()
    plan.save(tmp_path / "plan.sbpc")
    loaded = sbpc.load(tmp_path / "plan.sbpc")
    assert loaded.options.reduce == reduce
    for each in (plan, loaded):
        run = sbpc.simulate(each, model, args)
        assert run.bytes_sent == each.cost.bytes_sent == plan.cost.bytes_sent
        assert run.peak_memory <= each.cost.memory["total"] == plan.cost.memory["total"]
        assert all(run.gradients[name].dtype == p.dtype for name, p in model.named_parameters())
    symbols = {plan.cost.symbols[name]: value for name, value in plan.cost.numbers.items()}
    assert sum(float(each.xreplace(symbols)) for each in plan.cost.bytes_expr.values()) == sum(run.bytes_sent.values())


@pytest.mark.parametrize("reduce", ["float32", "exchange"])
def test_products_whose_results_are_gradients_are_not_cut_into_panels_that_are_summed(reduce: str) -> None:
    model, args, options = of_half(functools.partial(models.gpt2, batch=8, seq=8, vocab=64, width=32, heads=4), False)
    plan = sbpc.plan(model, args, Mesh(d=2, t=2), **options, reduce=reduce, panels=2)
    assert any("in panels" in remark for remark in plan.remarks)
    plan.verify()


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("reduce", ["float32", "exchange"])
def test_any_legal_plan_sums_gradients_in_float32(reduce: str, held: bool) -> None:
    model, args, options = made(held)
    one = error(sbpc.plan(model, args, Mesh(d=1), **options), model, args)
    plan = sbpc.plan(model, args, Mesh(d=2, t=3), **options, reduce=reduce, objective="serial")
    for seed in range(3):
        drawn = random_plan(plan, seed)
        drawn.verify()
        assert error(drawn, model, args) < 1.5 * one  # activations are summed in bfloat16


def test_an_exchange_is_taken_where_it_is_faster_and_is_in_the_formula() -> None:
    with torch.device("meta"):
        model, args = Net(2048).to(HALF), (torch.empty(512, 2048, dtype=HALF),) * 2
    for cluster, taken in (("h100", True), (replace(CLUSTERS["ideal"], collectives=SLOW), False)):
        plan = sbpc.baseline("data", model, args, Mesh(d=4, cluster=cluster), reduce="exchange")
        kinds = {node.meta["step"].collective for node in plan.boxed.graph.nodes if "step" in node.meta}
        assert ("exchange" in kinds) == taken
        assert plan.cost.subs() == pytest.approx(plan.cost.compute_seconds + plan.cost.comm_seconds)


def swapped(gm: GraphModule) -> GraphModule:
    """The graph with the first cast of which a sum is taken behind that sum."""
    pairs = [(cast, user) for cast in gm.graph.nodes if begins_sums(cast) for user in cast.users if adds_up(user)]
    (cast, step), (narrow,) = pairs[0], operands(pairs[0][0])
    step.replace_input_with(cast, narrow)
    with gm.graph.inserting_after(step):
        moved = gm.graph.node_copy(cast, lambda _: step)
    step.replace_all_uses_with(moved, delete_user_cb=lambda user: user is not moved)
    step.meta["val"] = narrow.meta["val"]
    return gm


@pytest.mark.parametrize("held", [False, True])
def test_a_cast_that_moves_across_a_collective_is_found(held: bool) -> None:
    model, args, options = made(held)
    gm = sbpc.baseline("data", model, args, Mesh(d=4), **options, objective="serial").boxed
    verify_sums(gm)
    with pytest.raises(VerifyError, match=r"a gradient is summed in torch.bfloat16, not in torch.float32\n  %box_"):
        verify_sums(swapped(gm))


def test_a_sum_that_is_made_in_float32_is_never_cast_before_it_is_taken() -> None:
    model, args, _ = made(True)
    for reduce, wide in (("float32", True), ("as computed", False)):
        gm = sbpc.baseline("data", model, args, Mesh(d=4), reduce=reduce).unscheduled
        (loss,) = [node for node in gm.graph.nodes if narrows(node) and not node.meta["val"].dim()]
        assert (P in layout_at(loss).states) != wide


def test_a_float32_model_is_planned_as_ever() -> None:
    model, args = Net(), (torch.randn(16, 32), torch.randn(16, 32))
    plans = [sbpc.plan(model, args, Mesh(d=2), reduce=reduce) for reduce in ("float32", "as computed")]
    assert str(plans[0].boxed.graph) == str(plans[1].boxed.graph)


def test_a_file_that_says_of_its_sums_what_is_not_so_is_refused(tmp_path: Path) -> None:
    model, args, _ = made(True)
    plan = sbpc.baseline("data", model, args, Mesh(d=2), reduce="as computed")
    replace(plan, options=replace(plan.options, reduce="float32")).save(tmp_path / "plan.sbpc")
    with pytest.raises(PlanError, match=r"a gradient is summed in torch\.bfloat16, not in torch\.float32"):
        sbpc.load(tmp_path / "plan.sbpc")


def test_an_unknown_type_of_sums_is_refused() -> None:
    model, args, _ = made(False)
    with pytest.raises(
        SbpcError, match="reduce is 'int4'\n  It is one of 'float32', 'exchange', 'as computed', 'int8', 'float8'"
    ):
        sbpc.plan(model, args, Mesh(d=2), reduce="int4")


class Shifted(nn.Module):
    """A model of whole numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_numbers_that_a_backend_cannot_send_are_refused_before_anything_runs() -> None:
    for dtype, fits in ((torch.int16, False), (torch.int32, True)):
        args = (torch.ones(4, dtype=dtype),)
        plan = sbpc.plan(Shifted(), args, Mesh(d=2), train=False, inputs=["S(0)@d"])
        error = (
            contextlib.nullcontext() if fits else pytest.raises(PlanError, match=r"numbers of torch\.int16 to .* gloo")
        )
        with error:
            placed(plan.local, torch.device("cpu"))


LOOPS: dict[str, dict[str, Any]] = {
    "micro-batches": {"axes": {"d": 2}, "microbatches": 8},
    "stages": {"axes": {"p": 2, "d": 2}, "stages": "p", "microbatches": 8},
}


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_micro_batches_and_stages_add_up_gradients_in_float32(loop: str, held: bool, tmp_path: Path) -> None:
    model, args, options = made(held)
    axes, more = LOOPS[loop]["axes"], {key: value for key, value in LOOPS[loop].items() if key != "axes"}
    one = error(sbpc.plan(model, args, Mesh(d=1), **options), model, args)
    plan = sbpc.plan(model, args, Mesh(**axes), **options, **more)
    plan.verify()
    plan.save(tmp_path / "plan.sbpc")
    sbpc.load(tmp_path / "plan.sbpc").verify()
    assert error(plan, model, args) < 1.05 * one
    run = sbpc.simulate(plan, model, args)
    assert run.bytes_sent == plan.cost.bytes_sent and run.peak_memory <= plan.cost.memory["total"]
    assert {node.meta["val"].dtype for chunk in plan.programs for node in chunk.summed} == {torch.float32}


def stepped(plans: list[Plan]) -> Any:
    """Gradients of real steps: at once, or of eight parts of the batch, all but the last within `no_sync`."""
    found = []
    for plan in plans:
        model, args, _ = made(plan.options.dtype is None)
        module: Any = sbpc.parallelize(model, plan)
        if plan.loop is not None:
            module.step(*args)
        else:
            for at in range(8):
                with module.no_sync() if at < 7 else contextlib.nullcontext():
                    module.step(*(each.chunk(8)[at] for each in args))
        found.append({name: p.grad.full_tensor() for name, p in module.named_parameters()})
    return found


@pytest.mark.parametrize("loop", [None, "stages"])
def test_real_ranks_add_up_gradients_in_float32(loop: str | None) -> None:
    mesh = Mesh(p=2, d=2) if loop else Mesh(d=2)
    more = {"stages": "p", "microbatches": 8} if loop else {"objective": "serial"}
    cases, plans = list(itertools.product((False, True), ("float32", "exchange"))), []
    for held, reduce in cases:
        model, args, options = made(held, rows=128 if loop else 16)
        plans.append(sbpc.plan(model, args, mesh, **options, **more, reduce=reduce))
    results = run_ranks(stepped, mesh.ranks, plans)
    assert all(isinstance(each, list) for each in results), results[0]
    for (held, reduce), of_ranks in zip(cases, zip(*results)):
        model, args, options = made(held)
        one = error(sbpc.plan(model, args, Mesh(d=1), **options), model, args)
        found = {name: each.double() / (1 if loop else 8) for rank in of_ranks for name, each in rank.items()}
        assert relative(found, model, args) < (1.05 if loop or reduce == "float32" else 1.2) * one


@pytest.mark.parametrize("options", [{"stages": "p"}, {"schedule": "breadth-first:2"}], ids=["stages", "loop"])
def test_the_gradient_of_a_tied_weight_is_summed_in_float32_in_every_chunk(options: dict[str, Any]) -> None:
    """Its part of the head is made in one chunk and added to that of the embedding in another."""
    model, args = models.gpt2(batch=16, layers=2)
    mesh = Mesh(p=2, d=2, cluster="h100")
    plan = sbpc.baseline("data", model, args, mesh, dtype=torch.bfloat16, microbatches=4, **options)
    summed = [
        node.meta["val"].dtype
        for chunk in plan.chunks
        for node in chunk.unscheduled.graph.nodes
        if "step" in node.meta and node.meta["step"].collective in ("all_reduce", "reduce_scatter")
    ]
    assert len(plan.chunks) == 2 and set(summed) == {torch.float32}
