"""The router of a mixture of experts: which experts compute a token, and with what weights."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.model.block import Hidden
from meshtune.model.linear import linear
from meshtune.model.norm import NormSpec

CHOICE = "expert_choice"  # a name that a rematerialisation policy may keep: the experts of every token
Scoring = Literal["softmax", "sigmoid", "sparse_mixer"]


class Routing(NamedTuple):
    """The experts of every token, their weights, and the scores of all experts, float32."""

    experts: Int[Array, "B T k"]
    weights: Float[Array, "B T k"]
    scores: Float[Array, "B T E"]


@dataclasses.dataclass(frozen=True)
class RouterSpec:
    """Chooses `top_k` of `experts` for every token by their scores, the softmax or sigmoid of a linear layer.

    Weights are the scores of the chosen experts, divided by their sum with `normalize` (`epsilon` is added to the sum,
    or with `clamp_sum` its least value), times `scale`. Softmax over only the chosen logits is softmax with
    `normalize`. With `norm` the input is normalised, and with `input_scale` multiplied by a vector of the model over
    the root of its width; `expert_scale` multiplies each expert's weights by its number. With `correction`
    experts are chosen by score + correction, a number per expert that no gradient trains
    (https://arxiv.org/abs/2408.15664). With `groups` > 1 experts come from the best `top_groups` groups of neighbours:
    a group's score is its best (`group_score` 1) or the sum of its two best experts' (2). `float32` multiplies in
    float32 whatever the compute dtype; logits are float32 in any case.

    The `sparse_mixer` (https://arxiv.org/abs/2409.12136), without its sampling, weighs each choice by itself: by its
    share of a softmax over the logits that are no further below it than 2 `jitter` times the greater of their size and
    its own value, earlier choices left out. Its scores are the softmax.
    """

    experts: int
    top_k: int
    scoring: Scoring = "softmax"
    normalize: bool = True
    epsilon: float = 0.0
    clamp_sum: bool = False
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal[1, 2] = 2
    float32: bool = False
    jitter: float = 0.0
    norm: NormSpec | None = None
    input_scale: bool = False
    expert_scale: bool = False

    def __post_init__(self):
        assert self.norm is None or self.norm.kind.endswith("plain"), "the norm of a router has no weights"
        assert 1 <= self.top_k <= self.experts, (self.top_k, self.experts)
        assert self.experts % self.groups == 0, (self.experts, self.groups)
        assert 1 <= self.top_groups <= self.groups, (self.top_groups, self.groups)

    def params(self, embed: int) -> Tree:
        """weight [E, D], and where the router has them bias [E], correction [E], always float32, and scales:
        scale [D] of the input, per_expert_scale [E]."""
        tree = {"weight": ArraySpec((self.experts, embed), "float32", ("whole", "embed"), role="router")}
        if self.bias:
            tree["bias"] = ArraySpec((self.experts,), "float32", ("whole",), "zeros", role="router")
        if self.correction:
            tree["correction"] = ArraySpec((self.experts,), "float32", ("whole",), "zeros", role="buffer")
        scales: Tree = {}
        if self.input_scale:
            scales["scale"] = ArraySpec((embed,), "float32", ("embed",), "ones", role="router")
        if self.expert_scale:
            scales["per_expert_scale"] = ArraySpec((self.experts,), "float32", ("whole",), "ones", role="router")
        return tree | ({"scales": scales} if scales else {})

    def route(self, x: Hidden, node: Tree, key: Array | None = None) -> Routing:
        """The routing of every token. Gradients flow through weights and scores; of equal scores the first wins."""
        layer = {name: leaf for name, leaf in node.items() if name not in ("correction", "scales")}
        if self.norm is not None:
            x = self.norm(x, {})
        if self.input_scale:
            x = x * node["scales"]["scale"].astype(x.dtype) * x.shape[-1] ** -0.5
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32)) if self.float32 else x
        logits = linear(x, layer, key, out=jnp.promote_types(x.dtype, jnp.float32))
        scores = jax.nn.sigmoid(logits) if self.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        if self.scoring == "sparse_mixer":
            return self._route_mixed(logits, scores)
        choice = lax.stop_gradient(scores)
        if self.scoring == "sigmoid" and not self.correction:
            choice = lax.stop_gradient(logits)  # in the same order, but for scores that round to one
        elif self.correction:
            choice = choice + lax.stop_gradient(node["correction"]).astype(choice.dtype)
        if self.groups > 1:
            choice = self._in_best_groups(choice)
        experts = checkpoint_name(lax.top_k(choice, self.top_k)[1], CHOICE)
        # A sum over experts in place of a gather, whose gradient would be a scatter.
        chosen = experts[..., None] == jnp.arange(self.experts)
        weights = jnp.sum(jnp.where(chosen, scores[..., None, :], 0), axis=-1)
        if self.normalize:
            total = jnp.sum(weights, axis=-1, keepdims=True)
            weights = weights / (jnp.maximum(total, self.epsilon) if self.clamp_sum else total + self.epsilon)
        if self.expert_scale:
            scale = node["scales"]["per_expert_scale"].astype(weights.dtype)
            weights = weights * jnp.sum(jnp.where(chosen, scale, 0), axis=-1)
        return Routing(experts, weights if self.scale == 1 else weights * self.scale, scores)

    def _route_mixed(self, logits: Float[Array, "B T E"], scores: Float[Array, "B T E"]) -> Routing:
        """The routing of the sparse mixer. Gradients flow through the softmax of each choice."""
        best, experts = lax.top_k(lax.stop_gradient(logits), self.top_k)
        chosen = experts[..., None] == jnp.arange(self.experts)
        earlier = jnp.cumsum(chosen, axis=-2) > chosen
        fixed = lax.stop_gradient(logits)[..., None, :]
        distance = (best[..., None] - fixed) / jnp.maximum(jnp.abs(fixed), best[..., None])
        left_out = earlier | (distance > 2 * self.jitter)
        shares = jax.nn.softmax(jnp.where(left_out, -jnp.inf, logits[..., None, :]), axis=-1)
        return Routing(experts, jnp.sum(jnp.where(chosen, shares, 0), axis=-1), scores)

    def _in_best_groups(self, choice: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """The scores, -inf outside each token's best groups."""
        grouped = choice.reshape(*choice.shape[:-1], self.groups, -1)
        totals = jnp.sum(lax.top_k(grouped, self.group_score)[0], axis=-1)
        _, best = lax.top_k(totals, self.top_groups)
        chosen = jnp.any(best[..., None] == jnp.arange(self.groups), axis=-2)
        return jnp.where(chosen[..., None], grouped, -jnp.inf).reshape(choice.shape)
