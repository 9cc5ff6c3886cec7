"""Files written while training can be read by the programs that they are written for."""

import dataclasses
import io
import json
import sys
import types

import matplotlib.image
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

from meshtune.adapters.method import ParameterCounts
from meshtune.cache import cache_folder
from meshtune.data.store import cache_directory
from meshtune.errors import UserError
from meshtune.objectives.stages import STAGES
from meshtune.plan.compilers.find import compilers_folder
from meshtune.train.report import events, metrics_log
from meshtune.train.report.banner import Plan, show_plan
from meshtune.train.report.events import Evaluated, Sampled, Started, Stepped, Stopped, open_sinks
from meshtune.train.report.plot import LossPlot, SmoothedLoss, draw, figure_of, loss_label
from meshtune.train.report.progress import ProgressBar, log_console


def step_event(step: int, loss: float = 2.0) -> Stepped:
    return Stepped(step, step / 10, loss, 0.5, 1e-4, {"accuracy": 0.25}, 100, 60, 0.5, 2**30)


def evaluation_event(step: int, loss: float = 1.5) -> Evaluated:
    return Evaluated(step, step / 10, loss, {"accuracy": 0.5}, True, 0.1)


def write(output, events):
    with open_sinks([metrics_log.MetricsLog(output)]) as sinks:
        for event in events:
            sinks.emit(event)


def test_metrics_are_one_json_object_a_line(tmp_path):
    write(tmp_path, [step_event(1), evaluation_event(1), Sampled(1, "Hello\n", "wörld\n"), step_event(2)])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["step"]) for row in rows] == [("train", 1), ("eval", 1), ("train", 2)]
    assert rows[0]["tokens_per_second"] == 200
    assert rows[0]["accuracy"] == 0.25
    (sample,) = (json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines())
    assert sample.pop("crc32")
    assert sample == {"step": 1, "prompt": "Hello\n", "text": "wörld\n"}


def test_cutting_back_leaves_what_an_uninterrupted_run_had_then(tmp_path):
    """Also after a death in the middle of a line."""
    full, cut = tmp_path / "whole", tmp_path / "cut"
    full.mkdir()
    cut.mkdir()
    events = [Sampled(0, "p", "t"), *map(step_event, range(1, 5)), evaluation_event(4)]
    write(full, events)
    write(cut, [*events, step_event(5), Sampled(5, "p", "t"), step_event(6)])
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    metrics_log.cut_back(cut, 4)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (cut / name).read_bytes() == (full / name).read_bytes()
    metrics_log.cut_back(cut, None)
    assert metrics_log.read(cut / "metrics.jsonl") == []


def test_every_flipped_bit_of_metrics_loses_its_line_and_no_other(tmp_path):
    write(tmp_path, [*map(step_event, range(1, 4)), evaluation_event(3)])
    file = tmp_path / "metrics.jsonl"
    content, rows = file.read_bytes(), metrics_log.read(file)
    ends = [place for place, byte in enumerate(content) if byte == ord("\n")]
    for bit in range(8 * len(content)):
        place = bit // 8
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit % 8
        file.write_bytes(damaged)
        line = sum(end < place for end in ends)
        lost = {line, line + 1} if place in ends else {line}  # without its end a line runs into the next one
        assert metrics_log.read(file) == [row for number, row in enumerate(rows) if number not in lost], bit


def test_a_resume_says_what_metrics_lack(tmp_path):
    file = tmp_path / "metrics.jsonl"

    def notes_after(content: bytes | None) -> list[str]:
        write(tmp_path, [*map(step_event, range(1, 5)), evaluation_event(4)])
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        return metrics_log.cut_back(tmp_path, 4)

    write(tmp_path, [*map(step_event, range(1, 5)), evaluation_event(4)])
    full = file.read_bytes()
    lines = full.splitlines(keepends=True)
    assert notes_after(full) == []
    assert notes_after(full + b'{"kind": "train", "st') == [], "a killed process leaves an incomplete line"
    flipped = full.replace(b'"loss": 2.0', b'"loss": 3.0', 1)
    assert notes_after(flipped) == [
        "metrics.jsonl is damaged: 1 of its lines are not what was written, and are left out"
    ]
    assert file.read_bytes() == b"".join(lines[1:])
    cut = b"".join(lines[:2]) + lines[2][:20]
    assert notes_after(cut) == ["metrics.jsonl is damaged: it ends at update 2, and the checkpoint is of update 4"]
    assert notes_after(None) == ["metrics.jsonl is missing: what it held of earlier updates is lost"]
    assert metrics_log.cut_back(tmp_path, None) == []


def test_metrics_of_versions_without_checksums_are_read(tmp_path):
    rows = [
        metrics_log.train_row(step_event(1)),
        metrics_log.eval_row(evaluation_event(1)),
        metrics_log.train_row(step_event(2)),
    ]
    (tmp_path / "samples.jsonl").touch()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert metrics_log.read(tmp_path / "metrics.jsonl") == rows
    assert metrics_log.cut_back(tmp_path, 1) == []
    assert metrics_log.read(tmp_path / "metrics.jsonl") == rows[:2]


