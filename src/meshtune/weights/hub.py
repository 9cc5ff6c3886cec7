"""Finds a model: a local directory, or an id of a hub or of ModelScope that is downloaded into that hub's cache. An
edge, not the core.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from meshtune.cache import cache_folder
from meshtune.errors import UserError, pip_install

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

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


# Never *.bin, *.pt, *.pkl (pickles) or *.py (code).
TOKENIZER = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
MODEL = ("*.safetensors", *TOKENIZER)
CONFIG = ("config.json",)
# Other layouts of the same weights, and what belongs to other runtimes, in folders of their own.
NOT_OURS = ("consolidated*", "*/*.safetensors", "*/*.json", "*/*.txt", "*/*.model")

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")


def locate(path_or_id: str | os.PathLike[str], revision: str | None = None, *, allow: tuple[str, ...] = MODEL) -> Path:
    """The local directory of a model; a hub id is downloaded first.

    `allow` are the patterns of the files to have: MODEL, TOKENIZER for just a tokenizer, or CONFIG. With MODEL the
    directory is known to hold a config.json and whole safetensors files; of a GGUF file it is one that represents it.
    `modelscope:owner/name` is a model of ModelScope (see `modelscope_id`). The hub's own cache, HF_TOKEN and
    HF_HUB_OFFLINE are honoured. Raises UserError for a path that does not exist, an unknown or gated repository, an
    unknown revision, no network, or a directory that is not a model's.
    """
    text = os.fspath(path_or_id)
    path = Path(text).expanduser()
    check_path(text, revision)
    if path.is_dir():
        directory = path
    elif path.exists():
        from meshtune.weights.gguf.directory import open_gguf

        directory = open_gguf(path, cache_folder())
    elif (repository := modelscope_id(text)) is not None:
        directory = download_model(repository, revision, allow, NOT_OURS)
    else:
        directory = _download(text, revision, allow)
    if allow == MODEL:
        from meshtune.weights.load import load_config
        from meshtune.weights.safetensors_files import headers

        load_config(directory)
        headers(directory)
    return directory


def check_path(text: str, revision: str | None = None) -> None:
    """Raises UserError if `text` is neither a directory, a GGUF file nor the form of a hub id. Does not import JAX."""
    path = Path(text).expanduser()
    if path.is_dir() and revision is not None:
        raise UserError(
            f"revision '{revision}' was given, but '{text}' is a local directory, which has no revisions",
            fix="remove the revision, or give a hub id",
        )
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return
    if path.exists():
        raise UserError(
            f"'{text}' is a file; a model is a directory with config.json and *.safetensors, or a GGUF file",
            fix=f"give the folder: {path.parent}",
        )
    if modelscope_id(text) is not None:
        return
    if path.suffix == ".gguf":
        raise UserError(
            f"there is no GGUF file '{text}'",
            where=str(path.absolute()),
            fix=f"{near_paths(path)}give the path of a file on this machine; one on the hub is downloaded first",
        )
    if not HUB_ID.match(text) or _is_plainly_a_path(text):
        raise UserError(
            f"model path '{text}' does not exist",
            where=str(path.absolute()),
            fix=f"{near_paths(path)}a hub id looks like organisation/name, as in HuggingFaceTB/SmolLM2-135M",
        )


def check_adapter(text: str) -> None:
    """Raises UserError if `text` is neither a directory nor the form of a hub id. Does not import JAX."""
    path = Path(text).expanduser()
    if not path.exists() and (_is_plainly_a_path(text) or not HUB_ID.match(text)):
        raise UserError(
            f"there is no adapter at '{text}': no such directory",
            where=str(path.absolute()),
            fix="give the directory with adapter_config.json and adapter_model.safetensors",
        )


def _is_plainly_a_path(text: str) -> bool:
    return text.startswith((".", "~", "/"))


def near_paths(path: Path) -> str:
    """`did you mean 'x'? ` for entries of the path's parent with similar names, or the problem with the parent."""
    parent = path.parent
    if not parent.is_dir():
        missing = next((p for p in reversed(path.parents) if not p.exists()), parent)
        return f"the folder '{missing}' does not exist either. "
    try:
        names = {
            entry.name.lower(): entry.name for entry in parent.iterdir() if entry.is_dir() or entry.suffix == ".gguf"
        }
    except PermissionError:
        return ""
    similar = difflib.get_close_matches(path.name.lower(), names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(repr(str(parent / names[name])) for name in similar)}? " if similar else ""


def _download(repo: str, revision: str | None, allow: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    near = near_paths(Path(repo)) if Path(repo).parent.is_dir() else ""
    where = f"hub id '{repo}'" + (f", revision '{revision}'" if revision else "")
    page = f"{_endpoint()}/{repo}"
    try:
        snapshot = snapshot_download(
            repo, revision=revision, allow_patterns=list(allow), ignore_patterns=list(NOT_OURS), library_name="meshtune"
        )
    except GatedRepoError as error:
        raise UserError(
            f"'{repo}' is gated: its owner asks you to accept a licence first",
            where=where,
            fix=f"accept it at {page}, then set HF_TOKEN to a token of that account (or run `hf auth login`)",
        ) from error
    except RepositoryNotFoundError as error:
        token = "the token in use may not see it" if os.environ.get("HF_TOKEN") else "no HF_TOKEN is set"
        raise UserError(
            f"no directory '{repo}' exists here, and the hub knows no such model, or it is private ({token})",
            where=where,
            fix=f"{near}check the spelling at {page}; for a private model set HF_TOKEN",
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(
            f"'{repo}' has no revision '{revision}'", where=where, fix=f"see its branches and tags at {page}/tree/main"
        ) from error
    except LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, HfHubHTTPError):  # the hub was reached and refused; nothing is cached
            raise _refusal_error(repo, where, error.__cause__) from error
        raise _not_cached(repo, where, near) from error
    except HfHubHTTPError as error:
        raise _refusal_error(repo, where, error) from error
    except (OSError, HTTPError) as error:  # the network broke, the proxy refused, or the disk is full
        raise UserError(
            f"downloading '{repo}' failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            where=where,
            fix="check network, proxy and disk space, then try again; what was already downloaded is kept",
        ) from error
    return Path(snapshot)


def _refusal_error(repo: str, where: str, error: HfHubHTTPError) -> UserError:
    status = getattr(error.response, "status_code", None)
    if status in (401, 403):
        return UserError(
            f"the hub refused access to '{repo}' (HTTP {status})",
            where=where,
            fix="set HF_TOKEN to a valid token of an account that may read it (or run `hf auth login`)",
        )
    return UserError(
        f"the hub could not serve '{repo}' (HTTP {status})",
        where=where,
        fix="try again later; what was already downloaded is kept",
    )


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _not_cached(repo: str, where: str, near: str) -> UserError:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    reason = (
        "HF_HUB_OFFLINE is set" if offline else f"the hub ({urlparse(_endpoint()).netloc}) cannot be reached from here"
    )
    misspelt, note = near, f"; no directory '{repo}' exists here"
    problem = f"'{repo}' is not (or not wholly) in the hub's cache, and {reason}"
    if (parent := Path(repo).parent) != Path() and parent.is_dir():  # a path that is misspelt, rather than an id
        problem = f"there is no '{Path(repo).name}' in the folder '{parent}' here; as an id of the hub, {problem}"
        misspelt, note = near or "check the spelling of the path; for a model of the hub ", ""
    return UserError(
        problem,
        where=where,
        fix=f"{misspelt}{'unset HF_HUB_OFFLINE' if offline else 'check the network'}; or download it elsewhere with "
        f"`hf download {repo}` and give the path of the folder{note}",
    )
