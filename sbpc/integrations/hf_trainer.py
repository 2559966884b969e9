"""Has a `transformers.Trainer` train the plan of its model.

To the trainer the mesh is one process with a larger batch: every rank loads the same whole batch, as the plan takes
it, and counts, samples, pads, logs and divides as one process does. So its numbers are those of one process, whatever
it computes of them. Only what is written is rank 0's alone.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from sbpc.api.alike import Alike
from sbpc.api.planning import plan as planned
from sbpc.api.task import Captured
from sbpc.errors import PlanError
from sbpc.integrations.checks import check
from sbpc.integrations.faces import Faces
from sbpc.integrations.saving import install as install_saving
from sbpc.mesh.mesh import Mesh
from sbpc.plans.plan import Plan
from sbpc.runtime.module import parallelize
from sbpc.runtime.state.members import PREPARED

COMPACT = "_use_triton"  # what TRL asks whether it is to take positions out


class _Called(BaseException):
    """Ends the trainer's own computation of a loss where it calls the model."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = args, kwargs


@dataclass(frozen=True)
class OfOneDevice(Alike):
    """Plans further steps of the face of one device."""

    faces: Faces

    def captured(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], train: bool) -> Captured:
        with all_positions(), self.faces.one_device() as alone:
            return super().captured(alone, args, kwargs, train)


def hf(trainer: Any, mesh: Mesh, *, data: str = "data", also: str = "auto", **options: Any) -> Plan:
    """Makes a `transformers.Trainer` train and evaluate its model on a mesh. Returns the plan of its first batch.

    Every rank of torchrun runs the script as it is for one device, with one more line; the trainer may be of a
    subclass, such as TRL's SFTTrainer, the model one of PEFT:

        trainer = Trainer(model=model, args=args, train_dataset=rows)
        sbpc.integrations.hf(trainer, mesh=sbpc.Mesh(data=2, tensor=2))
        trainer.train()

    The model becomes parallel in its place: your variable, too. A step's batch has `per_device_train_batch_size` rows
    for each place on the axis `data`, the next rows of one order, and loss, gradients, `num_items_in_batch`, metrics
    and what is logged are those of one process with a batch of that size, the last smaller batch included: all ranks
    load the whole batch, and `trainer.args`, now a copy of yours, counts its rows. Shapes, modes and values that were
    not planned are planned when they come, in the same homes: adapters may be turned off for a call, as DPO does.

    data       the axis that counts for the size of the batch. The plan uses every axis as it is fastest.
    also       how many plans there may be, as `sbpc.parallelize` takes it, where batches are padded to many lengths.
    options    those of `sbpc.plan`, such as `memory=`.

    Give hf the trainer before its first step, evaluation included. A Trainer without a train_dataset is planned for
    evaluation. `torch_compile_backend="sbpc"` cannot be: accelerate takes backends of its own list alone.

    `bf16=True` plans in bfloat16, `gradient_checkpointing=True` with `recompute="full"`, and
    `gradient_accumulation_steps` sends gradients once. Clipping is by the norm over all ranks. Checkpoints and
    `save_model` write what one process writes, which `from_pretrained` reads and the trainer resumes from, on any
    mesh. `trainer.model` returns its loss alone in training where nothing else is read of it.

    Raises PlanError, before anything is planned, for options of the trainer that another library would have to carry
    out, each with what to do instead; and what `sbpc.plan` and `sbpc.parallelize` raise.
    """
    trainer.args = copy.copy(trainer.args)  # the user's may be those of a second trainer
    options = check(trainer, options)
    rows = dict(zip(mesh.axes, mesh.sizes)).get(data, 1)
    as_one_process(trainer, rows)
    if reads_loss_alone(trainer):
        return_loss_alone(trainer.model)
    faces = Faces(trainer.model)
    args, kwargs = first_call(trainer)
    with all_positions():
        plan = planned(trainer.model, args, mesh, kwargs=kwargs, **options)
    plan.alike = OfOneDevice(**vars(plan.alike), faces=faces)
    before = dict(trainer.model.named_parameters())
    faces.show(parallelize(trainer.model, plan, also=also, device=trainer.args.device.type))
    setattr(type(trainer.model), PREPARED, True)  # for this trainer, too
    if trainer.optimizer is not None:
        take_parameters(trainer.optimizer, before, trainer.model)
    trainer.accelerator.clip_grad_norm_ = clipping(trainer)
    install_saving(trainer, plan)
    return plan


def as_one_process(trainer: Any, rows: int) -> None:
    """Shows a trainer one process whose batches are `rows` times as large, in states of its own: other accelerators
    of this process see the ranks."""
    accelerator, args = trainer.accelerator, trainer.args
    alone = type(accelerator.distributed_type)("NO")
    for owner, name in ((accelerator, "state"), (args, "distributed_state")):
        state = copy.copy(getattr(owner, name))  # a dict of its own: all states share one
        state.num_processes, state.distributed_type = 1, alone
        setattr(owner, name, state)
    accelerator.dataloader_config.dispatch_batches = False
    for name in ("gather", "reduce", "pad_across_processes"):
        setattr(accelerator, name, lambda tensor, *args, **kwargs: tensor)
    trainer.gather_function = accelerator.gather_for_metrics = functools.partial(rows_there_are, accelerator)
    args.per_device_train_batch_size *= rows
    args.per_device_eval_batch_size *= rows
    trainer._train_batch_size = args.train_batch_size
    loader = trainer._get_dataloader

    def same_workers(*given: Any, **named: Any) -> Any:
        rank, args.distributed_state.process_index = args.distributed_state.process_index, 0
        try:
            made = loader(*given, **named)  # seeds the workers by the index
        finally:
            args.distributed_state.process_index = rank
        if isinstance(made.dataset, torch.utils.data.IterableDataset):
            count_last_rows(made)
        return made

    trainer._get_dataloader = same_workers


