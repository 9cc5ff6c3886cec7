"""Data sets of the Hugging Face hub and of ModelScope, read from the cache of datasets (HF_HOME).

A stream reads parquet files of the hub where they are.

The hub client retries a connection for half a minute before it gives up. One attempt to connect is made first, and if
it fails, only the cache is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import re
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshtune.data.readers.columnar import MALFORMED, ColumnarRecords, quiet_datasets, root_cause
from meshtune.data.readers.remote import open_in_place, server_error
from meshtune.data.readers.textfiles import ConcatenatedRecords, Records
from meshtune.errors import UserError
from meshtune.weights.hub import PREFIX, download_data

if TYPE_CHECKING:
    from datasets import DatasetBuilder

CONNECT_SECONDS = 1.5  # for name resolution and a TCP connection; beyond it the hub counts as unreachable
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def open_hub(
    name: str,
    *,
    subset: str | None,
    split: str,
    revision: str | None,
    folder: str | None = None,
    streaming: bool = False,
) -> Records:
    """A split of a hub data set. HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and proxies are honoured. With `streaming`, one
    of parquet files is read there, if the hub can be reached; others are downloaded.

    Raises UserError without a network where the data set is not in the cache, and where it does not exist, may not be
    read, or has no such subset or split.
    """
    import datasets
    from datasets import config, exceptions

    where = f"data set {name}" + (f", subset {subset}" if subset else "") + f", split {split}"
    unreachable = not _offline_variables() and not is_reachable(config.HF_ENDPOINT)
    with quiet_datasets(progress_bars=True), _offline() if unreachable else contextlib.nullcontext():
        try:
            if streaming and not unreachable and not _offline_variables():
                builder = datasets.load_dataset_builder(name, name=subset, revision=revision, data_dir=folder)
                if (files := _parquet_files(builder, split, where)) is not None:
                    return _open_files(name, files)
            table = datasets.load_dataset(
                name, name=subset, split=split, revision=revision, data_dir=folder, streaming=False
            )
        except UserError:
            raise
        except exceptions.DatasetNotFoundError as error:
            raise UserError(
                f"the Hugging Face hub has no data set '{name}' that you may read, and there is no such local file",
                where=where,
                fix="check the spelling; for a gated or private one set HF_TOKEN and accept its terms on its page",
            ) from error
        except exceptions.DataFilesNotFoundError as error:
            raise UserError(f"the data set has no data files: {root_cause(error)}", where=where) from error
        except ConnectionError as error:
            raise _unreachable_error(name, where) from error
        except (exceptions.DatasetsError, RuntimeError, OSError, *MALFORMED) as error:
            if (busy := server_error(error, where)) is not None:
                raise busy from error
            if _is_connection_error(error):
                raise _unreachable_error(name, where) from error
            raise UserError(
                f"cannot load the data set: {root_cause(error)}", where=where, fix="check subset, split and revision"
            ) from error
    return ColumnarRecords(table, name)  # pyright: ignore[reportArgumentType]: with a split it is one Dataset


def _parquet_files(builder: DatasetBuilder, split: str, where: str) -> list[str] | None:
    """The addresses of the files of a split, at a commit; None if they are not of parquet or `split` is a part of one.
    Raises UserError if there is no such split."""
    splits = {str(name): files for name, files in (builder.config.data_files or {}).items()}
    if split not in splits and re.fullmatch(r"\w[\w.-]*", split):
        fix = f"set split to one of: {', '.join(splits)}"
        raise UserError(f"the data set has no split '{split}'", where=where, fix=fix)
    files = list(splits.get(split, []))
    return files if files and all(file.endswith(".parquet") for file in files) else None


def _open_files(name: str, files: list[str]) -> Records:
    """The records of parquet files of a hub data set, where they are."""
    root = files[0][: files[0].index("/", files[0].index("@"))]  # hf://datasets/owner/name@commit
    names = {file: name + file.removeprefix(root) for file in files}
    return ConcatenatedRecords([*open_in_place(names, refresh=False).values()])


def is_reachable(endpoint: str, seconds: float = CONNECT_SECONDS) -> bool:
    """Whether a TCP connection to `endpoint`, or to the proxy in front of it, opens within `seconds`."""
    url = urllib.parse.urlsplit(endpoint)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = url.port or (80 if url.scheme == "http" else 443)
    connected: list[bool] = []

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection((url.hostname or "", port), timeout=seconds):
            connected.append(True)

    # In a thread, because name resolution has no timeout of its own.
    thread = threading.Thread(target=connect, name="hub connection", daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(connected)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Makes `datasets` read only its cache."""
    from datasets import config

    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _offline_variables() -> list[str]:
    return [name for name in OFFLINE_VARIABLES if os.environ.get(name, "0") not in ("", "0")]


def _unreachable_error(name: str, where: str) -> UserError:
    variables = _offline_variables()
    reason = f"{' and '.join(variables)} is set" if variables else "the Hugging Face hub cannot be reached"
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    remedy = f"unset {' '.join(variables)}" if variables else "connect to the network"
    return UserError(
        f"'{name}' is not a local file, the data set of that name is not in the cache ({home}), and {reason}",
        where=where,
        fix=f"{remedy}; or fill the cache on a machine with a network, with this HF_HOME: "
        f"python -c \"import datasets; datasets.load_dataset('{name}')\"; or give the path of a local file",
    )


def _is_connection_error(error: BaseException | None) -> bool:
    """Whether an error was caused by a lost connection: `datasets` wraps them in its own errors."""
    while error is not None:
        name = type(error).__name__
        if isinstance(error, ConnectionError) or "Offline" in name or "LocalEntryNotFound" in f"{name}: {error}":
            return True
        error = error.__cause__ or error.__context__
    return False


def open_modelscope(
    repository: str, *, subset: str | None, split: str, revision: str | None, folder: str | None = None
) -> ColumnarRecords:
    """A split of a data set. Raises UserError as `download_data` does, and for a subset or split that it has not."""
    import datasets
    from datasets import config, exceptions

    name = f"{PREFIX}{repository}"
    directory = download_data(repository, revision)
    cache = f"{config.HF_DATASETS_CACHE}/modelscope-{_contents(directory)}"
    with quiet_datasets(progress_bars=True):
        try:
            table = datasets.load_dataset(str(directory), name=subset, split=split, data_dir=folder, cache_dir=cache)
        except (exceptions.DatasetsError, RuntimeError, OSError, *MALFORMED) as error:
            where = f"data set {name}" + (f", subset {subset}" if subset else "") + f", split {split}"
            raise UserError(
                f"cannot load the data set: {root_cause(error)}", where=where, fix="check subset, split and revision"
            ) from error
    return ColumnarRecords(table, name)  # pyright: ignore[reportArgumentType]: with a split it is one Dataset


def _contents(directory: pathlib.Path) -> str:
    """A hash of the files of a data set, which names the copy of `datasets`: by default it goes by their times."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(f"{path.relative_to(directory)} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:32]
