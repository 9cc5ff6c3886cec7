"""Data on object stores and whatever else fsspec opens: s3://, gs://, hf://, file://, memory:// and so on.

Credentials are found as the library of each protocol finds them (for s3fs the variables and files of AWS). A file is
copied once into $MESHTUNE_CACHE/downloads, by its size and time or tag, and read there. A stream reads parquet files
where they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec

from meshtune.cache import cache_folder
from meshtune.data.readers.parquet import Status, open_parquet
from meshtune.data.readers.textfiles import ConcatenatedRecords, Records
from meshtune.errors import UserError

FOLDER = "downloads"
_TAGS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created", "sha256", "blob_id")
_CONNECTIONS = 16  # parquet files opened at once
_CREDENTIALS = ("credential", "forbidden", "access denied", "unauthorized", "permission", "401", "403", "token")


class RemoteRecords(ConcatenatedRecords):
    """The records of copies of remote files. `files` are the remote ones, with the status that their store gives."""

    def __init__(self, parts: list[Records], states: dict[str, Status]):
        super().__init__(parts)
        self._states = states

    @property
    def files(self) -> dict[Any, Status]:
        return dict(self._states)


def open_url(url: str, split: str, *, streaming: bool = False) -> Records:
    """Opens a file, or a folder of files, of an address; with `streaming` parquet files without a copy.

    Raises UserError where the protocol's library is not installed, credentials are missing or not enough, there is no
    such bucket, folder or file, and as `open_path`.
    """
    from meshtune.data.sources import open_path

    system, listed = _list(url)
    kinds = {name: pathlib.PurePosixPath(name).suffix.lower() for name in listed}
    names = [name for name in listed if len(listed) == 1 or kinds[name] not in ("", ".md")]  # not README.md
    places = {name: system.unstrip_protocol(name) for name in names}
    in_place = {places[name]: places[name] for name in names if streaming and kinds[name] == ".parquet"}
    parts = open_in_place(in_place, refresh=True)
    for name in names:
        if places[name] not in in_place:
            with remote_errors(places[name]):
                local = _copy(system, name, _status({name: listed[name]}))
            parts[places[name]] = open_path(local, places[name], split=split)
    return RemoteRecords([parts[places[name]] for name in names], {url: _status(listed)})


def open_in_place(names: Mapping[str, str], *, refresh: bool) -> dict[str, Records]:
    """The records of parquet files by address, which are read there. `names` are what the user calls each; with
    `refresh` they may be others than in an earlier listing. Raises UserError as `open_url`."""

    def opened(address: str) -> Records:
        return open_parquet(address, names[address], file_state(address, refresh=refresh))

    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        return dict(zip(names, pool.map(opened, names), strict=True))


def open_file(address: str) -> Any:
    """A file of an address, each read of which is a request for those bytes alone."""
    system, name = fsspec.core.url_to_fs(address)
    return system.open(name, "rb", cache_type="none")


def file_state(address: str, *, refresh: bool = True) -> Status:
    """(0, the size of a file, a number of its tag or, without one, of its time), by a new look with `refresh`. Raises
    UserError as `open_url`."""
    with remote_errors(address):
        system, name = fsspec.core.url_to_fs(address)
        if refresh:
            system.invalidate_cache(name)
        info = system.info(name)
    tag = next((str(info[tag]) for tag in _TAGS if info.get(tag)), "")
    return 0, int(info.get("size") or 0), int(hashlib.sha256(tag.encode()).hexdigest()[:15], 16)


def remote_status(url: str) -> Status:
    """The status of a file or folder of an address, as readers.textfiles.file_status. Raises UserError as
    `open_url`."""
    return _status(_list(url)[1])


def _list(url: str) -> tuple[Any, dict[str, dict[str, Any]]]:
    """The file system of an address, and the files there by name, in order, as it describes them."""
    with remote_errors(url):
        system, root = fsspec.core.url_to_fs(url)
        system.invalidate_cache()
        listed = system.find(root, detail=True)
    names = sorted(name for name in listed if not pathlib.PurePosixPath(name).name.startswith("."))
    if not names:
        raise _missing_error(url)
    return system, {name: listed[name] for name in names}


def _status(listed: dict[str, dict[str, Any]]) -> Status:
    """(0, the size of all files, a number that changes with any of them)."""
    tags = repr([(name, info.get("size"), [str(info.get(tag)) for tag in _TAGS]) for name, info in listed.items()])
    number = int(hashlib.sha256(tags.encode()).hexdigest()[:15], 16)
    return 0, sum(int(info.get("size") or 0) for info in listed.values()), number


def _copy(system: Any, name: str, status: Status) -> pathlib.Path:
    """The local copy of a remote file, which is made once. Raises what the protocol's library raises."""
    key = hashlib.sha256(repr((system.unstrip_protocol(name), status)).encode()).hexdigest()[:32]
    local = cache_folder() / FOLDER / key / pathlib.PurePosixPath(name).name
    if local.is_file() and local.stat().st_size == status[1]:
        return local
    local.parent.parent.mkdir(parents=True, exist_ok=True)
    draft = pathlib.Path(tempfile.mkdtemp(dir=local.parent.parent, prefix=".draft-"))
    try:
        system.get_file(name, str(draft / local.name))
        shutil.rmtree(local.parent, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process was faster
            draft.rename(local.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return local


@contextlib.contextmanager
def remote_errors(url: str) -> Iterator[None]:
    """Turns what the libraries of protocols raise into UserErrors."""
    try:
        yield
    except UserError:
        raise
    except ImportError as problem:
        package = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}.get(url.split(":")[0])
        fix = f"pip install {package}" if package else "install the package that it names"
        raise UserError(f"addresses of this kind need a package: {problem}", where=url, fix=fix) from problem
    except FileNotFoundError as problem:
        raise _missing_error(url) from problem
    except Exception as problem:  # each library has its own, and botocore's have no common base with others
        text = str(problem) or type(problem).__name__
        status = getattr(getattr(problem, "response", None), "status_code", 0)
        if status == 429:
            fix = "wait; a run goes on with resume=true. A token (hf: HF_TOKEN) may have a higher limit"
            raise UserError(
                f"the server says that these are too many requests: {text}", where=url, fix=fix
            ) from problem
        if status >= 500:
            fix = "wait until it answers; a run goes on with resume=true"
            raise UserError(f"the server fails, also when it is asked again: {text}", where=url, fix=fix) from problem
        if isinstance(problem, PermissionError) or any(
            word in f"{type(problem).__name__} {text}".lower() for word in _CREDENTIALS
        ):
            fix = "give credentials as its library reads them (s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or "
            fix += "~/.aws; gs: GOOGLE_APPLICATION_CREDENTIALS; hf: HF_TOKEN), with the rights that this needs"
            raise UserError(f"credentials are missing or not enough: {text}", where=url, fix=fix) from problem
        if isinstance(problem, ValueError) and "protocol" in text.lower():
            fix = "give s3://, gs://, hf:// or a path"
            raise UserError(f"no such kind of address: {text}", where=url, fix=fix) from problem
        raise UserError(f"the address cannot be used: {text}", where=url, fix="check it, and the network") from problem


def server_error(problem: BaseException, where: str) -> UserError | None:
    """The error for an answer of a server over HTTP that may be another one later; None for another problem."""
    status = getattr(getattr(problem, "response", None), "status_code", 0)
    if status == 429:
        fix = "wait, or give a token (hf: HF_TOKEN), whose limit may be higher; a run goes on with resume=true"
        return UserError(f"the server says that these are too many requests: {problem}", where=where, fix=fix)
    if status >= 500:
        fix = "wait until it answers; a run goes on with resume=true"
        return UserError(f"the server fails: {problem}", where=where, fix=fix)
    return None


def _missing_error(url: str) -> UserError:
    return UserError("there is no such bucket, folder or file", where=url, fix="check the address, and its spelling")
