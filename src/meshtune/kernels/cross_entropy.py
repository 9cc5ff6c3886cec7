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


def flatten_rows(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[B, T, ..] as [B * T, ..]."""
    return tuple(jnp.asarray(x).reshape(-1, *x.shape[2:]) for x in arrays)


class TargetScores(NamedTuple):
    """-log p(target) [..] of a chunk of logits [..,V], with the values it was computed from.

    `correct` [..] says whether the target is the first of the largest logits. `exponentials` [..,V] are
    exp(logits - maximum), with the largest logit `maximum` [..,1], and `total` [..,1] is their sum over the whole
    vocabulary. `sum_over_vocab` sums over the devices that share the vocabulary, whose size is `vocab_size`.
    """

    losses: jax.Array
    target_logits: jax.Array
    correct: jax.Array
    is_target: jax.Array
    exponentials: jax.Array
    maximum: jax.Array
    total: jax.Array
    sum_over_vocab: Callable[[jax.Array], jax.Array]
    vocab_size: int

    def entropies(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The entropies [..] in nats of the distributions p that `logits` [..,V] give, and log p [..,V].

        log p is 0 where p is 0 in float32, so that products with p are 0 even for a logit of minus infinity.
        """
        log_p = jnp.where(self.exponentials > 0, logits - self.maximum - jnp.log(self.total), 0.0)
        return -self.sum_over_vocab((self.exponentials / self.total * log_p).sum(-1)), log_p


def score_targets(logits: jax.Array, targets: jax.Array, vocab_axis: str | None) -> TargetScores:
    """`vocab_axis` is the mesh axis over which the vocabulary of logits [..,V] is sharded, or None."""
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    if vocab_axis is None:
        max_over_vocab, sum_over_vocab, shards = lambda x: x, lambda x: x, 1
    else:
        max_over_vocab = functools.partial(jax.lax.pmax, axis_name=vocab_axis)
        sum_over_vocab = functools.partial(jax.lax.psum, axis_name=vocab_axis)
        shards = jax.lax.axis_size(vocab_axis)
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
    vocab_size = shards * logits.shape[-1]
    return TargetScores(
        losses, target_logits, correct, is_target, exponentials, maximum, total, sum_over_vocab, vocab_size
    )


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
    terms = Terms(smoothing, by_probability, entropies=entropy_weights is not None)
    if entropy_weights is not None:
        weights = jnp.stack([weights, entropy_weights], axis=-1)
    return _cross_entropy(head, min(chunk, hidden.shape[1]), sharding, terms, head_params, hidden, targets, weights)


class Terms(NamedTuple):
    """Terms of the loss of a position other than -log p(target).

    With `entropies` a position has two weights [..,2]: of its loss, and of its entropy.
    """

    smoothing: float
    by_probability: bool
    entropies: bool = False


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _cross_entropy(
    head: Head, chunk: int, sharding: LossSharding | None, terms: Terms, head_params, hidden, targets, weights
):
    leaves, treedef = jax.tree.flatten(head_params)

    def local_sums(vocab_axis, leaves, hidden, targets, weights):
        size = chunk * weights.shape[0]
        hidden, targets, weights = flatten_rows(hidden, targets, weights)
        schedule, params = ChunkSchedule.of(weights, size), jax.tree.unflatten(treedef, leaves)

        def add_chunk(c, sums):
            positions, chunk_weights = schedule.chunk(c, size)
            logits = head(params, hidden[positions])
            loss, correct, _ = _chunk_sums(logits, targets[positions], chunk_weights, vocab_axis, terms)
            return sums[0] + loss, sums[1] + correct

        return jax.lax.fori_loop(0, schedule.count, add_chunk, (jnp.float32(0.0), jnp.float32(0.0)))

    return run_over_mesh(local_sums, sharding, ("sum", "sum"), leaves, hidden, targets, weights)


def _cross_entropy_forward(
    head: Head, chunk: int, sharding: LossSharding | None, terms: Terms, head_params, hidden, targets, weights
):
    """The sums, and the gradients of the loss: of hidden and of the differentiated leaves (None for the others)."""
    if weights.perturbed:
        raise ValueError("the weights of a cross-entropy are data: they cannot be differentiated")
    leaves, treedef = jax.tree.flatten(head_params)
    trainable = [n for n, leaf in enumerate(leaves) if leaf.perturbed]
    hidden_grad = hidden.perturbed

    def local_sums_and_grads(vocab_axis, values, hidden, targets, weights):
        size, shape = chunk * weights.shape[0], hidden.shape
        hidden, targets, weights = flatten_rows(hidden, targets, weights)
        schedule = ChunkSchedule.of(weights, size)

        def logits_of(variables):
            params = list(values)
            for n, value in zip(trainable, variables["params"], strict=True):
                params[n] = value
            return head(jax.tree.unflatten(treedef, params), variables["hidden"])

        def add_chunk(c, running):
            loss, correct, d_params, d_hidden = running
            positions, chunk_weights = schedule.chunk(c, size)
            h = hidden[positions]
            variables = {"params": [values[n] for n in trainable]} | ({"hidden": h} if hidden_grad else {})
            logits, vjp = jax.vjp(lambda variables: logits_of({"hidden": h} | variables), variables)
            chunk_loss, chunk_correct, d_logits = _chunk_sums(
                logits, targets[positions], chunk_weights, vocab_axis, terms
            )
            (grads,) = vjp(d_logits)
            d_params = [total + grad.astype(total.dtype) for total, grad in zip(d_params, grads["params"], strict=True)]
            if hidden_grad:
                d_hidden = jax.lax.dynamic_update_slice_in_dim(d_hidden, grads["hidden"], c * size, axis=0)
            return loss + chunk_loss, correct + chunk_correct, d_params, d_hidden

        # The gradient of a bfloat16 head is accumulated over the chunks in float32.
        zero_grads = [jnp.zeros(values[n].shape, jnp.promote_types(values[n].dtype, jnp.float32)) for n in trainable]
        zero_hidden = jnp.zeros((schedule.order.shape[0], shape[2]), hidden.dtype) if hidden_grad else None
        zeros = jnp.float32(0.0), jnp.float32(0.0), zero_grads, zero_hidden
        loss, correct, d_params, d_hidden = jax.lax.fori_loop(0, schedule.count, add_chunk, zeros)
        if hidden_grad:
            d_hidden = schedule.unsort(d_hidden, weights.shape[0]).reshape(shape)
        return loss, correct, d_params, d_hidden

    values = [leaf.value for leaf in leaves]
    results = ("sum", "sum", [("head", n) for n in trainable], "hidden" if hidden_grad else None)
    arguments = values, hidden.value, targets.value, weights.value
    loss, correct, d_params, d_hidden = run_over_mesh(local_sums_and_grads, sharding, results, *arguments)
    d_leaves: list[jax.Array | None] = [None] * len(leaves)
    for n, grad in zip(trainable, d_params, strict=True):
        d_leaves[n] = grad.astype(values[n].dtype)
    return (loss, correct), (jax.tree.unflatten(treedef, d_leaves), d_hidden)


def _cross_entropy_backward(head: Head, chunk: int, sharding: LossSharding | None, terms: Terms, grads, cotangents):
    d_loss = cotangents[0]  # the other cotangent is irrelevant: the number of correct predictions has no gradient
    if isinstance(d_loss, SymbolicZero):
        d_loss = jnp.float32(0.0)
    d_params, d_hidden = jax.tree.map(lambda x: (x * d_loss).astype(x.dtype), grads)
    return d_params, d_hidden, None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward, symbolic_zeros=True)


