"""What a trainer is asked that a plan does in its own way, or cannot do."""

from __future__ import annotations

from typing import Any

import torch

from sbpc.errors import PlanError
from sbpc.runtime.state.whole import RUNNERS

TYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
REFUSED = {  # options of TrainingArguments: why, and what to do
    "deepspeed": ("DeepSpeed would divide the model, too", "Leave it out: memory= of hf has ZeRO where it pays."),
    "fsdp": ("FSDP would divide the model, too", "Leave it out: memory= of hf has ZeRO where it pays."),
    "parallelism_config": ("the mesh says how ranks share the work", "Leave it out."),
    "torch_compile": ("a plan's programs are compiled already", "Leave it out."),
    "auto_find_batch_size": ("shapes are planned, not tried", "Leave it out: memory= of hf says whether a batch fits."),
    "neftune_noise_alpha": ("its hook comes when the model is planned", "Draw the noise in the model's own forward."),
    "use_liger_kernel": ("its kernels would come into a planned model", "Leave it out."),
    "predict_with_generate": ("a parallel model does not generate", "Leave it out: generate by what it saves."),
    "eval_use_gather_object": ("every rank has all objects already", "Leave it out."),
    "bf16_full_eval": ("it would cast planned weights", "Leave it out: bf16=True evaluates in bfloat16, too."),
    "fp16_full_eval": ("it would cast planned weights", "Leave it out: fp16=True evaluates in float16, too."),
}


def check(trainer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of the plan, with what the trainer asks for. Raises PlanError for what cannot be done."""
    args, model = trainer.args, trainer.model
    for name, (why, todo) in REFUSED.items():
        refuse(bool(getattr(args, name, None)), f"TrainingArguments({name}=...): {why}", todo)
    refuse(trainer.model_init is not None, "Trainer(model_init=...) makes models that are not planned", "Give model=.")
    refuse("stages" in options, "a trainer calls forward and backward apart, which stages do not have", "Leave it out.")
    refuse(hasattr(type(model), RUNNERS), "the model is parallel already", "Give the trainer the one-device model.")
    refuse(args.n_gpu > 1, "DataParallel would run the model on several GPUs", "Start a process for each: torchrun.")
    refuse(
        trainer.optimizer is not None and bool(trainer.optimizer.state),
        "the optimizer has state of the model on one device",
        "Call hf before the first step.",
    )
    if args.gradient_checkpointing or getattr(args, "activation_checkpointing", False):
        options = {"recompute": "full"} | options
        args.gradient_checkpointing = args.activation_checkpointing = False  # of the model, when training begins
    kind = trainer.accelerator.mixed_precision
    refuse(kind not in TYPES, f"mixed precision {kind!r} is not planned", "Use bf16=True.")
    return {"dtype": TYPES[kind]} | options


def refuse(wrong: bool, what: str, todo: str) -> None:
    """Raises PlanError if something is wrong."""
    if wrong:
        raise PlanError(f"{what}\n  {todo}")
