"""The cases of every family. A family is one file here with `CASES`; its first case is that of the fast test."""

from __future__ import annotations

import importlib
import pkgutil

from families.case import Case

BY_FAMILY: dict[str, tuple[Case, ...]] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").CASES for module in pkgutil.iter_modules(__path__)
}
CASES: tuple[Case, ...] = tuple(case for cases in BY_FAMILY.values() for case in cases)
FIRST: tuple[Case, ...] = tuple(cases[0] for cases in BY_FAMILY.values())
BY_NAME: dict[str, Case] = {case.name: case for case in CASES}

assert len(BY_NAME) == len(CASES), "two cases share a name"
