"""A mixture of experts: the router, the experts and their sums.

A mixture of experts: a feed-forward network whose router chooses a few parts for every token
(https://arxiv.org/abs/1701.06538). No token is dropped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.kernels.chips import Chip, chip_of
from meshtune.mesh.layout import Layout
from meshtune.model.block import (
    CHOICE,
    Activation,
    BlockChoice,
    Context,
    Cost,
    Divisor,
    FeedForward,
    Hidden,
    Output,
    Sums,
)
from meshtune.model.cache import LayerCache
from meshtune.model.compute import Compute
from meshtune.model.dispatch import choose_exchange, over_mesh
from meshtune.model.linear import Groups, grouped_linear, linear, linear_params, site_key
from meshtune.model.mlp import ACTIVATIONS, ActivationName, MlpSpec
from meshtune.model.norm import NormSpec
from meshtune.quantize.weight import QuantisedWeight

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


# Of every layer: tokens per expert [L, E], router scores per expert [L, E], and tokens [L].
TOKENS, SCORES, ROUTED = "expert_tokens", "router_scores", "routed_tokens"
CORRECTION = "router/correction"  # its path in the node of a mixture


@dataclasses.dataclass(frozen=True)
class ExpertsSpec(FeedForward):
    """sum over a token's experts e of weight_e * down_e(activation(gate_e(x)) * up_e(x)), of width F each.

    Without a gate, down_e(activation(up_e(x))). With `clamp` c the gate is limited to c and up to +-c, and they give
    (up + 1) * gate * sigmoid(1.702 gate) (https://arxiv.org/abs/2508.10925). With `scale_input` the weight multiplies
    an expert's input in place of its result. A `shared` network computes every token in addition, with `shared_gate`
    times sigmoid(gate(x)). With `norm` the input is the unchanged stream (LayerSpec.ffn_norm): it is normalised for the
    experts and for the shared network, and so are both results, each with its own weights; the router reads the
    stream. With `latent` experts compute with that many numbers of a token, which a linear layer projects down to and
    another one up from, both with biases where `latent_bias` says so. `layers` is the number of layers in the model.
    The load-balancing loss (https://arxiv.org/abs/2101.03961) of all layers together, times `aux_loss`, is added to the
    model's loss. With `bias_update_rate` every update moves the router's correction of each expert by that much, up
    where the expert computed fewer tokens than the mean of its layer, down where more
    (https://arxiv.org/abs/2408.15664).
    """

    router: RouterSpec
    width: int
    layers: int
    activation: ActivationName = "silu"
    gated: bool = True
    bias: bool = False
    clamp: float | None = None
    scale_input: bool = False
    shared: MlpSpec | None = None
    shared_gate: bool = False
    aux_loss: float = 0.0
    bias_update_rate: float = 0.0
    norm: NormSpec | None = None
    latent: int | None = None
    latent_bias: bool = False
    name: ClassVar[str] = "mlp"

    def params(self, embed: int) -> Tree:
        """router {weight [E, D], ..}; experts {gate, up [E, F, D], down [E, D, F]}; shared; shared_gate [1, D];
        latent_in [N, D] and latent_out [D, N], where D of the experts is N, the `latent` numbers."""
        tree: Tree = {"router": self.router.params(embed), "experts": self._expert_params(embed)}
        if self.shared is not None:
            tree["shared"] = self.shared.params(embed)
        if self.shared_gate:
            gate = ArraySpec((1, embed), "float32", ("score", "embed"), role="router")
            tree["shared_gate"] = {"weight": gate}
        if self.norm is not None:
            tree |= {name: self.norm.params(embed, "embed") for name in self._norms}
        if self.latent is not None:
            narrow, wide = (self.latent, "whole"), (embed, "embed")
            tree["latent_in"] = linear_params(narrow, wide, self.latent_bias)
            tree["latent_out"] = linear_params(wide, narrow, self.latent_bias)
        return tree

    @property
    def _norms(self) -> tuple[str, ...]:
        norms = () if self.norm is None else ("norm", "post_norm")
        return norms if self.shared is None else (*norms, *(f"shared_{name}" for name in norms))

    def _expert_params(self, embed: int) -> Tree:
        wide, narrow = (self.width, "ffn"), (embed if self.latent is None else self.latent, "embed")

        def experts(out: tuple[int, str], into: tuple[int, str]) -> Tree:
            count = self.router.experts
            weight = ArraySpec((count, out[0], into[0]), "float32", ("experts", out[1], into[1]), role="experts")
            if not self.bias:
                return {"weight": weight}
            return {
                "weight": weight,
                "bias": ArraySpec((count, out[0]), "float32", ("experts", out[1]), "zeros", role="vector"),
            }

        into = ("gate", "up") if self.gated else ("up",)
        return {name: experts(wide, narrow) for name in into} | {"down": experts(narrow, wide)}

    def apply(self, x: Hidden, node: Tree, context: Context, cache: LayerCache | None = None) -> Output:
        """The network's result, zeros for padding where there is no shared network."""
        key, real = context.key, context.sequences.segment_ids > 0
        routing = self.router.route(x, node["router"], site_key(key, "router"))
        chosen = jnp.where(real[..., None], routing.experts, self.router.experts)  # padding is computed by none
        layout, experts = context.compute.layout, node["experts"]
        if layout is not None:
            experts = jax.tree.map(_with_plain_scales, experts, is_leaf=_is_quantised)

        def normalise(x: Hidden, name: str) -> Hidden:
            return x if self.norm is None else self.norm(x, node[name])

        chip = chip_of(context.compute.platform or jax.default_backend(), context.compute.chip)
        compute = functools.partial(self._compute, chip=chip, layout=layout)
        rows = normalise(x, "norm")
        if self.latent is not None:
            rows = linear(rows, node["latent_in"], site_key(key, "latent_in"))
        y = over_mesh(
            compute,
            layout,
            rows,
            chosen,
            routing.weights,
            experts,
            _specs_in_use(experts, self._expert_params(x.shape[-1]), layout),
            self.router.experts,
            context.compute.expert_exchange,
        )
        if self.latent is not None:
            y = linear(y, node["latent_out"], site_key(key, "latent_out"))
        y = normalise(y, "post_norm")
        if self.shared is not None:
            shared_context = dataclasses.replace(context, key=site_key(key, "shared"))
            shared = normalise(
                self.shared.apply(normalise(x, "shared_norm"), node["shared"], shared_context).y, "shared_post_norm"
            )
            if self.shared_gate:
                shared = shared * jax.nn.sigmoid(linear(x, node["shared_gate"], site_key(key, "shared_gate")))
            y = y + shared
        return Output(y, cache, self._sums(routing, real, context.index))

    def _compute(
        self, rows: Array, weights: Array, groups: Groups, node: Tree, *, chip: Chip, layout: Layout | None
    ) -> Array:
        """Rows sorted by expert through their experts, times their weights."""
        product = functools.partial(grouped_linear, groups=groups, chip=chip)
        factor = weights.astype(rows.dtype)[:, None]
        if self.scale_input:
            rows = rows * factor
        up = product(rows, node["up"])
        if self.clamp is not None:
            gate = jnp.minimum(product(rows, node["gate"]), self.clamp)
            wide = (jnp.clip(up, -self.clamp, self.clamp) + 1) * gate * jax.nn.sigmoid(1.702 * gate)
        elif self.gated:
            wide = ACTIVATIONS[self.activation](product(rows, node["gate"])) * up
        else:
            wide = ACTIVATIONS[self.activation](up)
        if self.scale_input:
            factor = jnp.ones_like(factor)
        # The weight multiplies what goes into the last product, not its wider result, which nobody then keeps.
        down = product(wide * factor, {name: leaf for name, leaf in node["down"].items() if name != "bias"})
        if not self.bias:
            return down
        bias = node["down"]["bias"].astype(down.dtype)
        if layout is not None and layout.size("tp") > 1:  # results are added over tp, and the bias counts once
            bias = jnp.where(jax.lax.axis_index("tp") == 0, bias, 0)
        return down + factor * groups.of_rows(bias)

    def _sums(self, routing: Routing, real: Array, index: Array | int) -> Sums:
        at = (jnp.arange(self.layers) == index).astype(jnp.float32)
        chosen = jnp.sum(routing.experts[..., None] == jnp.arange(self.router.experts), axis=-2, dtype=jnp.float32)
        layer_sums = {
            TOKENS: jnp.einsum("bte,bt->e", chosen, real.astype(jnp.float32)),
            ROUTED: jnp.sum(real, dtype=jnp.float32),
        }
        if self.aux_loss:
            layer_sums[SCORES] = jnp.einsum("bte,bt->e", routing.scores.astype(jnp.float32), real.astype(jnp.float32))
        return {name: at.reshape(-1, *(1,) * value.ndim) * value for name, value in layer_sums.items()}

    def sums(self) -> Mapping[str, tuple[int, ...]]:
        of_experts = (self.layers, self.router.experts)
        return {TOKENS: of_experts, ROUTED: (self.layers,)} | ({SCORES: of_experts} if self.aux_loss else {})

    def loss(self, sums: Sums) -> Array | None:
        """E * sum over experts of (their share of the tokens) * (their mean score), times `aux_loss`.

        Shares and means are of the tokens of all layers together, padding excluded, as in transformers. The gradient
        flows through nothing but the scores.
        """
        if not self.aux_loss:
            return None
        routed = jnp.maximum(jnp.sum(sums[ROUTED]), 1.0)
        share, score = (jnp.sum(sums[name], axis=0) / routed for name in (TOKENS, SCORES))
        return self.aux_loss * self.router.experts * jnp.sum(jax.lax.stop_gradient(share) * score)

    def adjusted_buffers(self) -> frozenset[str]:
        return frozenset({CORRECTION} if self.bias_update_rate else ())

    def adjust(self, buffers: Mapping[str, Array], sums: Sums, layers: Sequence[int]) -> Mapping[str, Array]:
        """The corrections [L, E] after an update, from the tokens of each expert in all of it, padding excluded."""
        tokens = sums[TOKENS][np.asarray(layers)]
        direction = jnp.sign(jnp.mean(tokens, axis=-1, keepdims=True) - tokens)
        return {path: bias + self.bias_update_rate * direction.astype(bias.dtype) for path, bias in buffers.items()}

    def metrics(self, sums: Sums) -> Mapping[str, tuple[Array, Array]]:
        """Metrics of the sums: `expert_load_max`, the tokens of a layer's busiest expert relative to the mean;
        `dead_experts`, those of a layer that computed no token; `dropped_tokens`, choices that none computed."""
        tokens, routed = sums[TOKENS], sums[ROUTED]
        sparse = (routed > 0).astype(jnp.float32)
        chosen = self.router.top_k * routed
        mean = jnp.maximum(chosen, 1.0) / self.router.experts
        dead = jnp.sum(tokens == 0, axis=-1) * sparse
        return {
            "expert_load_max": (jnp.sum(jnp.max(tokens, axis=-1) / mean), jnp.sum(sparse)),
            "dead_experts": (jnp.sum(dead), jnp.sum(sparse)),
            "dropped_tokens": (jnp.sum(chosen) - jnp.sum(tokens), jnp.ones(())),
        }

    def choices(self, compute: Compute) -> tuple[BlockChoice, ...]:
        """How tokens are exchanged over ep."""
        ep = 1 if compute.layout is None else compute.layout.size("ep")
        if ep == 1:
            return ()
        return (BlockChoice("expert exchange", *choose_exchange(compute.expert_exchange, ep, self.router.top_k)),)

    def divisors(self) -> tuple[Divisor, ...]:
        routed = (Divisor("tp", "width of an expert", self.width), Divisor("ep", "experts", self.router.experts))
        return routed + (() if self.shared is None else self.shared.divisors())

    def cost(self, embed: int) -> Cost:
        k, matrices = self.router.top_k, 3 if self.gated else 2
        into = embed if self.latent is None else self.latent
        weights = self.router.experts * embed + k * matrices * into * self.width
        weights += 0 if self.latent is None else 2 * embed * into
        wide = Activation("ffn", k * self.width, self.width, kept=True, products=1, elementwise=1)
        wide = wide._replace(routed=True)
        rows = Activation("embed", k * into, 1, kept=False, products=1, elementwise=1, routed=True)
        activations = (rows, *(wide,) * (matrices - 1), wide._replace(kept=False), rows)
        if self.shared is not None:
            shared = self.shared.cost(embed)
            weights, activations = weights + shared.weights, activations + shared.activations
        return Cost(weights + (embed if self.shared_gate else 0), activations, dispatched=k * into, chosen=k)


def _is_quantised(leaf: object) -> bool:
    return isinstance(leaf, QuantisedWeight)


def _with_plain_scales(leaf: Array | QuantisedWeight) -> Array | QuantisedWeight:
    return leaf.with_plain_scales() if isinstance(leaf, QuantisedWeight) else leaf


def _specs_in_use(node: Tree, arrays: Tree, layout: Layout | None) -> Tree | None:
    """How each leaf of the experts' parameters, adapters included, is sharded while a layer computes."""
    if layout is None:
        return None
    flat: dict[str, ArraySpec] = flatten(arrays)

    def spec_of(x: jax.Array, *axes: str, unit: int = 1) -> PartitionSpec:
        return layout.in_use(axes, (*x.shape[:-1], x.shape[-1] // unit)).spec

    specs = {}
    for path, leaf in flatten(node).items():
        owner, _, last = path.rpartition("/")
        axes = flat[f"{owner}/weight" if last in ("adapter", "fixed") else path].axes
        specs[path] = leaf.in_use(spec_of, axes) if hasattr(leaf, "in_use") else spec_of(leaf, *axes)
    return unflatten(specs)
