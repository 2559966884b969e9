"""Weights out: whole tensors by name on rank 0, and folders of libraries, from every parallel module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import CheckpointError, PlanError
from tests.hf_models import gpt2
from tests.processes import run_ranks
from tests.test_checkpoint import TOKENS, Tied


class Odd(Tied):
    """Types that gloo does not know, a tensor without dims and one without elements, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.z = nn.Parameter(torch.randn(5, 3).bfloat16()), nn.Parameter(torch.randn(3, dtype=torch.cfloat))
        self.gain, self.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
        self.register_buffer("bits", torch.tensor([True, False]))

    def get_extra_state(self) -> dict[str, int]:
        return {"answer": 42}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"answer": 42}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain + self.low.float().square().sum()


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return Odd()


def taken_out(plan: sbpc.Plan, saved: str) -> Any:
    """On a rank: the whole state dict, which is also saved."""
    state = sbpc.full_state_dict(sbpc.parallelize(seeded(), plan))
    if dist.get_rank() == 0:
        torch.save(state, saved)
    return state


def test_whole_tensors_come_to_rank_0_under_the_names_of_one_device(tmp_path: Path) -> None:
    pins = {"table.weight": "S(0)", "low": "S(0)", "z": "B"}
    plan, model = sbpc.plan(seeded(), TOKENS, Mesh(x=3), pin=pins), seeded()
    first, *others = run_ranks(taken_out, 3, plan, str(tmp_path / "a.pt"))
    assert others == [{}, {}] and list(first) == list(model.state_dict())
    other = Odd()
    other.load_state_dict(torch.load(tmp_path / "a.pt"))
    for name, value in model.state_dict().items():
        assert first[name].equal(value) if isinstance(value, Tensor) else first[name] == value, name
        assert isinstance(value, dict) or other.state_dict()[name].equal(value)
    assert first["table.weight"].data_ptr() == first["head.weight"].data_ptr()


def small(adapters: bool = False) -> tuple[Any, dict[str, Any]]:
    """GPT-2, whose head is tied; with LoRA if asked."""
    torch.manual_seed(0)
    model, kwargs = gpt2("sdpa", 1)
    if adapters:
        peft = pytest.importorskip("peft", reason="needs peft")
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    return model, kwargs | {"return_dict": False}


def trained(model: nn.Module, plan: sbpc.Plan | None, kwargs: dict[str, Any]) -> Any:
    """The model after a step, as this rank runs it or on one device."""
    module: Any = model if plan is None else sbpc.parallelize(model, plan)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    module(**kwargs)[0].backward()
    optimizer.step()
    return module


def into_folders(plan: sbpc.Plan, folder: str, adapters: bool = False) -> str:
    """On a rank: a trained model is saved by the library; what is said of a folder that cannot be made."""
    module = trained(small(adapters)[0], plan, small(adapters)[1])
    module.save_pretrained(f"{folder}/all")
    state = sbpc.full_state_dict(module)
    if dist.get_rank() == 0:  # alone, as trainers do
        module.save_pretrained(f"{folder}/given", state_dict=state)
    with pytest.raises((OSError, CheckpointError)) as caught:
        module.save_pretrained("/proc/none")
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("adapters", [False, True])
def test_save_pretrained_writes_what_the_library_reads_on_one_device(tmp_path: Path, adapters: bool) -> None:
    model, kwargs = small(adapters)
    said = run_ranks(into_folders, 2, sbpc.plan(model, (), Mesh(x=2), kwargs=kwargs), str(tmp_path), adapters)
    assert said[0].startswith("FileNotFoundError: ")
    assert said[1] == f"CheckpointError: rank 0 could not save the model: {said[0]}\n  Mend the cause, and save again."
    expected = trained(model, None, kwargs).state_dict()
    for name in ("all", "given"):
        if adapters:
            import peft

            other: Any = peft.PeftModel.from_pretrained(small()[0], str(tmp_path / name))
        else:
            other = type(model).from_pretrained(tmp_path / name)
            assert other.config.architectures == ["GPT2LMHeadModel"]
        found = other.state_dict()
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)


def in_bfloat16(plan: sbpc.Plan, folder: str) -> None:
    """On a rank: a model of bfloat16, whose parallel parameters are float32 masters, is saved in both ways."""
    module: Any = sbpc.parallelize(small()[0].bfloat16(), plan)
    assert {each.dtype for each in module.parameters()} == {torch.float32}
    module.save_pretrained(f"{folder}/given", state_dict=sbpc.full_state_dict(module))
    module.save_pretrained(f"{folder}/all")


def test_a_saved_model_with_masters_is_read_in_the_type_that_it_has_on_one_device(tmp_path: Path) -> None:
    model, kwargs = small()
    run_ranks(in_bfloat16, 1, sbpc.plan(model.bfloat16(), (), Mesh(x=1), kwargs=kwargs), str(tmp_path))
    for name in ("all", "given"):
        assert type(model).from_pretrained(tmp_path / name).dtype == torch.bfloat16


def test_what_is_no_module_has_no_weights() -> None:
    with pytest.raises(PlanError, match="the model is None"):
        sbpc.full_state_dict(None)  # type: ignore[arg-type]
    assert sbpc.full_state_dict(nn.Linear(2, 2)).keys() == {"weight", "bias"}  # without ranks
