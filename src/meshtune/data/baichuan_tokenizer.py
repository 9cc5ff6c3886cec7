"""Loads the tokenizer of Baichuan and Baichuan2 from tokenizer.model, without running the code in their repositories.

They have no chat template: their code puts the ids of two reserved pieces before user and assistant turns, and the
end-of-sequence token after the last turn alone. The template here does the same.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshtune.data.sentencepiece_model import USER_DEFINED, Pieces, fast_tokenizer, read_pieces
from meshtune.errors import UserError
from meshtune.json_text import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
    and assistant. Raises UserError where tokenizer.model is damaged.
    """
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    settings, pieces = _json(directory / "tokenizer_config.json"), read_pieces(directory / FILE)
    names = {kind: _content(settings.get(f"{kind}_token")) for kind in ("unk", "bos", "eos", "pad")}
    names = {
        "unk": names["unk"] or "<unk>",
        "bos": names["bos"] or "<s>",
        "eos": names["eos"] or "</s>",
        "pad": names["pad"] or names["unk"] or "<unk>",
    }
    core = fast_tokenizer(pieces, str(directory / FILE))
    begin, end = (bool(settings.get(f"add_{kind}_token")) for kind in ("bos", "eos"))
    if begin or end:
        text = " ".join([names["bos"]] * begin + ["$A"] + [names["eos"]] * end)
        ends = [(names[kind], core.token_to_id(names[kind])) for kind in ("bos", "eos")]
        core.post_processor = processors.TemplateProcessing(single=text, special_tokens=ends)  # pyright: ignore[reportAttributeAccessIssue]
    speakers = _speakers(directory, pieces)
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


def _speakers(directory: pathlib.Path, model: Pieces) -> dict[str, str] | None:
    """The pieces that begin the turns of user and assistant; None for a vocabulary that reserves none."""
    settings = _json(directory / "generation_config.json")
    ids = {name: settings.get(name, default) for name, (default, _) in SPEAKERS.items()}
    defined = set(model.ids(USER_DEFINED))
    if not all(id_ in defined for id_ in ids.values()):
        return None
    return {name: model.pieces[id_][0] for name, id_ in ids.items()}


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _json(file: pathlib.Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except UserError:  # reported by the code that requires the file
        return {}
