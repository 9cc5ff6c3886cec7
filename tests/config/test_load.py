"""Recipes are read as their authors mean them, and whatever is wrong with one is said at once, in words, with its
place.

The expected values and messages are written out here by hand: they are the product's own contract with its users.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from meshtune.adapters.config import FreezeConfig, FullConfig, LoraOptions
from meshtune.config import data_recipe, section
from meshtune.config.fields import keys
from meshtune.config.foreign.keys import suggestions
from meshtune.config.load import load_recipe
from meshtune.config.problems import RecipeError
from meshtune.config.recipe import Recipe
from meshtune.config.section import section_fields
from meshtune.errors import UserError
from meshtune.objectives.config import SftConfig

SMALL = "model: some/model\ndata: a.json\noutput: runs/x\n"


@pytest.fixture
def write_recipe(tmp_path: pathlib.Path):
    def write(text: str) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def refusal(source, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load_recipe(source, overrides)
    return caught.value


def test_short_forms_stand_for_long_ones(write_recipe):
    short = load_recipe(write_recipe(SMALL))
    long = load_recipe(
        {
            "model": {"path": "some/model"},
            "data": {"train": [{"path": "a.json"}]},
            "output": "runs/x",
            "method": {"kind": "lora"},
        }
    )
    assert short == long
    assert load_recipe(write_recipe(SMALL + "method: full\n")).method == FullConfig()
    assert load_recipe(write_recipe(SMALL + "method: {rank: 4}\n")).method == LoraOptions(rank=4)
    several = load_recipe(write_recipe("model: m\noutput: o\ndata: [a.json, {path: b.json, cap: 3}]\n"))
    assert [(source.path, source.cap) for source in several.data.train] == [("a.json", None), ("b.json", 3)]


def test_a_saved_recipe_reads_back_as_itself(write_recipe):
    """model_dump writes every default out; none of them may then look like a choice that contradicts another."""
    for method in ("lora", "full", "{kind: freeze, last_layers: 2}"):
        for optimizer in ("adamw", "sgd", "adafactor", "lion"):
            recipe = load_recipe(write_recipe(SMALL + f"method: {method}\noptimizer: {{name: {optimizer}}}\n"))
            assert load_recipe(recipe.model_dump(mode="json")) == recipe


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("2E5", 2e5), ("1e+2", 100.0), (".5", 0.5), ("3", 3.0), ("0x10", 16.0), ("010", 10.0)],
)
def test_numbers_are_numbers(write_recipe, text, value):
    assert load_recipe(write_recipe(SMALL + f"optimizer: {{learning_rate: {text}}}\n")).optimizer.learning_rate == value
    assert load_recipe(write_recipe(SMALL), [f"optimizer.learning_rate={text}"]).optimizer.learning_rate == value


def test_words_stay_words_and_switches_still_switch(write_recipe):
    recipe = load_recipe(write_recipe(SMALL.replace("runs/x", "no")))
    assert recipe.output == "no"
    for word, packing in (("off", False), ("no", False), ("false", False), ("on", True), ("yes", True)):
        assert load_recipe(write_recipe(SMALL), [f"data.packing={word}"]).data.packing is packing
    assert load_recipe(write_recipe(SMALL.replace("some/model", "2024-01-01"))).model.path == "2024-01-01"
    assert load_recipe(write_recipe(SMALL.replace("some/model", "12:30"))).model.path == "12:30"


def test_overrides_replace_what_stands_at_their_key(write_recipe):
    path = write_recipe(SMALL + "method: {rank: 4, alpha: 8}\n")
    recipe = load_recipe(
        path,
        [
            "model=other/model",
            "model.revision=main",
            "method.rank=16",
            "method.targets=[q_proj, v_proj]",
            "data.train.0.cap=10",
            "data.train.1.path=b.json",
            "data.train.1.columns.prompt=question",
            "data.validation=0.1",
            "data.system='Be kind: always.'",
            "optimizer.max_grad_norm=null",
            "train.steps=",
            "eval.every=50",
        ],
    )
    assert (recipe.model.path, recipe.model.revision) == ("other/model", "main")
    assert recipe.method == LoraOptions(rank=16, alpha=8, targets=("q_proj", "v_proj"))
    assert [(source.path, source.cap) for source in recipe.data.train] == [("a.json", 10), ("b.json", None)]
    assert recipe.data.train[1].columns == {"prompt": "question"}
    assert recipe.data.validation == 0.1
    assert recipe.data.system == "Be kind: always."
    assert recipe.optimizer.max_grad_norm is None
    assert recipe.train.steps is None
    assert recipe.eval.every == 50


def test_a_method_override_replaces_the_whole_method(write_recipe):
    path = write_recipe(SMALL + "method: {rank: 4, alpha: 8}\n")
    assert load_recipe(path, ["method=full"]).method == FullConfig()
    assert load_recipe(path, ["method={kind: freeze, last_layers: 1}"]).method == FreezeConfig(last_layers=1)


def test_later_overrides_win_and_the_source_is_left_alone():
    raw = {"model": {"path": "m"}, "data": {"train": ["a.json"]}, "output": "o"}
    recipe = load_recipe(raw, ["seed=1", "seed=2", "data.train.0.cap=1", "data.train=c.json"])
    assert recipe.seed == 2
    assert [(source.path, source.cap) for source in recipe.data.train] == [("c.json", None)]
    assert raw == {"model": {"path": "m"}, "data": {"train": ["a.json"]}, "output": "o"}


def test_overrides_alone_make_a_recipe():
    assert load_recipe(None, ["model=m", "data=a.json", "output=o"]).model.path == "m"
    assert load_recipe(load_recipe(None, ["model=m", "data=a.json", "output=o"]), ["seed=3"]).seed == 3


def test_paths_stay_as_written_and_home_is_found(write_recipe, monkeypatch):
    """Relative paths count from the current directory, not from the recipe's."""
    monkeypatch.setenv("HOME", "/home/someone")
    recipe = load_recipe(write_recipe(SMALL), ["output=~/runs", "data.train.0.path=../data/a.json"])
    assert recipe.output == "/home/someone/runs"
    assert recipe.data.train[0].path == "../data/a.json"


