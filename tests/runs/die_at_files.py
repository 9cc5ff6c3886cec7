"""Commands that die (SIGKILL) just before they touch a file. Not a test: see test_sudden_death.py.

python die_at_files.py FOLDER COUNT ARGUMENT... runs `meshtune ARGUMENT...` in copies of FOLDER/start: to its end in
FOLDER/whole, then in FOLDER/0, FOLDER/1 and so on, where it dies at another of the events at which it opens a file for
writing, renames, removes or makes one, and runs again to its end. FOLDER/N.json says how both ended. `prepare FILE` in
place of arguments tokenises the data of a recipe. `{folder}` in an argument is whole, 0, 1 and so on. Each run is a
fork of this process, which has imported everything.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import shutil
import signal
import sys
import traceback

EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")


def die_at(number: int, root: pathlib.Path) -> list[int]:
    """Dies at the event of this number in `root`; returns a list that holds the count so far."""
    count = [0]

    def hook(event: str, arguments: tuple) -> None:
        if event == "open":
            if not isinstance(arguments[2], int) or not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event not in EVENTS:
            return
        if isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.fsdecode(arguments[0])
            if os.path.isabs(path) and not path.startswith(str(root)):
                return
            count[0] += 1
            if count[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return count


def prepare(recipe: str) -> None:
    from meshtune.config.load import load_recipe
    from meshtune.data.prepare import prepare_data
    from meshtune.data.tokenizer import load_tokenizer

    loaded = load_recipe(recipe)
    prepared = prepare_data(loaded, load_tokenizer(loaded.model.path), cache="cache")
    store = prepared.train.store
    pathlib.Path("tokens.json").write_text(json.dumps([store[index].ids.tolist() for index in range(len(store))]))


def run(folder: pathlib.Path, arguments: list[str], death: int) -> tuple[int, str, int]:
    """The exit status, or minus the signal, of a fork; what it printed; and its number of events."""
    report = folder.with_suffix(".txt")
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        stream, code = io.StringIO(), 1
        count = die_at(death, folder)
        try:
            with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
                arguments = [argument.replace("{folder}", folder.name) for argument in arguments]
                if arguments[0] == "prepare":
                    prepare(arguments[1])
                    code = 0
                else:
                    from meshtune.cli.main import main

                    sys.argv = ["meshtune", *arguments]
                    code = main() or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            stream.write(traceback.format_exc())
        report.write_text(json.dumps([stream.getvalue(), count[0]]))
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    text, events = json.loads(report.read_text()) if code >= 0 else ("", 0)
    return code, text, events


def main() -> None:
    top, count, *arguments = sys.argv[1:]
    folder = pathlib.Path(top)
    import meshtune.cli.export
    import meshtune.data.prepare
    import meshtune.runs.export  # noqa: F401

    shutil.copytree(folder / "start", folder / "whole", symlinks=True)
    code, text, events = run(folder / "whole", arguments, 0)
    (folder / "whole.json").write_text(json.dumps({"code": code, "text": text, "events": events}))
    if code:
        return
    for number in range(int(count)):
        place = folder / str(number)
        shutil.copytree(folder / "start", place, symlinks=True)
        death = 1 + number * (events - 1) // max(1, int(count) - 1)
        first, _, _ = run(place, arguments, death)
        shutil.copytree(place, folder / f"{number}-dead", symlinks=True)
        second, text, _ = run(place, arguments, 0)
        fields = {"death": death, "first": first, "second": second, "text": text}
        (folder / f"{number}.json").write_text(json.dumps(fields))


if __name__ == "__main__":
    main()
