"""Shape classes of attention, random inputs of each, and what torch computes of them in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch


@dataclasses.dataclass(frozen=True)
class Shape:
    """One class of shapes. Rows hold documents of `lengths` tokens and then padding, up to `T` tokens.

    With `cache`, the queries are the last `queries` tokens of each row and the keys all of it, as in decoding.
    """

    lengths: tuple[tuple[int, ...], ...]
    T: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    cache: bool = False
    queries: int = 0

    def divided(self, by: int) -> Shape:
        """The together class with rows that are `by` times shorter, for slow platforms."""

        def shorter(length: int) -> int:
            return max(1, length // by)

        return dataclasses.replace(
            self,
            lengths=tuple(tuple(shorter(length) for length in row) for row in self.lengths),
            T=shorter(self.T) + (self.T % 2),
            window=None if self.window is None else shorter(self.window),
            queries=min(self.queries, 3),
        )

    @property
    def packed(self) -> bool:
        """Whether some row holds several documents."""
        return any(len(row) > 1 for row in self.lengths)


SHAPES: dict[str, Shape] = {
    "one document": Shape(((1024,), (1024,)), 1024, 8, 2, 128),
    "padded documents": Shape(((1000,), (17,)), 1024, 4, 4, 64),
    "packed": Shape(((500, 1, 300, 223), (640, 384)), 1024, 8, 2, 128),
    "packed, odd length": Shape(((333, 444), (700,)), 777, 8, 2, 64),
    "many short documents": Shape(((24,) * 42, (56,) * 18), 1024, 4, 1, 64),
    "a row of padding": Shape(((640,), ()), 640, 4, 2, 64),
    "one key head": Shape(((1024,),), 1024, 8, 1, 64),
    "no shared key heads": Shape(((600, 424),), 1024, 4, 4, 128),
    "window": Shape(((800, 224),), 1024, 8, 2, 128, window=200),
    "window wider than the row": Shape(((512,),), 512, 4, 2, 64, window=4096),
    "soft cap": Shape(((800, 224),), 1024, 4, 2, 128, softcap=20.0),
    "window and soft cap": Shape(((800, 224),), 1024, 4, 2, 256, window=200, softcap=30.0),
    "ALiBi": Shape(((700, 300),), 1024, 8, 8, 64, alibi=True),
    "heads of 16": Shape(((512, 400),), 1024, 4, 2, 16),
    "heads of 80": Shape(((512, 400),), 1024, 4, 2, 80),
    "heads of 96": Shape(((512, 400),), 1024, 4, 2, 96),
    "heads of 256": Shape(((512,),), 512, 2, 1, 256),
    "one new token": Shape(((1000,), (640,)), 1024, 8, 2, 128, cache=True, queries=1),
    "a few new tokens in a window": Shape(((1000,), (640,)), 1024, 8, 2, 64, window=256, cache=True, queries=5),
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of a shape: q [B,T,H,h], k and v [B,S,K,h], the output's gradient, token facts int32, slopes or None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    gradient: np.ndarray
    tokens: dict[str, np.ndarray]
    slopes: np.ndarray | None
    scale: float


def inputs_of(shape: Shape, seed: int = 0) -> Inputs:
    """Random float32 inputs of a seed."""
    random = np.random.default_rng(seed)
    B, S = len(shape.lengths), shape.T
    positions, segments = np.zeros((2, B, S), np.int32)
    for row, lengths in enumerate(shape.lengths):
        start = 0
        for number, length in enumerate(lengths, start=1):
            segments[row, start : start + length] = number
            positions[row, start : start + length] = np.arange(length)
            start += length
        assert start <= S
    facts = {"q_positions": positions, "kv_positions": positions, "q_segments": segments, "kv_segments": segments}
    T = S
    if shape.cache:  # the last tokens of each row's one document
        T = shape.queries
        last = np.array([[row[0] - T + n for n in range(T)] for row in shape.lengths], np.int32)
        facts |= {"q_positions": last, "q_segments": np.ones_like(last)}
    q, k, v, gradient = (
        random.normal(size=(B, length, heads, shape.head_dim)).astype(np.float32)
        for length, heads in ((T, shape.heads), (S, shape.kv_heads), (S, shape.kv_heads), (T, shape.heads))
    )
    slopes = (2.0 ** -np.arange(1, shape.heads + 1)).astype(np.float32) if shape.alibi else None
    return Inputs(q, k, v, gradient, facts, slopes, shape.head_dim**-0.5)


def exact(shape: Shape, inputs: Inputs) -> list[np.ndarray]:
    """Output and gradients of q, k and v in float64, by torch's autograd through plain products."""
    q, k, v, gradient = (
        torch.tensor(array.astype(np.float64)).transpose(1, 2)
        for array in (inputs.q, inputs.k, inputs.v, inputs.gradient)
    )
    for array in (q, k, v):
        array.requires_grad_()
    tokens = {name: torch.tensor(array) for name, array in inputs.tokens.items()}
    distance = tokens["q_positions"][:, :, None] - tokens["kv_positions"][:, None, :]
    together = tokens["q_segments"][:, :, None] == tokens["kv_segments"][:, None, :]
    visible = together & (tokens["q_segments"][:, :, None] != 0) & (distance >= 0)
    if shape.window is not None:
        visible = visible & (distance < shape.window)
    groups = shape.heads // shape.kv_heads
    scores = q @ k.repeat_interleave(groups, 1).mT * inputs.scale
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    if inputs.slopes is not None:
        scores = scores - torch.tensor(inputs.slopes, dtype=torch.float64)[:, None, None] * distance[:, None]
    blind = ~visible.any(-1)[:, None, :, None]
    weights = scores.masked_fill(~visible[:, None], -torch.inf).masked_fill(blind, 0.0).softmax(-1)
    out = (weights @ v.repeat_interleave(groups, 1)).masked_fill(blind, 0.0)
    out.backward(gradient)
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return [array.detach().transpose(1, 2).numpy() for array in (out, q.grad, k.grad, v.grad)]
