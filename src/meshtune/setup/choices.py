"""Decides each `auto` of a recipe, with the reason for its value, converts recipe sections to core configs, and checks
the chosen kernels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax

from meshtune.cache import cache_folder
from meshtune.config.recipe import Recipe
from meshtune.errors import UserError
from meshtune.families import float16_obstacle
from meshtune.kernels.attention import AttentionRequest, choose_backend
from meshtune.kernels.attention.self_check import self_check
from meshtune.kernels.chips import Chip, chip_of
from meshtune.mesh.config import MeshConfig, resolve_mesh
from meshtune.mesh.layout import Layout, make_mesh
from meshtune.model.compute import Compute, Precision, RematName
from meshtune.model.gather import Unsplit, check_experts, layout_for
from meshtune.model.spec import ModelSpec
from meshtune.objectives.stages import STAGES
from meshtune.optim.build import OptimizerConfig
from meshtune.setup.machine import Machine, this_machine
from meshtune.translatable import Translatable

WIDE_BYTES = 128 * 2**20  # target size of one MLP activation, 16-bit, per device
ATTENTION_BYTES = 64 * 2**20  # target size of one array of queries, 16-bit, per device
LOGITS_BYTES = 64 * 2**20  # target size of the float32 logits that exist at once on a device
LEAST = 256  # tokens on a device: shorter chunks make matmuls too small to use it well
HEAD = {"cpu": 16}  # tokens whose logits cost as much as reading the head once; on accelerators about LEAST


def chunks_of(
    recipe: Recipe, spec: ModelSpec, rows: int, length: int, layout: Layout | None
) -> tuple[int | None, int | None, list[tuple[str, str, str]]]:
    """Returns (mlp_chunk, attention_chunk, banner lines as (name, value, reason)) for micro-batches of `rows` rows.

    Chunks are in tokens; None computes the whole row at once.

    Raises: UserError for attention chunks with context parallelism or where every mixer needs whole rows.
    """
    options = recipe.compute
    cp = layout.size("cp") if layout is not None else 1
    if options.attention_chunk is not None and cp > 1:
        raise UserError(
            f"compute.attention_chunk takes rows apart that mesh.cp={cp} has split over devices already",
            where="compute.attention_chunk, mesh.cp",
            fix="leave out attention_chunk (mlp_chunk works with cp), or give cp's devices to fsdp or tp",
        )
    if options.attention_chunk is not None and (mixer_name := _only_whole_rows(spec)):
        if options.attention_chunk != "auto":
            raise UserError(
                f"this model has {mixer_name} layers, which need whole rows",
                where="compute.attention_chunk",
                fix="leave out attention_chunk; mlp_chunk works",
            )
        options = options.model_copy(update={"attention_chunk": None})
    device_rows = _device_rows(rows, layout)
    heads = layout.size("tp") if layout is not None else 1
    choices = []

    def resolve(name: str, chunk: int | str | None, width: int, target_bytes: int) -> int | None:
        if chunk is None:
            return None
        reason = Translatable("asked for")
        if chunk == "auto":
            fitting = target_bytes * heads * cp // (2 * device_rows * width)
            chunk = max(LEAST, 1 << (max(1, fitting).bit_length() - 1))
            reason = Translatable("auto: about {size} MiB an array", size=target_bytes >> 20)
        unchunked = int(chunk) >= length
        part = Translatable("{count} of {length} tokens", count=chunk, length=length)
        choices.append((name, Translatable("the whole row") if unchunked else part, reason))
        return None if unchunked else int(chunk)

    mlp = resolve("mlp_chunk", options.mlp_chunk, _widest(spec, "ffn"), WIDE_BYTES)
    attention = resolve("attention_chunk", options.attention_chunk, _widest(spec, "heads"), ATTENTION_BYTES)
    return mlp, attention, choices


def loss_chunk_of(
    recipe: Recipe,
    spec: ModelSpec,
    rows: int,
    length: int,
    layout: Layout | None,
    learned: float = 1.0,
    platform: str = "",
) -> tuple[int, str]:
    """Returns the positions of each row whose logits exist at once, and why, for micro-batches of `rows` rows.

    Every chunk reads the whole head, and adds to all of its gradient where it is trained, so that a device should have
    LEAST tokens in each, even if their logits are more than LOGITS_BYTES. Positions that are not learned come last and
    their chunks are left out (kernels.cross_entropy), so where only a share `learned` of all positions is, the last
    chunk that is computed should not be much longer than what is left for it.
    """
    asked_for = recipe.compute.loss_chunk
    if asked_for is not None:
        return min(max(1, asked_for // rows), length), Translatable("asked for")
    device_rows = _device_rows(rows, layout)
    token_bytes = 4 * spec.vocab // (layout.size("tp") if layout is not None else 1)
    positions = max(LEAST, LOGITS_BYTES // token_bytes) // device_rows
    chunk = min(max(16, 1 << (max(1, positions).bit_length() - 1)), length)
    tokens, total = chunk * device_rows, length * device_rows
    read = HEAD.get(platform, LEAST)
    least = max(device_rows, read)
    sizes = [tokens, *(1 << power for power in range(tokens.bit_length()) if least <= 1 << power < tokens)]

    def cost(size: int) -> float:
        """Of the chunks of a row, in positions; the last one is half empty, as a rule."""
        return (size if size >= total else learned * total + size / 2) + math.ceil(learned * total / size) * read

    best = min(sizes, key=cost)
    if best < tokens:
        share = Translatable("auto: {share} of the positions are learned", share=f"{learned:.0%}")
        return max(1, best // device_rows), share
    size = max(1, tokens * token_bytes >> 20)
    return chunk, Translatable("auto: {size} MiB of logits at once on a device", size=size)


def _device_rows(rows: int, layout: Layout | None) -> int:
    return max(1, rows // (layout.size("dp", "fsdp", "ep") if layout is not None else 1))


def _widest(spec: ModelSpec, axis: str) -> int:
    """Returns the width of the widest activation along a logical axis, over all blocks."""
    costs = (block.cost(spec.embed) for block in spec.blocks)
    return max(
        (activation.width for cost in costs for activation in cost.activations if activation.axis == axis), default=1
    )


def _only_whole_rows(spec: ModelSpec) -> str | None:
    """Returns the name of a mixer if none of the model's can be computed in chunks, or None.

    Where some can, the others are computed for whole rows.
    """
    mixers = [kind.mixer for kind in spec.layer_kinds if kind.mixer is not None]
    chunked = any(mixer.row_params() is not None for mixer in mixers)
    return None if chunked or not mixers else mixers[0].name


LEARNING_RATES = {"lora": 2e-4, "full": 2e-5, "freeze": 2e-5, "llama_pro": 2e-4}
ADAPTER_RATES = {"pissa": 0.1, "vera": 10.0}  # relative to LoRA's rate, following the papers
GENTLER = 0.1  # factor for preference stages, whose gradients do not shrink near the initial model


WARNING = "warning"  # the name of a Decision that users should hardly want as it is


@dataclasses.dataclass(frozen=True)
class Decision:
    """A resolved setting and the reason for its value, for the banner. `value` and `reason` are Translatable where they
    have words that the board shows."""

    name: str
    value: str
    reason: str

    @property
    def text(self) -> str:
        """The decision as one line."""
        return f"{self.name}: {self.value} ({self.reason})"

    @property
    def style(self) -> str:
        """The style of its name in a terminal."""
        return "bold yellow" if self.name == WARNING else "bold"


def precision_of(
    recipe: Recipe, stored: str, platform: str = "", arch: str = "", config: Mapping[str, object] | None = None
) -> tuple[Precision, Decision]:
    """Resolves the dtypes of a run for weights stored in dtype `stored` of the model with this config.json, on a
    platform (default: JAX's backend) and architecture (default: its first device's).

    Raises: UserError for float16 with a model that is known to overflow in it.
    """
    requested, obstacle = recipe.compute.precision, float16_obstacle(config or {})
    platform = platform or jax.default_backend()
    if requested == "float16" and obstacle is not None:
        raise UserError(
            f"the activations of {(config or {}).get('model_type')} overflow in float16: {obstacle}",
            where="compute.precision",
            fix="use mixed where the device has bfloat16 (NVIDIA from Ampere on), else float32, which takes twice the "
            "memory for activations and is several times slower on such cards",
        )
    name, reason = requested, Translatable("asked for")
    if requested == "auto":
        name, reason = _automatic_precision(platform, chip_of(platform, arch), obstacle)
    match name:
        case "float32":
            precision = Precision(name, "float32", "float32", "float32", "float32")
        case "bfloat16":
            precision = Precision(name, "bfloat16", "bfloat16", "bfloat16", "bfloat16")
        case "float16":
            frozen = "float16" if recipe.method.kind == "lora" or stored != "float32" else "float32"
            precision = Precision(name, frozen, "float32", "float16", "float32")
        case _:
            # Weights that may be trained keep their stored precision. Weights that are only multiplied with bf16
            # activations do not need more than bf16.
            frozen = "bfloat16" if recipe.method.kind == "lora" or stored != "float32" else "float32"
            precision = Precision(name, frozen, "float32", "bfloat16", "float32")
    return precision, Decision("precision", name, reason)


def _automatic_precision(platform: str, chip: Chip, obstacle: str | None) -> tuple[str, str]:
    """(the precision for a chip, the reason); `obstacle` is why the model cannot be computed in float16."""
    if platform == "cpu":
        return "float32", Translatable("auto: {value} on {backend}", value="float32", backend=platform)
    if chip.has_bfloat16:
        return "mixed", Translatable("auto: {value} on {backend}", value="mixed", backend=platform)
    if obstacle is None:
        return "float16", Translatable("auto: {chip} has no bfloat16", chip=chip)
    return "float32", Translatable(
        "auto: {chip} has no bfloat16, and float16 overflows ({obstacle}); twice the memory for activations, slower",
        chip=chip,
        obstacle=obstacle,
    )


def mesh_of(recipe: Recipe, devices: int, spec: ModelSpec) -> tuple[MeshConfig, str]:
    """Resolves the mesh for `devices` devices and returns it with the reason.

    A mesh without a -1 axis keeps its own device count. setup.search must have resolved 'auto' before.
    """
    assert recipe.mesh != "auto", "resolve mesh=auto before (setup.search)"
    config = recipe.mesh
    check_experts(config.ep, spec)
    return (resolve_mesh(config, devices) if -1 in config.sizes.values() else config), Translatable("asked for")


def layout_of(config: MeshConfig, why: str, spec: ModelSpec, machine: Machine) -> tuple[Layout | None, list[Decision]]:
    """Returns the layout of arrays on the machine's devices (None for a single device) and its banner lines.

    Raises: UserError for a mesh that the model does not support.
    """
    if config.devices == 1:
        return None, []
    layout, notes = layout_for(make_mesh(config, machine.devices), spec)
    return layout, mesh_decisions(config, why, notes)


def mesh_decisions(config: MeshConfig, why: str, notes: list[Unsplit]) -> list[Decision]:
    """Describes a mesh and the arrays that it cannot split, for the banner."""
    return [Decision("mesh", str(config), why), *(Decision(note.axis, "whole", note.text) for note in notes)]


def shares_prompts(recipe: Recipe, spec: ModelSpec, compute: Compute) -> tuple[bool, str]:
    """Whether the completions of a prompt share it in the rows of an online stage, and why.

    Raises: UserError where a recipe asks for what the model or its kernels cannot do.
    """
    from meshtune.rollout.shared import shared_prompts_obstacle

    assert recipe.rollout is not None
    asked = recipe.rollout.shared_prompts
    if asked is False:
        return False, "asked for"
    obstacle = shared_prompts_obstacle(spec, compute)
    if obstacle is None:
        return True, "auto: fewer positions, the same result" if asked is None else "asked for"
    if asked:
        fix = "leave rollout.shared_prompts out, or set it to false"
        raise UserError(f"prompts cannot be shared: {obstacle}", where="rollout.shared_prompts", fix=fix)
    return False, f"auto: {obstacle}"


def compute_of(
    recipe: Recipe,
    spec: ModelSpec,
    precision: Precision,
    rows: int,
    length: int,
    layout: Layout | None = None,
    machine: Machine | None = None,
    learned: float = 1.0,
) -> tuple[Compute, list[Decision]]:
    """Resolves the compute options for micro-batches of `rows` rows (over all devices) of `length` positions, of which
    the share `learned` has a loss.

    Raises: UserError for a forced attention backend that does not support the model.
    """
    options = recipe.compute
    machine = machine or this_machine()
    mlp_chunk, attention_chunk, tiles = chunks_of(recipe, spec, rows, length, layout)
    remat, why = _remat_of(recipe)
    decisions = [Decision("remat", remat, why), *(Decision(*tile) for tile in tiles)]
    chunk, reason = loss_chunk_of(recipe, spec, rows, length, layout, learned, machine.platform)
    tokens = Decision("loss_chunk", Translatable("{count} tokens", count=chunk * rows), reason)
    compute = Compute(
        precision.compute,
        remat,
        chunk,
        options.scan_layers,
        layout,
        attention=options.attention,
        platform=machine.platform,
        chip=machine.chip,
        packed=recipe.data.packing or STAGES[recipe.stage.kind].dataset_type != "documents",
        mlp_chunk=mlp_chunk,
        attention_chunk=attention_chunk,
        offload=options.offload,
        expert_exchange=options.expert_exchange,
    )
    if recipe.rollout is not None:
        shared, why = shares_prompts(recipe, spec, compute)
        compute = dataclasses.replace(compute, shared_prompts=shared)
        decisions.append(Decision("prompts", "computed once a group" if shared else "repeated", why))
    decisions += _block_decisions(compute, spec)
    for request in attention_requests(compute, spec, rows, length):
        backend, reason = choose_backend(request, options.attention)
        windowed = Translatable("{backend} (window {window})", backend=backend.name, window=request.window)
        decisions.append(Decision("attention", windowed if request.window else backend.name, reason))
    decisions.append(tokens)
    if options.offload:
        decisions.append(Decision("offload", ", ".join(options.offload), Translatable("asked for")))
    return compute, decisions


def _remat_of(recipe: Recipe) -> tuple[RematName, str]:
    """The remat that a recipe asks for; setup.search has decided `auto`, but for optimizers that fix it."""
    remat = recipe.compute.remat
    if remat != "auto":
        return remat, Translatable("asked for")
    assert recipe.optimizer.layerwise, "setup.search decides compute.remat: auto"
    return "full", Translatable("auto: each layer is made again when its update comes")


def _block_decisions(compute: Compute, spec: ModelSpec) -> list[Decision]:
    """The choices of the model's blocks. Raises: UserError for a forced exchange of tokens that no block makes."""
    choices = dict.fromkeys(choice for block in spec.blocks for choice in block.choices(compute))
    exchanges = [choice for choice in choices if choice.name == "expert exchange"]
    if compute.expert_exchange != "auto" and not exchanges:
        raise UserError(
            f"expert_exchange={compute.expert_exchange} is how tokens reach experts on other devices, and no experts "
            "are split over devices",
            where="compute.expert_exchange",
            fix="leave it out, or split the experts of a mixture with mesh.ep",
        )
    return [Decision(*choice) for choice in choices]