def test_lines_are_on_disk_at_once(tmp_path):
    log = metrics_log.MetricsLog(tmp_path)
    log.receive(step_event(1))
    assert len(metrics_log.read(tmp_path / "metrics.jsonl")) == 1
    log.close()


def test_the_plot_is_a_picture_of_both_curves(tmp_path):
    train = [(step, 3 * 0.99**step + 0.1 * np.sin(step)) for step in range(1, 300)]
    curve = SmoothedLoss(300, [loss for _, loss in train]).history
    draw(tmp_path / "a.png", train, curve, [(100, 1.5), (200, 1.0)], title="x")
    draw(tmp_path / "b.png", train, curve, [])
    both, single = (matplotlib.image.imread(tmp_path / name) for name in ("a.png", "b.png"))
    assert both.shape == single.shape == (630, 1120, 4)

    def orange(picture):
        r, g, b = picture[..., 0], picture[..., 1], picture[..., 2]
        return int(((r > 0.75) & (g < 0.5) & (b < 0.3)).sum())

    assert orange(both) > 500
    assert orange(single) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"], "no draft is left"


def test_the_legend_lies_off_the_curves_and_the_title_and_every_value_is_in_view():
    train = [(1, 9.0), *((step, 2.0 - 0.001 * step) for step in range(2, 50))]
    curve = SmoothedLoss(50, [loss for _, loss in train]).history
    title = "Meta-Llama-3.1-8B-Instruct, direct preference optimisation, lora on a 4-bit base"
    figure = figure_of(train, curve, [(20, 1.5), (49, 1.2)], title=title, label=loss_label("pair"))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    legend = axes.get_legend().get_window_extent(canvas.get_renderer())
    assert not legend.overlaps(axes.get_window_extent())
    assert not legend.overlaps(axes._left_title.get_window_extent())
    low, high = axes.get_ylim()
    assert low < 1.2, "the last validation loss is inside"
    assert high > 9.0, "the first loss is inside"
    assert axes.get_ylabel() == "loss per pair"
    assert axes.get_title(loc="left") == title


def test_the_plot_goes_on_after_a_resume(tmp_path):
    write(tmp_path, [*map(step_event, range(1, 4)), evaluation_event(3)])
    loss = SmoothedLoss(4, [2.0, 2.0, 2.0])
    plot = LossPlot(tmp_path, loss, interval=1, title="x", history=metrics_log.read(tmp_path / "metrics.jsonl"))
    loss.receive(step_event(4))
    plot.receive(step_event(4))
    assert plot._curve == [2.0] * 4
    assert plot._train == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 2.0)]
    assert plot._validation == [(3, 1.5)]
    plot.close()
    assert (tmp_path / "loss.png").stat().st_size > 5000


@pytest.mark.parametrize(("losses", "smoothed"), [([np.nan, 4.0, np.inf, 4.0], [4.0] * 3), ([np.nan, np.nan], [])])
def test_losses_of_updates_that_were_skipped_leave_curve_and_plot_alone(tmp_path, losses, smoothed):
    """Overflows in float16 make the loss of one update, or of the first updates, not a number."""
    curve = SmoothedLoss(100, losses).history
    assert [loss for loss in curve if np.isfinite(loss)] == smoothed
    draw(tmp_path / "a.png", list(enumerate(losses)), curve, [(1, np.nan), (2, losses[-1])])
    assert (tmp_path / "a.png").exists()


def test_smoothing_starts_at_the_first_loss_keeps_a_constant_and_quiets_noise():
    assert SmoothedLoss(100, np.full(100, 2.0)).history == pytest.approx(np.full(100, 2.0))
    noise = np.random.default_rng(0).normal(size=2000)
    assert np.std(SmoothedLoss(2000, noise).history[200:]) < 0.2
    assert SmoothedLoss(2000, [7.0]).value == 7.0


def test_smoothing_does_not_lag_behind_the_fall_at_the_start():
    """With its full span of 50 from the start, the mean would be 0.8 above this loss after 20 updates."""
    falling = 2.0 + 3.0 * 0.8 ** np.arange(1000)
    curve = np.array(SmoothedLoss(1000, falling).history)
    assert curve[0] == falling[0]
    assert curve[20] - falling[20] < 0.25


def test_what_is_printed_is_kept_without_colours_and_bars(tmp_path):
    """On a terminal the bar is drawn over itself; the log has lines in its place, and the error that ended the run."""
    console = Console(force_terminal=True, width=60, file=io.StringIO())
    loss, path = SmoothedLoss(2), "/a/path/that/is/longer/than/the/terminal/is/wide/and/must/not/be/cut/anywhere"

    def run():
        with log_console(console) as log:
            console.print("[bold]before[/] the output is known")
            log.open(tmp_path)
            with open_sinks([loss, ProgressBar(console, loss, log)]) as sinks:
                for event in (Started(0, 2), step_event(1), evaluation_event(1), step_event(2), Stopped(2)):
                    sinks.emit(event)
            console.print(path)
            raise UserError("the disk is full")

    with pytest.raises(UserError):
        run()
    lines = (tmp_path / "console.log").read_text().splitlines()
    assert [line.rstrip() for line in lines if line.strip()] == [
        "before the output is known",
        "update 1/2  smoothed loss 2.0000  200 tok/s  host 1.0 GiB",
        "validation after 1: loss 1.5000, accuracy 50.0%  best so far",
        "update 2/2  smoothed loss 2.0000  200 tok/s  host 1.0 GiB",
        path,
        "UserError: the disk is full",
    ]