def _chunk_sums(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, vocab_axis: str | None, terms: Terms
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weighted sums of losses and of correct predictions over a chunk, and the gradient of the former with respect
    to the logits [..,V], whose vocabulary may be sharded over `vocab_axis`."""
    scores = score_targets(logits, targets, vocab_axis)
    losses, d_logits = scores.losses, scores.exponentials / scores.total
    entropy_loss, d_entropy_loss = jnp.float32(0.0), None
    if terms.entropies:
        weights, entropy_weights = weights[..., 0], weights[..., 1]
        entropies, log_p = scores.entropies(logits)
        entropy_loss = jnp.where(entropy_weights != 0.0, entropies * entropy_weights, 0.0).sum()
        d_entropy_loss = -d_logits * (log_p + entropies[..., None]) * entropy_weights[..., None]
    correct = (weights * scores.correct).sum()
    if terms.by_probability:
        weights = weights * jnp.exp(-losses)
    if smoothing := terms.smoothing:
        logits_sum = scores.sum_over_vocab(logits.sum(-1))
        losses = losses + smoothing * (scores.target_logits - logits_sum / scores.vocab_size)
        d_logits = d_logits - jnp.where(scores.is_target, 1.0 - smoothing, 0.0) - smoothing / scores.vocab_size
    else:
        d_logits = jnp.where(scores.is_target, d_logits - 1.0, d_logits)
    # A product alone would turn an infinite loss of weight 0 into NaN.
    loss = jnp.where(weights != 0.0, losses * weights, 0.0).sum()
    d_loss = d_logits * weights[..., None]
    return (
        (loss, correct, d_loss) if d_entropy_loss is None else (loss + entropy_loss, correct, d_loss + d_entropy_loss)
    )


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
    if derivatives is not None and entropy_cotangent is None:
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
