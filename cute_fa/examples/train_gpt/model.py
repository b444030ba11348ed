"""A pre-norm GPT over bytes, with rotary positions and attention chosen by name."""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import cute_fa
from cute_fa.examples.train_gpt.data import VOCABULARY
from cute_fa.examples.train_gpt.train_config import TrainConfig


def attend_cute_fa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return cute_fa.flash_attn_func(q, k, v, causal=True)


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (rearrange(x, "batch seqlen heads dim -> batch heads seqlen dim") for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return rearrange(out, "batch heads seqlen dim -> batch seqlen heads dim")


# Each maps q, k, v (batch, seqlen, heads, head_dim) to the causal attention of the same shape.
ATTEND = {"cute_fa": attend_cute_fa, "sdpa": attend_sdpa}


class Rotary(nn.Module):
    """Turns pairs of features by angles that grow with the position, so that q . k depends on the distance."""

    def __init__(self, seqlen: int, head_dim: int):
        super().__init__()
        frequency = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
        angle = torch.outer(torch.arange(seqlen), frequency)[:, None]  # (seqlen, 1 for heads, head_dim / 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = (table[: x.shape[1]].to(x.dtype) for table in (self.cos, self.sin))
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), for x (batch, seqlen, width)."""

    def __init__(self, config: TrainConfig):
        super().__init__()
        width = config.width
        self.heads, self.attend = config.heads, ATTEND[config.attention]
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        split = "batch seqlen (three heads dim) -> three batch seqlen heads dim"
        q, k, v = rearrange(self.qkv(self.attention_norm(x)), split, three=3, heads=self.heads)
        out = self.attend(rotary(q), rotary(k), v)
        x = x + self.attention_out(rearrange(out, "batch seqlen heads dim -> batch seqlen (heads dim)"))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Bytes (batch, seqlen) to logits (batch, seqlen, 256) of the byte that follows each."""

    def __init__(self, config: TrainConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.rotary = Rotary(config.seqlen, config.width // config.heads)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(config.seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Branches that add to the residual stream start smaller, so that its variance stays near 1 (GPT-2).
                adds = name.endswith("_out.weight")
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.layers if adds else 1), generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.head(self.norm(x))

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.parameters())

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward: 6 for each weight of a matmul, and the scores and outputs of causal attention."""
        num_matmul = self.num_parameters - self.embedding.weight.numel()
        return 6 * num_matmul + 12 * self.config.layers * self.config.width * self.config.seqlen / 2
