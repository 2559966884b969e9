"""Meshes of more ranks than there are machines: planned for 1,024, run with real numbers on 64, all in this process."""

from __future__ import annotations

import torch

import sbpc
from sbpc import Mesh
from tests import models


def test_a_plan_for_1024_ranks_needs_no_ranks() -> None:
    with torch.device("meta"):
        model, args = models.gpt2(batch=64, seq=64, vocab=512, width=256, heads=16, layers=2)
    plan = sbpc.plan(model, args, Mesh(data=64, tensor=16, cluster="h100"))
    assert plan.local_at(1023).graph.find_nodes(op="output")
    assert "1024 ranks" in str(plan)


def test_a_step_on_64_ranks_equals_one_process() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = models.gpt2(batch=4, seq=8, vocab=32, width=16, heads=4, layers=1, tied=False)
    pins = {"blocks.0.up.weight": "[S(0), S(0), S(1)]", "blocks.0.down.weight": "[B, S(1), S(0)]"}
    plan = sbpc.plan(model, args, Mesh(x=4, y=4, z=4), pin=pins)
    run = sbpc.simulate(plan, model, args)
    expected = model(*args)
    expected.backward()
    torch.testing.assert_close(run.outputs, expected.detach(), rtol=1e-10, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            run.gradients[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert sum(run.bytes_sent.values()) > 0
