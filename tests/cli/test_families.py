"""`meshtune families` names every model_type that is supported, with what it takes."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from meshtune.cli.main import app
from meshtune.families import FAMILIES, description
from meshtune.families.family import GROUPS
from meshtune.families.wrappers import WRAPPERS


def print_families(*options: str) -> str:
    result = CliRunner().invoke(app, ["families", *options], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_has_every_family_in_the_order_of_groups():
    entries = json.loads(print_families("--json"))
    assert entries.keys() == FAMILIES.keys() | WRAPPERS.keys()
    groups = [entry["group"] for entry in entries.values()]
    assert groups == sorted(groups, key=[*GROUPS, "composite"].index)
    for name in FAMILIES:
        family, entry = description(name), entries[name]
        assert entry["models"] == list(family.models)
        assert {"lora", "full"} - family.refusals.keys() <= set(entry["methods"])
        assert {"dp", "fsdp", "tp", "cp"} - family.refusals.keys() <= set(entry["mesh"])
        assert ("ep" in entry["mesh"]) == (family.experts and "ep" not in family.refusals)
        assert family.refusals.keys().isdisjoint(entry["mesh"] + entry["methods"])


def test_the_table_of_a_narrow_terminal_cuts_no_name():
    table = print_families()
    assert all(any(line.startswith(f"│ {name} ") for line in table.splitlines()) for name in FAMILIES)
