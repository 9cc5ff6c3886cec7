"""Baichuan2 in torch, written from its report (https://arxiv.org/abs/2309.10305) and the papers it cites: what our
model is compared with. Module and tensor names are the original's, so that peft and checkpoints see what they would.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import nn

SEVEN = {
    "model_type": "baichuan",
    "architectures": ["BaichuanForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"},
    "tokenizer_class": "BaichuanTokenizer",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.2,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
    "model_max_length": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "_from_model_config": True,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.29.2",
    "use_cache": True,
    "vocab_size": 97,
}
# Ten heads, no power of two; and no max_position_embeddings, which is how a 13B is known.
THIRTEEN = {k: v for k, v in SEVEN.items() if k != "max_position_embeddings"} | {
    "hidden_size": 40,
    "num_attention_heads": 10,
    "gradient_checkpointing": False,
    "z_loss_weight": 0,
}


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class NormHead(nn.Module):
    """Logits from rows of length one."""

    def __init__(self, size: int, vocab: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, size))

    def forward(self, x):
        return nn.functional.linear(x, nn.functional.normalize(self.weight))


def slopes(heads: int) -> list[float]:
    """Press et al., appendix: exact for powers of two, else interleaved from the power above."""

    def of_power(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return of_power(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return of_power(closest) + slopes(2 * closest)[0::2][: heads - closest]


class Attention(nn.Module):
    def __init__(self, size: int, heads: int, rotary: bool):
        super().__init__()
        self.heads, self.width, self.rotary = heads, size // heads, rotary
        self.W_pack = nn.Linear(size, 3 * size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)

    def forward(self, x):
        batch, length, size = x.shape
        q, k, v = self.W_pack(x).split(size, dim=-1)
        q, k, v = (states.view(batch, length, self.heads, self.width).transpose(1, 2) for states in (q, k, v))
        place = torch.arange(length)
        if self.rotary:
            inverse = 1.0 / (10000.0 ** (torch.arange(0, self.width, 2).float() / self.width))
            phase = torch.outer(place.float(), inverse)
            phase = torch.cat([phase, phase], -1)
            q, k = (states * phase.cos() + half_turned(states) * phase.sin() for states in (q, k))
        scores = q @ k.transpose(2, 3) / math.sqrt(self.width)
        if (
            not self.rotary
        ):  # the original adds slope * place of the key: the same, but for what every key has in common
            scores = scores + torch.tensor(slopes(self.heads))[:, None, None] * place[None, None, :]
        scores = scores.masked_fill(place[None, :] > place[:, None], float("-inf"))
        mixed = torch.softmax(scores, -1) @ v
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, size))


def half_turned(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class MLP(nn.Module):
    def __init__(self, size: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = Attention(size, config["num_attention_heads"], "max_position_embeddings" in config)
        self.mlp = MLP(size, config["intermediate_size"])
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Baichuan(nn.Module):
    """`forward(tokens [B, T])` gives logits [B, T, V]; other arguments of transformers' models are ignored."""

    def __init__(self, fields: dict, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        size, vocab = fields["hidden_size"], fields["vocab_size"]
        self.config = SimpleNamespace(**fields, get=fields.get, to_dict=lambda: fields)
        self.model = Model(fields)
        first = vocab == 64000  # Baichuan's own vocabulary, before Baichuan2
        self.lm_head = nn.Linear(size, vocab, bias=False) if first else NormHead(size, vocab)
        with torch.no_grad():
            for path, weight in self.named_parameters():
                weight.copy_(torch.randn_like(weight) * 0.3 + (1.0 if weight.ndim == 1 else 0.0))
                if path == "lm_head.weight":  # rows of very different length
                    weight.mul_(torch.linspace(0.1, 3.0, vocab)[:, None])

    def forward(self, input_ids, **_):
        return self.lm_head(self.model(input_ids))

    def prepare_inputs_for_generation(self, tokens):
        """Exists because peft requires it of a causal language model."""
        return {"tokens": tokens}
