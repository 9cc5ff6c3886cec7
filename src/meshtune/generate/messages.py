"""What processes that share a model tell each other, as JSON: numbers, texts, NumPy's arrays, arguments of a step."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshtune.generate.prefix_tree import ScoredText
from meshtune.generate.programs import Feed
from meshtune.generate.sampling import Knobs, Switches

RECORDS: dict[str, type] = {kind.__name__: kind for kind in (Feed, Knobs, ScoredText, Switches)}


def encode(value: Any) -> Any:
    """The JSON form of a value; dataclasses are those of RECORDS."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return {"array": base64.b64encode(array.tobytes()).decode(), "dtype": str(array.dtype), "shape": array.shape}
    if dataclasses.is_dataclass(value):
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        assert type(value).__name__ in RECORDS, value
        return {"record": type(value).__name__, "fields": fields}
    if isinstance(value, Mapping):
        return {"mapping": {name: encode(item) for name, item in value.items()}}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    assert value is None or isinstance(value, bool | int | float | str), value
    return value


def decode(value: Any) -> Any:
    """The value of its JSON form; sequences come back as tuples."""
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    if "array" in value:
        numbers = np.frombuffer(base64.b64decode(value["array"]), value["dtype"])
        return numbers.reshape(value["shape"])
    if "record" in value:
        return RECORDS[value["record"]](**{name: decode(item) for name, item in value["fields"].items()})
    return {name: decode(item) for name, item in value["mapping"].items()}