PATHS = {
    "output": "output",
    "model": "model.path",
    "model.tokenizer": "model.tokenizer",
    "model.chat_template": "model.chat_template",
    "model.adapter": "model.adapter",
    "model.merge_adapters.0": "model.merge_adapters.0",
    "data.train": "data.train.0.path",
    "data.validation": "data.validation.0.path",
    "data.registry": "data.registry",
    "vision.media_dir": "vision.media_dir",
    "stage.reference": "stage.reference",
    "evaluate.tasks.mmlu": "evaluate.tasks.mmlu",
    "rewards.0.model": "rewards.0.model",
    "rewards.0.json_schema": "rewards.0.json_schema",
}


def test_the_list_of_paths_has_every_key_that_is_one():
    sources = set(pathlib.Path(section.__file__).parent.glob("*.py"))
    sources -= {pathlib.Path(data_recipe.__file__)}  # tests/synth/test_data_recipe.py has its list
    declared = {name for file in sources for name in re.findall(r"^ +(\w+): [^=]*PathText", file.read_text(), re.M)}
    assert declared
    assert declared <= {step for path in PATHS.values() for step in path.split(".")}


@pytest.mark.parametrize("key", PATHS)
def test_home_and_environment_variables_are_put_into_every_path(write_recipe, monkeypatch, tmp_path, key):
    """In a file, where no shell does it, and in an override in single quotes."""
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("WHERE", str(tmp_path))
    monkeypatch.delenv("UNSET", raising=False)
    path = PATHS[key].split(".")
    for text, expected in {
        "${WHERE}/x": f"{tmp_path}/x",
        "$WHERE/x": f"{tmp_path}/x",
        "~/x": "/home/someone/x",
    }.items():
        raw: dict = {"model": {"path": "m", "merge_adapters": []}, "data": {"train": "a"}, "output": "o"}
        raw |= {"stage": "dpo"} if key.startswith("stage") else {}
        if key.startswith("rewards"):
            raw |= {"stage": "grpo", "rollout": {"max_tokens": 8}, "rewards": [{path[-1]: "x"}]}
        value: object = load_recipe(raw, [f"{key}={text}"]).model_dump()
        for step in path:
            value = value[int(step)] if isinstance(value, list) else value[step]
        assert value == expected
        with pytest.raises(UserError) as caught:
            load_recipe(raw, [f"{key}=${{UNSET}}/x"])
        assert "names the environment variable UNSET, which is not set: set it" in caught.value.what
        monkeypatch.setenv("UNSET", "now")
        load_recipe(raw, [f"{key}=${{UNSET}}/x"])  # the fix that is offered
        monkeypatch.delenv("UNSET")


