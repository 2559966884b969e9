"""Trainers of other libraries train plans by one line: on ranks they log, save and predict what they do in one process."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sbpc
from tests.processes import run_ranks

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


class Stream(torch.utils.data.IterableDataset[Any]):
    """Rows without a number, whose last batch has three."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(rows(11))


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
    """As run_clm does: accumulation, uneven last batches, evaluation and saving each epoch, the best model at the end, predictions."""
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
        eval_dataset=rows(11),  # eight and three
        data_collator=padded,
        compute_metrics=accuracy,
    )
    signature, held = inspect.signature(model.forward), type(model)
    started(trainer, mesh).train()
    assert inspect.signature(model.forward) == signature and isinstance(model, held) and trainer.model is model
    predictions = trainer.predict(rows(6)).predictions
    trainer.evaluate(Stream())
    trainer.save_model(f"{folder}/final")
    return {"logs": logs(trainer), "predictions": predictions, "best": trainer.state.best_global_step}


def resumed(folder: str, mesh: Any) -> dict[str, Any]:
    """Goes on from the checkpoint of `language`, of whatever ranks it is, and trains a second time."""
    from transformers import Trainer

    args = arguments(folder, mesh, num_train_epochs=3, gradient_accumulation_steps=2)
    trainer = Trainer(model=llama(), args=args, train_dataset=rows(), data_collator=padded)
    (checkpoint,) = Path(folder.replace("resumed", "language")).glob("checkpoint-*")
    started(trainer, mesh).train(resume_from_checkpoint=str(checkpoint))
    first = logs(trainer)
    trainer.train()  # again, with the optimizer that it has
    return {"logs": first + logs(trainer)}


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


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{at}": at + 3 for at in range(90)}}
    words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def tuned(folder: str, mesh: Any) -> dict[str, Any]:
    """SFTTrainer, whose loss reads more than the loss that its model returns; it asks for checkpointing by itself."""
    import trl.trainer.utils
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = [" ".join(f"w{int(at) % 90}" for at in row["input_ids"][:8]) for row in rows(32)]
    args = arguments(
        folder, mesh, SFTConfig, max_steps=3, max_length=12, eval_strategy="steps", eval_steps=3, bf16=False
    )
    data = Dataset.from_dict({"text": texts})
    trainer = SFTTrainer(
        model=llama(),
        args=args,
        train_dataset=data,
        eval_dataset=data.select(range(6)),
        processing_class=word_tokenizer(),
    )
    if mesh is not None:  # as on GPUs, where TRL takes the positions with labels out
        trl.trainer.utils._use_triton = lambda device: True
    started(trainer, mesh).train()
    return {"logs": logs(trainer)}


def preferred(folder: str, mesh: Any) -> dict[str, Any]:
    """DPOTrainer with adapters, which it turns off for the model of reference."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    ids = [row["input_ids"][:8].tolist() for row in rows(16)]
    texts = [" ".join(f"w{each % 90}" for each in row) for row in ids]
    data = {"prompt": texts, "chosen": texts[::-1], "rejected": [*texts[3:], *texts[:3]]}
    args = arguments(
        folder, mesh, DPOConfig, max_steps=3, max_length=20, eval_strategy="steps", eval_steps=3, bf16=False
    )
    trainer = DPOTrainer(
        model=llama(), args=args, train_dataset=Dataset.from_dict(data), processing_class=word_tokenizer(),
        eval_dataset=Dataset.from_dict(data).select(range(6)),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )  # fmt: skip
    started(trainer, mesh).train()
    return {"logs": logs(trainer)}


def smoothed(folder: str, mesh: Any) -> dict[str, Any]:
    """A loss that the trainer makes of the logits, and an optimizer that was made of the model on one device, whose state has
    other shapes; the run goes on from its first checkpoint."""
    from transformers import Adafactor, Trainer

    args = arguments(folder, mesh, max_steps=4, label_smoothing_factor=0.1, save_strategy="steps", save_steps=2)

    def trainer() -> Any:
        model = llama()
        own = Adafactor(model.parameters(), lr=1e-2, scale_parameter=False, relative_step=False)
        made = Trainer(model=model, args=args, train_dataset=rows(16), data_collator=padded, optimizers=(own, None))
        return started(made, mesh)

    trainer().train()
    again = trainer()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return {"logs": logs(again)}


def own_loop(folder: str, mesh: Any) -> dict[str, Any]:
    """A loop of one's own with accelerate, whose loader gives each rank its own rows, in a model that is parallel already."""
    from accelerate import Accelerator, DataLoaderConfiguration

    long = rows(150)[::5]  # 30 of one length, as each rank pads its own rows: the last batch has four and two
    batches = torch.utils.data.DataLoader(long, batch_size=8 if mesh is None else 4, collate_fn=padded)
    model = llama()
    model.config.use_cache = False
    if mesh is not None:
        plan = sbpc.plan(model, (), sbpc.Mesh(**mesh), kwargs=padded(long[:8]), inputs="data")
        model = sbpc.parallelize(model, plan, also="auto")
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches)
    found: list[dict[str, float]] = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found.append(
                    {"loss": loss.item(), "grad_norm": float(accelerator.clip_grad_norm_(model.parameters(), 0.5))}
                )
            optimizer.step()
            optimizer.zero_grad()
    return {"logs": found}


