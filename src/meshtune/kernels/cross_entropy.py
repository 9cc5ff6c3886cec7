"""Cross-entropy and log-probabilities of targets, with the logits of one chunk of rows at a time.

The loss made of log-probabilities (the sum over an answer, the difference of two answers) is known only after the last
chunk, so the forward pass cannot compute its gradients as `cross_entropy` does. It does compute the derivative of every
log-probability by its own hidden state, which the backward pass multiplies by the cotangents. If the head is trained or
entropies are differentiated, the backward pass is a cross-entropy with the cotangents as weights: it recomputes the
logits chunk by chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

# A function of (head params, hidden [..,D]) that returns float32 logits [..,V].
Head = Callable[[PyTree, jax.Array], jax.Array]


class ChunkSchedule(NamedTuple):
    """The order in which positions are computed: those with weight 0 last, so that only `count` chunks have any weight.

    order int32 is [n * chunk] and sorted_weights [n * chunk, ..]; entries past the last position have position 0 and
    weight 0. count is an int32 scalar, at most n.
    """

    order: jax.Array
    sorted_weights: jax.Array
    count: jax.Array

    @staticmethod
    def of(weights: jax.Array, chunk: int) -> ChunkSchedule:
        """The schedule for weights [positions, ..], in chunks of `chunk` positions; those that are all 0 come last."""
        is_zero = weights == 0.0 if weights.ndim == 1 else (weights == 0.0).all(-1)
        order = jnp.argsort(is_zero, stable=True)
        padding = [(0, -order.shape[0] % chunk), *[(0, 0)] * (weights.ndim - 1)]
        sorted_weights = jnp.pad(weights[order], padding)
        return ChunkSchedule(jnp.pad(order, padding[0]), sorted_weights, -(-(~is_zero).sum() // chunk))

    def chunk(self, c: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """The positions [size] of chunk c and their weights [size, ..]."""
        start = c * size
        return (
            jax.lax.dynamic_slice_in_dim(self.order, start, size),
            jax.lax.dynamic_slice_in_dim(self.sorted_weights, start, size),
        )

    def unsort(self, x: jax.Array, count: int) -> jax.Array:
        """Results [n * chunk, ..] in the schedule's order, as [count, ..] in the order of the positions."""
        return x[jnp.argsort(self.order[:count])]


def flatten_rows(*trees: PyTree) -> tuple[PyTree, ...]:
    """Arrays [B, T, ..] as [B * T, ..]."""
    return jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, *x.shape[2:]), trees)


