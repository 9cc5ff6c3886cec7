"""Writes parameters as a verified Hugging Face directory, tensor by tensor. They may be spread over the devices of
several processes: each file is written by one of them, process 0 writes all that is not weights, and the directory
gets its name when all have written and verified their part.

Parameters may be spread over the devices of several processes: each file is written by one of them, process 0 writes
everything but weights, and the directory gets its name when all have written and verified their part.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from meshtune.arrays.tree import Tree, flatten
from meshtune.errors import UserError
from meshtune.families import scored_fields, tensors
from meshtune.families.composite import text_config, with_text_fields
from meshtune.families.tensors import Shape, TensorMap
from meshtune.json_text import read_json
from meshtune.mesh.layout import Layout
from meshtune.mesh.processes import SINGLE_PROCESS, Job, raise_collectively
from meshtune.model.spec import ModelSpec
from meshtune.quantize.published import without_scheme
from meshtune.weights.check import check
from meshtune.weights.ends import GENERATION, config_with_ends, generation_with_ends
from meshtune.weights.finite import all_finite, check_range
from meshtune.weights.load import MODEL_DTYPES, load_config, load_spec, spec_of, stored_dtype
from meshtune.weights.packed import model_tensors
from meshtune.weights.passed_through import passed_tensors
from meshtune.weights.publish import check_room, disk_errors, publish_directory
from meshtune.weights.safetensors_files import (
    DTYPES,
    INDEX,
    SINGLE,
    ST_DTYPES,
    STORED_DTYPES,
    FileTensor,
    StoredTensor,
    Tensor,
    header,
    tensors_of,
)
from meshtune.weights.shards import Progress
from meshtune.weights.tensor_reader import TensorReader
from meshtune.weights.verify import (
    ExportError,
    RoundingError,
    Verified,
    check_logits,
    probe_logits,
    relative_difference,
    verify_export,
    written_logits,
)
from meshtune.weights.writer import write_file

METADATA = {"format": "pt"}

# What a tokenizer is made of, and the texts that must travel with a model.
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.model",
    "*.tiktoken", "chat_template.*", "additional_chat_templates/*.jinja",
)  # fmt: skip
MODEL_FILES = (
    "generation_config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
CODE_OR_PICKLES = ("*.py", "*.pkl", "*.bin", "*.pt", "*.pth")


@dataclasses.dataclass(frozen=True)
class Exported:
    """The written directory: its path, its weight files, their bytes and dtype, and how it was verified."""

    path: Path
    files: tuple[str, ...]
    nbytes: int
    dtype: str
    verified: Verified


def export_model(
    params: Tree,
    spec: ModelSpec,
    source: Path,
    dest: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    expected: Float[ndarray, "B T V"] | None = None,
    tokenizer: Path | None = None,
    chat_template: str | None = None,
    record: Mapping[str, object] | None = None,
    progress: Progress | None = None,
    checking: Progress | None = None,
    layout: Layout | None = None,
    job: Job = SINGLE_PROCESS,
    pad: int | None = None,
    ends: Sequence[int] = (),
) -> Exported:
    """Writes `params` (merged: without adapters) as a Hugging Face directory and verifies it.

    `source` is the model the training started from: config, generation config and tokenizer come from there (the
    tokenizer from `tokenizer` if given, the chat template from `chat_template`). `ends` are ids that end a text besides
    those of the source. `dtype` defaults to the source's.
    `record` says how the model came to be; it goes, as JSON, into the metadata of every file.
    `expected` are the `probe_logits` of the trained model, taken before adapters were merged. Tensors are written one
    after another, so host memory holds one block of one tensor; `progress(done, total)` counts the bytes written,
    `checking` those that are compared afterwards. Tensors of the source's checkpoint outside of the model
    (vision towers, next-token heads) is copied byte for byte from its files. `dest` appears whole and verified or not
    at all; an export that fails its verification is left next to it as `<dest>.failed-verification`.

    A scored model is written as its family's ForSequenceClassification with one label; `pad` is then the id that
    transformers passes over when it looks for a row's last token.

    `layout` says how `params` lie on a mesh. With several processes all of `job` call this; what one of them raises all
    raise.

    Raises UserError for a destination that holds something, a full disk, a bad dtype, and numbers that it cannot hold;
    ExportError if the written files differ from the trained model.
    """
    source, dest = Path(source), Path(dest)
    config = load_config(source)
    dtype = dtype or stored_dtype(source, config)
    if dtype not in MODEL_DTYPES:
        raise UserError(f"dtype '{dtype}' cannot be exported", fix=f"one of {', '.join(MODEL_DTYPES)}")
    metadata = METADATA | ({} if record is None else {"meshtune": json.dumps(record)})
    passed = passed_tensors(source, spec, job)
    computed = tensors_of(tensors(spec), flatten(params), dtype)
    check_range(computed, dtype)
    files = plan_shards([*computed, *passed], max_shard_bytes)
    total = sum(tensor.nbytes for shard in files.values() for tensor in shard)
    copies = list(_copies(source, MODEL_FILES)) + list(_copies(tokenizer or source, TOKENIZER_FILES))
    with raise_collectively(job, "export: destination"):
        if job.is_main_process:
            check_destination(dest, (source, *([tokenizer] if tokenizer else [])), overwrite)
            _check_room(dest, files, copies, metadata)

    expected = probe_logits(params, spec, layout) if expected is None else expected
    check_logits(expected, str(source))
    with publish_directory(dest, "config.json", job) as folder:
        done = 0
        for number, (name, shard) in enumerate(files.items()):
            with raise_collectively(job, f"export: {name}"), disk_errors(dest):
                by_main = any(isinstance(tensor, StoredTensor) for tensor in shard)  # the others may lack the source
                writer = 0 if by_main else number % job.process_count
                for written in write_file(folder / name, shard, metadata, writes=writer == job.process_index):
                    done += written
                    if progress:
                        progress(done, total)
        with raise_collectively(job, "export: config"), disk_errors(dest):
            if job.is_main_process:
                exported = config_with_ends(_exported_config(config, spec, source, dtype, pad), ends)
                _write_rest(folder, exported, files, copies, chat_template)
                write_generation(folder, source, ends)
        verified = _verify_files(params, spec, folder, dest, dtype, expected, layout, job, passed, checking)
    return Exported(dest, tuple(files), total, dtype, verified)


def _write_rest(
    folder: Path,
    config: Mapping[str, object],
    files: dict[str, list[FileTensor]],
    copies: list[tuple[Path, str]],
    chat_template: str | None,
) -> None:
    if len(files) > 1:
        weight_map = {tensor.name: name for name, shard in files.items() for tensor in shard}
        written = [tensor for shard in files.values() for tensor in shard]
        metadata = {
            "total_parameters": sum(math.prod(tensor.shape) for tensor in written),
            "total_size": sum(tensor.nbytes for tensor in written),
        }
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})
    write_json(folder / "config.json", config)
    _copy(copies, folder)
    if chat_template is not None:
        write_chat_template(folder, chat_template)


def _verify_files(
    params: Tree,
    spec: ModelSpec,
    folder: Path,
    dest: Path,
    dtype: str,
    expected: ndarray | None,
    layout: Layout | None,
    job: Job,
    passed: list[StoredTensor],
    checking: Progress | None,
) -> Verified:
    try:
        return verify_export(
            params,
            spec,
            folder,
            dtype=dtype,
            expected=expected,
            layout=layout,
            job=job,
            passed=passed,
            progress=checking,
        )
    except RoundingError as error:
        raise RoundingError(error.what, where=str(dest), fix=error.fix) from error
    except UserError as error:
        failed = dest.with_name(f"{dest.name}.failed-verification")
        if job.is_main_process:
            shutil.rmtree(failed, ignore_errors=True)
            folder.rename(failed)
        raise ExportError(
            f"the export was written but is not what was trained, so it is not called done: {error.what}",
            where=str(failed),
            fix="if the disk is sound this is a defect of Meshtune: please report it with this message; "
            f"nothing was put at {dest}",
        ) from error


def plan_shards(tensors: Sequence[FileTensor], max_shard_bytes: int) -> dict[str, list[FileTensor]]:
    """File name -> tensors of each shard, filled in order up to the size; a larger tensor has a separate shard."""
    if max_shard_bytes <= 0:
        raise UserError(f"a shard of {max_shard_bytes} bytes cannot hold anything", fix="give a size such as 5 GB")
    shards: list[list[FileTensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _exported_config(
    config: Mapping[str, Any], spec: ModelSpec, source: Path, dtype: str, pad: int | None
) -> dict[str, Any]:
    """The source's config with the dtype that was written, under the name (or names) it has there; of a composite, in
    the text model's config too, but not in those of parts that are passed through."""
    fields = [field for field in ("torch_dtype", "dtype") if field in config] or ["dtype"]
    exported = {**without_scheme(config), **dict.fromkeys(fields, dtype)}
    text = text_config(config)
    if text is not config:
        inner = [field for field in ("torch_dtype", "dtype") if field in text]
        exported = with_text_fields(exported, dict.fromkeys(inner, dtype))
    if spec_of(config, source, dtype).tied != spec.tied:
        exported["tie_word_embeddings"] = spec.tied
    if spec.scored:
        exported |= scored_fields(exported, pad)
    return exported


