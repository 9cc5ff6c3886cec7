"""What a run starts from, where that is not a model as published: adapters folded in, more tokens, more layers.

The start is written once, as a model directory in the run (base/), before any weight is loaded. From there on it is a
base like any other: it is loaded, split, quantised and hashed as such, and adapters name it as theirs.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshtune.adapters.config import ExpandConfig, LoraConfig, Method
from meshtune.adapters.continued import check_continued, content_hash, continued
from meshtune.adapters.peft_format import BaseRecord
from meshtune.config.recipe import Recipe
from meshtune.data.new_tokens import NewTokens, add_tokens
from meshtune.data.tokenizer import load_tokenizer
from meshtune.digests import damaged, write_digests
from meshtune.errors import UserError
from meshtune.families import model_spec, scored_spec
from meshtune.families.expansion import expanded_config, grouped
from meshtune.mesh.collective_errors import raise_collectively
from meshtune.mesh.processes import Job
from meshtune.model.spec import ModelSpec
from meshtune.objectives import STAGES
from meshtune.runs.output import ADAPTER, BASE
from meshtune.runs.sources import is_run
from meshtune.runs.verify import check_result, find_damage_collectively
from meshtune.setup.choices import method_of
from meshtune.setup.start_files import write_start
from meshtune.weights.export import write_json
from meshtune.weights.fingerprint import base_hash
from meshtune.weights.load import load_config, load_spec
from meshtune.weights.publish import disk_errors, published

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from meshtune.setup.resolved import Settled

RECORD = "start.json"


@dataclasses.dataclass(frozen=True)
class Start:
    """What a run starts from: `config` and `spec` are those of the model that is trained, `source` is where it, or the
    model that it is made from, lies."""

    source: pathlib.Path
    config: dict[str, Any]
    spec: ModelSpec
    method: Method
    tokens: NewTokens = dataclasses.field(default_factory=NewTokens)
    blocks: int = 0
    changed: bool = False


def start_of(recipe: Recipe, source: pathlib.Path, dtype: str) -> Start:
    """The start of a recipe's run, from the config in `source` and the tokenizer alone; weights are in `dtype`.

    Raises UserError for tokens, layers or an adapter that cannot be.
    """
    asked, method = recipe.model, method_of(recipe)
    config = load_config(source)
    where = str(source / "config.json")
    tokens, blocks = NewTokens(), 0
    if asked.new_tokens or asked.new_special_tokens or asked.pad_vocab_to:
        if asked.new_tokens or asked.new_special_tokens:
            tokenizer = load_tokenizer(asked.tokenizer or asked.path, revision=asked.revision)
            tokens = add_tokens(tokenizer, asked.new_tokens, asked.new_special_tokens)
        before = model_spec(config, where=where).vocab
        rows = tokens.padded_vocab(before, asked.pad_vocab_to)
        config = config | {"vocab_size": rows}
        method = _with_rows(method, tokens, tuple(range(before, rows)), recipe)
    if isinstance(method, ExpandConfig):
        blocks = method.blocks
        config = expanded_config(config, blocks)
    spec = model_spec(config, dtype, where)
    if asked.adapter is not None:
        assert isinstance(method, LoraConfig), "the recipe has seen to it"
        check_result(adapter_directory(asked.adapter))
        method = continued(adapter_directory(asked.adapter), staged(spec, recipe), method)
    spec = grouped(spec, blocks) if blocks else spec
    changed = asked.changed or blocks > 0
    if changed and isinstance(method, LoraConfig) and method.adapter == "loftq" and method.loftq_iterations > 1:
        raise UserError(
            "loftq in several turns makes a base of its own, and this run has one already: the model it starts from",
            where="method.loftq_iterations, model",
            fix="set method.loftq_iterations=1, or make the start first and give it as model.path",
        )
    return Start(source, config, staged(spec, recipe), method, tokens, blocks, changed)


def staged(spec: ModelSpec, recipe: Recipe) -> ModelSpec:
    """The model as the recipe's stage needs it. Raises UserError for a reward model where the next token is learned."""
    scores = STAGES[recipe.stage.kind].has_score_head
    if spec.scored and not scores:
        raise UserError(
            f"this is a reward model: it gives a score, and stage {recipe.stage.kind} learns the next token",
            where="model.path",
            fix="give the causal language model, or use stage: rm",
        )
    return scored_spec(spec) if scores else spec


def adapter_directory(named: str) -> pathlib.Path:
    """The directory of an adapter that a recipe names: itself, or its run's."""
    path = pathlib.Path(named)
    return path / ADAPTER if is_run(path) else path


