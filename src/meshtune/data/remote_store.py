"""Prepared data sets in a folder that fsspec opens (data.prepared): s3://, gs://, file:// and so on.

The folder has the files of a cache: `meshtune data prepare` uploads a store's shards, then its manifest, then the data
set's, which says that all are there. A run downloads the manifests and, from then on, each shard when it is first read;
a damaged one is removed, and comes again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import fsspec

from meshtune.data.manifest import FOLDER, Manifest
from meshtune.data.progress import Progress
from meshtune.data.readers.remote import remote_errors
from meshtune.data.store import LENGTHS, MANIFEST, ORIGIN, Store, read_json, write_json
from meshtune.errors import UserError


@contextlib.contextmanager
def _file_system(url: str) -> Iterator[tuple[Any, str]]:
    """The file system of an address, and its folder there. What is raised meanwhile becomes UserError."""
    with remote_errors(url):
        system, root = fsspec.core.url_to_fs(url)
        system.invalidate_cache()
        yield system, root.rstrip("/")


def check_writable(url: str) -> None:
    """Raises UserError where nothing can be written to: no such bucket, no credentials, no package for its protocol."""
    with _file_system(url) as (system, root):
        _make_folder(system, root)
        system.pipe_file(f"{root}/.probe", b"probe")
        system.rm_file(f"{root}/.probe")


def _make_folder(system: Any, folder: str) -> None:
    """Makes a folder, where there are folders: on an object store it would make a bucket."""
    if "file" in system.protocol or "local" in system.protocol:
        system.makedirs(folder, exist_ok=True)


def upload_set(
    url: str, manifest: Manifest, stores: Iterable[Store], progress: Progress, share: tuple[int, int] = (0, 1)
) -> None:
    """Uploads a data set, but for the shards that are there; those of this `share` (index, count) first. Raises
    UserError."""
    with _file_system(url) as (system, root):
        present = {name: info["size"] for name, info in system.find(root, detail=True).items()}
        for store in {store.path: store for store in stores}.values():
            target, shards = f"{root}/{store.path.name}", list(enumerate(store.files))
            _make_folder(system, target)
            shards.sort(key=lambda item: (item[0] - share[0]) % share[1])
            for done, (_, file) in enumerate(shards):
                progress("uploading", done, len(shards))
                name = f"{target}/{file.name}"
                # One that is not in the cache has been read from there.
                if file.exists() and present.get(name) != file.stat().st_size:
                    system.put_file(str(file), name)
            for file in (LENGTHS, MANIFEST):
                system.put_file(str(store.path / file), f"{target}/{file}")
        _make_folder(system, f"{root}/{FOLDER}")
        system.put_file(str(manifest.file), f"{root}/{FOLDER}/{manifest.file.name}")


def fetch_set(url: str, manifest: Manifest) -> bool:
    """Downloads a data set's manifests and lengths; False if there is none. Raises UserError where there is no such
    folder, or it cannot be read."""
    with _file_system(url) as (system, root):
        if not system.exists(root):
            raise FileNotFoundError(root)
        try:
            data = system.cat_file(f"{root}/{FOLDER}/{manifest.file.name}")
        except FileNotFoundError:
            return False
        manifest.file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=manifest.file.parent, suffix=".fetched") as draft:
            pathlib.Path(draft.name).write_bytes(data)
            try:
                content = read_json(pathlib.Path(draft.name))
            except ValueError as problem:
                fix = "prepare the data again, in another folder"
                raise UserError(f"the manifest there is damaged: {problem}", where=url, fix=fix) from problem
        assert content is not None
        for key in content["stores"].values():
            local = manifest.folder / key
            if not (local / MANIFEST).exists():
                local.mkdir(parents=True, exist_ok=True)
                write_json(local / ORIGIN, {"url": f"{url.rstrip('/')}/{key}"})
                for file in (LENGTHS, MANIFEST):
                    _download(system, f"{root}/{key}/{file}", local / file)
        write_json(manifest.file, content | {"remote": url})
    return True


def fetch_shard(file: pathlib.Path) -> None:
    """Downloads the file of a store that was fetched, once for all processes of a host. Raises UserError."""
    origin = read_json(file.parent / ORIGIN)
    assert origin is not None
    with _file_system(origin["url"]) as (system, root), file.with_suffix(".lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: it may be downloaded twice
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            _download(system, f"{root}/{file.name}", file)


def _download(system: Any, name: str, file: pathlib.Path) -> None:
    descriptor, draft = tempfile.mkstemp(dir=file.parent, prefix=".draft-")
    os.close(descriptor)
    try:
        system.get_file(name, draft)
        os.replace(draft, file)
    finally:
        pathlib.Path(draft).unlink(missing_ok=True)