def copy_files(directory: Path, folder: Path, patterns: tuple[str, ...]) -> None:
    """Copies the files of a model directory that match some patterns, but no code and no pickles."""
    _copy(list(_copies(directory, patterns)), folder)


def _copy(copies: list[tuple[Path, str]], folder: Path) -> None:
    for file, relative in copies:
        (folder / relative).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, folder / relative)


def _copies(directory: Path, patterns: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    for file in sorted([*directory.glob("*"), *directory.glob("additional_chat_templates/*")]):
        relative = file.relative_to(directory).as_posix()
        matching = any(fnmatch.fnmatch(relative, pattern) for pattern in patterns)
        if file.is_file() and matching and not any(fnmatch.fnmatch(relative, pattern) for pattern in CODE_OR_PICKLES):
            yield file, relative


def write_chat_template(folder: Path, template: str) -> None:
    """One template, in the file that transformers prefers; none elsewhere that could say something different."""
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        fields = read_json(settings)
        fields.pop("chat_template", None)
        write_json(settings, fields)


def write_generation(folder: Path, source: Path, ends: Iterable[int]) -> None:
    """Writes the generation_config.json of the model in `source` with further ends, where it lacks any of them."""
    if (fields := generation_with_ends(source, ends)) is not None:
        write_json(folder / GENERATION, fields)


def write_json(file: Path, value: Mapping[str, object]) -> None:
    """A JSON object as people read it."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_destination(dest: Path, sources: tuple[Path, ...], overwrite: bool) -> None:
    """Raises UserError for a destination that is one of the sources, or is not empty."""
    for source in sources:
        ours, theirs = dest.resolve(), source.resolve()
        if ours == theirs or ours in theirs.parents or theirs in ours.parents:
            raise UserError(
                "the export's destination and the model it is made from are the same folder, or one inside the other",
                where=str(dest),
                fix="export to another directory",
            )
    if dest.is_dir() and any(dest.iterdir()) and not overwrite:
        raise UserError(
            "the export's destination is not empty", where=str(dest), fix="give an empty directory, or ask to overwrite"
        )


def _check_room(
    dest: Path, files: dict[str, list[FileTensor]], copies: list[tuple[Path, str]], metadata: dict[str, str]
) -> None:
    need = sum(len(header(shard, metadata)) + sum(tensor.nbytes for tensor in shard) for shard in files.values())
    check_room(dest, need + sum(file.stat().st_size for file, _ in copies))


MAX_SHARD_BYTES = 5_000_000_000
WRITTEN = {short: dtype for dtype, short in ST_DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class NewTensor:
    """A tensor to write: `make` gives its numbers (in `dtype`, a name such as bfloat16) when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], np.ndarray]

    @property
    def entry(self) -> Tensor:
        """Its entry in a file's header."""
        return Tensor(self.name, self.shape, self.dtype, ())


