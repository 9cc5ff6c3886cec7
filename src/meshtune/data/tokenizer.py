"""Loads the tokenizer of a model, with its own chat template or another one, and with new tokens.

They have no chat template: their code puts the ids of two reserved pieces before user and assistant turns, and the
end-of-sequence token after the last turn only. The template here does the same.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshtune.config.sections import ModelSection
from meshtune.data.chat_templates import template_text
from meshtune.errors import UserError, pip_install
from meshtune.json_text import read_json
from meshtune.weights.hub import TOKENIZER, locate
from meshtune.weights.safetensors_files import TOKENIZER_PROBLEM

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)  # types of pieces in sentencepiece_model.proto
BPE = 2
SPACE = "\u2581"  # the character that stands for a space in pieces
CLASSES = ("BaichuanTokenizer", "BaiChuanTokenizer")
FILE = "tokenizer.model"
TEMPLATE = "baichuan2"
# Fields of generation_config.json: the default id of each, and the piece that stands for it in the template.
SPEAKERS = {"user_token_id": (195, "<reserved_106>"), "assistant_token_id": (196, "<reserved_107>")}


def is_baichuan(directory: pathlib.Path) -> bool:
    """Whether a model directory has Baichuan's own tokenizer."""
    if not (directory / FILE).is_file():
        return False
    name = _json(directory / "tokenizer_config.json").get("tokenizer_class")
    return (name or _json(directory / "config.json").get("tokenizer_class")) in CLASSES


def load_baichuan(directory: pathlib.Path, template: str) -> PreTrainedTokenizerFast:
    """Loads the fast tokenizer of a directory.

    Its chat template is the one it was saved with, or else `template`, if the vocabulary has reserved pieces for user
    and assistant. Raises UserError where tokenizer.model is damaged, and without the package
    sentencepiece.
    """
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    settings, model = _json(directory / "tokenizer_config.json"), _read_model(directory / FILE)
    names = {kind: _content(settings.get(f"{kind}_token")) for kind in ("unk", "bos", "eos", "pad")}
    names = {
        "unk": names["unk"] or "<unk>",
        "bos": names["bos"] or "<s>",
        "eos": names["eos"] or "</s>",
        "pad": names["pad"] or names["unk"] or "<unk>",
    }
    core = _fast_tokenizer(model, str(directory / FILE))
    begin, end = (bool(settings.get(f"add_{kind}_token")) for kind in ("bos", "eos"))
    if begin or end:
        text = " ".join([names["bos"]] * begin + ["$A"] + [names["eos"]] * end)
        ends = [(names[kind], core.token_to_id(names[kind])) for kind in ("bos", "eos")]
        core.post_processor = processors.TemplateProcessing(single=text, special_tokens=ends)  # pyright: ignore[reportAttributeAccessIssue]
    speakers = _speakers(directory, model)
    if speakers is not None:
        core.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in speakers.values()])
        for name, piece in speakers.items():
            template = template.replace(SPEAKERS[name][1], piece)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        name_or_path=str(directory),
        chat_template=_saved_template(directory, settings) or (None if speakers is None else template),
        model_max_length=settings.get("model_max_length", 4096),
        clean_up_tokenization_spaces=False,
        **{f"{kind}_token": name for kind, name in names.items()},
    )


