"""`/metrics`: what a server has done and is doing, in Prometheus' text format."""

from __future__ import annotations

from meshtune.serve.models import Models


def metrics_text(models: Models) -> str:
    """Requests running and waiting, and tokens generated since the start, by model."""
    lines = []
    for name, kind, meaning, value in (
        ("requests_running", "gauge", "Requests that have a row of the batch.", lambda s: s.running),
        ("requests_waiting", "gauge", "Requests in the queue.", lambda s: s.waiting),
        ("generated_tokens_total", "counter", "Tokens generated since the start.", lambda s: s.generated),
    ):
        lines += [f"# HELP meshtune_{name} {meaning}", f"# TYPE meshtune_{name} {kind}"]
        lines += [f'meshtune_{name}{{model="{_escape_label(s.id)}"}} {value(s)}' for s in models]
    return "\n".join(lines) + "\n"


def _escape_label(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