class TargetScores(NamedTuple):
    """-log p(target) [..] of a chunk of logits [..,V], with the values it was computed from.

    `correct` [..] says whether the target is the first of the largest logits. `exponentials` [..,V] are
    exp(logits - maximum), with the largest logit `maximum` [..,1], and `total` [..,1] is their sum over the whole
    vocabulary. `sum_over_vocab` sums over the devices that share the vocabulary.
    """

    losses: jax.Array
    target_logits: jax.Array
    correct: jax.Array
    is_target: jax.Array
    exponentials: jax.Array
    maximum: jax.Array
    total: jax.Array
    sum_over_vocab: Callable[[jax.Array], jax.Array]

    def entropies(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The entropies [..] in nats of the distributions p that `logits` [..,V] give, and log p [..,V].

        log p is 0 where p is 0 in float32, so that products with p are 0 even for a logit of minus infinity.
        """
        log_p = jnp.where(self.exponentials > 0, logits - self.maximum - jnp.log(self.total), 0.0)
        return -self.sum_over_vocab((self.exponentials / self.total * log_p).sum(-1)), log_p


def over_vocab(axis: str | None) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """The maximum and the sum over the devices of a mesh axis that share the vocabulary; None: there is one."""
    if axis is None:
        return lambda x: x, lambda x: x
    return functools.partial(jax.lax.pmax, axis_name=axis), functools.partial(jax.lax.psum, axis_name=axis)


def score_targets(logits: jax.Array, targets: jax.Array, vocab_axis: str | None) -> TargetScores:
    """`vocab_axis` is the mesh axis over which the vocabulary of logits [..,V] is sharded, or None."""
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    max_over_vocab, sum_over_vocab = over_vocab(vocab_axis)
    if vocab_axis is not None:
        ids = ids + (jax.lax.axis_index(vocab_axis) * logits.shape[-1]).astype(ids.dtype)
    maximum = max_over_vocab(logits.max(-1, keepdims=True))
    exponentials = jnp.exp(logits - maximum)
    total = sum_over_vocab(exponentials.sum(-1, keepdims=True))
    is_target = ids == targets[..., None]
    target_logits = sum_over_vocab(jnp.where(is_target, logits, 0.0).sum(-1))
    losses = (maximum + jnp.log(total))[..., 0] - target_logits
    # What argmax == targets says, of which compilers for CPUs make a reduction that takes several times as long.
    largest_before = max_over_vocab(jnp.where(ids < targets[..., None], logits, -jnp.inf).max(-1))
    correct = (target_logits == maximum[..., 0]) & (largest_before < target_logits)
    return TargetScores(losses, target_logits, correct, is_target, exponentials, maximum, total, sum_over_vocab)


# What a result is: "sum" (a scalar), "token" (a number per position), "hidden" (like the hidden states), or ("head", n)
# (the gradient of leaf n of the head).
ResultKind = str | tuple[str, int]


@dataclasses.dataclass(frozen=True)
class LossSharding:
    """The sharding of a loss's arrays. `rows` is the spec of [B, T], `head` those of the head's leaves in order.

    `vocab` is the mesh axis that splits the vocabulary, or None.
    """

    mesh: Mesh | AbstractMesh
    rows: PartitionSpec
    head: tuple[PartitionSpec, ...]
    vocab: str | None = None

    def reduction_axes(self, kind: ResultKind) -> tuple[str, ...]:
        """The axes over which a result is a partial sum on each device."""
        vocab = () if self.vocab is None else (self.vocab,)
        if kind == "sum":
            return _axes(self.rows)
        if kind == "token":
            return ()
        if kind == "hidden":
            return vocab
        return _axes(self.rows) + tuple(axis for axis in vocab if axis not in _axes(self.head[_leaf(kind)]))

    def spec(self, kind: ResultKind) -> PartitionSpec:
        """The sharding of a result."""
        if kind == "sum":
            return PartitionSpec()
        return self.rows if kind in ("token", "hidden") else self.head[_leaf(kind)]


def run_over_mesh(
    function: Callable[..., Any], sharding: LossSharding | None, results: PyTree, *arguments: PyTree
) -> Any:
    """Calls `function(vocab axis, *arguments)`, on a mesh for every device's rows and shard of the vocabulary.

    The arguments are the head's leaves, hidden states, targets and weights; `results` is the tree of the kinds of the
    results (None for no result). Without a mesh the vocab axis is None.
    """
    return function(None, *arguments) if sharding is None else _over_mesh(function, sharding, results)(*arguments)


def _over_mesh(function: Callable[..., Any], sharding: LossSharding, results: PyTree) -> Callable[..., Any]:
    """Maps `function` over devices and sums its partial results."""

    def local(*arguments: PyTree) -> PyTree:
        return jax.tree.map(sum_over_axes, results, function(sharding.vocab, *arguments), is_leaf=_is_kind)

    def sum_over_axes(kind: ResultKind | None, partial: jax.Array) -> jax.Array:
        axes = () if kind is None else sharding.reduction_axes(kind)
        return jax.lax.psum(partial, axes) if axes else partial

    specs = jax.tree.map(lambda kind: None if kind is None else sharding.spec(kind), results, is_leaf=_is_kind)
    in_specs = (list(sharding.head), sharding.rows, sharding.rows, sharding.rows)
    # Each result is summed over exactly the axes over which it is partial; the check cannot verify that through loops.
    return jax.shard_map(local, mesh=sharding.mesh, in_specs=in_specs, out_specs=specs, check_vma=False)


def _is_kind(x: object) -> bool:
    return x is None or isinstance(x, str) or (isinstance(x, tuple) and len(x) == 2 and x[0] == "head")


def _leaf(kind: ResultKind) -> int:
    assert not isinstance(kind, str), kind
    return kind[1]


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    return tuple(axis for entry in entries for axis in entry)


def cross_entropy(
    head: Head,
    head_params: PyTree,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    chunk: int,
    sharding: LossSharding | None = None,
    smoothing: float = 0.0,
    by_probability: bool = False,
    entropy_weights: Float[Array, "B T"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The weighted sums of -log p(target) and of correct predictions: float32 scalars, to be divided by sum(weights).

    `head(head_params, hidden[..,D])` gives float32 logits [..,V]; `chunk` is the number of positions of each row whose
    logits exist at a time, so the peak is B * chunk * V float32 numbers. hidden and the differentiated leaves of
    head_params get gradients; none is computed for the other leaves. Positions of weight 0 may have any target.
    With a `sharding` each device of its mesh computes its own rows and its own shard of the vocabulary: `head` then
    gets that shard of head_params.

    With `smoothing` e the loss of a position is (1 - e) * -log p(target) + e * the mean of -log p over the vocabulary
    (label smoothing, arXiv:1512.00567). With `by_probability` it is multiplied by p(target), through which no gradient
    flows (dynamic fine-tuning, arXiv:2508.05629). With `entropy_weights` the weighted sum of the entropies of the
    predicted distributions is added to the loss.
    Raises: ValueError if the weights are differentiated.
    """
    score = functools.partial(_score_chunk, terms=Terms(smoothing, by_probability, entropy_weights is not None))
    if entropy_weights is not None:
        weights = jnp.stack([weights, entropy_weights], axis=-1)
    return chunked_sums(head, score, min(chunk, hidden.shape[1]), sharding, head_params, hidden, targets, weights)


class Terms(NamedTuple):
    """Terms of the loss of a position other than -log p(target).

    With `entropies` a position has two weights [..,2]: of its loss, and of its entropy.
    """

    smoothing: float
    by_probability: bool
    entropies: bool = False


def _score_chunk(
    vocab_axis: str | None, _: PyTree, logits: jax.Array, targets: jax.Array, weights: jax.Array, *, terms: Terms
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weighted sums of losses and of correct predictions over a chunk, and the gradient of the former with respect
    to the logits [..,V], whose vocabulary may be sharded over `vocab_axis`."""
    scores, loss_weights = score_targets(logits, targets, vocab_axis), weights[..., 0] if terms.entropies else weights
    correct, losses = (loss_weights * scores.correct).sum(), scores.losses
    if terms.by_probability:
        loss_weights = loss_weights * jnp.exp(-losses)
    probabilities = scores.exponentials / scores.total
    if terms.smoothing:
        losses, d_logits = _smooth(terms.smoothing, scores, logits, probabilities, vocab_axis)
    else:
        d_logits = jnp.where(scores.is_target, probabilities - 1.0, probabilities)
    # A product alone would turn an infinite loss of weight 0 into NaN.
    loss, d_loss = jnp.where(loss_weights != 0.0, losses * loss_weights, 0.0).sum(), d_logits * loss_weights[..., None]
    if terms.entropies:
        entropy_loss, d_entropy_loss = _weigh_entropies(scores, logits, probabilities, weights[..., 1])
        loss, d_loss = loss + entropy_loss, d_loss + d_entropy_loss
    return loss, correct, d_loss


def _smooth(
    smoothing: float, scores: TargetScores, logits: jax.Array, probabilities: jax.Array, vocab_axis: str | None
) -> tuple[jax.Array, jax.Array]:
    """The losses with label smoothing, and their gradients."""
    vocab_size = logits.shape[-1] * (1 if vocab_axis is None else jax.lax.axis_size(vocab_axis))
    logits_sum = scores.sum_over_vocab(logits.sum(-1))
    losses = scores.losses + smoothing * (scores.target_logits - logits_sum / vocab_size)
    return losses, probabilities - jnp.where(scores.is_target, 1.0 - smoothing, 0.0) - smoothing / vocab_size


def _weigh_entropies(
    scores: TargetScores, logits: jax.Array, probabilities: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of the entropies, and its gradient."""
    entropies, log_p = scores.entropies(logits)
    gradient = -probabilities * (log_p + entropies[..., None]) * weights[..., None]
    return jnp.where(weights != 0.0, entropies * weights, 0.0).sum(), gradient


# (vocab axis, head params, logits of a chunk [..,V], its part of `other`, its weights) -> (the weighted sum of its
# losses, another sum, the gradient of the first with respect to the logits).
Score = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def chunked_sums(
    head: Head, score: Score, chunk: int, sharding: LossSharding | None, head_params, hidden, other, weights
) -> tuple[jax.Array, jax.Array]:
    """The two sums of `score` over all positions, with the logits of `chunk` positions of each row at a time.

    `other` is what else is known of the positions, arrays [B, T, ..]: their targets, or the hidden states of another
    model. The first sum has gradients, computed at once: of `hidden` and of the differentiated leaves of `head_params`.
    """
    leaves, treedef = jax.tree.flatten(head_params)
    return _sums_and_gradients(head, score, chunk, sharding, treedef, [], False, leaves, hidden, other, weights)[:2]


def _sums_and_gradients(
    head: Head, score: Score, chunk: int, sharding: LossSharding | None, treedef: Any,
    trainable: list[int], hidden_grad: bool, leaves: list[jax.Array], *arrays: PyTree,
):  # fmt: skip
    """The sums, and the gradients of the first: of the leaves with these numbers, and of hidden (None: of none)."""

    def local_sums_and_grads(vocab_axis, leaves, hidden, other, weights):
        size, shape = chunk * weights.shape[0], hidden.shape
        hidden, other, weights = flatten_rows(hidden, other, weights)
        schedule, params = ChunkSchedule.of(weights, size), jax.tree.unflatten(treedef, leaves)

        def logits_of(variables):
            trained = dict(zip(trainable, variables["params"], strict=True))
            merged = [trained.get(n, leaf) for n, leaf in enumerate(leaves)]
            return head(jax.tree.unflatten(treedef, merged), variables["hidden"])

        def add_chunk(c, running):
            loss, count, d_params, d_hidden = running
            positions, chunk_weights = schedule.chunk(c, size)
            h, known = jax.tree.map(lambda x: x[positions], (hidden, other))
            variables = {"params": [leaves[n] for n in trainable]} | ({"hidden": h} if hidden_grad else {})
            logits, vjp = jax.vjp(lambda variables: logits_of({"hidden": h} | variables), variables)
            chunk_loss, chunk_count, d_logits = score(vocab_axis, params, logits, known, chunk_weights)
            (grads,) = vjp(d_logits)
            d_params = [total + grad.astype(total.dtype) for total, grad in zip(d_params, grads["params"], strict=True)]
            if hidden_grad:
                d_hidden = jax.lax.dynamic_update_slice_in_dim(d_hidden, grads["hidden"], c * size, axis=0)
            return loss + chunk_loss, count + chunk_count, d_params, d_hidden

        # The gradient of a bfloat16 head is accumulated over the chunks in float32.
        zero_grads = [jnp.zeros(leaves[n].shape, jnp.promote_types(leaves[n].dtype, jnp.float32)) for n in trainable]
        zero_hidden = jnp.zeros((schedule.order.shape[0], shape[2]), hidden.dtype) if hidden_grad else None
        zeros = jnp.float32(0.0), jnp.float32(0.0), zero_grads, zero_hidden
        loss, count, d_params, d_hidden = jax.lax.fori_loop(0, schedule.count, add_chunk, zeros)
        if hidden_grad:
            d_hidden = schedule.unsort(d_hidden, weights.shape[0]).reshape(shape)
        return loss, count, d_params, d_hidden

    results = ("sum", "sum", [("head", n) for n in trainable], "hidden" if hidden_grad else None)
    return run_over_mesh(local_sums_and_grads, sharding, results, leaves, *arrays)


def _sums_forward(
    head: Head, score: Score, chunk: int, sharding: LossSharding | None, head_params, hidden, other, weights
):
    """The sums, and the gradients of the first: of hidden and of the differentiated leaves (None for the others)."""
    if weights.perturbed:
        raise ValueError("the weights of a cross-entropy are data: they cannot be differentiated")
    leaves, treedef = jax.tree.flatten(head_params)
    trainable, values = [n for n, leaf in enumerate(leaves) if leaf.perturbed], [leaf.value for leaf in leaves]
    arrays = values, hidden.value, jax.tree.map(lambda leaf: leaf.value, other), weights.value
    loss, count, d_params, d_hidden = _sums_and_gradients(
        head, score, chunk, sharding, treedef, trainable, hidden.perturbed, *arrays
    )
    d_leaves = {n: grad.astype(values[n].dtype) for n, grad in zip(trainable, d_params, strict=True)}
    return (loss, count), (jax.tree.unflatten(treedef, [d_leaves.get(n) for n in range(len(leaves))]), d_hidden)


def _sums_backward(head: Head, score: Score, chunk: int, sharding: LossSharding | None, grads, cotangents):
    d_loss = cotangents[0]  # the other cotangent is irrelevant: that sum has no gradient
    if isinstance(d_loss, SymbolicZero):
        d_loss = jnp.float32(0.0)
    d_params, d_hidden = jax.tree.map(lambda x: (x * d_loss).astype(x.dtype), grads)
    return d_params, d_hidden, None, None


chunked_sums.defvjp(_sums_forward, _sums_backward, symbolic_zeros=True)


def log_probs(
    head: Head,
    head_params: PyTree,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    chunk: int,
    sharding: LossSharding | None = None,
) -> Float[Array, "B T"]:
    """float32 log p(target) where `mask` is True, and 0 elsewhere; masked positions cost nothing.

    `head`, `chunk` and `sharding` as for `cross_entropy`. hidden and the differentiated leaves of head_params get
    gradients; none is computed for the other leaves, nor for positions whose cotangent is 0.
    """
    mask, size = jnp.asarray(mask, jnp.float32), min(chunk, hidden.shape[1])
    results: Any = _log_probs(head, size, sharding, False, head_params, hidden, targets, mask)
    return results[0]


def log_probs_and_entropies(
    head: Head,
    head_params: PyTree,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    chunk: int,
    sharding: LossSharding | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`log_probs`, and the entropies in nats of the distributions over the whole vocabulary, of the same logits.

    Entropies that are used only under stop_gradient cost nothing in the backward pass.
    """
    mask, size = jnp.asarray(mask, jnp.float32), min(chunk, hidden.shape[1])
    results: Any = _log_probs(head, size, sharding, True, head_params, hidden, targets, mask)
    return results


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _log_probs(
    head: Head, chunk: int, sharding: LossSharding | None, with_entropies: bool, head_params, hidden, targets, mask
):
    """(log-probabilities, entropies or None)."""
    arguments = head_params, hidden, targets, mask
    return _scores_and_derivatives(head, chunk, sharding, with_entropies, False, *arguments)[:2]


def _scores_and_derivatives(
    head: Head,
    chunk: int,
    sharding: LossSharding | None,
    with_entropies: bool,
    with_derivatives: bool,
    head_params: PyTree,
    hidden: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
) -> Any:
    """(log-probabilities, entropies or None, the derivative [B, T, D] of each log-probability by its hidden state or
    None)."""
    leaves, treedef = jax.tree.flatten(head_params)

    def local_scores(vocab_axis, leaves, hidden, targets, mask):
        size, shape = chunk * mask.shape[0], mask.shape
        hidden, targets, mask = flatten_rows(hidden, targets, mask)
        schedule, params = ChunkSchedule.of(mask, size), jax.tree.unflatten(treedef, leaves)

        def add_chunk(c, results):
            positions, chunk_mask = schedule.chunk(c, size)
            chosen = hidden[positions]
            logits, vjp = (
                jax.vjp(functools.partial(head, params), chosen)
                if with_derivatives
                else (
                    head(params, chosen),
                    None,
                )
            )
            scores = score_targets(logits, targets[positions], vocab_axis)
            derivatives = None
            if vjp is not None:
                probabilities = scores.exponentials / scores.total
                (derivatives,) = vjp(jnp.where(scores.is_target, 1.0 - probabilities, -probabilities))
            values = (-scores.losses, scores.entropies(logits)[0] if with_entropies else None, derivatives)

            def place(result, value):
                real = (chunk_mask != 0).reshape(size, *[1] * (value.ndim - 1))
                return jax.lax.dynamic_update_slice_in_dim(result, jnp.where(real, value, 0), c * size, axis=0)

            return jax.tree.map(place, results, values)

        count = schedule.order.shape[0]
        zeros = jnp.zeros(count, jnp.float32)
        no_derivatives = jnp.zeros((count, hidden.shape[1]), hidden.dtype) if with_derivatives else None
        start = (zeros, zeros if with_entropies else None, no_derivatives)
        results = jax.lax.fori_loop(0, schedule.count, add_chunk, start)
        return jax.tree.map(lambda x: schedule.unsort(x, mask.shape[0]).reshape(*shape, *x.shape[1:]), results)

    kinds = ("token", "token" if with_entropies else None, "hidden" if with_derivatives else None)
    return run_over_mesh(local_scores, sharding, kinds, leaves, hidden, targets, mask)


def _forward(
    head: Head, chunk: int, sharding: LossSharding | None, with_entropies: bool, head_params, hidden, targets, mask
):
    leaves, treedef = jax.tree.flatten(head_params)
    trainable = {n: () for n, leaf in enumerate(leaves) if leaf.perturbed}  # keys are static: known while tracing
    arguments = (
        jax.tree.unflatten(treedef, [leaf.value for leaf in leaves]),
        *(argument.value for argument in (hidden, targets, mask)),
    )
    with_derivatives = hidden.perturbed and not trainable
    *results, derivatives = _scores_and_derivatives(head, chunk, sharding, with_entropies, with_derivatives, *arguments)
    return tuple(results), (*arguments, trainable, derivatives)


def _backward(head: Head, chunk: int, sharding: LossSharding | None, with_entropies: bool, residuals, cotangents):
    head_params, hidden, targets, mask, trainable, derivatives = residuals
    leaves, treedef = jax.tree.flatten(head_params)
    cotangent, entropy_cotangent = (None if isinstance(c, SymbolicZero) else c for c in cotangents)
    if cotangent is None and entropy_cotangent is None:
        return jax.tree.unflatten(treedef, [None] * len(leaves)), None, None, None
    if derivatives is not None and cotangent is not None and entropy_cotangent is None:
        factors = jnp.where(mask != 0.0, cotangent, 0.0)[..., None]
        d_hidden = jnp.where(factors != 0.0, derivatives * factors, 0.0).astype(hidden.dtype)
        return jax.tree.unflatten(treedef, [None] * len(leaves)), d_hidden, None, None

    weights = jnp.zeros_like(mask) if cotangent is None else jnp.where(mask != 0.0, -cotangent, 0.0)
    options: dict[str, Any] = {"chunk": chunk, "sharding": sharding}
    if entropy_cotangent is not None:
        options["entropy_weights"] = jnp.where(mask != 0.0, entropy_cotangent, 0.0)

    def loss(trained_leaves: dict[int, Array], hidden: Array) -> Array:
        params = jax.tree.unflatten(treedef, [trained_leaves.get(n, leaf) for n, leaf in enumerate(leaves)])
        return cross_entropy(head, params, hidden, targets, weights, **options)[0]

    d_leaves, d_hidden = jax.grad(loss, argnums=(0, 1))({n: leaves[n] for n in trainable}, hidden)
    return jax.tree.unflatten(treedef, [d_leaves.get(n) for n in range(len(leaves))]), d_hidden, None, None


_log_probs.defvjp(_forward, _backward, symbolic_zeros=True)
