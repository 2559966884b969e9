"""A trainer's checkpoints of a parallel model: what one process writes and reads, so that they go on on any mesh."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sbpc._compat import tree_map
from sbpc.mesh.layout import broadcast
from sbpc.plans.plan import Plan
from sbpc.runtime.start.lost_ranks import watched
from sbpc.runtime.state.dtensors import at_home
from sbpc.runtime.state.whole import full_state_dict

RANDOM_STATE = "sbpc_random_state.json"


def install(trainer: Any, plan: Plan) -> None:
    """Has a trainer save and load whole tensors. All ranks call what it saves by, as it does."""
    save, save_optimizer, save_random = trainer._save, trainer._save_optimizer_and_scheduler, trainer._save_rng_state
    make_optimizer, load_random = trainer.create_optimizer, trainer._load_rng_state
    model = trainer.model

    def save_whole(output_dir: str | None = None, state_dict: Any = None) -> None:
        save(output_dir, full_state_dict(model))  # rank 0 alone writes
        wait()

    def save_whole_optimizer(output_dir: str) -> None:
        with_state(trainer.optimizer, whole_state(trainer.optimizer), lambda: save_optimizer(output_dir))
        wait()

    def save_random_once(output_dir: str) -> None:
        if trainer.args.should_save:
            save_random(output_dir)
            Path(output_dir, RANDOM_STATE).write_text(json.dumps(model.random_state()))
        wait()

    def load_random_state(checkpoint: str | None) -> None:
        load_random(checkpoint)
        path = Path(checkpoint or "", RANDOM_STATE)
        if path.is_file():
            model.set_random_state(json.loads(path.read_text()))

    def optimizer_of_shards(*args: Any, **kwargs: Any) -> Any:
        made = make_optimizer(*args, **kwargs)
        if not hasattr(made, "optimizer"):  # accelerate's, of an earlier call of train
            made.register_load_state_dict_pre_hook(sharding(model, plan))
        return made

    trainer._save, trainer._save_optimizer_and_scheduler = save_whole, save_whole_optimizer
    trainer._save_rng_state, trainer._load_rng_state = save_random_once, load_random_state
    trainer.create_optimizer = optimizer_of_shards


def wait() -> None:
    """Returns when all ranks are here: none looks for files that rank 0 still writes."""
    with watched("a trainer's save"):
        dist.barrier()


def with_state(optimizer: Any, state: Any, run: Callable[[], None]) -> None:
    """Runs something to which an optimizer has this state."""
    optimizer.state_dict = lambda: state
    try:
        run()
    finally:
        del optimizer.state_dict


def whole_state(optimizer: Any) -> Any:
    """Returns the state of an optimizer as whole tensors in CPU memory, on rank 0; without tensors elsewhere."""

    def whole(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return value.cpu() if dist.get_rank() == 0 else None

    return tree_map(whole, optimizer.state_dict())


def sharding(model: nn.Module, plan: Plan) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
    """Returns what makes DTensors of the whole tensors that an optimizer loads: those as large as their parameter in
    the parameter's home, others, such as the rows of Adafactor, whole on each rank. Numbers stay as they are."""
    homes = {parameter: plan.parameters.get(name) for name, parameter in model.named_parameters()}

    def shard(parameter: Any, value: Any) -> Any:
        home = homes.get(parameter)
        if home is None or not isinstance(value, Tensor) or not value.ndim:
            return value
        layout = home if value.shape == parameter.shape else broadcast(plan.mesh.axes)
        return at_home(value, layout, plan.mesh, parameter.device)

    def shards(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        by_number = dict(zip(numbers, parameters))
        state = {
            number: {key: shard(by_number[number], value) for key, value in held.items()}
            for number, held in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    return shards