def test_a_variable_in_a_path_beside_the_recipe_and_a_dollar_in_a_name(tmp_path, monkeypatch):
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "a.json").write_text("[]")
    (tmp_path / "beside" / "r.yaml").write_text("model: m\noutput: o\ndata: ${NAME}.json\n")
    (tmp_path / "cost$x.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NAME", "a")
    assert load_recipe("beside/r.yaml", notify=lambda _: None).data.train[0].path == "beside/a.json"
    assert load_recipe("beside/r.yaml", ["data=cost$x.json"]).data.train[0].path == "cost$x.json"


def test_merge_keys_and_anchors_work(write_recipe):
    text = "model: m\noutput: o\ndata:\n  train: [{<<: &x {path: a.json, cap: 3}, cap: 4}, {<<: *x, path: b.json}]\n"
    recipe = load_recipe(write_recipe(text))
    assert [(source.path, source.cap) for source in recipe.data.train] == [("a.json", 4), ("b.json", 3)]


# One mistake each: what the message says, and where it says it is.
@pytest.mark.parametrize(
    ("addition", "message", "line"),
    [
        ("method: {rank: 0}\n", "method.rank is 0: it must be a whole number above 0", 4),
        ("method:\n  rank: -8\n", "method.rank is -8: it must be a whole number above 0", 5),
        ("method: {rank: true}\n", "method.rank is true: it must be a whole number above 0", 4),
        ("method: {rank: eight}\n", "method.rank is 'eight': it must be a whole number above 0", 4),
        (
            "method: {rnk: 8}\n",
            "method.rnk is not a key; did you mean 'rank'? method takes kind, adapter, rank, alpha,",
            4,
        ),
        (
            "method: lorra\n",
            "method is 'lorra': it must be one of lora, full, freeze, llama_pro; did you mean 'lora'?",
            4,
        ),
        ("method: {kind: full, rank: 8}\n", "method.rank does not belong to method full, which takes kind", 4),
        (
            "method: freeze\n",
            "method: freeze without last_layers, first_layers or modules trains nothing: give",
            4,
        ),
        (
            "optimizer: {name: adam}\n",
            "optimizer.name is 'adam': it must be one of adamw, adamw8bit, adam_mini, muon, galore, apollo, badam, "
            "adafactor, lion, sgd, schedule_free, prodigy, sophia; did you mean 'adamw'?",
            4,
        ),
        ("optimizer: {learning_rate: 0}\n", "optimizer.learning_rate is 0: it must be a number above 0 or null", 4),
        (
            "optimizer: {learning_rate: .nan}\n",
            "optimizer.learning_rate is nan: it must be a number above 0 or null",
            4,
        ),
        (
            "optimizer: {momentum: 0.9}\n",
            "optimizer: momentum is read by sgd and muon alone, and adamw was chosen",
            4,
        ),
        (
            "optimizer: {warmup_steps: 5, warmup_ratio: 0.1}\n",
            "optimizer: give warmup_ratio or warmup_steps, not both",
            4,
        ),
        ("learning_rate: 1\n", "learning_rate is not a key; did you mean 'optimizer.learning_rate'? a recipe takes", 4),
        ("lora_rank: 1\n", "lora_rank is not a key; did you mean 'method.rank'?", 4),
        ("seed: -1\n", "seed is -1: it must be a whole number of at least 0 and below 2147483648", 4),
        ("sample: {every: 5}\n", "the recipe: sample.every needs sample.prompts: there is nothing to continue", 4),
        ("sample: {prompts: [1]}\n", "sample.prompts.0 is 1: it must be text", 4),
        ("eval: {every: weekly}\n", "eval.every is 'weekly': it must be a whole number above 0, epoch or null", 4),
        ("eval: {early_stopping: 2}\n", "the recipe: eval.early_stopping needs validation data", 4),
        ("log: {trackers: [wand]}\n", "log.trackers.0 is 'wand': it must be one of tensorboard, wandb,", 4),
        (
            "train: {epochs: 1, steps: 2}\n",
            "train: give epochs or steps, not both: steps=null or epochs",
            4,
        ),
        (
            "train:\n  batch_size: 6\n  micro_batch: 4\n",
            "train: batch_size 6 does not divide by micro_batch 4",
            "5 and 6",
        ),
        (
            "model.chat_template: chatml\n",
            "model.chat_template is written so on the command line alone; in a recipe it is "
            "model: {chat_template: ...}",
            4,
        ),
        ("resume: true\noverwrite: true\n", "the recipe: give resume or overwrite, not both", "4 and 5"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_what_would_be_right(write_recipe, addition, message, line):
    path = write_recipe(SMALL + addition)
    error = refusal(path)
    assert error.what.startswith(message)
    assert error.where == f"{path}, line{'s' * isinstance(line, str)} {line}"
    says_it_all = re.search(r"did you mean|give |leave .* out|sample.prompts:|divide|was chosen", error.what)
    assert error.fix == (None if says_it_all else "change it; `meshtune schema --markdown` lists every key")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{train: a.json, max_length: -1}", "data.max_length is -1: it must be a whole number above 0"),
        ("{train: [{path: a, weigth: 2}]}", "data.train.0.weigth is not a key; did you mean 'weight'?"),
        ("{train: [{cap: 2}]}", "data.train.0: give exactly one of path and name"),
        ("{train: []}", "data.train is []: it must be a list of sources (paths or mappings)"),
        ("{train: [{name: alpaca}]}", "data: the source named 'alpaca' needs data.registry"),
        ("{train: a, validation: [{pth: b}]}", "data.validation.0.pth is not a key; did you mean 'path'?"),
        ("{train: a, validation: -1}", "data.validation: give a share between 0 and 1, or a whole number of records"),
        ("{train: a, validation: true}", "data.validation is true: it must be a number, a list of sources"),
        ("{train: a, train_on_prompt: true, last_turn_only: true}", "data: give train_on_prompt or last_turn_only"),
        ("{train: a, overlong: cut}", "data.overlong is 'cut': it must be one of truncate, turns, drop, error"),
    ],
)
def test_mistakes_in_the_data_section(write_recipe, data, message):
    error = refusal(write_recipe(f"model: m\noutput: o\ndata: {data}\n"))
    assert error.what.startswith(message)
    assert error.where is not None
    assert error.where.endswith("line 3")


def test_all_mistakes_are_listed_at_once_each_with_its_place(write_recipe):
    path = write_recipe("model: m\ndata: a.json\nmethod:\n  rank: -1\n  rnk: 3\n")
    error = refusal(path, "eval.every=weekly")
    assert error.what.splitlines() == [
        f"4 problems in {path}:",
        "  output is missing: Directory of the run: checkpoints, logs, plots, the final adapter or model"
        f"  [{path}, line 1]",
        f"  method.rank is -1: it must be a whole number above 0  [{path}, line 4]",
        f"  method.rnk is not a key; did you mean 'rank'? method takes {', '.join(section_fields(LoraOptions))}"
        f"  [{path}, line 5]",
        "  eval.every is 'weekly': it must be a whole number above 0, epoch or null  [command line, eval.every=weekly]",
    ]


@pytest.mark.parametrize(
    ("override", "message", "fix"),
    [
        (
            "seed",
            "'seed' is not an override",
            "write key=value or section.key=value, e.g. optimizer.learning_rate=1e-4",
        ),
        ("=3", "'=3' is not an override", "write key=value"),
        ("a..b=3", "'a..b=3' is not an override", "write key=value"),
        ("data.train.3.cap=1", "data.train is a list with entries 0 to 0, not '3'", "use a number from 0 to 1; 1 adds"),
        ("data.train.cap=1", "data.train is a list with entries 0 to 0, not 'cap'", "use a number from 0 to 1"),
        ("output.x=1", "output is 'runs/x': it has no parts to set", "write output=VALUE"),
        ("method.targets=[a", "this is not YAML: ", "correct that line"),
    ],
)
def test_a_bad_override_is_named(write_recipe, override, message, fix):
    error = refusal(write_recipe(SMALL), override)
    assert error.what.startswith(message)
    assert error.fix is not None
    assert error.fix.startswith(fix)
    assert error.where is not None
    assert error.where.startswith("command line")


def test_an_override_that_does_not_fit_is_blamed_not_the_file(write_recipe):
    error = refusal(write_recipe(SMALL + "method: {rank: 8}\n"), "method.rank=0")
    assert error.where == "command line, method.rank=0"


@pytest.mark.parametrize("doubled", [True, False])
def test_the_name_that_is_suggested_for_a_misspelt_key_is_the_one_that_was_meant(doubled):
    """For every key of a recipe, with one letter doubled, and with one left out; all in one recipe."""
    base = {"model": "m", "data": "d", "output": "o"}
    meant: dict[str, str] = {}
    for name in (entry.name for entry in keys()):
        head, _, last = name.rpartition(".")
        of_another_kind = head in ("method", "stage") and last not in section_fields(
            LoraOptions if head == "method" else SftConfig
        )
        if ".N." in name or name in base or len(last) < 5 or of_another_kind:
            continue
        misspelt = last[:2] + last[1:] if doubled else last[:2] + last[3:]
        meant[f"{head}.{misspelt}" if head else misspelt] = name
    error = refusal(base, *(f"{misspelt}=1" for misspelt in meant))
    assert isinstance(error, RecipeError)
    sentences = {path: sentence for path, sentence, _ in error.problems if path in meant}
    assert len(sentences) > 100
    wrong: list[str] = []
    for path, sentence in sentences.items():
        head, suggested = path.rpartition(".")[0], re.search(r"did you mean '([^']+)'", sentence)
        name = suggested and (suggested[1] if "." in suggested[1] or not head else f"{head}.{suggested[1]}")
        wrong += [sentence] if name != meant[path] else []
    assert wrong == []


def test_a_misspelt_section_on_the_command_line_is_located_there(write_recipe):
    for override in ("optimiser.learning_rate=1e-3", "optimizr.name=adam", "optimiser={name: adamw}"):
        error = refusal(write_recipe(SMALL), override)
        assert "did you mean 'optimizer'?" in error.what
        assert error.where == f"command line, {override}"
        assert error.fix is None, "the message has the right word"


@pytest.mark.parametrize(
    ("in_file", "override"),
    [
        ("train: {epochs: 3}", "train.steps=6"),
        ("train: {steps: 3}", "train.epochs=6"),
        ("train: {steps: 3}", "train={epochs: 6}"),
        ("optimizer: {warmup_ratio: 0.1}", "optimizer.warmup_steps=5"),
        ("optimizer: {warmup_steps: 5}", "optimizer.warmup_ratio=0.1"),
        ("data: {train: a, train_on_prompt: true}", "data.last_turn_only=true"),
        ("data: {train: a, last_turn_only: true}", "data.train_on_prompt=true"),
        ("resume: true", "overwrite=true"),
    ],
)
def test_a_key_on_the_command_line_wins_over_the_one_that_says_the_same_in_the_file(write_recipe, in_file, override):
    notices: list[str] = []
    text = SMALL if "data" not in in_file else SMALL.replace("data: a.json\n", "")
    recipe = load_recipe(write_recipe(f"{text}{in_file}\n"), [override], notify=notices.append)
    without = load_recipe(write_recipe(text if text == SMALL else SMALL), [override], notify=notices.append)
    assert recipe.model_dump(exclude={"data": {"train"}}) == without.model_dump(exclude={"data": {"train"}})
    if "={" not in override:  # which replaces the section
        (notice,) = notices
        assert notice.startswith(f"command line, {override}: ")
        assert notice.endswith(" in the recipe has no effect")


def test_other_names_of_float16_are_answered_by_ours(write_recipe):
    for word in ("fp16", "half"):
        error = refusal(write_recipe(SMALL), f"compute.precision={word}")
        assert "did you mean 'float16'?" in error.what
    for word in ("mixed", "bfloat16", "float16", "float32"):
        assert load_recipe(write_recipe(SMALL), [f"compute.precision={word}"]).compute.precision == word


def test_a_rule_between_keys_is_located_at_the_keys_it_names(write_recipe):
    """Not at line 1: the override, or the lines, that broke it."""
    path = write_recipe(SMALL + "method: full\nseed: 1\n")
    assert refusal(path, "sample.every=5").where == "command line, sample.every=5"
    assert refusal(path, "quantize=nf4").where == f"command line, quantize=nf4; {path}, line 4"
    assert refusal(path, "train.epochs=1", "train.steps=2").where == (
        "command line, train.epochs=1; command line, train.steps=2"
    )


@pytest.mark.parametrize("key", suggestions())
def test_a_key_of_another_tool_suggests_the_one_that_does_it_here(key):
    meant = suggestions()[key]
    sections = {name.rsplit(".", 1)[0] for name in (entry.name for entry in keys()) if "." in name}
    assert meant in {entry.name for entry in keys()} | sections
    assert f"did you mean '{meant}'?" in refusal({"model": "m", "data": "d", "output": "o", key: 1}).what


def test_lora_r_means_the_rank():
    """Not `loss`, which is nearest in spelling."""
    error = refusal({"model": "m", "data": "d", "output": "o", "method": {"lora_r": 16}})
    assert error.what.startswith("method.lora_r is not a key; did you mean 'method.rank'?")


def test_the_former_name_of_a_key_works_for_one_release_with_a_notice(write_recipe):
    notices: list[str] = []
    text = SMALL + "method: full\noptimizer: {fused: true, max_grad_norm: null}\n"
    assert load_recipe(write_recipe(text), notify=notices.append).optimizer.in_backward
    assert load_recipe(
        write_recipe(SMALL + "method: full\n"),
        ["optimizer.fused=true", "optimizer.max_grad_norm=null"],
        notify=notices.append,
    ).optimizer.in_backward
    notice = "the old name works in this release and will be refused by the next"
    assert notices == [f"optimizer.fused is now called optimizer.in_backward; {notice}"] * 2
    error = refusal(write_recipe(text.replace("fused: true", "fused: true, in_backward: false")))
    assert error.what == "optimizer.fused is the former name of optimizer.in_backward, and both are given"
    assert refusal(write_recipe(text.replace("fused: true", "fused: 3"))).what.startswith("optimizer.in_backward is 3:")


def test_relative_paths_of_a_recipe_are_found_beside_it(tmp_path, monkeypatch):
    """First from the current directory, then from the recipe's folder; those of the command line only from the
    former."""
    recipes, elsewhere = tmp_path / "recipes", tmp_path / "elsewhere"
    (recipes / "data").mkdir(parents=True)
    elsewhere.mkdir()
    (recipes / "data/a.json").touch()
    (recipes / "mine.jinja").touch()
    recipe = recipes / "recipe.yaml"
    recipe.write_text("model: {path: hub/model, chat_template: mine.jinja}\ndata: data/a.json\noutput: runs/x\n")
    monkeypatch.chdir(elsewhere)
    notices: list[str] = []
    loaded = load_recipe(recipe, notify=notices.append)
    assert loaded.data.train[0].path == str(recipes / "data/a.json")
    assert (loaded.model.path, loaded.model.chat_template) == ("hub/model", str(recipes / "mine.jinja"))
    assert loaded.output == "runs/x"
    assert notices == [
        "not found from the current directory, so taken from beside the recipe: model.chat_template is "
        f"{recipes / 'mine.jinja'}, data.train.0.path is {recipes / 'data/a.json'}"
    ]
    overridden = load_recipe(recipe, ["data=data/a.json"], notify=notices.append)
    assert overridden.data.train[0].path == "data/a.json"
    (elsewhere / "data").mkdir()
    (elsewhere / "data/a.json").touch()
    assert load_recipe(recipe, notify=notices.append).data.train[0].path == "data/a.json"


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        ("model: a\nmodel: b\n", "the key 'model' is given twice", "lines 1 and 2"),
        ("data:\n  train: a\n  train: b\n", "the key 'train' is given twice", "lines 2 and 3"),
        ("model: a\n  b: c\n", "this is not YAML: mapping values are not allowed here", "line 2, column 4"),
        ("model: a\n\tb: c\n", "this is not YAML: a tab is used for indentation", "line 2, column 1"),
        ("model: [a\n", "this is not YAML: ", "line 2, column 1"),
        ("model: 'a\n", "this is not YAML: ", "line 2, column 1"),
        ("model: !!python/object:os.system a\n", "this is not YAML: a recipe has no values of the type", "line 1"),
        ("model: *nope\n", "this is not YAML: found undefined alias", "line 1"),
        ("a: 1\n---\nb: 2\n", "this is not YAML: ", "line 2"),
        ("model: &x [*x]\n", "an alias refers to a value it is part of", "line 1"),
        ("1: a\n", "a key must be text", "line 1"),
        ("model: \x00\n", "this is not YAML: ", ""),
        ("", "the recipe is empty", ""),
        ("# nothing\n", "the recipe is empty", ""),
        ("- a\n", "a recipe is a mapping of keys to values, and this is a list", ""),
        ("just words\n", "a recipe is a mapping of keys to values, and this is text", ""),
    ],
)
def test_text_that_is_no_recipe_is_an_error_with_its_place(write_recipe, text, message, place):
    path = write_recipe(text)
    error = refusal(path)
    assert error.what.startswith(message)
    assert error.where is not None
    assert error.where.startswith(path)
    assert place in error.where


