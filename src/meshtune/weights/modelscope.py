"""Models and data sets of ModelScope, downloaded into its own cache by its own package. An edge, not the core."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshtune.errors import UserError, pip_install

PREFIX = "modelscope:"
VARIABLE = "USE_MODELSCOPE_HUB"
REPOSITORY = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
INSTALL = pip_install("modelscope")


def modelscope_id(name: str) -> str | None:
    """The id on ModelScope that `name` means: `modelscope:owner/name`, or any hub id where USE_MODELSCOPE_HUB is set;
    else None. Raises UserError for a prefix before something else than an id."""
    if name.startswith(PREFIX):
        repository = name.removeprefix(PREFIX)
        if not REPOSITORY.match(repository):
            raise UserError(
                f"'{repository}' is not an id of ModelScope", where=name, fix=f"write it as {PREFIX}owner/name"
            )
        return repository
    return name if is_default() and REPOSITORY.match(name) and not Path(name).exists() else None


def is_default() -> bool:
    """Whether USE_MODELSCOPE_HUB is set, as LLaMA-Factory reads it."""
    return os.environ.get(VARIABLE, "").lower() in ("1", "true", "yes", "on")


def download_model(repository: str, revision: str | None, allow: Sequence[str], ignore: Sequence[str]) -> Path:
    """The local directory of a model's files that match `allow` and not `ignore`. Raises UserError without the package,
    and for whatever ModelScope refuses."""
    return _call_modelscope(
        "snapshot_download", repository, revision, allow_patterns=[*allow], ignore_patterns=[*ignore]
    )


def download_data(repository: str, revision: str | None) -> Path:
    """The local directory of a data set's files. Raises as `download_model` does."""
    return _call_modelscope("dataset_snapshot_download", repository, revision)


def _call_modelscope(function: str, repository: str, revision: str | None, **patterns: Any) -> Path:
    where = f"{PREFIX}{repository}" + (f", revision '{revision}'" if revision else "")
    try:
        from modelscope.hub import errors  # pyright: ignore[reportMissingImports]
        from modelscope.hub import snapshot_download as downloads  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError("ModelScope needs its own package, which is not installed", where=where, fix=INSTALL) from error
    download: Callable[..., str] = getattr(downloads, function)
    # Its errors have no class in common.
    refusals = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    try:
        return Path(download(repository, revision=revision, **patterns))
    except (*refusals, OSError, ValueError, RuntimeError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"ModelScope could not give '{repository}': {type(error).__name__}: {first}",
            where=where,
            fix="check the spelling, the revision, the network and MODELSCOPE_API_TOKEN; what was downloaded is kept",
        ) from error