def refusals(folder: str, mesh: Any) -> dict[str, Any]:
    """What is said of what a plan cannot do for a trainer, and of a trainer and an Accelerator that take it for one device's."""
    import accelerate
    from transformers import Trainer

    said = []
    for options in ({"neftune_noise_alpha": 5}, {"auto_find_batch_size": True}, {"torch_compile": True}):
        trainer = Trainer(
            model=llama(), args=arguments(folder, mesh, **options), train_dataset=rows(8), data_collator=padded
        )
        with pytest.raises(sbpc.SbpcError) as error:
            sbpc.integrations.hf(trainer, mesh=sbpc.Mesh(data=1))
        said.append(str(error.value))
    batch = padded(rows(8))
    parallel = sbpc.parallelize(llama(), sbpc.plan(llama(), (), sbpc.Mesh(data=1), kwargs=batch), also="auto")
    trainer = Trainer(model=parallel, args=arguments(folder, mesh), train_dataset=rows(8), data_collator=padded)
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.prepare(parallel) is parallel
    for call in (trainer.train, lambda: trainer.evaluate(rows(8)), lambda: accelerator.save_state(f"{folder}/state")):
        with pytest.raises(sbpc.SbpcError) as error:
            call()
        said.append(str(error.value))
    return {"said": said}


USUAL, MORE = ["language", "adapters", "tuned"], ["preferred", "smoothed", "own_loop", "resumed"]


def done(folder: str, mesh: Any, names: list[str]) -> dict[str, Any]:
    """On a rank, or in one process: what scenarios give."""
    if mesh is not None:
        ranks = str(torch.distributed.get_world_size())
        os.environ |= {"LOCAL_RANK": os.environ["RANK"], "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ["SBPC_CACHE"] = f"{folder}/plans"  # a step that comes in several of them is planned once
    found = {name: globals()[name](f"{folder}/{name}", mesh) for name in names}
    sbpc.stop()
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of one process, and where it has saved."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, run_ranks(done, 1, str(folder), None, [*USUAL, *MORE, "refusals"], seconds=200)[0]


def same(found: Any, expected: Any) -> None:
    assert len(found["logs"]) == len(expected["logs"]) > 1
    for here, there in zip(found["logs"], expected["logs"]):
        assert here == pytest.approx(there, rel=1e-5, abs=1e-6)


def test_trainers_do_on_two_ranks_what_they_do_in_one_process(alone: Any, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    folder, expected = alone
    for found in run_ranks(done, 2, str(tmp_path), TWO, USUAL, seconds=280):
        for name in USUAL:
            same(found[name], expected[name])
        torch.testing.assert_close(
            *(torch.tensor(each["language"]["predictions"]) for each in (found, expected)), rtol=1e-4, atol=1e-5
        )
        assert found["adapters"]["held"] == expected["adapters"]["held"] == ["adapter_model.safetensors"]
        torch.testing.assert_close(found["adapters"]["weights"], expected["adapters"]["weights"], rtol=1e-4, atol=1e-5)
    models = [LlamaForCausalLM.from_pretrained(each / "language" / "final") for each in (tmp_path, folder)]
    torch.testing.assert_close(*(dict(each.state_dict()) for each in models), rtol=1e-4, atol=1e-5)


@pytest.mark.prove
def test_other_losses_optimizers_and_loops_of_ones_own_do_so_too(alone: Any) -> None:
    folder, expected = alone
    for found in run_ranks(done, 2, str(folder), TWO, MORE, seconds=280):
        for name in MORE:
            same(found[name], expected[name])


def test_a_trainer_goes_on_on_four_ranks_from_what_one_process_saved(alone: Any) -> None:
    folder, expected = alone
    for found in run_ranks(done, 4, str(folder), FOUR, ["resumed"], seconds=280):
        same(found["resumed"], expected["resumed"])


def test_what_a_plan_cannot_do_for_a_trainer_is_said_before_it_plans(alone: Any) -> None:
    starts = ["neftune_noise_alpha", "auto_find_batch_size", "torch_compile"]
    said = alone[1]["refusals"]["said"]
    for start, each in zip(starts, said):
        assert each.startswith(f"TrainingArguments({start}=...)") and "\n  " in each
    train, evaluate, state = said[len(starts) :]
    assert (
        train
        == evaluate
        == (
            "a transformers.Trainer has a model that sbpc.parallelize made\n"
            "  Give the Trainer the one-device model, then call sbpc.integrations.hf(trainer, mesh=...), which plans it."
        )
    )
    assert "as safetensors and Accelerator.save_state do" in state and "sbpc.Checkpoints" in state
