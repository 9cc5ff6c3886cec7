"""The files of a model that say how it reads pictures."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshtune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from meshtune.config.sections import VisionSection

# Of a picture: token ids, the number of the feature of each (see PictureLayout), rows and columns of each tile.
Layout = tuple[Sequence[int], Sequence[int], Sequence[tuple[int, int]]]


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """The files of a model that say how it reads pictures: `config` and its vision part, `settings` of the image
    processor, `processor` those of the processor around it."""

    directory: pathlib.Path
    config: Mapping[str, Any]
    vision: Mapping[str, Any]
    settings: dict[str, Any]
    processor: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerFast

    @property
    def patch(self) -> int:
        """The side of a patch."""
        size = self.vision.get("patch_size", 14)
        return int(size[0] if isinstance(size, list) else size)

    def id(self, token: str) -> int:
        """The id of a token. Raises UserError where the tokenizer does not have it."""
        id_ = self.tokenizer.get_vocab().get(token)
        if id_ is None:
            raise UserError(
                f"the tokenizer has no token {token}, which stands for pictures",
                where=str(self.directory),
                fix="use the tokenizer of this model: leave model.tokenizer out",
            )
        return id_

    def token(self, name: str, default: str) -> str:
        """A token that the tokenizer has a name for."""
        return str(getattr(self.tokenizer, name, None) or default)

    def ids(self, text: str) -> tuple[int, ...]:
        """The ids of a text between special tokens."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def refuse_crops(vision: VisionSection, family: str) -> None:
    """Raises UserError where tiles are asked for of a family that has none."""
    if vision.crops is not None:
        raise UserError(
            f"{family} does not cut pictures into tiles",
            where="vision.crops",
            fix="leave it out; max_pixels scales pictures",
        )
