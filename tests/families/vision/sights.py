"""Pictures as transformers' processors give them and as our batches hold them, and documents of words and pictures."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Array
from PIL import Image

from families.case import Case, directory, torch_model, write_model
from meshtune.adapters.targets import modules
from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, logits
from meshtune.model.inputs import inputs_of
from meshtune.model.spec import ModelSpec
from meshtune.weights.load import load_params, load_spec

IMAGE = 95  # the id that stands for a picture
PLAIN = Compute(attention="direct", loss_chunk=16)


@dataclasses.dataclass(frozen=True)
class Sight:
    """One picture: the inputs of transformers, and our patches [P, K] with their tile's number and place [P, 4].

    `tokens` are the ids that stand for it in a text, `visual` the numbers of their features among the picture's own: 0
    text, k + 1 feature k, -1 the end of a row. `turns` are the three positions of M-RoPE of each token, from 0.
    `mutual`: its tokens see each other both ways. `kinds` names the input by which transformers tells pictures apart.
    """

    inputs: Mapping[str, torch.Tensor]
    patches: np.ndarray
    tiles: np.ndarray
    grid: np.ndarray
    tokens: list[int]
    visual: list[int]
    turns: np.ndarray | None = None
    mutual: bool = False
    kinds: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class VisionCase:
    """A tiny model that sees, and how it reads a picture. `merge` patches of a side are one feature. `rounding` is the
    share of a gradient that float32 loses where sums are made in another order. With `prefix` all tokens of a prompt
    see each other."""

    case: Case
    read: Callable[[Image.Image], Sight]
    merge: int = 1
    rounding: float = 1e-5
    prefix: bool = False

    @property
    def name(self) -> str:
        return self.case.name


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture with large and small structure, no two rows or columns alike."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).resize((width, height))
    noise = rng.integers(-40, 40, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(coarse).astype(int) + noise, 0, 255).astype(np.uint8))


def cut(pixels: np.ndarray, side: int, merge: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(patches [P, C side side], grid [P, 4]) of one tile [C, H, W]: merge x merge neighbours one after another."""
    channels, rows, columns = pixels.shape[0], pixels.shape[1] // side, pixels.shape[2] // side
    blocks = (rows // merge, merge, columns // merge, merge)
    patches = pixels.reshape(channels, *blocks[:2], side, *blocks[2:], side).transpose(1, 4, 2, 5, 0, 3, 6)
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    places = places.reshape(*blocks, 2).transpose(0, 2, 1, 3, 4).reshape(-1, 2)
    sizes = np.broadcast_to((rows, columns), places.shape)
    return patches.reshape(rows * columns, -1), np.concatenate([places, sizes], axis=1).astype(np.int32)


def cut_tiles(tiles: Sequence[np.ndarray], side: int, merge: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(patches, numbers of tiles from 1, grid) of the tiles of a picture."""
    parts = [cut(tile, side, merge) for tile in tiles]
    numbers = np.repeat(np.arange(1, len(parts) + 1), [len(patches) for patches, _ in parts])
    return np.concatenate([p for p, _ in parts]), numbers, np.concatenate([grid for _, grid in parts])


class Answer(list[int]):
    """The token ids at the end of a document, whose tokens before see each other."""


# A document: runs of token ids, and pictures.
Document = Sequence[list[int] | Sight]


def ids_of(document: Document) -> list[int]:
    return [token for part in document for token in (part.tokens if isinstance(part, Sight) else part)]


def prompt_length(document: Document) -> int | None:
    """The number of tokens before a document's answer; None where it has none."""
    return len(ids_of(document)) - len(document[-1]) if isinstance(document[-1], Answer) else None


def turns_of(document: Document) -> np.ndarray:
    """M-RoPE positions [T, 3] of a document, as the paper numbers them; every picture must have `turns`."""
    at, parts = 0, []
    for part in document:
        count = len(part.tokens) if isinstance(part, Sight) else len(part)
        steps = np.broadcast_to(np.arange(count)[:, None], (count, 3))
        if isinstance(part, Sight):
            assert part.turns is not None
            steps = part.turns
        parts.append(steps + at)
        at += int(steps.max()) + 1
    return np.concatenate(parts)


def batch_of(rows: Sequence[Sequence[Document]], length: int, patches: int) -> dict[str, jax.Array]:
    """The arrays of rows of documents: next-token targets within each, weight 0 where the target stands for a picture.

    `patches` a row; 0 for a batch without pictures.
    """
    count = len(rows)
    names = ("tokens", "targets", "positions", "segment_ids", "visual", "weights")
    arrays: dict[str, np.ndarray] = {name: np.zeros((count, length), np.int32) for name in names}
    arrays["weights"] = arrays["weights"].astype(np.float32)
    arrays["mrope_positions"] = np.zeros((count, length, 3), np.int32)
    sights = [part for row in rows for document in row for part in document if isinstance(part, Sight)]
    width = sights[0].patches.shape[1] if sights else 1
    arrays["patches"] = np.zeros((count, patches, width), np.float32)
    arrays["patch_segments"], arrays["patch_grid"] = (np.zeros((count, patches, *n), np.int32) for n in ((), (4,)))
    arrays["reach"] = np.zeros((count, length), np.int32)
    has_turns = all(sight.turns is not None for sight in sights) and bool(sights)
    for number, row in enumerate(rows):
        at = first = features = tiles = 0
        for segment, document in enumerate(row, 1):
            ids, visual, reach = ids_of(document), list[int](), list[int]()
            for part in document:
                last = len(reach) + len(part.tokens if isinstance(part, Sight) else part) - 1
                reach += [last] * len(part.tokens) if isinstance(part, Sight) else range(len(reach), last + 1)
                if not isinstance(part, Sight):
                    visual += [0] * len(part)
                    continue
                visual += [n + features if n > 0 else n for n in part.visual]
                span = slice(first, first + len(part.patches))
                arrays["patches"][number, span] = part.patches
                arrays["patch_segments"][number, span] = part.tiles + tiles
                arrays["patch_grid"][number, span] = part.grid
                first, tiles = span.stop, tiles + int(part.tiles.max())
                features += max(part.visual)
            span = slice(at, at + len(ids))
            arrays["tokens"][number, span], arrays["positions"][number, span] = ids, np.arange(len(ids))
            arrays["segment_ids"][number, span], arrays["visual"][number, span] = segment, visual
            arrays["reach"][number, span] = reach
            arrays["targets"][number, at : at + len(ids) - 1] = ids[1:]
            arrays["weights"][number, at : at + len(ids) - 1] = np.asarray(visual[1:]) == 0
            if (prompt := prompt_length(document)) is not None:
                arrays["reach"][number, span] = np.where(np.arange(len(ids)) < prompt, prompt - 1, 0)
                arrays["weights"][number, at : at + prompt - 1] = 0
            if has_turns:
                arrays["mrope_positions"][number, span] = turns_of(document)
            at = span.stop
    if not any(sight.mutual for sight in sights) and prompt_length(rows[0][0]) is None:
        del arrays["reach"]
    if not has_turns:
        del arrays["mrope_positions"]
    if not patches:
        for name in ("patches", "patch_segments", "patch_grid", "visual"):
            del arrays[name]
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def load(case: VisionCase) -> tuple[ModelSpec, Tree]:
    """Our spec and parameters, with the tower, from the files that transformers wrote."""
    spec, _ = load_spec(directory(case.case), "float32", vision=True)
    return spec, load_params(directory(case.case), spec)


@functools.partial(jax.jit, static_argnums=(1, 3))
def our_logits(params: Tree, spec: ModelSpec, batch: dict[str, Array], compute: Compute = PLAIN) -> Array:
    """float32 [B, T, V]."""
    return logits(params, spec, forward(params, spec, compute, inputs_of(batch)).hidden)


def mean_loss(params: Tree, spec: ModelSpec, batch: dict[str, Array], compute: Compute = PLAIN) -> Array:
    """The weighted mean of -log p of the targets."""
    predicted = jax.nn.log_softmax(our_logits(params, spec, batch, compute))
    chosen = jnp.take_along_axis(predicted, batch["targets"][..., None], axis=-1)[..., 0]
    return -jnp.sum(chosen * batch["weights"]) / jnp.sum(batch["weights"])


def torch_inputs(document: Document) -> dict[str, Any]:
    """A document for transformers, in a row by itself."""
    sights = [part for part in document if isinstance(part, Sight)]
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids_of(document)])}
    for name in sights[0].inputs if sights else ():
        inputs[name] = torch.cat(fill_up([sight.inputs[name] for sight in sights]))
    kinds = (inputs["input_ids"] == IMAGE).int()
    if sights and sights[0].kinds is not None:
        inputs[sights[0].kinds] = kinds
    if (prompt := prompt_length(document)) is not None:
        inputs["token_type_ids"] = (torch.arange(kinds.shape[1]) >= prompt).int()[None]
    return inputs


