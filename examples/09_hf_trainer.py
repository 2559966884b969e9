"""Trains a Llama by transformers.Trainer on a mesh of two ranks, with one line more than on one device.

    pip install sbpc[integrations]
    torchrun --nproc-per-node 2 examples/09_hf_trainer.py

The batch has 2 * 4 rows, and what is logged and saved is what one process logs and saves with a batch of eight.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import sbpc

CONFIG = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    """Returns sequences that count on from a number, so that there is something to learn."""
    starts = torch.randint(0, 96, (count, 1), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": ids, "labels": ids} for ids in starts + torch.arange(32)]


torch.manual_seed(0)  # every rank makes the same model and data
folder = sys.argv[1] if len(sys.argv) > 1 else "trained"
args = TrainingArguments(
    folder,
    per_device_train_batch_size=4,
    num_train_epochs=2,
    learning_rate=1e-2,
    logging_steps=4,
    eval_strategy="epoch",
    save_strategy="epoch",
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(LlamaForCausalLM(CONFIG), args, train_dataset=texts(64), eval_dataset=texts(10))
plan = sbpc.integrations.hf(trainer, mesh=sbpc.Mesh(data=2))  # the one line
trainer.train()
trainer.save_model()  # LlamaForCausalLM.from_pretrained(folder) reads it anywhere
if trainer.is_world_process_zero():
    print(plan)
sbpc.stop()
