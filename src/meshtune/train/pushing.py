"""Pushes what a run makes to the hub: at every n-th save in the background, and when it has ended.

The repository is checked before training. From then on a push that fails is reported, and the run continues.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import pathlib
import shutil
import tempfile

from rich.console import Console
from rich.markup import escape

from meshtune import terminal
from meshtune.arrays.tree import Tree
from meshtune.config.recipe import Recipe
from meshtune.config.sections import HubSection
from meshtune.errors import UserError
from meshtune.hub.account import Repository, check_access, open_repository
from meshtune.hub.push import Package, push, run_base, send
from meshtune.mesh.processes import Job, raise_collectively
from meshtune.runs.output import BASE
from meshtune.train.assemble import LoadedRun
from meshtune.train.result.final import export_result
from meshtune.train.run_setup import PreparedRun

STAGING = ".hub"  # in the run: the result of the save that is being pushed


def check_hub(recipe: Recipe, job: Job) -> None:
    """Raises UserError, on every process, for what would stop the pushes of a run: token, permission, other files."""
    section = recipe.hub
    if section is None:
        return
    with raise_collectively(job, "hub: check"):
        if job.is_main_process:
            _open(section)


def push_result(recipe: Recipe, console: Console, job: Job) -> None:
    """Pushes the result of a run that has ended; what the hub refuses is reported, with the command to repeat it."""
    section = recipe.hub
    if section is None or not job.is_main_process:
        return
    output = pathlib.Path(recipe.output).expanduser()
    try:
        pushed = push(
            output,
            section.repository,
            merge=section.merge,
            base_model=section.base_model,
            public=section.public,
            overwrite=section.overwrite,
            report=lambda text: console.print(text, markup=False, soft_wrap=True),
        )
    except (UserError, OSError) as error:
        flags = [flag for flag in ("merge", "public", "overwrite") if getattr(section, flag)]
        base = ["--base-model", section.base_model] if section.base_model else []
        again = terminal.command("push", str(output), section.repository, *(f"--{flag}" for flag in flags), *base)
        _report(
            console,
            f"the result was not pushed: {_line(error) if isinstance(error, UserError) else error}\n  again: {again}",
        )
        return
    console.print(f"[bold]pushed[/] {pushed.url}", soft_wrap=True)


class Pusher:
    """Pushes the current result at every `every`-th save. The files are written while training waits and sent in a
    thread; a save during a push is left out."""

    def __init__(self, run: LoadedRun):
        assert run.recipe.hub is not None
        self._run, self._section = run, run.recipe.hub
        self._saves = 0
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="hub")
        self._sending: concurrent.futures.Future[str] | None = None

    def saved(self, trainable: Tree, step: int) -> None:
        """Called after each save by all processes of the job."""
        self._saves += 1
        interval = self._section.every
        if interval is None or self._saves % interval or step == self._run.total_steps:  # the end has a push of its own
            return
        busy = self._sending is not None and not self._sending.done()
        if self._run.job.broadcast("hub: busy", busy):
            self._say(f"not pushed after update {step}: the push before it is still being sent")
            return
        self._collect()
        try:
            path = self._write(trainable)
        except UserError as error:
            self._say(f"not pushed after update {step}: {_line(error)}")
            return
        if self._run.job.is_main_process:
            self._sending = self._pool.submit(self._send, path, step)

    def close(self) -> None:
        """Waits for a push under way, and removes the files that were written for it."""
        self._pool.shutdown(wait=True)
        self._collect()
        if self._run.job.is_main_process:
            shutil.rmtree(self._run.output / STAGING, ignore_errors=True)

    def _write(self, trainable: Tree) -> pathlib.Path:
        run = self._run
        staging = run.output / STAGING
        if run.job.is_main_process:
            staging.mkdir(exist_ok=True)
        return export_result(
            staging,
            dataclasses.replace(self._run.model, trainable=trainable),
            run.method,
            run.source,
            run.base,
            run.tokenizer,
            ends=run.ends,
            layout=run.layout,
            job=run.job,
        )

    def _send(self, path: pathlib.Path, step: int) -> str:
        """Sends a result; returns what to tell the user."""
        from huggingface_hub.utils import disable_progress_bars

        section, run = self._section, self._run
        disable_progress_bars()  # they would be drawn over the run's own
        try:
            base = run_base(run.output, section.base_model)
            scored = run.spec.scored
            package = Package(path.name, path, base, run.output, run.source, scored)
            with tempfile.TemporaryDirectory(dir=run.output / STAGING) as folder:
                message = f"After update {step} of {run.total_steps}"
                send(package, _open(section), pathlib.Path(folder), message=message, report=lambda text: None)
        except UserError as error:
            return f"[yellow]not pushed after update {step}: {escape(_line(error))}[/]"
        return f"[bold]pushed[/] the result after update {step} to {section.repository}"

    def _collect(self) -> None:
        if self._sending is not None:
            failure = self._sending.exception()
            text = self._sending.result() if failure is None else f"[yellow]the push failed: {escape(repr(failure))}[/]"
            self._run.console.print(text, soft_wrap=True)
            self._sending = None

    def _say(self, text: str) -> None:
        _report(self._run.console, text)


def _open(section: HubSection) -> Repository:
    token = check_access(section.repository)
    return open_repository(section.repository, token, public=section.public, overwrite=section.overwrite)


def check_base(run: PreparedRun) -> None:
    """Raises UserError where the adapter alone would be pushed of a run that changes its base."""
    section = run.recipe.hub
    if section is None:
        return
    adapters = run.method.adapters
    makes_base = adapters is not None and (adapters.changes_base or (run.output / BASE).is_dir())
    if makes_base and not section.merge:
        raise UserError(
            "this run makes a base of its own, which is not on the hub: its adapter alone would be of no use there",
            where="hub.merge",
            fix="hub.merge=true pushes the whole model at the end",
        )
    if section.every and section.merge:
        raise UserError(
            "hub.every pushes the result as it is by then, and hub.merge merges it at the end",
            where="hub.every",
            fix="leave one of the two out",
        )


def _line(error: UserError) -> str:
    return "; ".join(part for part in (error.what, error.fix) if part)


def _report(console: Console, text: str) -> None:
    console.print(text, style="yellow", markup=False, soft_wrap=True)
