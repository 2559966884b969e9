"""Trainers of other libraries train plans by one line: on ranks they log, save and predict what they do in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import sbpc

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import
for library in ("transformers", "accelerate", "peft", "trl", "datasets"):
    pytest.importorskip(library, reason="pip install sbpc[integrations]")

ROWS, LENGTHS = 30, (8, 12)  # batches of eight rows: the last one has six
TWO, FOUR = {"data": 2}, {"data": 2, "tensor": 2}
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "train_loss", "total_flos", "num_tokens")


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, num_key_value_heads=2, pad_token_id=0, **sizes))


def rows(count: int = ROWS) -> list[dict[str, Any]]:
    """Texts of two lengths, with a column that no model takes."""
    made = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, 96, (LENGTHS[at % 5 == 0],), generator=made) for at in range(count)]
    return [{"input_ids": each, "labels": each, "number": at} for at, each in enumerate(ids)]


def padded(batch: list[dict[str, Any]]) -> dict[str, Any]:
    longest = max(len(row["input_ids"]) for row in batch)
    made: dict[str, list[Any]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in batch:
        ids, more = row["input_ids"], longest - len(row["input_ids"])
        made["input_ids"].append(torch.nn.functional.pad(ids, (0, more)))
        made["attention_mask"].append(torch.nn.functional.pad(torch.ones_like(ids), (0, more)))
        made["labels"].append(torch.nn.functional.pad(ids, (0, more), value=-100))
    return {name: torch.stack(values) for name, values in made.items()}


def arguments(folder: str, mesh: Any, kind: Any = None, **more: Any) -> Any:
    from transformers import TrainingArguments

    options = {
        "per_device_train_batch_size": 8 // (mesh or {}).get("data", 1), "per_device_eval_batch_size": 8 // (mesh or {}).get("data", 1),
        "report_to": [], "logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2, "max_grad_norm": 0.5,
    }  # fmt: skip
    return (kind or TrainingArguments)(folder, **options | {"save_strategy": "no"} | more)


def started(trainer: Any, mesh: Any, **options: Any) -> Any:
    if mesh is not None:
        sbpc.integrations.hf(trainer, mesh=sbpc.Mesh(**mesh), **options)
    return trainer


def logs(trainer: Any) -> list[dict[str, float]]:
    return [{name: row[name] for name in LOGGED if name in row} for row in trainer.state.log_history]


def accuracy(result: Any) -> dict[str, float]:
    right = (result.predictions.argmax(-1)[:, :-1] == result.label_ids[:, 1:]) & (result.label_ids[:, 1:] >= 0)
    return {"accuracy": right.sum().item() / 100}


def language(folder: str, mesh: Any) -> dict[str, Any]:
    """As run_clm does: accumulation, an uneven last batch, evaluation and saving each epoch, the best model at the end, predictions."""
    from transformers import Trainer

    args = arguments(
        folder, mesh, num_train_epochs=2, gradient_accumulation_steps=2, eval_strategy="epoch", save_strategy="epoch",
        save_total_limit=1, load_best_model_at_end=True, lr_scheduler_type="cosine", warmup_steps=1, weight_decay=0.1,
    )  # fmt: skip
    model = llama()
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows(),
        eval_dataset=rows(6),
        data_collator=padded,
        compute_metrics=accuracy,
    )
    started(trainer, mesh).train()
    predictions = trainer.predict(rows(6)).predictions
    trainer.save_model(f"{folder}/final")
    assert trainer.model is model
    return {"logs": logs(trainer), "predictions": predictions, "best": trainer.state.best_global_step}


def resumed(folder: str, mesh: Any) -> dict[str, Any]:
    """Goes on from a checkpoint of `language`, wherever it was made."""
    from transformers import Trainer

    args = arguments(folder, mesh, num_train_epochs=3, gradient_accumulation_steps=2)
    trainer = Trainer(model=llama(), args=args, train_dataset=rows(), data_collator=padded)
    (checkpoint,) = Path(folder).glob("checkpoint-*")
    started(trainer, mesh).train(resume_from_checkpoint=str(checkpoint))
    return {"logs": logs(trainer)[-3:]}


def adapters(folder: str, mesh: Any) -> dict[str, Any]:
    """LoRA on frozen weights: the run goes on from its first checkpoint, and what is saved is the adapter alone."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import Trainer

    def trainer(steps: int) -> Any:
        args = arguments(folder, mesh, max_steps=steps, save_strategy="steps", save_steps=2)
        model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        return started(Trainer(model=model, args=args, train_dataset=rows(32), data_collator=padded), mesh)

    trainer(2).train()
    again = trainer(4)
    again.train(resume_from_checkpoint=True)
    again.save_model(f"{folder}/final")
    held = sorted(path.name for path in Path(folder, "final").glob("*.safetensors"))
    saved = PeftModel.from_pretrained(llama(), f"{folder}/final")
    return {"logs": logs(again), "held": held, "weights": dict(saved.state_dict())}


def tuned(folder: str, mesh: Any) -> dict[str, Any]:
    """SFTTrainer, whose loss reads more than the loss that its model returns; it asks for checkpointing by itself."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(
        models.WordLevel(
            {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{at}": at + 3 for at in range(90)}}, unk_token="<unk>"
        )
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    texts = [" ".join(f"w{int(at) % 90}" for at in row["input_ids"][:8]) for row in rows(32)]
    args = arguments(folder, mesh, SFTConfig, max_steps=3, max_length=12, eval_strategy="steps", eval_steps=3)
    data = Dataset.from_dict({"text": texts})
    trainer = SFTTrainer(
        model=llama(), args=args, train_dataset=data, eval_dataset=data.select(range(6)), processing_class=tokenizer
    )
    started(trainer, mesh).train()
    return {"logs": logs(trainer)}


def smoothed(folder: str, mesh: Any) -> dict[str, Any]:
    """A loss that the trainer makes of the logits, and adafactor."""
    from transformers import Trainer

    args = arguments(folder, mesh, max_steps=2, label_smoothing_factor=0.1, optim="adafactor")
    trainer = started(Trainer(model=llama(), args=args, train_dataset=rows(16), data_collator=padded), mesh)
    trainer.train()
    return {"logs": logs(trainer)}
