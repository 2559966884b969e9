"""Plans of small GPTs that differ, for the bed: by experts' pins, by random pins, by the solver alone, and drawn at random throughout."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

import sbpc
from sbpc import Cluster, Mesh, Plan
from tests import models
from tests.random_plans import random_plan

GPT = {"batch": 32, "seq": 64, "vocab": 1024, "width": 256, "heads": 8, "layers": 2, "tied": False}
SMALL = {"batch": 16, "seq": 32, "vocab": 512, "width": 128, "heads": 8, "layers": 2, "tied": False}
ROWS = {"*qkv.weight": "S(0)", "*up.weight": "S(0)", "*proj.weight": "S(1)", "*down.weight": "S(1)"}
HIDDEN = "gelu", "gelu_1"  # the hidden values of the two blocks: dims batch, sequence, width
EVERY = "*.weight", "*.bias"
DRAWS = 20


def build(small: bool = False) -> tuple[nn.Module, tuple[Any, ...]]:
    """A GPT and its batch, the same on every rank."""
    torch.manual_seed(0)
    return models.gpt2(**(SMALL if small else GPT))  # type: ignore[arg-type]


def ten_plans(cluster: Cluster, hosts: int) -> dict[str, Plan]:
    """Plans whose collectives run beside computing, by name."""
    model, args = build()
    one, two = Mesh(t=hosts, cluster=cluster), Mesh(d=2, t=hosts // 2, cluster=cluster)

    def pinned(mesh: Mesh, hidden: str, homes: dict[str, str], inputs: str | None = None) -> Plan:
        pins = {**homes, **dict.fromkeys(HIDDEN, hidden)}
        return sbpc.plan(model, args, mesh, pin=pins, inputs=inputs and [inputs, inputs])

    def drawn(mesh: Mesh, seed: int) -> Plan:
        draw = random.Random(seed)
        matrices = [name for name, parameter in model.named_parameters() if parameter.dim() == 2]
        homes = {name: f"{draw.choice(['S(0)', 'S(1)', 'B'])}@{draw.choice(mesh.axes)}" for name in matrices}
        hidden = {name: f"S({draw.randrange(3)})@{draw.choice(mesh.axes)}" for name in HIDDEN}
        return sbpc.plan(model, args, mesh, pin={**homes, **hidden})

    half = sbpc.plan(model, args, Mesh(t=1)).cost.memory["total"] / 2
    rows = {name: f"{state}@t" for name, state in ROWS.items()}
    both = {name: f"{state}@t,S({1 - int(state[2])})@d" for name, state in ROWS.items()}
    return {
        "data": pinned(one, "S(0)@t", dict.fromkeys(EVERY, "B@t"), "S(0)@t"),
        "fsdp": pinned(one, "S(0)@t", dict.fromkeys(EVERY, "S(0)@t"), "S(0)@t"),
        "tensor": pinned(one, "S(2)@t", rows),
        "sequence": pinned(one, "S(1)@t", {}),
        "data x tensor": pinned(two, "S(0)@d,S(2)@t", {name: f"{text},B@d" for name, text in rows.items()}, "S(0)@d"),
        "fsdp x tensor": pinned(two, "S(0)@d,S(2)@t", both, "S(0)@d"),
        "random, one axis": drawn(one, 1),
        "random, two axes": drawn(two, 2),
        "solver, one axis": sbpc.plan(model, args, one, memory=half),
        "solver, two axes": sbpc.plan(model, args, two, memory=half),
    }


def random_plans(cluster: Cluster, hosts: int) -> dict[str, Plan]:
    """Random legal plans of the smaller GPT, half of them on two axes."""
    model, args = build(small=True)
    meshes = Mesh(t=hosts, cluster=cluster), Mesh(d=2, t=hosts // 2, cluster=cluster)
    solved = [sbpc.plan(model, args, mesh, microbatches=1, panels=1) for mesh in meshes]
    return {f"random {seed:02}": random_plan(solved[seed % 2], seed) for seed in range(DRAWS)}
