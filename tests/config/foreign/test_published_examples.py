"""Every published example of the three tools is translated, or refused for the keys that are filed.

Needs their repositories: MESHTUNE_EXAMPLES_LLAMA_FACTORY, _AXOLOTL and _TRL name checkouts. An example
whose verdict is not the filed one is listed, as are new examples.
"""

from __future__ import annotations

import os
import pathlib

import pytest
from published_examples import expected_lines, verdicts

COUNTS = {"llama_factory": (95, 31), "axolotl": (252, 151), "trl": (24, 8)}


@pytest.mark.parametrize("tool", COUNTS)
def test_published_examples_come_to_what_is_filed(tool):
    variable = f"MESHTUNE_EXAMPLES_{tool.upper()}"
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no checkout of its repository")
    assert dict(verdicts(tool, pathlib.Path(os.environ[variable]))) == expected_lines(tool)


@pytest.mark.parametrize("tool", COUNTS)
def test_the_list_has_every_example_with_a_verdict(tool):
    filed = expected_lines(tool)
    files, translated = COUNTS[tool]
    assert len(filed) == files
    assert sum(not entry.startswith("refused") for entry in filed.values()) == translated
    assert all(entry.split()[0] in ("train", "refused") for entry in filed.values())
