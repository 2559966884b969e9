"""Large models for the planning benchmark, on the meta device: every function returns (model, args, kwargs)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import Block, gpt2

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Decoder(nn.Module):
    """Learned positions and pre-norm blocks, the head tied to the embedding; (tokens, targets) -> cross-entropy."""

    def __init__(self, vocab: int, seq: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def tokens(batch: int, seq: int, vocab: int) -> Tensor:
    return torch.zeros(batch, seq, dtype=torch.int64, device="meta")


def gpt3(layers: int = 96, batch: int = 64, seq: int = 2048) -> Case:
    """GPT-3 175B (Brown et al. 2020), in bfloat16."""
    with torch.device("meta"):
        model = Decoder(51_200, seq, 12_288, 96, layers).to(torch.bfloat16)
    return model, (tokens(batch, seq, 51_200), tokens(batch, seq, 51_200)), {}


def gpt(layers: int = 4, batch: int = 16, seq: int = 64) -> Case:
    """A small GPT, of which parameters take most of the bytes."""
    with torch.device("meta"):
        return *gpt2(batch, seq, vocab=1024, width=512, heads=8, layers=layers), {}


class Stream(nn.Module):
    """One block between pinned-free ends: the mean of its squares as the loss."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.block = Block(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).float().square().mean()


def block(batch: int = 64, seq: int = 2048) -> Case:
    """One transformer block of width 4096."""
    with torch.device("meta"):
        model = Stream(4096, 32).to(torch.bfloat16)
        return model, (torch.zeros(batch, seq, 4096, dtype=torch.bfloat16),), {}


LLAMA_8B, LLAMA_405B = (4096, 14_336, 32), (16_384, 53_248, 128)  # width, width inside, heads


def llama(layers: int = 32, batch: int = 64, seq: int = 8192, sizes: tuple[int, int, int] = LLAMA_8B) -> Case:
    """Llama-3 (Dubey et al. 2024) of the transformers library."""
    import transformers

    width, inside, heads = sizes
    config = transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=width, intermediate_size=inside, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=seq, rope_theta=500_000.0,
        use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    ids = tokens(batch, seq, 128_256)
    return model, (), {"input_ids": ids, "labels": ids}


class LossAlone(nn.Module):
    """A model of the transformers library without its logits, which every rank would have whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Any:
        return self.model(input_ids=tokens, labels=tokens).loss


def llama_loss(layers: int = 32, batch: int = 64, seq: int = 8192, sizes: tuple[int, int, int] = LLAMA_8B) -> Case:
    """Llama-3 as it is trained: its loss alone."""
    model, _, kwargs = llama(layers, batch, seq, sizes)
    return LossAlone(model), (kwargs["input_ids"],), {}


def t5(layers: int = 24, batch: int = 64, seq: int = 512) -> Case:
    """T5 (Raffel et al. 2020): an encoder, a decoder that reads its output in every layer, shared position biases."""
    import transformers

    config = transformers.T5Config(
        vocab_size=32_128, d_model=1024, d_kv=64, d_ff=4096, num_layers=layers, num_decoder_layers=layers,
        num_heads=16, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config).to(torch.bfloat16)
    return model, (), {"input_ids": tokens(batch, seq, 32_128), "labels": tokens(batch, seq, 32_128)}


def mixtral(layers: int = 32, batch: int = 8, seq: int = 1024) -> Case:
    """Mixtral (Jiang et al. 2024): in every layer a mixture of 8 experts, of which each token goes to two."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=32_000, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=seq, use_cache=False,
        num_local_experts=8, num_experts_per_tok=2, attn_implementation="sdpa", experts_implementation="grouped_mm",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config).to(torch.bfloat16)
    ids = tokens(batch, seq, 32_000)
    return model, (), {"input_ids": ids, "labels": ids}


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, channels), nn.GroupNorm(32, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


class UNet(nn.Module):
    """Blocks at every resolution on the way down and up; each level up reads the level down of its resolution."""

    def __init__(self, channels: int, levels: int, blocks: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(levels)]
        self.stem, self.head = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 3, padding=1)
        self.down = nn.ModuleList(nn.Sequential(*(Residual(w) for _ in range(blocks))) for w in widths)
        self.up = nn.ModuleList(nn.Sequential(*(Residual(w) for _ in range(blocks))) for w in widths)
        self.shrink = nn.ModuleList(nn.Conv2d(w, 2 * w, 2, stride=2) for w in widths[:-1])
        self.grow = nn.ModuleList(nn.Conv2d(2 * w, w, 1) for w in widths[:-1])
        self.join = nn.ModuleList(nn.Conv2d(2 * w, w, 1) for w in widths[:-1])

    def forward(self, x: Tensor) -> Tensor:
        image, skips = x, []
        x = self.stem(x)
        for level, part in enumerate(self.down):
            x = part(x)
            if level < len(self.shrink):
                skips.append(x)
                x = self.shrink[level](x)
        x = self.up[-1](x)
        for level in reversed(range(len(self.shrink))):
            x = F.interpolate(self.grow[level](x), scale_factor=2.0, mode="nearest")
            x = self.up[level](self.join[level](torch.cat([x, skips[level]], 1)))
        return (self.head(x) - image).float().square().mean()


def unet(blocks: int = 12, batch: int = 64, size: int = 64) -> Case:
    """A U-Net (Ronneberger et al. 2015) of residual blocks with group norms, skip connections between its levels."""
    with torch.device("meta"):
        model = UNet(128, 3, blocks).to(torch.bfloat16)
        return model, (torch.zeros(batch, 3, size, size, dtype=torch.bfloat16),), {}