def _saved_template(directory: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")


def _speakers(directory: pathlib.Path, model: Any) -> dict[str, str] | None:
    """The pieces that begin the turns of user and assistant; None for a vocabulary that reserves none."""
    settings = _json(directory / "generation_config.json")
    ids = {name: settings.get(name, default) for name, (default, _) in SPEAKERS.items()}
    defined = set(_ids(model, USER_DEFINED))
    if not all(id_ in defined for id_ in ids.values()):
        return None
    return {name: model.pieces[id_].piece for name, id_ in ids.items()}


def _read_model(file: pathlib.Path) -> Any:
    """Reads a sentencepiece model file, a ModelProto. Raises UserError if it is damaged, or without sentencepiece."""
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as problem:
        raise UserError(
            f"{FILE} is read with the package sentencepiece, which is missing ({problem})",
            where=str(file),
            fix=pip_install("sentencepiece"),
        ) from problem
    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(file.read_bytes())  # pyright: ignore[reportAttributeAccessIssue]
        if not model.pieces or not all(entry.piece and math.isfinite(entry.score) for entry in model.pieces):
            raise ValueError("it has no pieces, or pieces without a text or a score")
    except (DecodeError, ValueError, OSError) as problem:
        raise UserError(
            f"this is not a complete sentencepiece model: {problem}",
            where=str(file),
            fix="download tokenizer.model again (a small text file is a pointer of Git LFS)",
        ) from problem
    return model


def _ids(model: Any, *types: int) -> list[int]:
    """The ids of all pieces of these types."""
    return [id_ for id_, entry in enumerate(model.pieces) if entry.type in types]


def _fast_tokenizer(model: Any, where: str) -> Tokenizer:
    """Builds a fast tokenizer with the ids of sentencepiece. User-defined pieces are matched in the text first.

    Each stretch of text between such pieces is normalised as if it were a text by itself. Raises UserError for models
    that are not byte pair encoding.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

    if model.trainer_spec.model_type != BPE or _ids(model, UNUSED):
        raise UserError(
            "only sentencepiece models of byte pair encoding, without unused pieces, have a fast version",
            where=where,
            fix="save the tokenizer once with transformers as a fast one, so that there is a tokenizer.json",
        )
    normalizer, names = model.normalizer_spec, [entry.piece for entry in model.pieces]
    unknown = next(iter(_ids(model, UNKNOWN)), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: id_ for id_, name in enumerate(names)},
            merges=_merges(model),
            unk_token=None if unknown is None else names[unknown],
            fuse_unk=True,
            byte_fallback=model.trainer_spec.byte_fallback,
        )
    )
    steps: list[normalizers.Normalizer] = []
    if normalizer.precompiled_charsmap:
        steps.append(normalizers.Precompiled(normalizer.precompiled_charsmap))
    if normalizer.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" +"), " ")]
    if normalizer.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    if normalizer.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    decoding: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if normalizer.add_dummy_prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)  # pyright: ignore[reportAttributeAccessIssue]
    controls = [AddedToken(names[id_], special=True, normalized=False) for id_ in _ids(model, CONTROL, UNKNOWN)]
    defined = [names[id_] for id_ in _ids(model, USER_DEFINED)]
    tokenizer.add_special_tokens(controls)
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=SPACE in piece) for piece in defined])
    return tokenizer


def _merges(model: Any) -> list[tuple[str, str]]:
    """Lists the pairs of pieces that merge into a piece, in sentencepiece's order: the best score first."""
    scores = {model.pieces[id_].piece: (model.pieces[id_].score, id_) for id_ in _ids(model, NORMAL)}
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, (score, id_) in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                merges.append((-score, id_, cut, left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _json(file: pathlib.Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except UserError:  # reported by the code that requires the file
        return {}


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """The ids of new tokens, and for each the ids that its text was tokenised to before (`pieces`)."""

    ids: tuple[int, ...] = ()
    pieces: tuple[tuple[int, ...], ...] = ()

    def padded_vocab(self, vocab: int, multiple: int | None = None) -> int:
        """The size that an embedding of `vocab` tokens needs with the new ones, rounded up to a multiple."""
        size = max(vocab, *(id_ + 1 for id_ in self.ids)) if self.ids else vocab
        return size if multiple is None else -(-size // multiple) * multiple


def add_tokens(tokenizer: PreTrainedTokenizerFast, plain: Sequence[str], special: Sequence[str]) -> NewTokens:
    """Adds tokens to a tokenizer: plain ones are text; special ones can be left out when decoding.

    Raises UserError for a token that exists already, is given twice, or is blank.
    """
    tokens = [*plain, *special]
    known = tokenizer.get_vocab()
    for index, token in enumerate(tokens):
        where = "model.new_tokens" if index < len(plain) else "model.new_special_tokens"
        if not token.strip():
            raise UserError(f"a new token is {token!r}", where=where, fix="give text that is not blank")
        if token in tokens[:index]:
            raise UserError(f"the new token {token!r} is given twice", where=where, fix="give it once")
        if token in known:
            raise UserError(
                f"{token!r} is a token already, with id {known[token]}", where=where, fix="leave it out: it can be used"
            )
    pieces = tuple(tuple(tokenizer(token, add_special_tokens=False)["input_ids"]) for token in tokens)
    tokenizer.add_tokens(list(plain))
    tokenizer.add_tokens(list(special), special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids(tokens) if tokens else []
    return NewTokens(tuple(ids), pieces)  # pyright: ignore[reportArgumentType] - a list of ids


# A directory with any of these has a tokenizer; transformers reads its other files.
_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")


def tokenizer_of(
    model: ModelSection, source: str | os.PathLike[str] | None = None
) -> tuple[PreTrainedTokenizerFast, NewTokens]:
    """The tokenizer of a recipe's run, with its chat template and its new tokens, and the ids of those.

    Everything that shows, counts or trains on a recipe's tokens has it from here. `source` is the model's directory,
    where it has been located. Raises UserError as `load_tokenizer` and `add_tokens` do.
    """
    revision = None if model.tokenizer else model.revision
    tokenizer = load_tokenizer(model.tokenizer or source or model.path, model.chat_template, revision=revision)
    return tokenizer, add_tokens(tokenizer, model.new_tokens, model.new_special_tokens)


def load_tokenizer(
    path: str | os.PathLike[str], chat_template: str | None = None, *, revision: str | None = None
) -> PreTrainedTokenizerFast:
    """Loads the tokenizer in a directory or of a hub id, without running any remote code.

    `chat_template` replaces the tokenizer's own: a Jinja file, or one of `chat_templates.template_names()`.
    Raises UserError if there is no tokenizer, if it has no fast (tokenizer.json) form, or if the template is unknown.
    """
    directory = _directory(path, revision)
    if is_baichuan(directory):
        tokenizer = load_baichuan(directory, template_text(TEMPLATE))
    else:
        tokenizer = _from_transformers(directory)
    if chat_template is not None:
        tokenizer.chat_template = template_text(chat_template)
    return tokenizer


def _from_transformers(directory: pathlib.Path) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer  # imported here because it takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), use_fast=True, trust_remote_code=False, local_files_only=True
        )
        if not isinstance(tokenizer.chat_template, str | dict | None):
            raise TypeError(f"its chat_template is {tokenizer.chat_template!r}, which is no text")
        if tokenizer.is_fast:
            tokenizer.encode("a")  # fields of tokenizer_config.json are first used here
    except BaseException as problem:  # transformers validates config.json too, with exceptions of several libraries
        if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":  # of a library in Rust
            raise
        cause = problem.__cause__ or problem
        first = str(cause).strip().splitlines() or [type(cause).__name__]
        raise UserError(
            f"the tokenizer cannot be read: {first[0]}",
            where=str(directory),
            fix="check tokenizer.json, tokenizer_config.json and config.json, or set model.tokenizer",
        ) from problem
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} has no fast version, which exact loss masks need",
            where=str(directory),
            fix="save it once with transformers as a fast tokenizer, so that there is a tokenizer.json",
        )
    return tokenizer


def _directory(path: str | os.PathLike[str], revision: str | None) -> pathlib.Path:
    file = pathlib.Path(path).expanduser()
    if file.is_file() and file.suffix != ".gguf":
        raise UserError(
            "a tokenizer is a directory, this is a file", where=str(file), fix=f"give its folder, {file.parent}"
        )
    directory = locate(path, revision, allow=TOKENIZER)
    if (directory / TOKENIZER_PROBLEM).is_file():
        problem = read_json(directory / TOKENIZER_PROBLEM)
        raise UserError(problem["what"], where=problem["where"], fix=problem["fix"])
    if not any((directory / name).is_file() for name in _FILES):
        raise UserError(
            "there is no tokenizer here (no tokenizer.json)",
            where=str(directory),
            fix="copy the model's tokenizer.json and tokenizer_config.json into it, or set model.tokenizer",
        )
    return directory


def chat_templates(tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """The tokenizer's chat templates by name, the usual one under "default"."""
    templates = tokenizer.chat_template or {}
    return {"default": templates} if isinstance(templates, str) else dict(templates)


def padding_id(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """An id for padding that never ends a text, so that the last token of a sequence can be found; the tokenizer's own
    padding id, which may be None, if it has no other special token."""
    reserved, default = (tokenizer.eos_token_id, tokenizer.bos_token_id), tokenizer.pad_token_id
    candidates = [default, tokenizer.unk_token_id, *sorted(tokenizer.added_tokens_decoder)]
    ids = (id_ for id_ in candidates if isinstance(id_, int) and id_ not in reserved)
    return next(ids, default if isinstance(default, int) else None)


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, vocab: int) -> None:
    """Raises UserError if the tokenizer has ids beyond the `vocab` tokens of the model's embedding."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab:
        raise UserError(
            f"the tokenizer has ids up to {largest}, but the model's embedding has {vocab} entries",
            where=str(tokenizer.name_or_path),
            fix="use the tokenizer of this model; for added tokens the model's embedding must be enlarged",
        )
