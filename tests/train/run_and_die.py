"""A training run in a separate process that kills itself (SIGKILL) at a named point. Not a test: see test_resume.py.

python run_and_die.py RECIPE.json WHEN [SCRIPT], where SCRIPT is run before, and WHEN is: never; save:N, while it is
writing the checkpoint of update N; step:N, after update N is reported; generate:N, in the middle of generating rollout
N; rollout:N, when rollout N is on disk and no update is made of it; delete:N, when the checkpoint of update N is about
to be thinned out; time:S, after S seconds; int:N or term:N, which send SIGINT or SIGTERM after update N instead.
"""

import inspect
import json
import os
import pathlib
import runpy
import signal
import sys
import threading
import time


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_when_seen(directory: pathlib.Path, pattern: str) -> None:
    def watch():
        while True:
            if any(directory.glob(pattern)):
                die()
            time.sleep(0.0005)

    threading.Thread(target=watch, daemon=True).start()


def arrange(when: str, output: pathlib.Path) -> None:
    kind, _, number = when.partition(":")
    from meshtune.train.report.metrics_log import MetricsLog

    receive = MetricsLog.receive

    def after(action):
        def wrapper(self, event):
            receive(self, event)
            if type(event).__name__ == "Stepped" and event.step == int(number):
                action()

        MetricsLog.receive = wrapper

    match kind:
        case "never":
            pass
        case "save":
            # Arrays are on their way (their directory exists), the checkpoint does not have its name yet.
            die_when_seen(output / "checkpoints", f"{number}.orbax-checkpoint-tmp*/*")
        case "step":
            after(die)
        case "generate":
            import meshtune.rollout.source as source

            generate = source.generate

            def half_way(*arguments, **options):
                call = inspect.signature(generate).bind(*arguments, **options)
                if source_of_number.pop("number", None) == int(number):
                    call.arguments["progress"] = lambda done, total: die()
                return generate(*call.args, **call.kwargs)

            source_of_number: dict[str, int] = {}
            make = source.RolloutSource.generate

            def remember(self, rollout, params):
                source_of_number["number"] = rollout
                return make(self, rollout, params)

            source.generate, source.RolloutSource.generate = half_way, remember
        case "rollout":
            import meshtune.rollout.source as source

            write = source.write_rollout

            def write_and_die(folder, rollout, content):
                write(folder, rollout, content)
                if rollout == int(number):
                    die()

            source.write_rollout = write_and_die
        case "delete":
            import shutil

            rmtree = shutil.rmtree

            def half(path, *arguments, **options):
                if pathlib.Path(path).name == number:
                    next(iter(pathlib.Path(path).rglob("_METADATA"))).unlink()
                    die()
                rmtree(path, *arguments, **options)

            shutil.rmtree = half
        case "time":
            timer = threading.Timer(float(number), die)
            timer.daemon = True
            timer.start()
        case "int":
            after(lambda: os.kill(os.getpid(), signal.SIGINT))
        case "term":
            after(lambda: os.kill(os.getpid(), signal.SIGTERM))
        case _:
            raise SystemExit(f"unknown point: {when}")


def main() -> None:
    sys.modules["torch"] = None  # Training needs no torch, and starts sooner without it.
    fields, when = json.loads(pathlib.Path(sys.argv[1]).read_text()), sys.argv[2]
    if len(sys.argv) > 3:
        runpy.run_path(sys.argv[3], run_name="__main__")
    arrange(when, pathlib.Path(fields["output"]))
    from meshtune.config.load import load_recipe
    from meshtune.train.run import train

    result = train(load_recipe(fields))
    sys.exit(128 + result.interrupted if result.interrupted else 0)


if __name__ == "__main__":
    main()
