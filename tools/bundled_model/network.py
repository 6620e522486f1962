"""The bundled model in PyTorch: a small Mixtral, written once, plainly, for training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from corpus import CONTEXT
from torch import nn

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2048, 128, 6, 4, 2, 32
EXPERTS, CHOSEN, WIDTH, THETA, EPS = 8, 2, 192, 10000.0, 1e-5


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return F.rms_norm(x, (HIDDEN,), self.weight, EPS)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN) * HIDDEN**-0.5)
        self.out = nn.Parameter(torch.randn(HIDDEN, HEADS * HEAD_DIM) * (HIDDEN * 2 * LAYERS) ** -0.5)

    def forward(self, x, cos, sin):
        rows, length, _ = x.shape
        q, k, v = (
            F.linear(x, self.qkv)
            .view(rows, length, -1, HEAD_DIM)
            .transpose(1, 2)
            .split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(mixed.transpose(1, 2).reshape(rows, length, -1), self.out)


def rotate(x, cos, sin):
    """Rotary position: the two halves of a head turn together (the Hugging Face convention)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Experts(nn.Module):
    """Router and experts. Tokens are sorted by expert, so that each expert is two matrix products over its own rows."""

    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(torch.randn(EXPERTS, HIDDEN) * 0.02)
        self.w13 = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) * HIDDEN**-0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * (WIDTH * 2 * LAYERS) ** -0.5)

    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, HIDDEN)
        probability = F.linear(x.float(), self.router).softmax(dim=-1)
        weight, expert = probability.topk(CHOSEN, dim=-1)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        order = expert.flatten().argsort(stable=True)
        counts = expert.flatten().bincount(minlength=EXPERTS)
        token = order // CHOSEN
        outputs = []
        for e, rows in enumerate(x[token].split(counts.tolist())):
            gate, up = F.linear(rows, self.w13[e]).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, self.w2[e]))
        scaled = torch.cat(outputs) * weight.flatten()[order, None].to(outputs[0].dtype)
        result = torch.zeros_like(x, dtype=scaled.dtype).index_add(0, token, scaled)
        # Load balance: 1 when every expert gets the same share, 8 when one gets all.
        # Only the mean probability carries a gradient.
        balance = EXPERTS * (counts / counts.sum() * probability.mean(dim=0)).sum()
        return result.view(shape), balance, expert


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.experts = Norm(), Attention(), Norm(), Experts()

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        update, balance, expert = self.experts(self.norm2(x))
        return x + update, balance, expert


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCAB, HIDDEN) * 0.05)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Parameter(torch.randn(VOCAB, HIDDEN) * 0.02)
        angles = torch.arange(CONTEXT)[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids):
        """Logits, the mean load-balance term, and each layer's chosen experts."""
        x, balances, chosen = F.embedding(ids, self.embedding), [], []
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.blocks:
            x, balance, expert = block(x, cos, sin)
            balances.append(balance)
            chosen.append(expert)
        return F.linear(self.norm(x), self.head), torch.stack(balances).mean(), chosen
