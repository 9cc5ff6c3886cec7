"""A small Hugging Face hub: the endpoints that huggingface_hub calls for a push and a download, over real HTTP."""

from __future__ import annotations

import base64
import collections
import contextlib
import functools
import hashlib
import http.server
import json
import pathlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlparse

import yaml

TOKENS = {"hf_" + "w" * 34: "ann", "hf_" + "r" * 34: "reader"}
TOKEN, READER = TOKENS
LARGE = (".safetensors", ".gguf", ".png")


@dataclass
class Repository:
    """`files` are contents by name; a commit's name counts them. `card` is the front matter of README.md."""

    private: bool = True
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    commits: int = 1

    @property
    def sha(self) -> str:
        return hashlib.sha1(f"{self.commits}{sorted(self.files)}".encode()).hexdigest()

    @property
    def card(self) -> dict[str, object]:
        text = self.files.get("README.md", b"").decode()
        return (yaml.safe_load(text.split("---")[1]) if text.startswith("---") else {}) or {}


@dataclass
class Hub:
    """A hub's repositories and the requests it received. `objects` are large files by hash; `refuse_after` large files
    no more are taken. While `open` is cleared, commits wait. `bytes_sent` are those of files, by name. The next
    requests for files are answered by the `failures`, as statuses."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    sent: list[tuple[str, str, bytes]] = field(default_factory=list)
    bytes_sent: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[int] = field(default_factory=list)
    refuse_after: int | None = None
    open: threading.Event = field(default_factory=threading.Event)
    counting: threading.Lock = field(default_factory=threading.Lock)  # files are uploaded in parallel

    def paths(self, method: str) -> list[str]:
        return [path for verb, path, _ in self.sent if verb == method]


class Refused(Exception):
    def __init__(self, status: int, code: str = "", text: str = "no"):
        self.status, self.code, self.text = status, code, text


class Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer("HEAD")

    def do_GET(self):
        self.answer("GET")

    def do_POST(self):
        self.answer("POST")

    def do_PUT(self):
        self.answer("PUT")

    def answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = unquote(urlparse(self.path).path).strip("/")
        self.hub.sent.append((method, path, body))
        try:
            content, headers = self.route(method, path.split("/"), body)
            status = 200
            if "ETag" in headers and method == "GET":
                if self.hub.failures:
                    raise Refused(self.hub.failures.pop(0))
                status, content = self.part(content, headers)
                self.hub.bytes_sent[path.rpartition("/")[2]] += len(content)
        except Refused as refused:
            status, content = refused.status, json.dumps({"error": refused.text}).encode()
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.text}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if method != "HEAD":
            self.wfile.write(content)

    def part(self, content: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        """The bytes of a file that a request is for (RFC 9110, section 14)."""
        if (bounds := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range") or "")) is None:
            return 200, content
        first, last = int(bounds[1]), min(int(bounds[2] or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return 206, content[first : last + 1]

    def route(self, method: str, path: list[str], body: bytes) -> tuple[bytes, dict[str, str]]:
        user = TOKENS.get((self.headers.get("authorization") or "").removeprefix("Bearer "))
        match path:
            case ["lfs", oid]:
                return self.take(oid, body), {}
            case ["api", "whoami-v2"]:
                if user is None:
                    raise Refused(401, text="Invalid username or password.")
                return self.json({"name": user, "type": "user", "orgs": []})
            case ["api", "validate-yaml"]:
                text = json.loads(body)["content"]
                fields = yaml.safe_load(text.split("---")[1])
                errors = [] if isinstance(fields.get("tags"), list) else [{"message": "tags"}]
                return self.json({"errors": errors, "warnings": []})
            case ["api", "repos", "create"]:
                return self.create(json.loads(body), user)
            case ["api", "models", owner, name, *tail]:
                return self.model(f"{owner}/{name}", tail, body, user)
            case ["api", "datasets", owner, name, *tail]:
                return self.data_set(f"{owner}/{name}", tail, body, user)
            case [owner, name, "info", "lfs", "objects", "batch"]:
                self.repository(f"{owner}/{name.removesuffix('.git')}", user, write=True)
                return self.batch(json.loads(body))
            case [owner, name, "resolve", _, *file] | ["datasets", owner, name, "resolve", _, *file]:
                repository = self.repository(f"{owner}/{name}", user)
                content = repository.files.get("/".join(file))
                if content is None:
                    raise Refused(404, "EntryNotFound")
                return content, {"ETag": f'"{digest(content)}"', "X-Repo-Commit": repository.sha}
        raise Refused(404, text=f"no such endpoint: {method} {'/'.join(path)}")

    def json(self, value: object) -> tuple[bytes, dict[str, str]]:
        return json.dumps(value).encode(), {"Content-Type": "application/json"}

    def repository(self, name: str, user: str | None, *, write: bool = False) -> Repository:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and user is None):
            raise Refused(404 if user else 401, "RepoNotFound", "Repository not found")
        if write and user != name.split("/")[0]:
            raise Refused(403, text="You don't have the rights to write here")
        return repository

    def create(self, fields: dict[str, str], user: str | None) -> tuple[bytes, dict[str, str]]:
        owner, name = fields.get("organization") or user, fields["name"]
        if user is None:
            raise Refused(401, text="Invalid username or password.")
        if owner != user:
            raise Refused(403, text=f"You don't have the rights to create a model under the namespace {owner!r}")
        self.hub.repositories[f"{owner}/{name}"] = Repository(private=fields.get("visibility") == "private")
        return self.json({"url": f"{self.hub.url}/{owner}/{name}"})

    def model(self, name: str, tail: list[str], body: bytes, user: str | None) -> tuple[bytes, dict[str, str]]:
        match tail:
            case [] | ["revision", *_]:
                repository = self.repository(name, user)
                siblings = [{"rfilename": file} for file in repository.files]
                facts = {"id": name, "sha": repository.sha, "private": repository.private, "siblings": siblings}
                return self.json(facts | {"cardData": repository.card})
            case ["tree", _, *folder]:
                return self.tree(self.repository(name, user).files, "/".join(folder))
            case ["preupload", _]:
                stored = self.repository(name, user, write=True).files
                modes = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                        "shouldIgnore": False,
                        "oid": self.oid(file["path"], stored),
                    }
                    for file in json.loads(body)["files"]
                ]
                return self.json({"files": modes})
            case ["commit", _]:
                return self.commit(name, self.repository(name, user, write=True), body)
        raise Refused(404)

    def data_set(self, name: str, tail: list[str], body: bytes, user: str | None) -> tuple[bytes, dict[str, str]]:
        if tail[:1] == ["paths-info"]:
            files = self.repository(name, user).files
            requested = [file for path in parse_qs(body.decode())["paths"] for file in files if file == path]
            return self.json([{"type": "file", "path": file, **self.size(files[file])} for file in requested])
        return self.model(name, tail, body, user)

    def tree(self, files: dict[str, bytes], folder: str) -> tuple[bytes, dict[str, str]]:
        prefix, is_recursive = f"{folder}/" if folder else "", "recursive=true" in self.path
        below = {file: data for file, data in files.items() if file.startswith(prefix)}
        if folder and not below:
            raise Refused(404, "EntryNotFound")
        folders = {str(parent) for file in below for parent in pathlib.PurePosixPath(file).parents}
        entries = [{"type": "directory", "path": path, "oid": blob(path.encode()), "size": 0} for path in folders]
        entries += [{"type": "file", "path": file, **self.size(data)} for file, data in below.items()]
        inside = [item for item in entries if item["path"].startswith(prefix) and item["path"] != "."]
        return self.json([item for item in inside if is_recursive or "/" not in item["path"].removeprefix(prefix)])

    def size(self, data: bytes) -> dict[str, object]:
        return {"size": len(data), "oid": blob(data)}

    def oid(self, path: str, files: dict[str, bytes]) -> str | None:
        if path not in files:
            return None
        return hashlib.sha256(files[path]).hexdigest() if path.endswith(LARGE) else blob(files[path])

    def batch(self, request: dict[str, list[dict[str, object]]]) -> tuple[bytes, dict[str, str]]:
        objects = []
        for entry in request["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{entry['oid']}", "header": {}}}
            objects.append(entry | ({} if entry["oid"] in self.hub.objects else {"actions": upload}))
        return self.json({"transfer": "basic", "objects": objects})

    def take(self, oid: str, body: bytes) -> bytes:
        with self.hub.counting:
            if self.hub.refuse_after is not None and len(self.hub.objects) >= self.hub.refuse_after:
                raise Refused(400, text="the upload broke")
            assert hashlib.sha256(body).hexdigest() == oid
            self.hub.objects[oid] = body
        return b""

    def commit(self, name: str, repository: Repository, body: bytes) -> tuple[bytes, dict[str, str]]:
        self.hub.open.wait(300)
        header, *lines = [json.loads(line) for line in body.splitlines()]
        parent = header["value"].get("parentCommit")
        if parent not in (None, repository.sha):
            raise Refused(412, text="A commit has happened since")
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    repository.files[value["path"]] = self.hub.objects[value["oid"]]
                case "deletedFile":
                    del repository.files[value["path"]]
        repository.commits += 1
        return self.json({"commitUrl": f"{self.hub.url}/{name}/commit/{repository.sha}", "commitOid": repository.sha})


@functools.lru_cache(maxsize=64)
def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@functools.lru_cache(maxsize=64)
def blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """Serves a hub on a free port until the block ends."""
    hub = Hub()
    hub.open.set()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("OneHub", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