@dataclasses.dataclass(frozen=True)
class Publication:
    """Where a model goes and what goes with it: `tokenizer` is the directory of its files, `chat_template` replaces
    theirs, and `record`, as JSON, goes into the metadata of every file. `ends` are further ids that end a text."""

    dest: Path
    tokenizer: Path
    chat_template: str | None
    record: Mapping[str, object]
    overwrite: bool
    max_shard_bytes: int
    ends: tuple[int, ...] = ()


def publish_model(
    publication: Publication,
    source: Path,
    config: Mapping[str, object],
    tensors: Callable[[TensorReader], Iterator[NewTensor]],
    expected: Float[np.ndarray, "B T V"],
    progress: Progress | None = None,
) -> float:
    """Writes a whole model directory, which appears once it is complete, and reads it back: how far the probe's logits
    are from `expected` (root mean square, relative).

    `tensors` gives those of all files; one is in memory at a time. Raises as `write_model` does, and
    ExportError where the written files compute no numbers.
    """
    dest = publication.dest
    check_destination(dest, (source, publication.tokenizer), publication.overwrite)
    with publish_directory(dest, "config.json") as folder, disk_errors(dest), TensorReader() as reader:
        record, size = publication.record, publication.max_shard_bytes
        config = config_with_ends(config, publication.ends)
        write_model(folder, source, config, list(tensors(reader)), record, size, progress)
        write_generation(folder, source, publication.ends)
        copy_files(publication.tokenizer, folder, TOKENIZER_FILES)
        if publication.chat_template is not None:
            write_chat_template(folder, publication.chat_template)
        difference = relative_difference(expected, written_logits(folder))
        if not np.isfinite(difference):
            raise ExportError("the logits of the written model are not finite", where=str(dest))
    return difference