def _with_rows(method: Method, tokens: NewTokens, added: tuple[int, ...], recipe: Recipe) -> Method:
    """The method that trains the rows of new tokens, where it does not train the whole embedding."""
    rows = tuple(sorted({*tokens.ids, *added}))
    if isinstance(method, LoraConfig) and rows:
        return dataclasses.replace(method, token_rows=rows)
    if tokens.ids and recipe.method.kind not in ("lora", "full") and not _embeds(recipe):
        raise UserError(
            f"method {recipe.method.kind} would not train the embeddings of the new tokens",
            where="model.new_tokens, method",
            fix="use method: lora, which trains their rows, or full; with freeze name embed_tokens in method.modules",
        )
    return method


def _embeds(recipe: Recipe) -> bool:
    return any("embed_tokens" in name for name in getattr(recipe.method, "modules", ()))


def tokenizer_of(recipe: Recipe, source: pathlib.Path) -> PreTrainedTokenizerFast:
    """The run's tokenizer, with its chat template and its new tokens."""
    asked = recipe.model
    tokenizer = load_tokenizer(asked.tokenizer or source, asked.chat_template, revision=asked.revision)
    add_tokens(tokenizer, asked.new_tokens, asked.new_special_tokens)
    return tokenizer


def written_start(
    start: Start,
    recipe: Recipe,
    output: pathlib.Path,
    tokenizer: PreTrainedTokenizerFast,
    hash: str,
    job: Job,
    say: Callable[[str], None],
) -> pathlib.Path:
    """The directory that the run's weights are loaded from: output/base, or the source where nothing changes.

    `hash` is the source's. Process 0 writes, one tensor at a time; adapters are folded in as `meshtune export --merge`
    does it. What a resumed run finds there is used as it is. Raises UserError as `start_of` and `export` do.
    """
    if not start.changed:
        return start.source
    dest = (output / BASE).absolute()
    record = {
        "path": recipe.model.path,
        "hash": hash,
        "merged": list(recipe.model.merge_adapters),
        "new_tokens": recipe.model.new_tokens,
        "new_special_tokens": recipe.model.new_special_tokens,
        "vocab": start.spec.vocab,
        "new_layers": start.blocks,
    }
    is_there = all(job.exchange("start: record", _recorded(dest) == record))
    damage = find_damage_collectively(dest, job, required=True) if is_there else {}
    if damage:
        say(f"what the run starts from is damaged ({damaged(dest, damage, '').what}) and is written again")
    if damage or not is_there:
        say(f"writing what the run starts from to {dest}")
        with published(dest, "config.json", job) as folder, raise_collectively(job, "start: files"), disk_errors(dest):
            if job.is_main_process:
                write_start(start, recipe, folder, record)
                tokenizer.save_pretrained(str(folder))
                write_json(folder / RECORD, record)
                write_digests(folder)
    written = staged(load_spec(dest, start.spec.dtype)[0], recipe)
    if (grouped(written, start.blocks) if start.blocks else written) != start.spec:
        raise UserError(
            "an adapter that is folded in makes another model of its base (its head is not the embedding any more)",
            where=str(dest),
            fix="fold it in first: meshtune export --merge, and give the result as model.path",
        )
    return dest


def begun_at(
    settled: Settled,
    recipe: Recipe,
    output: pathlib.Path,
    tokenizer: PreTrainedTokenizerFast,
    base: BaseRecord,
    job: Job,
    say: Callable[[str], None],
) -> tuple[Settled, BaseRecord]:
    """(what a run came to, the record of its base) once the model that it starts from is there (`written_start`)."""
    start = settled.start
    if start is None or not start.changed:
        return settled, base
    assert base.hash is not None
    source = written_start(start, recipe, output, tokenizer, base.hash, job, say)
    return dataclasses.replace(settled, source=source), BaseRecord(str(source), base_hash(source), base.quantize)


def continued_adapter(recipe: Recipe, settled: Settled, base: BaseRecord) -> str:
    """What is to be known again of the adapter that a run goes on with; empty where there is none.

    Raises UserError for one of another base, unless the recipe takes any.
    """
    source = settled.method.continued if isinstance(settled.method, LoraConfig) else None
    if source is None:
        return ""
    if not recipe.model.any_base:
        check_continued(source, settled.spec, base)
    return f" with adapter {content_hash(source)}"


def _recorded(dest: pathlib.Path) -> dict[str, Any] | None:
    file = dest / RECORD
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
