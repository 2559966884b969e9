"""Torch's own data parallelism around a parallel module is refused, in Lightning, too; around other modules it works."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import sbpc
from sbpc import Mesh
from sbpc.errors import SbpcError
from tests.processes import run_ranks

WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "DistributedDataParallel by keyword": lambda module: DistributedDataParallel(module=module),
    "DataParallel": nn.DataParallel,
    "FullyShardedDataParallel": lambda module: FullyShardedDataParallel(module, device_id=torch.device("cpu")),
    "fully_shard": lambda module: fully_shard(module, mesh=init_device_mesh("cpu", (2,))),
}


class Loss(nn.Module):
    """A layer and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


class Around(nn.Module):
    """A module that is not parallel itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.own = inner, nn.Linear(2, 2)


def said(wrap: Callable[[nn.Module], Any], module: nn.Module) -> str:
    try:
        wrap(module)
    except SbpcError as problem:
        return str(problem)
    return "wrapped"


def wrapped() -> dict[str, list[str]]:
    """What each wrapper says of a parallel module, of one within another, and of one that is not parallel."""
    plan = sbpc.plan(Loss(), (torch.randn(4, 6),), Mesh(data=2))
    return {
        name: [
            said(wrap, sbpc.parallelize(Loss(), plan)),
            said(wrap, Around(sbpc.parallelize(Loss(), plan))),
            said(wrap, Around(Loss())),
        ]
        for name, wrap in WRAPPERS.items()
    }


def planned() -> list[str]:
    """What is said of a wrapped module that is to be planned."""
    return [
        said(lambda module: sbpc.plan(module, (torch.randn(4, 6),), Mesh(data=2)), made)
        for made in (DistributedDataParallel(Loss()), Around(DistributedDataParallel(Loss())), nn.DataParallel(Loss()))
    ]


def test_no_plan_is_made_of_what_a_wrapper_holds() -> None:
    for ddp, within, dp in run_ranks(planned, 2):
        assert ddp == (
            "the model is a DistributedDataParallel, and the plan is the parallelism\n  Give the module within, its .module."
        )
        assert within == ddp.replace("the model", "inner", 1) and dp == ddp.replace("DistributedData", "Data")


def without_a_module() -> None:
    sbpc.parallelize(Loss(), sbpc.plan(Loss(), (torch.randn(4, 6),), Mesh(data=2)))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'module'"):
        DistributedDataParallel()  # type: ignore[call-arg]


def test_a_wrapper_that_is_given_nothing_says_what_torch_says() -> None:
    assert run_ranks(without_a_module, 2) == [None, None]


def test_no_wrapper_takes_a_module_that_a_plan_made_parallel() -> None:
    for found in run_ranks(wrapped, 2):
        for name, (alone, within, other) in found.items():
            kind = name.split()[0]
            assert alone.startswith(f"{kind} of a module that sbpc.parallelize made\n  Leave it out"), (name, alone)
            assert within == alone and other == "wrapped", (name, within, other)


def in_lightning(strategy: str) -> str:
    """What the Trainer says of a module whose inner one is parallel."""
    import lightning

    class Module(lightning.LightningModule):
        def configure_model(self) -> None:
            self.net = sbpc.parallelize(Loss(), sbpc.plan(Loss(), (torch.randn(4, 6),), Mesh(data=2)))

        def training_step(self, batch: Tensor, index: int) -> Any:
            return self.net(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters())

    set_by_torchrun = {"TORCHELASTIC_RUN_ID": "job", "LOCAL_RANK": os.environ["RANK"], "WORLD_SIZE": "2"}
    os.environ.update(set_by_torchrun)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, max_epochs=1)
    return said(lambda module: trainer.fit(module, [torch.randn(4, 6)]), Module())


def test_lightning_refuses_its_strategy_ddp_and_names_the_one_to_use() -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")
    for found in run_ranks(in_lightning, 2, "ddp"):
        assert found.startswith("DistributedDataParallel of a module") and "strategy=ModelParallelStrategy" in found
