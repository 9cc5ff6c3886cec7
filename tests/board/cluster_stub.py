"""A small API server of Kubernetes over real HTTP: it holds objects, checks them by the definitions of JobSet and
Kubeflow Trainer, and refuses what a test tells it to."""

from __future__ import annotations

import contextlib
import http.server
import json
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

from test_kubernetes import problems, schema

TOKEN = "token-of-the-test"
OBJECT = re.compile(r"(/api/v1|/apis/[^/]+/[^/]+)/namespaces/([^/]+)/([a-z]+)(?:/([^/]+))?(/log)?")


class ClusterStub:
    """`objects` by (namespace, plural, name); `forbidden` and `missing` are plurals; `requests` are (method, path)."""

    def __init__(self):
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.forbidden: set[str] = set()
        self.missing: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.address = ""
        self.lock = threading.Lock()

    def of(self, plural: str) -> list[dict[str, Any]]:
        """The objects of a kind."""
        return [entry for (_, kind, _), entry in self.objects.items() if kind == plural]

    def add(self, namespace: str, plural: str, name: str, **fields: Any) -> dict[str, Any]:
        """Adds an object, as a controller does."""
        metadata = {"name": name, "namespace": namespace, **fields.pop("metadata", {})}
        self.objects[namespace, plural, name] = entry = {"metadata": metadata, **fields}
        return entry


def respond(stub: ClusterStub, method: str, path: str, body: Any) -> tuple[int, Any]:
    """(status, answer) of a request."""
    address = urllib.parse.urlsplit(path)
    query = dict(urllib.parse.parse_qsl(address.query))
    match = OBJECT.fullmatch(address.path)
    if match is None:
        return 404, "the server could not find the requested resource"
    _, namespace, plural, name, log = match.groups()
    if plural in stub.missing:
        return 404, "the server could not find the requested resource"
    if plural in stub.forbidden:
        return 403, f'{plural} is forbidden: User "ann" cannot do this in the namespace "{namespace}"'
    key = (namespace, plural, name or "")
    if log:
        lines = stub.logs.get(name or "")
        return (200, lines) if lines is not None else (400, "container is waiting to start")
    if method == "POST":
        key = (namespace, plural, body["metadata"]["name"])
        wrong = problems(schema(body["kind"]), body) if plural in ("jobsets", "trainjobs", "trainingruntimes") else []
        if (
            plural == "trainjobs"
            and (namespace, "trainingruntimes", body["spec"]["runtimeRef"]["name"]) not in stub.objects
        ):
            wrong.append("the runtime does not exist")
        if wrong:
            return 422, "; ".join(wrong)
        if key in stub.objects:
            return 409, "it already exists"
        body["metadata"] |= {"uid": f"uid-{len(stub.objects)}", "namespace": namespace}
        stub.objects[key] = body
        return 201, body
    if name is None:
        labels = dict(part.partition("=")[::2] for part in query.get("labelSelector", "").split(",") if part)
        selected = {
            key: entry
            for key, entry in stub.objects.items()
            if key[:2] == (namespace, plural)
            and all(
                label in entry["metadata"].get("labels", {}) and value in ("", entry["metadata"]["labels"][label])
                for label, value in labels.items()
            )
        }
        if method == "DELETE":
            for key in selected:
                del stub.objects[key]
        return 200, {"items": list(selected.values()), "metadata": {}}
    if key not in stub.objects:
        return 404, f"{plural} {name!r} not selected"
    if method == "PATCH":
        stub.objects[key]["metadata"] |= body["metadata"]
    if method == "DELETE":
        uid = stub.objects.pop(key)["metadata"].get("uid")
        owned = [
            key
            for key, entry in stub.objects.items()
            if uid in [owner["uid"] for owner in entry["metadata"].get("ownerReferences", ())]
        ]
        for entry in owned:  # as the garbage collector does
            del stub.objects[entry]
        return 200, {"kind": "Status", "status": "Success"}
    return 200, stub.objects[key]


@contextlib.contextmanager
def cluster_stub() -> Iterator[ClusterStub]:
    """Serves a stub until the context ends."""
    stub = ClusterStub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing."""

        def answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with stub.lock:
                stub.requests.append((self.command, self.path))
                code, value = 401, "Unauthorized"
                if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                    code, value = respond(stub, self.command, self.path, json.loads(content or b"null"))
            if code >= 400:
                value = {"kind": "Status", "status": "Failure", "message": value, "code": code}
            text = value if isinstance(value, str) else json.dumps(value)
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if isinstance(value, str) else "application/json")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_PATCH = do_DELETE = answer

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()


def write_kubeconfig(file: pathlib.Path, address: str, token: str = TOKEN) -> pathlib.Path:
    """Writes a kubeconfig whose context is in the namespace `team`."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        "current-context": "x",
    }
    file.write_text(json.dumps(config))
    return file