def fill_up(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Filled up with zeros, as processors fill up pictures that are smaller or have fewer tiles."""
    filled = []
    for tensor in tensors:
        size = [max(sizes) for sizes in zip(*(other.shape[1:] for other in tensors), strict=True)]
        filled.append(tensor.new_zeros((len(tensor), *size)))
        filled[-1][tuple(slice(n) for n in tensor.shape)] = tensor
    return filled


def torch_run(model: torch.nn.Module, documents: Sequence[Document]) -> tuple[list[np.ndarray], torch.Tensor]:
    """(logits [T, V] of each document in a row by itself, the mean loss of all targets that are words)."""
    total, weight, every = torch.zeros(()), 0, []
    for document in documents:
        out = model(**mask_of_unified(model, torch_inputs(document))).logits[0]
        every.append(out.detach().numpy())
        batch = batch_of([[document]], len(out), sum(len(p.patches) for p in document if isinstance(p, Sight)))
        mask = torch.tensor(np.asarray(batch["weights"][0]) > 0)
        targets = torch.tensor(np.asarray(batch["targets"][0])).long()
        total = total + torch.nn.functional.cross_entropy(out[mask], targets[mask], reduction="sum")
        weight += int(mask.sum())
    return every, total / weight


def mask_of_unified(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of Gemma 4 12B with the mask of generation over a static cache; its forward makes another one."""
    if model.config.model_type != "gemma4_unified":
        return inputs
    embeds = torch.zeros((*inputs["input_ids"].shape, 1))
    places, kinds = torch.arange(embeds.shape[1])[None], inputs.get("mm_token_type_ids")
    mask = model.create_masks_for_generate(model.config, embeds, None, None, places, kinds)
    return inputs | {"attention_mask": mask}


def torch_gradients(case: VisionCase, spec: ModelSpec, documents: Sequence[Document]) -> tuple[float, Tree]:
    """The mean loss and its gradients, through the files that transformers writes of them; what has none is zero."""
    model = torch_model(case.case)
    loss = torch_run(model, documents)[1]
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for buffer in model.buffers():
            buffer.zero_()
    return float(loss.detach()), load_params(write_model(model), spec)


def words(count: int, seed: int, most: int = 90) -> list[int]:
    """Random token ids, none of which stands for a picture."""
    return np.random.default_rng(seed).integers(1, most, count).tolist()


def tower_targets(spec: ModelSpec) -> tuple[str, ...]:
    """Patterns for every linear layer of the tower, one of the projector if it has any, and the queries of the language
    model."""
    linear = [module for module in modules(spec).values() if module.linear]
    tower = {(m.name.split(".")[1], m.name.rpartition(".")[2]) for m in linear if m.part == "tower"}
    projector = [m.name for m in linear if m.part == "projector"][:1]
    return ("self_attn.q_proj", *projector, *(f"{root}.*.{name}" for root, name in sorted(tower)))
