"""Prepares the data of a recipe for training: documents, tokens (cached or in a stream), rows and a report."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

from meshtune.cache import cache_folder
from meshtune.config.data_options import GYM
from meshtune.config.recipe import Recipe
from meshtune.data.chat import ChatTemplate
from meshtune.data.documents import Documents, data_sources, load_documents, open_documents
from meshtune.data.formats.record import MARGIN
from meshtune.data.loader import Loader, PartTask, Units, nll_share
from meshtune.data.manifest import Manifest, PreparedSet, picture_statuses
from meshtune.data.progress import Progress
from meshtune.data.report import DataReport, TemplateInfo, make_report, prompt_report
from meshtune.data.sources import is_url
from meshtune.data.store import VERSION, Store
from meshtune.data.tokenise import (
    Preparer,
    ends_with_token,
    nothing_to_train_error,
    one_label_error,
    read_counts,
    stage_examples,
    task_key,
    token_options,
)
from meshtune.data.tokenizer import check_vocabulary, load_tokenizer
from meshtune.errors import UserError
from meshtune.lazy import LazyFunction
from meshtune.objectives.stages import STAGES
from meshtune.weights.hub import TOKENIZER, locate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from meshtune.data.pictures.files import PictureFiles
    from meshtune.data.pictures.reader import PictureReader
    from meshtune.data.prompts import PromptLoader
    from meshtune.data.stream import Stream

prompt_loader = LazyFunction("meshtune.data.prompts:PromptLoader")
rollout_row_length = LazyFunction("meshtune.data.prompts:rollout_row_length")
prompts_in_row = LazyFunction("meshtune.data.prompts:prompts_in_row")
AnsweredPrompts = LazyFunction("meshtune.data.answered_prompts:AnsweredPrompts")
picture_files = LazyFunction("meshtune.data.pictures.files:PictureFiles")
picture_reader = LazyFunction("meshtune.data.pictures.families:picture_reader")
check_writable = LazyFunction("meshtune.data.remote_store:check_writable")
fetch_set = LazyFunction("meshtune.data.remote_store:fetch_set")
upload_set = LazyFunction("meshtune.data.remote_store:upload_set")
prepare_stream = LazyFunction("meshtune.data.prepare_stream:prepare_stream")


def check_streaming(recipe: Recipe) -> None:
    """Raises UserError for options that are not possible with data.streaming."""
    data, train = recipe.data, recipe.train
    obstacles = {
        "train.steps": train.steps is None
        and "the length of an epoch of a stream is unknown before its end: give train.steps",
        "vision": recipe.vision is not None
        and "pictures are checked and measured before training: the sizes of a run's batches depend on them",
        "data.prepared": data.prepared is not None and "its data are not prepared: leave data.prepared out",
        "data.packing": recipe.stage.kind == "pt"
        and not data.packing
        and "a stream of plain text fills its rows: leave data.packing out",
    }
    for where, reason in obstacles.items():
        if reason:
            fix = "or set data.streaming=false"
            raise UserError(f"data.streaming is not possible here: {reason}", where=where, fix=fix)


@dataclasses.dataclass(frozen=True)
class PreparedData:
    """The data of a run. `fingerprint` is a hash of all training tokens and weights."""

    train: Loader | Stream | PromptLoader
    validation: Loader | PromptLoader | None
    report: DataReport
    validation_report: DataReport | None
    fingerprint: str


def prepare_data(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    *,
    vocab: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    share: tuple[int, int] = (0, 1),
    processes: int | None = None,
    upload: bool = False,
) -> PreparedData:
    """Opens the prepared data of a recipe, or reads and tokenises its sources; with data.prepared, opens those there
    or, with `upload`, prepares and uploads them.

    `vocab` is the size of the model's embedding, None to skip the check. `cache` is the directory of tokenised data, by
    default $MESHTUNE_CACHE or ~/.cache/meshtune. `share` is (index of this host, number of hosts) that prepare the
    same data now: if they share the cache, each tokenises its part, in as many `processes` (None: as there are
    processors). Validation batches have the size of a micro-batch and keep the order of the data.

    Raises UserError as sources, formats and templates do, if the tokenizer has ids that the model does not have, and if
    there is nothing to train on.
    """
    if vocab is not None:
        check_vocabulary(tokenizer, vocab)
    if recipe.stage.kind == "pt" and recipe.data.system:
        problem = "stage pt trains on plain text, which has no place for a system prompt"
        raise UserError(problem, where="data.system", fix="leave it out, or set stage: sft")
    if recipe.data.streaming:
        return _Preparation(recipe, tokenizer, cache, progress, share, processes).stream()
    reader, files = (None, None) if recipe.vision is None else _open_pictures(recipe, tokenizer, cache)
    preparation = _Preparation(recipe, tokenizer, cache, progress, share, processes, reader, files, upload)
    prepared, changed = preparation.data_set()
    train, report = preparation.split("train", prepared.stores["train"])
    report = dataclasses.replace(preparation.add_records(report, prepared), changed=tuple(changed))
    validation, validation_report = None, None
    if "validation" in prepared.stores:
        validation, validation_report = preparation.split("validation", prepared.stores["validation"])
    return PreparedData(train, validation, report, validation_report, train.store.path.name)


def _open_pictures(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, cache: str | os.PathLike[str] | None
) -> tuple[PictureReader, PictureFiles]:
    assert recipe.vision is not None
    folder = pathlib.Path(cache or cache_folder()).expanduser() / "pictures"
    return open_reader(recipe, tokenizer), picture_files(str(folder), recipe.vision.media_dir)


def open_reader(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> PictureReader:
    """The reader of pictures for the recipe's model. Raises UserError for a model that does not see."""
    assert recipe.vision is not None
    return picture_reader(locate(recipe.model.path, recipe.model.revision, allow=TOKENIZER), recipe.vision, tokenizer)