def attention_requests(compute: Compute, spec: ModelSpec, rows: int, length: int) -> list[AttentionRequest]:
    """Returns the distinct attention requests of one device, for micro-batches of `rows` rows of `length` positions."""
    q_length = compute.attention_chunk or length
    mixers = (kind.mixer for kind in spec.layer_kinds)
    requests = [mixer.attention_request(rows, q_length, length, compute) for mixer in mixers if mixer is not None]
    requests = [request for request in dict.fromkeys(requests) if request is not None]
    if compute.layout is not None:
        sharding = compute.layout.attention_sharding()
        requests = [sharding.fit(request).local(request) for request in requests]
    return sorted(requests, key=lambda request: (request.window is not None, request.window or 0))


def optimizer_of(recipe: Recipe, precision: Precision) -> OptimizerConfig:
    """Converts the recipe's optimizer section, with learning rate, state dtype and seed resolved."""
    resolved = {
        "learning_rate": learning_rate_of(recipe),
        "state_dtype": precision.state if precision.trainable != "float32" else None,
        "seed": recipe.seed,
    }
    return OptimizerConfig(**vars(recipe.optimizer) | resolved)


def learning_rate_of(recipe: Recipe) -> float:
    """The recipe's learning rate, or the default of its method and stage."""
    options, stage = recipe.optimizer, STAGES[recipe.stage.kind]
    rate = LEARNING_RATES[recipe.method.kind] * ADAPTER_RATES.get(getattr(recipe.method, "adapter", ""), 1.0)
    if options.name == "prodigy":
        rate = 1.0
    elif stage.dataset_type != "documents" and not stage.has_score_head:
        rate *= GENTLER
    return options.learning_rate or rate


def checked_attention(compute: Compute, spec: ModelSpec, rows: int, length: int) -> list[str]:
    """A line for each kernel: compared now, or by an earlier run on this kind of device (in the user's cache).

    Raises: UserError where a kernel's numbers are wrong, with the way around it.
    """
    lines = []
    for request in attention_requests(compute, spec, rows, length):
        report = self_check(request, choose_backend(request, compute.attention)[0], cache_folder() / "attention-checks")
        if report is not None:
            lines.append(f"attention: {report}")
    return list(dict.fromkeys(lines))
