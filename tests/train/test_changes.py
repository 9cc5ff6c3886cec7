"""Changes allowed in a resumed run's recipe: none that change the result."""

from __future__ import annotations

import pytest

from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.train.checkpoint.resume import check_changes


def recipe(*overrides: str) -> dict:
    return load_recipe(None, ["model=m", "data=d.json", "output=o", *overrides]).model_dump(mode="json")


@pytest.mark.parametrize("change", ["data.packing=false", "data.shuffle=false", "data.max_length=77", "method.rank=9"])
def test_how_rows_are_made_may_not_change(change):
    with pytest.raises(UserError, match=change.split("=")[0]):
        check_changes(recipe(), recipe(change))


@pytest.mark.parametrize(
    "change", ["output=p", "log.every=5", "hub.repository=a/b", "checkpoint.keep=9", "data.train.0.path=moved.json"]
)
def test_places_and_logs_may_change(change):
    assert [changed.key for changed in check_changes(recipe(), recipe(change))]