def test_tensorboard_reads_what_is_written_and_neither_tensorflow_nor_torch_is_imported(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_sinks([events.TensorBoard(tmp_path, "p", {}, 0)]) as sinks:
        for step in range(1, 4):
            sinks.emit(step_event(step, loss=float(step)))
        sinks.emit(evaluation_event(3))
    with open_sinks([events.TensorBoard(tmp_path, "p", {}, 2)]) as sinks:  # resumed after update 2
        sinks.emit(step_event(3, loss=30.0))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert {"train/loss", "train/learning_rate", "train/grad_norm", "eval/loss"} <= set(board.Tags()["scalars"])
    assert [(scalar.step, scalar.value) for scalar in board.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_tracker_that_is_not_installed_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install '\.\[wandb\]'"):
        events.check_installed(["tensorboard", "wandb"])
    assert set(events.NEEDS) == set(events.TRACKERS)


def test_a_resumed_run_is_the_same_run_for_wandb(tmp_path, monkeypatch):
    calls = []
    module = types.ModuleType("wandb")

    class Run:
        def log(self, values, step):
            calls.append((step, values))

        def finish(self):
            calls.append("finish")

    module.init = lambda **options: calls.append(options) or Run()
    monkeypatch.setitem(sys.modules, "wandb", module)
    for start in (0, 5):
        with open_sinks([events.Wandb(tmp_path, "p", {"seed": 1}, start)]) as sinks:
            sinks.emit(step_event(start + 1))
    first, _, _, second, (step, values), last = calls
    assert first["id"] == second["id"]
    assert first["config"] == {"seed": 1}
    assert (step, values["train/loss"], last) == (6, 2.0, "finish")


@pytest.mark.parametrize("terminal", [True, False])
def test_the_screen_of_dpo_shows_accuracy_and_margin(terminal):
    console = Console(force_terminal=terminal, width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    loss = SmoothedLoss(2)
    metrics = [{"rewards/accuracies": share, "rewards/margins": share / 2} for share in (0.25, 0.75)]
    steps = [dataclasses.replace(step_event(step + 1), metrics=values) for step, values in enumerate(metrics)]
    evaluation = dataclasses.replace(evaluation_event(1), metrics=metrics[1])
    with open_sinks([loss, ProgressBar(console, loss, headline=STAGES["dpo"].headline)]) as sinks:
        for event in (Started(0, 2), steps[0], evaluation, steps[1], Stopped(2)):
            sinks.emit(event)
    text = console.export_text()
    assert "accuracy 75.0%, margin 0.375" in text  # of the evaluation
    assert "accuracy 50.0%" in text  # of both updates
    assert "margin 0.250" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_the_screen_shows_loss_speed_memory_evaluation_and_sample(terminal):
    console = Console(force_terminal=terminal, width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    loss = SmoothedLoss(2)
    with open_sinks([loss, ProgressBar(console, loss)]) as sinks:
        for event in (
            Started(0, 2),
            step_event(1),
            evaluation_event(1),
            Sampled(1, "prompt", "[bold]text"),
            step_event(2),
        ):
            sinks.emit(event)
        sinks.emit(Stopped(2))
    text = console.export_text()
    for part in ("loss 1.5000", "accuracy 50.0%", "best so far", "prompt", "[bold]text"):
        assert part in text
    if not terminal:
        assert "update 2/2  smoothed loss 2.0000  200 tok/s  host 1.0 GiB" in text


def test_the_banner_counts_the_base_without_adapters_and_never_cuts_a_path():
    path = "/models/" + "a-rather-long-name/" * 6 + "model"
    plan = Plan(
        path,
        "llama",
        ParameterCounts(adapters=10_000, full=0, frozen=1_000_000),
        "lora",
        1,
        1,
        1,
        8,
        8.0,
        "3 documents",
        "sgd",
        0,
    )
    console = Console(width=80, record=True, file=io.StringIO())
    show_plan(console, plan, [])
    text = "".join(console.export_text().split())
    assert path in text
    assert "1Mparameters" in text
    assert "10ktrainable,0.99%" in text


def test_one_variable_moves_everything_that_is_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path))
    monkeypatch.delenv("MESHTUNE_COMPILERS", raising=False)
    assert cache_directory() == tmp_path / "tokens"
    assert compilers_folder() == tmp_path / "compilers"
    assert cache_folder() == tmp_path
