"""The definition of attention in float64 NumPy loops, torch's gradients of it, and random packed rows to ask about."""

from __future__ import annotations

import numpy as np
import torch


def reference(q, k, v, q_positions, kv_positions, q_segments, kv_segments, *, scale, window=None, softcap=None):
    """[B,T,H,h] in float64: written from the contract, one head at a time, keys never regrouped."""
    out = np.zeros(q.shape, np.float64)
    for b in range(q.shape[0]):
        seen = mask(q_positions[b], kv_positions[b], q_segments[b], kv_segments[b], window)
        for n in range(q.shape[2]):
            shared = n // (q.shape[2] // k.shape[2])
            scores = q[b, :, n].astype(np.float64) @ k[b, :, shared].astype(np.float64).T * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(np.where(seen, scores, -np.inf))
            total = weights.sum(1, keepdims=True)
            out[b, :, n] = np.divide(weights, total, where=total > 0, out=np.zeros_like(weights)) @ v[b, :, shared]
    return out


def mask(q_positions, kv_positions, q_segments, kv_segments, window):
    """bool [T,S] for one row, pair by pair."""
    seen = np.zeros((len(q_positions), len(kv_positions)), bool)
    for i in range(seen.shape[0]):
        for j in range(seen.shape[1]):
            apart = q_positions[i] - kv_positions[j]
            near = window is None or apart < window
            seen[i, j] = q_segments[i] == kv_segments[j] != 0 and apart >= 0 and near
    return seen


def packed(lengths_of_rows, T):
    """Segments and positions int32 [B,T] of rows that hold documents of these lengths, then padding."""
    segments = np.zeros((len(lengths_of_rows), T), np.int32)
    positions = np.zeros_like(segments)
    for row, lengths in enumerate(lengths_of_rows):
        start = 0
        for n, length in enumerate(lengths):
            segments[row, start : start + length] = n + 1
            positions[row, start : start + length] = np.arange(length)
            start += length
        assert start <= T
    return segments, positions


def normal(seed, *shapes):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def torch_gradients(q, k, v, g, tokens, *, scale, window, softcap):
    """Output and gradients in float64 by torch's own autograd: scaled_dot_product_attention where it can."""
    q, k, v, g = (torch.tensor(x, dtype=torch.float64).transpose(1, 2) for x in (q, k, v, g))
    for x in (q, k, v):
        x.requires_grad_()
    names = ("q_positions", "kv_positions", "q_segments", "kv_segments")
    rows = zip(*(tokens[name] for name in names), strict=True)
    seen = torch.tensor(np.stack([mask(*row, window) for row in rows]))[:, None]
    blind = ~seen.any(-1, keepdim=True)
    # Torch would give NaN to a row that sees nothing: let it see all, then take it out of the result.
    allowed = seen | blind
    groups = q.shape[1] // k.shape[1]
    if softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=True)
    else:
        scores = softcap * torch.tanh(q @ k.repeat_interleave(groups, 1).mT * scale / softcap)
        out = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v.repeat_interleave(groups, 1)
    out = out.masked_fill(blind, 0.0)
    out.backward(g)
    return [x.detach().transpose(1, 2).numpy() for x in (out, q.grad, k.grad, v.grad)]