def test_a_file_that_is_not_there_suggests_the_nearest(tmp_path, write_recipe):
    write_recipe(SMALL)
    error = refusal(tmp_path / "recip.yaml")
    assert error.what == "there is no such recipe"
    assert error.fix == "did you mean 'recipe.yaml'? name a recipe in it: recipe.yaml"
    assert refusal(tmp_path / "nowhere/recipe.yaml").fix == f"the directory {tmp_path}/nowhere does not exist either"
    assert refusal(tmp_path).what == "the recipe is a directory, not a file"
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    assert refusal(tmp_path / "loop.yaml").fix == (
        "the symbolic link leads back to itself: name the file itself, or make the link again"
    )
    assert refusal(tmp_path / f"{'x' * 300}.yaml").fix == "give a path whose parts are below 256 bytes"
    (tmp_path / "latin.yaml").write_bytes("model: caf\xe9\n".encode("latin-1"))
    assert refusal(tmp_path / "latin.yaml").what == "the recipe is not UTF-8 text (byte 10)"


def test_recipes_are_frozen_and_refuse_unknown_keys_in_python_too():
    with pytest.raises(ValueError, match="rnk"):
        Recipe.model_validate({"model": "m", "data": "d", "output": "o", "method": {"rnk": 1}})
    recipe = load_recipe({"model": "m", "data": "d", "output": "o"})
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_recipes_are_read_without_jax():
    """It takes longer to import than a recipe to read, and options of the core's dataclasses need none of it."""
    code = "import meshtune.config.load, sys; print('jax' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_options_that_an_objective_refuses_together_are_named_with_their_lines(write_recipe):
    path = write_recipe(SMALL + "stage:\n  kind: dpo\n  loss: hinge\n  label_smoothing: 0.1\n")
    error = refusal(path)
    assert error.what == (
        "stage: label_smoothing has no meaning for loss hinge: use loss sigmoid (conservative) or robust, or leave "
        "label_smoothing out"
    )
    assert error.where == f"{path}, lines 6 and 7"


def test_a_removed_key_with_the_only_value_left_is_read_in_old_recipes():
    fields = {"model": "m", "data": "d.jsonl", "output": "o"}
    old = load_recipe(fields | {"evaluate": {"tasks": {"mmlu": "mmlu"}, "protocol": "lm-eval"}})
    assert old == load_recipe(fields | {"evaluate": {"tasks": {"mmlu": "mmlu"}}})
    with pytest.raises(UserError, match=r"protocol is not a key"):
        load_recipe(fields | {"evaluate": {"protocol": "llama-factory"}})
