"""Loads Baichuan's own tokenizers, which are sentencepiece models, as fast ones.

They have no chat template: their code puts the ids of two reserved pieces before user and assistant turns, and the
end-of-sequence token after the last turn only. The template here does the same.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshtune.errors import UserError, pip_install
from meshtune.json_text import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)  # types of pieces in sentencepiece_model.proto
BPE = 2
SPACE = "\u2581"  # the character that stands for a space in pieces
FILE = "tokenizer.model"
# Fields of generation_config.json: the default id of each, and the piece that stands for it in the template.
SPEAKERS = {"user_token_id": (195, "<reserved_106>"), "assistant_token_id": (196, "<reserved_107>")}


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
