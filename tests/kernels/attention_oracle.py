"""The definition of attention in float64 NumPy, torch's gradients of it, and random packed rows as inputs."""

from __future__ import annotations

import numpy as np
import torch


def reference(q, k, v, q_positions, kv_positions, q_segments, kv_segments, *, scale, window=None, softcap=None):
    """[B,T,H,h] in float64: written from the contract, one head at a time, without grouping query heads."""
    out = np.zeros(q.shape, np.float64)
    for b in range(q.shape[0]):
        is_visible = mask(q_positions[b], kv_positions[b], q_segments[b], kv_segments[b], window)
        for n in range(q.shape[2]):
            key_head = n // (q.shape[2] // k.shape[2])
            scores = q[b, :, n].astype(np.float64) @ k[b, :, key_head].astype(np.float64).T * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(np.where(is_visible, scores, -np.inf))
            total = weights.sum(1, keepdims=True)
            out[b, :, n] = np.divide(weights, total, where=total > 0, out=np.zeros_like(weights)) @ v[b, :, key_head]
    return out


def mask(q_positions, kv_positions, q_segments, kv_segments, window, q_parents=None, q_reach=None):
    """bool [T,S] of one row, pair by pair."""
    is_visible = np.zeros((len(q_positions), len(kv_positions)), bool)
    for i in range(is_visible.shape[0]):
        for j in range(is_visible.shape[1]):
            distance = q_positions[i] - kv_positions[j]
            in_window = window is None or distance < window
            segments = (q_segments[i], *([] if q_parents is None else [q_parents[i]]))
            reached = kv_positions[j] <= (q_positions if q_reach is None else q_reach)[i]
            is_visible[i, j] = kv_segments[j] != 0 and kv_segments[j] in segments and reached and in_window
    return is_visible


def pack_rows(lengths_of_rows, T):
    """Segments and positions int32 [B,T] of rows that contain documents of these lengths, then padding."""
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


def same_tokens(segments, positions):
    """The tokens of queries and keys that are those of the same rows, as arguments of `attention`."""
    return {"q_positions": positions, "kv_positions": positions, "q_segments": segments, "kv_segments": segments}


def normal(seed, *shapes):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def torch_gradients(q, k, v, g, tokens, *, scale, window, softcap, sinks=None):
    """Output and gradients of q, k, v and sinks, if any, in float64 by autograd; scaled_dot_product_attention where it
    can."""
    q, k, v, g = (torch.tensor(x, dtype=torch.float64).transpose(1, 2) for x in (q, k, v, g))
    inputs = [q, k, v] if sinks is None else [q, k, v, torch.tensor(sinks, dtype=torch.float64)]
    for x in inputs:
        x.requires_grad_()
    names = ("q_positions", "kv_positions", "q_segments", "kv_segments")
    optional = [name for name in ("q_parents", "q_reach") if name in tokens]
    rows = zip(*(tokens[name] for name in (*names, *optional)), strict=True)
    masks = [mask(*row[:4], window, **dict(zip(optional, row[4:], strict=True))) for row in rows]
    is_visible = torch.tensor(np.stack(masks))[:, None]
    sees_nothing = ~is_visible.any(-1, keepdim=True)
    # torch gives NaN for a row that sees nothing: let it see everything, and set its result to zero afterwards.
    allowed = is_visible | sees_nothing
    groups = q.shape[1] // k.shape[1]
    if softcap is None and sinks is None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=True)
    else:
        scores = q @ k.repeat_interleave(groups, 1).mT * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~allowed, -torch.inf)
        if sinks is not None:  # one more column, whose weight is dropped
            scores = torch.cat([scores, inputs[3][None, :, None, None].expand(*scores.shape[:3], 1)], -1)
        out = scores.softmax(-1)[..., : k.shape[2]] @ v.repeat_interleave(groups, 1)
    out = out.masked_fill(sees_nothing, 0.0)
    out.backward(g)
    results = [x.detach().transpose(1, 2).numpy() for x in (out, q.grad, k.grad, v.grad)]
    return results if sinks is None else [*results, inputs[3].grad.numpy()]