@dataclasses.dataclass(frozen=True)
class _Preparation:
    """The options that all splits of a recipe are prepared with."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerFast
    cache: str | os.PathLike[str] | None
    progress: Progress | None
    share: tuple[int, int]
    processes: int | None = None
    pictures: PictureReader | None = None
    files: PictureFiles | None = None
    upload: bool = False

    @functools.cached_property
    def preparer(self) -> Preparer:
        """The preparer of the stores."""
        stage, kind = STAGES[self.recipe.stage.kind], self.recipe.stage.kind
        options = token_options(self.recipe.data, kind, self._room if stage.dataset_type == "prompts" else 0)
        task = PartTask(self.tokenizer, options, stage_examples(kind), self.pictures)
        return Preparer(task, self.cache, self.progress or (lambda *_: None), self.share, self.processes)

    def data_set(self) -> tuple[PreparedSet, list[str]]:
        """The stores of all splits, opened, fetched or made, and the files for which they were made again."""
        manifest, url = Manifest(self.preparer.folder, self._facts()), self.recipe.data.prepared
        prepared, changed = manifest.open()
        if url is not None and self.upload:
            check_writable(url)
        if url is not None and prepared is None and not changed:
            if fetch_set(url, manifest, may_be_new=self.upload):
                prepared, changed = manifest.open()
            elif not self.upload:
                problem = "there are no data that were prepared with these sources, options and tokenizer"
                fix = "run meshtune data prepare with this recipe first, or leave data.prepared out"
                raise UserError(problem, where=f"data.prepared: {url}", fix=fix)
        prepared = prepared or self._read(manifest)
        if url is not None and self.upload:
            upload_set(url, manifest, prepared.stores.values(), self.preparer.progress, self.share)
        return prepared, changed

    def _facts(self) -> dict[str, object]:
        """Everything but the contents of files that the stores depend on."""
        data, dataset_type = self.recipe.data, STAGES[self.recipe.stage.kind].dataset_type
        lists = {"train": data_sources(data, data.train, dataset_type)}
        if isinstance(data.validation, list):
            lists["validation"] = data_sources(data, data.validation, dataset_type)
        sources = {
            split: [(dataclasses.asdict(source), _absolute(source.path)) for source in several]
            for split, several in lists.items()
        }
        held_out = data.validation if isinstance(data.validation, float) else None
        options = [data.mixing, data.on_bad, data.system, held_out, self.recipe.seed, dataset_type, VERSION]
        packages = [version("reasoning_gym") for source in lists["train"] if source.path.startswith(GYM)]
        facts = {"sources": sources, "options": options, "packages": packages, "tokens": task_key(self.preparer.task)}
        if self.files is not None:
            facts["pictures"] = self.files.base and os.path.abspath(os.path.expanduser(self.files.base))
        return json.loads(json.dumps(facts, default=dict))

    def _read(self, manifest: Manifest) -> PreparedSet:
        """Reads the sources, makes the stores, and records both."""
        recipe, preparer, folder = self.recipe, self.preparer, manifest.folder / f".checked-{manifest.name}"
        dataset_type = STAGES[recipe.stage.kind].dataset_type
        documents = load_documents(
            recipe.data,
            seed=recipe.seed,
            dataset_type=dataset_type,
            progress=self.progress,
            pictures=self.files,
            run=preparer.run,
            folder=folder,
        )
        splits = {"train": documents.train, "validation": documents.validation}
        stores = {
            split: preparer.store(split, samples.with_system(recipe.data.system))
            for split, samples in splits.items()
            if samples is not None
        }
        prepared = PreparedSet(stores, documents.skipped, documents.unread)
        checked = [checked for samples in splits.values() if samples is not None for checked in samples.sources]
        files = {path: status for source in checked for path, status in source.records.files.items()}
        if self.pictures is not None:
            files |= picture_statuses(stores.values())
        manifest.write(prepared, files)
        shutil.rmtree(folder, ignore_errors=True)
        return prepared

    def split(self, name: str, store: Store) -> tuple[Loader | PromptLoader, DataReport]:
        """The loader of the split `name`, and the report on it."""
        data, train, stage = self.recipe.data, self.recipe.train, STAGES[self.recipe.stage.kind]
        counts, template = read_counts(store.meta["counts"]), store.meta["template"]
        template = TemplateInfo(**template) if template else None
        if not len(store):
            raise nothing_to_train_error(name, counts)
        is_train = name == "train"
        if stage.dataset_type == "labelled" and is_train:
            _check_both_labels(store)
        if stage.dataset_type == "prompts" or (is_train and self.recipe.rollout is not None):
            prompts = self._prompts(store, is_train=is_train)
            return prompts, prompt_report(name, prompts, counts, data.max_length, template)
        loader = Loader(
            store,
            max_length=data.max_length,
            batch_size=train.batch_size if is_train else train.batch_size // train.accumulation,
            accumulation=train.accumulation if is_train else 1,
            packing=data.packing,
            shuffle=data.shuffle and is_train,
            seed=self.recipe.seed,
            units=None if stage.unit_segments == 1 else self._units(name, store),
            pictures=self.pictures,
            max_patches=self.recipe.vision.max_patches if self.recipe.vision else None,
        )
        length, kind = data.max_length, stage.dataset_type
        report = make_report(name, loader, counts, max_length=length, template=template, dataset_type=kind)
        return loader, self._with_template_fix(report)

    def add_records(self, report: DataReport, documents: Documents | PreparedSet) -> DataReport:
        """The report with the records of all `documents` that were skipped, and their fields that are not read: of
        prompts none, which are columns for rewards."""
        has_unread = bool(documents.unread) and self.recipe.rollout is None
        unread = tuple(self._not_read(documents.unread).items()) if has_unread else ()
        return dataclasses.replace(report, skipped=(*documents.skipped, *report.skipped), unread=unread)

    @property
    def _room(self) -> int:
        """Tokens that a prompt leaves to its completion."""
        return self.recipe.rollout.max_tokens if self.recipe.rollout else 0

    def _prompts(self, store: Store, *, is_train: bool) -> PromptLoader:
        recipe, rollout = self.recipe, self.recipe.rollout
        assert rollout is not None, "config.rules requires it"
        stage = STAGES[recipe.stage.kind]
        answered, row_length = stage.dataset_type == "documents", recipe.data.max_length * stage.unit_segments
        # Pairs need room for both with a prompt each; an environment adds to prompts, and answers have any length.
        if stage.unit_segments == 1 and rollout.environment is None and not answered and recipe.data.packing:
            longest, cp = int(store.lengths.max()), getattr(recipe.mesh, "cp", 1)
            row_length = rollout_row_length(longest, rollout, row_length, cp=cp)
        records = AnsweredPrompts(store, recipe.data.max_length - self._room, self.tokenizer) if answered else store
        return prompt_loader(
            records,
            prompts=rollout.prompts,
            updates=rollout.updates * rollout.iterations,
            row_length=row_length,
            batch_size=recipe.train.batch_size,
            accumulation=recipe.train.accumulation,
            shuffle=recipe.data.shuffle and is_train,
            seed=recipe.seed,
            reader=self.pictures,
            copies=prompts_in_row(int(records.lengths.max()), rollout, row_length, stage.unit_segments)
            if recipe.data.packing
            else stage.unit_segments,
            max_patches=recipe.vision.max_patches if recipe.vision else None,
        )

    def _not_read(self, unread: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        """The fields of each source that are not read, without those of turns that the chat template names, and without
        the margin that a reward model learns."""
        names_in_template = set(re.findall(r"\w+", str(self.tokenizer.chat_template)))
        read = {MARGIN} if self.recipe.stage.kind == "rm" else set[str]()
        names = {
            path: [
                n for n in fields if n not in read and ("[]." not in n or n.rpartition(".")[2] not in names_in_template)
            ]
            for path, fields in unread.items()
        }
        return {path: tuple(fields) for path, fields in names.items() if fields}

    def _with_template_fix(self, report: DataReport) -> DataReport:
        """The report, with the template that ends turns with a token where this one does not."""
        template = report.template
        if template is None or template.end_is_token or not template.end_of_turn:
            return report
        return dataclasses.replace(report, template_fix=self._template_fix())

    def _template_fix(self) -> str | None:
        model = self.recipe.model
        if model.chat_template is not None:
            revision = None if model.tokenizer else model.revision
            model_tokenizer = load_tokenizer(model.tokenizer or model.path, revision=revision)
            if model_tokenizer.chat_template and ends_with_token(ChatTemplate(model_tokenizer)):
                return "leave model.chat_template out: the tokenizer has its own"
        for name, chat in ChatTemplate(self.tokenizer).alternatives.items():
            if ends_with_token(chat):
                return f"set model.chat_template: {name}"
        return None

    def _units(self, split: str, store: Store) -> Units:
        units = _units(self.recipe)
        if split == "validation" and units.nll_mean == "tokens":
            # The validation loss is summed over all batches, so its weights are computed over the whole store.
            units = dataclasses.replace(units, nll_share=nll_share(store, units))
        return units

    def stream(self) -> PreparedData:
        """Training data as a stream; validation data as usual."""
        check_streaming(self.recipe)
        units = None if STAGES[self.recipe.stage.kind].dataset_type == "documents" else _units(self.recipe)
        dataset_type = STAGES[self.recipe.stage.kind].dataset_type
        documents = open_documents(self.recipe.data, seed=self.recipe.seed, dataset_type=dataset_type, streaming=True)
        stream, report = prepare_stream(self.recipe, self.tokenizer, documents.train, units)
        validation, validation_report = None, None
        if documents.validation is not None:
            samples = documents.validation.with_system(self.recipe.data.system)
            validation, validation_report = self.split("validation", self.preparer.store("validation", samples))
        report = self._with_template_fix(self.add_records(report, documents))
        return PreparedData(stream, validation, report, validation_report, stream.fingerprint)


def _absolute(path: str) -> str:
    """The absolute path of a source; an address, or the id of a data set, as it is written."""
    local = os.path.expanduser(path)
    return os.path.abspath(local) if os.path.exists(local) and not is_url(path) else path


def _units(recipe: Recipe) -> Units:
    """The options of units: which tokens of chosen answers have a cross-entropy, if any, and their weights."""
    stage = STAGES[recipe.stage.kind]
    nll_mean = stage.nll_mean(recipe.stage)
    if nll_mean is None:
        return Units(stage.unit_segments)
    return Units(stage.unit_segments, nll="all" if recipe.data.train_on_prompt else "answer", nll_mean=nll_mean)


def _check_both_labels(store: Store) -> None:
    """Raises UserError if all labels are the same, since there would be nothing to compare."""
    least, largest = store.meta["values"]
    if least == largest:
        raise one_label_error(len(store) // 2, bool(least))
