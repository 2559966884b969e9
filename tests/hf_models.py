"""Models of the `transformers` library with random weights and tiny configurations; nothing is downloaded.

Every function returns (model, kwargs); the caller seeds. Sizes are such that meshes of 2 and 3 ranks per axis divide most.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import
import transformers

Model = tuple[nn.Module, dict[str, Any]]
VOCAB, BATCH, SEQ = 48, 4, 12
DECODER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 4, "max_position_embeddings": 2 * SEQ, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Doubled(TorchFunctionMode):
    """While this lasts what asks for float32 gets float64: these models have their norms and losses in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        given = {key: double(value) for key, value in (kwargs or {}).items()}
        return func(*map(double, args), **given)


def double(value: Any) -> Any:
    """float64 for float32, anything else as it is."""
    return torch.float64 if isinstance(value, torch.dtype) and value == torch.float32 else value


def tokens() -> dict[str, Any]:
    ids = torch.randint(0, VOCAB, (BATCH, SEQ))
    return {"input_ids": ids, "labels": ids.clone()}


def padded() -> dict[str, Any]:
    """Two sequences end early: their tail is masked, and does not count in the loss."""
    given = tokens()
    mask = torch.ones(BATCH, SEQ, dtype=torch.int64)
    mask[1, -3:] = mask[3, -1:] = 0
    given["labels"][mask == 0] = -100
    return {**given, "attention_mask": mask}


def gpt2(attention: str, layers: int) -> Model:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=48, n_layer=layers, n_head=12, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=1, eos_token_id=2, attn_implementation=attention,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), tokens()


def llama(attention: str, layers: int) -> Model:
    """Grouped-query attention, RMS norm, rotary positions, gated layers."""
    config = transformers.LlamaConfig(**DECODER, num_hidden_layers=layers, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config), tokens()


def qwen(attention: str, layers: int) -> Model:
    """As Llama, with a norm of each query and key head."""
    config = transformers.Qwen3Config(**DECODER, num_hidden_layers=layers, attn_implementation=attention)
    return transformers.Qwen3ForCausalLM(config), padded()


def bert(attention: str, layers: int) -> Model:
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=layers, num_attention_heads=12, intermediate_size=96,
        max_position_embeddings=SEQ, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation=attention,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), padded()


def t5(attention: str, layers: int) -> Model:
    """An encoder, a decoder, and learned biases of relative positions."""
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=48, d_kv=4, d_ff=96, num_layers=layers, num_decoder_layers=layers, num_heads=12,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    given = padded()
    return transformers.T5ForConditionalGeneration(config), {**given, "labels": torch.randint(1, VOCAB, (BATCH, 6))}


def vit(attention: str, layers: int) -> Model:
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=layers, num_attention_heads=12, intermediate_size=96, image_size=12,
        patch_size=4, num_channels=3, num_labels=12, attn_implementation=attention,
    )  # fmt: skip
    images, labels = torch.randn(BATCH, 3, 12, 12), torch.randint(0, 12, (BATCH,))
    return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": labels}


def mixtral(attention: str, layers: int, experts: str | None = "batched_mm") -> Model:
    """A mixture of four experts, of which each token goes to two. experts: how they are computed; None is the library's default."""
    config = transformers.MixtralConfig(
        **DECODER, num_hidden_layers=layers, num_local_experts=4, num_experts_per_tok=2, attn_implementation=attention,
        experts_implementation=experts,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), tokens()


def qwen_moe(attention: str, layers: int) -> Model:
    config = transformers.Qwen3MoeConfig(
        **DECODER, num_hidden_layers=layers, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        attn_implementation=attention,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config), tokens()


def deepseek(attention: str, layers: int) -> Model:
    """Latent attention, experts chosen within groups and by a learned correction, and one that sees every token."""
    sizes = {key: value for key, value in DECODER.items() if key not in ("head_dim", "num_key_value_heads")}
    config = transformers.DeepseekV3Config(
        **sizes, num_hidden_layers=layers, num_key_value_heads=12, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=2,
        n_shared_experts=1, moe_intermediate_size=32, first_k_dense_replace=0, attn_implementation=attention,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config), tokens()


def gpt_oss(attention: str, layers: int) -> Model:
    """Experts with biases, attention with a sink for each head."""
    config = transformers.GptOssConfig(
        **DECODER, num_hidden_layers=layers, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, attn_implementation=attention,
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config), tokens()


def olmoe(attention: str, layers: int) -> Model:
    """Norms of all queries and keys at once."""
    sizes = {key: value for key, value in DECODER.items() if key != "head_dim"}
    config = transformers.OlmoeConfig(
        **sizes, num_hidden_layers=layers, num_experts=4, num_experts_per_tok=2, attn_implementation=attention,
    )  # fmt: skip
    return transformers.OlmoeForCausalLM(config), tokens()


def with_default_experts(net: str) -> Model:
    """A model of one layer, with a mixture of experts as the library computes it by default."""
    if net == "mixtral":
        return mixtral("sdpa", 1, experts=None)
    return MIXTURES[net]("eager" if net == "gpt_oss" else "sdpa", 1)


MODELS: dict[str, Callable[[str, int], Model]] = {
    made.__name__: made for made in (gpt2, llama, qwen, bert, t5, vit, mixtral)
}
MIXTURES: dict[str, Callable[[str, int], Model]] = {
    made.__name__: made for made in (mixtral, qwen_moe, deepseek, gpt_oss, olmoe)
}