def count_last_rows(loader: Any) -> None:
    """Has a loader of accelerate, of rows without a number, know how many its last batch has, as it does in one
    process."""
    from accelerate.utils import find_batch_size

    batches = loader.base_dataloader.__iter__

    def counted() -> Iterator[Any]:
        rows = -1
        for batch in batches():
            rows = find_batch_size(batch) or -1
            yield batch
        loader.remainder = rows

    loader.base_dataloader.__iter__ = counted


def rows_there_are(accelerator: Any, data: Any, use_gather_object: bool = False) -> Any:
    """Does what `accelerator.gather_for_metrics` does in one process: of the last smaller batch it takes as many rows
    as there are, where a trainer repeats its loss for each row of a whole one."""
    from accelerate.utils import recursively_apply

    rest = accelerator.gradient_state.remainder
    if use_gather_object or not accelerator.gradient_state.end_of_dataloader or rest <= 0:
        return data
    return recursively_apply(lambda tensor: tensor[:rest] if tensor.ndim else tensor, data)


def reads_loss_alone(trainer: Any) -> bool:
    """Returns whether the trainer reads nothing but the loss of what its model returns in training."""
    import transformers

    own = type(trainer).compute_loss is not transformers.Trainer.compute_loss
    return not own and trainer.label_smoother is None and trainer.compute_loss_func is None


def return_loss_alone(model: nn.Module) -> None:
    """Has a model of `transformers` return no logits in training, so that no rank holds those of the whole batch."""
    forward: Any = model.forward
    if not isinstance(forward, MethodType):
        return

    @functools.wraps(forward)
    def loss_alone(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        asked: Any = forward.__self__  # no cell of its own: the class of what stands in one is guarded
        loss = outputs.get("loss") if asked.training and isinstance(outputs, dict) else None
        return outputs if loss is None else type(outputs)(loss=loss)

    vars(model)["forward"] = loss_alone


def take_parameters(optimizer: Any, before: dict[str, nn.Parameter], model: nn.Module) -> None:
    """Gives an optimizer that was made of a model's parameters those that the model has now. Raises PlanError for one
    of other parameters."""
    now = dict(model.named_parameters())
    by_old = {old: now[name] for name, old in before.items()}
    for group in optimizer.param_groups:
        if any(each not in by_old for each in group["params"]):
            raise PlanError("the optimizer has a parameter that is none of the model\n  Make it of model.parameters().")
        group["params"] = [by_old[each] for each in group["params"]]


def first_call(trainer: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with which the trainer calls its model on the first batch, which trains if there is
    something to train on."""
    train = trainer.train_dataset is not None
    model: nn.Module = trainer.model.train(train)
    with same_random_numbers():
        loader = trainer.get_train_dataloader() if train else trainer.get_eval_dataloader()
        batch = next(iter(getattr(loader, "base_dataloader", loader)))
    batch = trainer._prepare_inputs(batch)

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Called(args, kwargs)

    hook = model.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        count = trainer._get_num_items_in_batch([batch], trainer.args.device)
        trainer.compute_loss(model, batch, num_items_in_batch=count)
    except _Called as called:
        return called.call
    finally:
        hook.remove()
    raise PlanError(
        f"{type(trainer).__name__}.compute_loss does not call the model\n  Plan and parallelize it by hand."
    )


@contextlib.contextmanager
def all_positions() -> Iterator[None]:
    """Has TRL score every position while this lasts. On GPUs it takes those with a label out, and how many these are
    is a size that no plan knows."""
    modules = [sys.modules.get(name) for name in ("trl.trainer.utils", "trl.kernels.chunked_logprob")]
    before = {module: getattr(module, COMPACT) for module in modules if hasattr(module, COMPACT)}
    for module in before:
        setattr(module, COMPACT, lambda device: False)
    try:
        yield
    finally:
        for module, function in before.items():
            setattr(module, COMPACT, function)


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Leaves the generators of torch, Python and numpy as they were."""
    import numpy as np

    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(of_python)
    np.random.set_state(of_numpy)


def clipping(trainer: Any) -> Any:
    """Returns what clips as `accelerator.clip_grad_norm_` does, by the norm over all ranks."""

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        given, own = ({id(each) for each in some} for some in (parameters, trainer.model.parameters()))
        if given != own:
            raise PlanError("the trainer clips some gradients alone\n  Clip those of model.parameters().")
        trainer.accelerator.unscale_gradients()
        return trainer.model.clip_grad_norm_(max_norm, norm_type)

    return clip_grad_norm_