def whole_tensor(entries: Sequence[TensorMap], leaves: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """A tensor of the files in float32, of the parts of leaves (path -> array)."""
    numbers = np.empty(shape, np.float32)
    for entry in entries:
        entry.view.write(np.asarray(leaves[entry.path][entry.index], np.float32), numbers)
    return numbers


def round_numbers(numbers: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Finite numbers in another dtype. Raises UserError, naming the tensor, where they are beyond it."""
    with np.errstate(over="ignore"):
        result = numbers.astype(dtype)
    if not all_finite(result) and all_finite(numbers):
        raise UserError(
            f"tensor '{name}' has numbers up to {np.abs(numbers).max():.4g}, beyond {dtype}'s range",
            where=name,
            fix="leave --format out, and give --dtype float32",
        )
    return result


def write_model(
    folder: Path,
    source: Path,
    config: Mapping[str, object],
    tensors: Sequence[NewTensor],
    record: Mapping[str, object],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Writes the files of a model into an existing folder, but for a tokenizer: `source` gives the files that travel
    with it.

    One tensor is in memory at a time. `record`, as JSON, goes into the metadata of every file; `progress(done, total)`
    counts bytes. Raises UserError where
    the written files do not match the config, OSError where the disk refuses.
    """
    shards = list(_shards(tensors, max_shard_bytes))
    names = [SINGLE] if len(shards) == 1 else [_name(n, len(shards)) for n in range(1, len(shards) + 1)]
    metadata = {"format": "pt", "meshtune": json.dumps(record)}
    done, total = 0, sum(tensor.entry.nbytes for tensor in tensors)
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            file.write(header([tensor.entry for tensor in shard], metadata))
            for tensor in shard:
                numbers = np.ascontiguousarray(tensor.make())
                assert numbers.shape == tensor.shape, (tensor.name, numbers.shape, tensor.shape)
                assert numbers.dtype == DTYPES[STORED_DTYPES[tensor.dtype]], (tensor.name, numbers.dtype, tensor.dtype)
                file.write(numbers.reshape(-1).view("u1").data)
                done += tensor.entry.nbytes
                if progress:
                    progress(done, total)
    if len(shards) > 1:
        where = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    write_json(folder / "config.json", config)
    copy_files(source, folder, MODEL_FILES)
    spec, _ = load_spec(folder)
    check(folder, spec, model_tensors(folder, spec.published))


def _shards(tensors: Sequence[NewTensor], max_bytes: int) -> Iterator[list[NewTensor]]:
    shard: list[NewTensor] = []
    for tensor in tensors:
        if shard and sum(entry.entry.nbytes for entry in shard) + tensor.entry.nbytes > max_bytes:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def _name(number: int, of: int) -> str:
    return f"model-{number:05d}-of-{of:05d}.safetensors"
