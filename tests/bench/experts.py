"""Predicts a step of models of experts with and without sharing out rows by their groups: python -m tests.bench.experts

Sizes are those that were published, with fewer layers (--layers). The models return their loss alone.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

import sbpc
from sbpc.passes import annotate

COMMON = {"use_cache": False, "max_position_embeddings": 4096, "attn_implementation": "sdpa", "vocab_size": 32_768}


class Loss(nn.Module):
    """The loss of a language model on its own tokens."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(input_ids=tokens, labels=tokens).loss


def qwen3(layers: int) -> nn.Module:
    """Qwen3-30B-A3B: 128 experts, of which each token goes to 8."""
    config = transformers.Qwen3MoeConfig(
        **COMMON, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, num_hidden_layers=layers,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def mixtral(layers: int) -> nn.Module:
    """Mixtral 8x7B: 8 experts, of which each token goes to 2."""
    config = transformers.MixtralConfig(
        **COMMON, hidden_size=4096, intermediate_size=14_336, num_attention_heads=32, num_key_value_heads=8,
        num_hidden_layers=layers,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def deepseek(layers: int) -> nn.Module:
    """DeepSeek-V3: 256 experts, of which each token goes to 8, and one that sees all of them, behind three dense layers."""
    config = transformers.DeepseekV3Config(
        **COMMON | {"vocab_size": 129_280}, num_hidden_layers=layers, first_k_dense_replace=min(3, layers - 1)
    )
    return transformers.DeepseekV3ForCausalLM(config)


LARGE = {"recompute": "full", "capacity": 1.25}
CASES: dict[str, tuple[Callable[[int], nn.Module], dict[str, int], dict[str, Any]]] = {
    "Qwen3-30B-A3B": (qwen3, {"expert": 64}, {}),
    "Mixtral 8x7B": (mixtral, {"expert": 8}, {}),
    "DeepSeek-V3": (deepseek, {"expert": 256}, LARGE),
}


def planned(name: str, layers: int, shares: bool, **options: Any) -> tuple[sbpc.Plan, float]:
    """The plan of a sequence of 4096 tokens a rank, and the CPU seconds that it took. options: those of `sbpc.plan`."""
    make, sizes, more = CASES[name]
    mesh = sbpc.Mesh(**sizes, cluster="h100")
    with torch.device("meta"):
        model, tokens = Loss(make(layers)).bfloat16(), torch.zeros(mesh.ranks, 4096, dtype=torch.int64)
    start = time.process_time()
    off = mock.patch.object(annotate, "share_rows", lambda *_: None)
    with mock.MagicMock() if shares else off:
        plan = sbpc.plan(model, (tokens,), mesh, **more, **options)
    return plan, time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--memory", type=float, help="bytes of a rank, as in 80e9")
    parser.add_argument("names", nargs="*", default=list(CASES))
    asked = parser.parse_args()
    for name in asked.names:
        print(name, CASES[name][1], f"{asked.layers} layers")
        found = {shares: planned(name, asked.layers, shares, memory=asked.memory) for shares in (False, True)}
        for shares, (plan, taken) in found.items():
            experts = plan.layout(next(each for each in plan.parameters if each.endswith("up_proj")))
            sent, memory = sum(plan.cost.bytes_sent.values()) / 1e9, plan.cost.memory["total"] / 1e9
            what = (
                f"{'rows shared out' if shares else 'without':16} {plan.cost.seconds:8.4f} s  gap {plan.cost.gap:6.2%}"
            )
            print(f"  {what}  {sent:7.2f} GB sent  {memory:7.1f} GB  experts {experts}  planned in {taken:.0f} s")
        print(f"  {found[False][0].cost.seconds / found[True][0].cost.seconds:.2f} times as fast")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB of memory taken to plan")


if __name__ == "__main__":
    main()
