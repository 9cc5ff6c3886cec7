"""A repository of the Hugging Face hub before it is written: the token, the permission, what it already holds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from meshtune.errors import UserError
from meshtune.weights.hub import modelscope_id

if TYPE_CHECKING:
    from huggingface_hub import HfApi

RECORD = "meshtune.json"  # in a repository: what the last push wrote
CARD = "README.md"
GIT = ".gitattributes"  # every repository of the hub has it
PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9])?"
REPOSITORY = re.compile(rf"^(?!.*(?:--|\.\.)){PART}/{PART}$")


@dataclasses.dataclass(frozen=True)
class Repository:
    """A repository that the token may write to. `head` is its last commit, `pushed` the files of an earlier push."""

    api: HfApi
    name: str
    token: str
    head: str | None
    files: frozenset[str]
    pushed: frozenset[str]

    @property
    def url(self) -> str:
        return f"{self.api.endpoint}/{self.name}"


def check_access(name: str) -> str:
    """Returns the token to push with. Raises UserError for a name that the hub refuses, offline mode and no token."""
    from huggingface_hub import constants, get_token

    if modelscope_id(name) is not None:
        raise UserError(
            "a push goes to the Hugging Face hub, not to ModelScope",
            where=name,
            fix="`meshtune export`, and `modelscope upload owner/name FOLDER` by ModelScope's own package; or, where "
            "USE_MODELSCOPE_HUB made this an id of ModelScope, unset it",
        )
    if not REPOSITORY.match(name):
        raise UserError(
            f"'{name}' is not the name of a repository",
            where="repository",
            fix="write it as user/name or organisation/name: letters, digits, '-', '_' and '.'",
        )
    if constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set: nothing can be pushed", where=name, fix="unset HF_HUB_OFFLINE")
    token = get_token()
    if not token:
        raise UserError(
            "there is no token of the hub to push with",
            where=name,
            fix="set HF_TOKEN to a token with write access (from the hub's settings, Access Tokens), or run "
            "`hf auth login`",
        )
    return token


def open_repository(name: str, token: str, *, public: bool, overwrite: bool) -> Repository:
    """Opens a repository for writing, and creates it where it does not exist: private unless `public`.

    Raises UserError for a token that the hub does not accept or that may not write, for a public repository without
    `public` and a private one with it, and, unless `overwrite` is set, for one with files that no push wrote.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token, library_name="meshtune")
    with hub_errors(name):
        api.whoami()
        try:
            info = api.model_info(name)
        except RepositoryNotFoundError:
            api.create_repo(name, private=not public, exist_ok=True)
            info = api.model_info(name)
        if not info.private and not public:
            raise UserError(
                f"'{name}' is a public repository: everybody would see what is pushed",
                where=name,
                fix="add --public (hub.public in a recipe) if that is meant, or push to another repository",
            )
        if info.private and public:
            raise UserError(
                f"'{name}' is a private repository, and a push does not make it public",
                where=name,
                fix="make it public in its settings on the hub first, or leave --public (hub.public) out",
            )
        files = frozenset(sibling.rfilename for sibling in info.siblings or ())
        pushed = _pushed_files(api, name, info.sha) if RECORD in files else frozenset()
        foreign = sorted(files - pushed - {GIT})
        if foreign and not overwrite:
            raise UserError(
                f"'{name}' has files that no push of Meshtune wrote: {', '.join(foreign[:4])}"
                f"{', ...' if len(foreign) > 4 else ''}",
                where=name,
                fix="push to another repository; or add --overwrite (hub.overwrite): files of the same names are "
                "replaced, the others stay",
            )
        api.preupload_lfs_files(name, additions=[CommitOperationAdd(CARD, b"-")])  # refused without write access
    return Repository(api, name, token, info.sha, files, pushed)


def _pushed_files(api: HfApi, name: str, revision: str | None) -> frozenset[str]:
    """The files that the last push wrote, by the repository's own record; none where that is not readable."""
    with tempfile.TemporaryDirectory() as folder:
        path = api.hf_hub_download(name, RECORD, revision=revision, local_dir=folder)
        try:
            return frozenset({RECORD, *json.loads(Path(path).read_bytes())["files"]})
        except (ValueError, KeyError, TypeError):
            return frozenset()


# HTTP status -> what it means and what to do, with {name} for the repository.
REFUSALS = {
    401: (
        "the hub does not accept this token",
        "set HF_TOKEN to a valid token with write access (or run `hf auth login`)",
    ),
    403: (
        "this token may not write to '{name}'",
        "push to your own name, or use a token with write access of an account that may write there",
    ),
    409: ("the repository was changed during this push", "look at it, and push again"),
    412: ("the repository was changed during this push", "look at it, and push again"),
}
OTHER_REFUSAL = "the hub refused the push", "push again later: the files that arrived are not sent a second time"


@contextlib.contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turns a refusal of the hub and a broken connection into one UserError."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except UserError:
        raise
    except (HfHubHTTPError, HTTPError, OSError, RuntimeError, ValueError) as error:
        causes = list(_causes(error))
        refusal = next((cause for cause in causes if isinstance(cause, HfHubHTTPError)), None)
        broken = next((cause for cause in causes if isinstance(cause, HTTPError | OSError)), None)
        text = (str(broken or error).splitlines() or [type(broken).__name__])[0]
        if refusal is not None:
            status = getattr(refusal.response, "status_code", None)
            problem, fix = REFUSALS.get(status or 0, OTHER_REFUSAL)
            message = (refusal.server_message or "").strip()
            problem = f"{problem.format(name=name)} (HTTP {status}{f': {message}' if message else ''})"
        elif broken is None:
            problem, fix = f"the hub did not take the push: {error}", "see its message"
        elif "xet" in text and "404" in text:  # a mirror, or a hub of one's own
            problem, fix = f"this hub has no Xet storage: {text}", "set HF_HUB_DISABLE_XET=1 and push again"
        else:
            problem = f"the connection to the hub broke: {text}"
            fix = "push again: the files that arrived are not sent a second time"
        raise UserError(problem, where=name, fix=fix) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
