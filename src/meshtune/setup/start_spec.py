"""The description of the model that a run starts from."""

from __future__ import annotations

import dataclasses
import pathlib

from meshtune.adapters.training_method import Method
from meshtune.data.new_tokens import NewTokens
from meshtune.model.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class Start:
    """The model that a run starts from.

    `config` and `spec` are of the model that is trained; `source` is its directory, or that of the model it is made
    from where `changed` is set. `tokens` are new ones, `blocks` the number of new layers.
    """

    source: pathlib.Path
    config: dict[str, object]
    spec: ModelSpec
    method: Method
    tokens: NewTokens = dataclasses.field(default_factory=NewTokens)
    blocks: int = 0
    changed: bool = False
