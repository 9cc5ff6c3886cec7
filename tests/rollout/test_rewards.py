"""Rewards: user functions that behave and misbehave, ready kinds beside trl, servers and confined code."""

from __future__ import annotations

import http.server
import importlib.util
import json
import math
import pathlib
import re
import textwrap
import threading
import time
from typing import ClassVar

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError
from trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward

from meshtune.config.load import load_recipe
from meshtune.config.rewards import FunctionReward, RewardSection, rewards_written_out
from meshtune.config.sections import DataSection, SourceSection
from meshtune.data.conversation import Conversation, Prompt
from meshtune.data.documents import load_documents
from meshtune.data.sources import DataSource, open_source
from meshtune.errors import UserError
from meshtune.rollout.code_sandbox import Limits, passed_share
from meshtune.rollout.reward_functions import Completions
from meshtune.rollout.rewards import Rewards, check_rewards

FUNCTIONS = """
import asyncio, math, os, random, re, time
import numpy as np
from neighbour import BONUS

class Judge:
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0.4)
        return [0.25] * len(completions)

judge = Judge()

def length(completions): return [len(c) for c in completions]
def everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, environments, **columns):
    assert environments is None and sorted(columns) == ["answer", "finish_reasons", "level"]
    log_extra("seen", [p.upper() for p in prompts])
    log_metric("share", np.float32(0.5))
    return [BONUS + trainer_state.global_step + len(ids) for ids in completion_ids]
async def slow(completions, answer, level=None):
    await asyncio.sleep(0.4)
    return [a == c for a, c in zip(answer, completions)]
def kinds_of_numbers(completions): return [True, np.float32(0.5), None, np.int64(3), np.array(2.0)][: len(completions)]
def few(completions): return [1.0]
def text(completions): return ["good"] * len(completions)
def nan(completions): return [1.0, math.nan, 1.0]
def infinite(completions): return [1.0, 1.0, math.inf]
def one_number(completions): return 1.0
def nothing(completions): return None
def raising(completions):
    return [1 / (len(c) - 1) for c in completions]
def needs(completions, solution): return [0.0] * len(completions)
def sleeping(completions): time.sleep(60)
def looping(completions):
    while True:
        pass
def backtracking(completions):
    return [re.match("(a+)+$", "a" * 40 + "b") for c in completions]
async def sleeping_async(completions): await asyncio.sleep(60)
async def blocking_async(completions): time.sleep(60)
def leaving(completions): raise SystemExit(3)
def dying(completions): os._exit(7)
def logs_too_few(completions, log_extra): log_extra("x", [1])
def with_environments(completions, environments): return [e.pop() for e in environments]
def hanging_environments(completions, environments): time.sleep(60)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "neighbour.py").write_text("BONUS = 100\n")
    (folder / "reward.py").write_text(FUNCTIONS)
    return folder / "reward.py"


def sections(*rewards):
    return TypeAdapter(list[RewardSection]).validate_python(rewards_written_out(list(rewards)))


def completions(*texts: str, **columns) -> Completions:
    count = len(texts)
    return Completions(
        prompts=[f"prompt {number}" for number in range(count)],
        completions=list(texts),
        completion_ids=[list(range(len(text))) for text in texts],
        columns={name: list(values) for name, values in columns.items()},
        origins=[f"data.jsonl, record {number}" for number in range(count)],
        step=7,
    )


def chats(*texts: str, **columns) -> Completions:
    plain = completions(*texts, **columns)
    prompts = [[{"role": "user", "content": prompt}] for prompt in plain.prompts]
    answers = [[{"role": "assistant", "content": text}] for text in texts]
    return Completions(prompts, answers, plain.completion_ids, plain.columns, plain.origins)


def score(batch: Completions, *rewards, **options) -> np.ndarray:
    with Rewards(sections(*rewards), **options) as ready:
        return ready.score(batch).values


def test_functions_get_the_arguments_of_trl_and_async_ones_run_together(file):
    batch = completions("4", "abc", "", answer=["4", "5", ""], level=[1, None, {"a": [2]}])
    with Rewards(
        sections(
            f"{file}:length",
            {"function": f"{file}:everything", "weight": 0.5},
            f"{file}:slow",
            f"{file}:judge",
            {"function": f"{file}:length", "name": "again"},
            f"{file}:kinds_of_numbers",
        )
    ) as rewards:
        assert rewards.names == ["length", "everything", "slow", "judge", "again", "kinds_of_numbers"]
        assert rewards.weights.tolist() == [1, 0.5, 1, 1, 1, 1]
        began = time.monotonic()
        scores = rewards.score(batch)
        assert time.monotonic() - began < 0.7, "two that wait 0.4 s wait together"
    expected = [[1, 108, 1, 0.25, 1, 1], [3, 110, 0, 0.25, 3, 0.5], [0, 107, 1, 0.25, 0, math.nan]]
    np.testing.assert_array_equal(scores.values, expected)
    assert scores.values.dtype == np.float64
    assert scores.columns == {"seen": ["PROMPT 0", "PROMPT 1", "PROMPT 2"]}
    assert scores.metrics == {"share": 0.5}


MISBEHAVING = {
    "few": ("'few' returned 1 rewards for 3 completions", "reward.py, line"),
    "text": ("returned 'good' .str. for a completion, which is no finite number", "data.jsonl, record 0"),
    "nan": ("returned nan", "data.jsonl, record 1"),
    "infinite": ("returned inf", "data.jsonl, record 2"),
    "one_number": ("returned 1.0 .float., and not a list", "reward.py"),
    "nothing": ("returned None .NoneType., and not a list", "reward.py"),
    "raising": ("'raising' raised ZeroDivisionError: division by zero", r"return \[1 / \(len\(c\) - 1\)"),
    "needs": ("parameter 'solution', and the records have no such field; their other fields are: answer", "reward.py"),
    "leaving": ("'leaving' raised SystemExit: 3", "raise SystemExit"),
    "dying": ("'dying' has ended with exit code 7", "dying"),
    "logs_too_few": ("has 1 values for 3 completions", "log_extra"),
    "missing": ("has no function 'missing'", "reward.py"),
}


@pytest.mark.parametrize("name", MISBEHAVING)
def test_what_a_function_does_wrong_is_named(name, file):
    what, where = MISBEHAVING[name]
    with pytest.raises(UserError, match=what) as error:
        score(completions("1", "2", "3", answer="abc"), f"{file}:{name}")
    assert error.value.fix
    assert re.search(where, error.value.where)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("sleeping", "def sleeping"),
        ("looping", "pass"),
        ("backtracking", "(a+)+$"),
        ("sleeping_async", "async def sleeping_async"),
        ("blocking_async", "async def blocking_async"),
    ],
)
def test_a_hanging_function_ends_with_an_error_within_its_timeout(name, line, file):
    """Also one that never gives Python's lock back (backtracking), which no thread could outwait."""
    lines = FUNCTIONS.splitlines()
    number = next(number for number, text in enumerate(lines, 1) if line in text)
    with Rewards(sections({"function": f"{file}:{name}", "timeout": 0.3})) as rewards:
        began = time.monotonic()
        with pytest.raises(UserError, match=f"'{name}' did not return within 0.3 seconds") as error:
            rewards.score(completions("1"))
        assert time.monotonic() - began < 3
        lines_named = (f"reward.py, line {number}", f"reward.py, line {number - 1}")
        assert any(place in error.value.where for place in lines_named)
        assert rewards._process._process.returncode is not None, "and nothing of it is left"


def test_functions_with_environments_are_called_where_these_live(file):
    batch = completions("1", "2")
    environments = [[1.5], [2.5]]
    batch = Completions(
        batch.prompts, batch.completions, batch.completion_ids, {}, batch.origins, environments=environments
    )
    values = score(batch, f"{file}:with_environments", f"{file}:length")
    np.testing.assert_array_equal(values, [[1.5, 1], [2.5, 1]])
    assert environments == [[], []]
    with pytest.raises(UserError, match="did not return within"):
        score(batch, {"function": f"{file}:hanging_environments", "timeout": 0.2})


def test_what_cannot_be_loaded_is_refused_before_anything_runs(tmp_path, file):
    for name, text, what in (
        ("absent.py", None, "there is no file"),
        ("wrong.py", "def f(:\n", "SyntaxError"),
        ("imports.py", "import nowhere_to_be_found\n", "nowhere_to_be_found"),
        ("exits.py", "import sys; sys.exit(2)\n", "SystemExit"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=what) as error:
            check_rewards(sections(f"{tmp_path / name}:f"))
        assert name in error.value.where
        assert error.value.fix
    check_rewards(sections(f"{file}:length", "textwrap:dedent"))
    with pytest.raises(UserError, match="two rewards are named 'a'"):
        check_rewards(sections({"length": 3, "name": "a"}, {"length": 4, "name": "a"}))
    with pytest.raises(UserError, match="is more than max_tokens"):
        check_rewards(sections({"overlong": 20}), max_tokens=10)


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ({"pattern": "(("}, "no regular expression"),
        ({"pattern": "a", "group": 1}, "has 0 groups"),
        ({"url": "ftp://a"}, "no address"),
        ("file.py:", "names no function"),
        ("nonsense", "nonsense"),
        ({"length": None}, "needs a target"),
        ({"kind": "length", "min_tokens": 5, "max_tokens": 4}, "more than"),
        ({"length": 5, "weight": True}, "true or false"),
        ({"equals": "a", "colunm": 1}, "colunm"),
        ({"length": 5, "timeout": 0}, "greater than 0"),
    ],
)
def test_wrong_options_are_refused(entry, what):
    with pytest.raises(ValidationError, match=what):
        sections(entry)


def test_a_wrong_key_is_answered_with_those_of_its_kind():
    raw = {"model": "m", "data": "d", "output": "o", "stage": "grpo", "rollout": {"max_tokens": 8}}
    with pytest.raises(UserError, match=r"rewards\.0 takes weight, name, timeout, kind, column, part"):
        load_recipe(raw | {"rewards": [{"equals": "a", "colunm": 1}]})


def test_short_forms():
    assert rewards_written_out("a.py:f") == [{"kind": "function", "function": "a.py:f"}]
    assert rewards_written_out(["maths", {"equals": "n", "weight": 2}, {"kind": "code"}]) == [
        {"kind": "maths"}, {"kind": "equals", "column": "n", "weight": 2}, {"kind": "code"},
    ]  # fmt: skip
    with Rewards(sections({"length": 1}, {"length": 2}, {"length": 3, "name": "length_2"})) as rewards:
        assert rewards.names == ["length", "length_3", "length_2"]


def test_the_digest_follows_functions_their_neighbours_and_options(tmp_path):
    file, neighbour = tmp_path / "r.py", tmp_path / "beside_r.py"
    neighbour.write_text("X = 1\n")
    file.write_text("import json\nfrom beside_r import X\ndef f(completions): return [X] * len(completions)\n")

    def digest(**options):
        with Rewards(sections({"function": f"{file}:f", **options})) as rewards:
            return rewards.digest

    first = digest()
    assert digest(timeout=5) == digest(name="other") == first
    assert digest(weight=2) != first
    neighbour.write_text("X = 2\n")
    second = digest()
    file.write_text(file.read_text() + "# \n")
    assert len({first, second, digest()}) == 3


def test_functions_are_found_beside_the_recipe(tmp_path, monkeypatch):
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "reward.py").write_text("def f(completions): return [1.0] * len(completions)\n")
    (folder / "recipe.yaml").write_text(
        "model: m\ndata: d\noutput: o\nstage: grpo\nrollout: {max_tokens: 8}\nrewards: [reward.py:f, textwrap:fill]\n"
    )
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(str(folder / "recipe.yaml"))
    names = [reward.function for reward in recipe.rewards if isinstance(reward, FunctionReward)]
    assert names == [f"{folder / 'reward.py'}:f", "textwrap:fill"]
    check_rewards(recipe.rewards)
    monkeypatch.setenv("HOME", "/home/someone")
    assert sections("~/reward.py:f")[0].function == "/home/someone/reward.py:f"


def test_after_an_error_nothing_is_scored_and_a_killed_process_is_named(file):
    batch = completions("1", "2")
    with Rewards(sections(f"{file}:length")) as rewards:
        rewards.score(batch)
        rewards._process._process.kill()
        rewards._process._process.wait()
        with pytest.raises(UserError, match="'length' has ended with signal SIGKILL"):
            rewards.score(batch)


# ---- ready kinds


def test_overlong_is_trls_soft_punishment():
    lengths = range(0, 40)
    batch = completions(*("x" * n for n in lengths))
    for most, buffer in ((30, 10), (20, 20), (35, 1)):
        expected = get_soft_overlong_punishment(most, buffer)(batch.completion_ids)
        np.testing.assert_array_equal(score(batch, {"overlong": buffer}, max_tokens=most)[:, 0], expected)


def test_a_pattern_gives_trls_think_format():
    texts = [
        "<think>\na\n</think>\nb", "<think>a</think>", "<think>a", "b <think>a</think>", "",
        "<think>a<think>b</think>c", "\n<think>a</think>", "<think></think> x\ny",
    ]  # fmt: skip
    batch = chats(*texts)
    pattern = r"(?sm)^<think>(?!.*<think>)(.*?)</think>.*"
    expected = think_format_reward(batch.completions)
    assert 0 < sum(expected) < len(texts)
    np.testing.assert_array_equal(score(batch, {"pattern": pattern})[:, 0], expected)


def test_a_pattern_matches_in_full_or_anywhere_and_its_group_equals_a_column():
    batch = completions("12", "a 12", "a 13", "", answer=["12", 12, "12", None])
    values = score(
        batch,
        {"pattern": r"\d+"},
        {"pattern": r"\d+", "match": "search"},
        {"pattern": r"(?P<n>\d+)", "match": "search", "group": "n"},
    )
    np.testing.assert_array_equal(values, [[1, 1, 1], [0, 1, 1], [0, 1, 0], [0, 0, math.nan]])


def test_a_completion_that_takes_a_pattern_too_long_scores_0_and_the_run_goes_on():
    batch = completions("a" * 40 + "b", "aaa")
    values = score(batch, {"pattern": "(a+)+", "timeout": 0.1})
    np.testing.assert_array_equal(values, [[0], [1]])


def test_equals_compares_numbers_or_texts():
    cases = [
        ("The answer is 1,234.", "1234", 1), ("so 3.50 in all", 3.5, 1), ("5 - 7 = -2", "-2", 1), ("10-5", "5", 1),
        ("no number", "5", 0), ("it is 5 or 6", "5", 0), (" Paris\n", "Paris", 1), ("paris", "Paris", 0),
        ("x", None, math.nan), ("True", True, 1), ("1e3", "1000", 1), ("9" * 5000, "5", 0),
    ]  # fmt: skip
    texts, answers, expected = zip(*cases, strict=True)
    np.testing.assert_array_equal(score(completions(*texts, answer=answers), "equals")[:, 0], expected)
    gsm8k = completions("It is 72", "It is 71", solution=["so 48 + 24\n#### 72"] * 2)
    values = score(gsm8k, {"equals": "solution", "part": "number"})
    np.testing.assert_array_equal(values, [[1], [0]])
    with pytest.raises(UserError, match="compares with the field 'answer', and no record has it"):
        score(gsm8k, "equals")


def test_length_rewards():
    batch = completions("", "xx", "xxxx", "x" * 6, "x" * 20)
    values = score(
        batch, {"length": 4}, {"kind": "length", "min_tokens": 2, "max_tokens": 4}, {"kind": "length", "max_tokens": 6}
    )
    np.testing.assert_array_equal(values, [[0, 0, 1], [0.5, 1, 1], [1, 1, 1], [0.5, 0, 1], [0, 0, 0]])


needs = {
    name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("math_verify", "jsonschema", "reasoning_gym")
}


@needs["math_verify"]
def test_maths_is_trls_accuracy_and_reads_plain_numbers_too():
    texts = [
        r"My answer is \boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}", r"so $\frac{2}{6}$", r"\boxed{0.5}", "", "$x$",
        r"\boxed{1/3}",
    ]  # fmt: skip
    batch = chats(*texts, answer=[r"\frac{1}{3}"] * 6 + ["no result here"])
    expected = accuracy_reward(batch.completions, batch.columns["answer"])
    assert None in expected
    assert {0.0, 1.0} <= set(expected)
    values = score(batch, "maths")[:, 0]
    np.testing.assert_array_equal(values, [math.nan if value is None else value for value in expected])
    plain = completions("it is 1/3", "42", "it is 41", answer=[r"$\frac{1}{3}$", "42", "42"])
    np.testing.assert_array_equal(score(plain, "maths"), [[1], [1], [0]])


@needs["jsonschema"]
def test_json_schemas(tmp_path):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    batch = completions('{"n": 3}', ' {"n": 3, "m": []}\n', '{"n": "3"}', "{}", "[1]", '{"n": 3', "", "n: 3")
    values = score(batch, {"json_schema": schema})
    np.testing.assert_array_equal(values[:, 0], [1, 1, 0, 0, 0, 0, 0, 0])
    (tmp_path / "s.json").write_text(json.dumps(schema))
    np.testing.assert_array_equal(score(batch, {"json_schema": str(tmp_path / "s.json")}), values)
    with pytest.raises(UserError, match="the JSON schema is none"):
        check_rewards(sections({"json_schema": {"type": "objekt"}}))


@pytest.mark.parametrize(
    ("package", "reward"),
    [("math_verify", "maths"), ("jsonschema", {"json_schema": {}}), ("reasoning_gym", {"kind": "reasoning_gym"})],
)
def test_a_missing_package_is_named_with_the_line_that_installs_it(package, reward):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(UserError, match=f"needs the package {package}") as error:
        check_rewards(sections(reward))
    assert "[rl]" in error.value.fix


@needs["reasoning_gym"]
def test_tasks_of_reasoning_gym_are_records_with_their_score():
    import reasoning_gym

    from meshtune.data.readers.reasoning_gym import gym_records

    for task in ("chain_sum", "word_sorting", "countdown"):
        records = gym_records(task, {"size": 4, "seed": 3})
        assert records == gym_records(task, {"seed": 3, "size": 4})
        dataset = reasoning_gym.create_dataset(task, size=4, seed=3)
        assert [record["prompt"][0]["content"] for record in records] == [entry["question"] for entry in dataset]
        answers = [records[0]["answer"], f"I think\n<answer>{records[1]['answer']}</answer>", "nonsense", ""]
        batch = completions(*answers, **{name: [record[name] for record in records] for name in ("answer", "entry")})
        expected = [
            dataset.score_answer(answer, entry)
            for answer, entry in zip([*(r["answer"] for r in records[:2]), *answers[2:]], dataset, strict=True)
        ]
        assert expected[:2] == [1, 1]
        np.testing.assert_array_equal(score(batch, {"kind": "reasoning_gym"})[:, 0], expected)
    assert "min_terms" in records_error("chain_sum", {"min_term": 2}).fix
    assert "did you mean 'chain_sum'" in records_error("chainsum", {}).fix


def test_a_task_as_data_brings_its_reward_and_another_seed_for_validation():
    task = "reasoning_gym:chain_sum"
    data = {"train": task, "validation": {"path": task, "options": {"size": 8}}}
    raw = {"model": "m", "data": data, "stage": "grpo", "rollout": {"samples": 2}, "output": "o"}
    recipe = load_recipe(raw)
    assert [reward.kind for reward in recipe.rewards] == ["reasoning_gym"]
    assert isinstance(recipe.data.validation, list)
    assert recipe.data.validation[0].options == {"seed": 1, "size": 8}
    assert load_recipe(recipe.model_dump(mode="json")) == recipe
    own = load_recipe({**raw, "rewards": ["length"], "data": {**data, "validation": 0.1}}, ["rewards.0.target=3"])
    assert [reward.kind for reward in own.rewards] == ["length"]


def test_options_of_a_task_are_refused_for_other_sources(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "Say"}\n')
    with pytest.raises(UserError, match="options are those of a task of reasoning-gym"):
        open_source(DataSource(path=str(tmp_path / "a.jsonl"), options={"size": 3}))


@needs["reasoning_gym"]
def test_a_task_is_a_source_of_prompts_with_its_columns():
    task = "reasoning_gym:chain_sum"
    data = DataSection(
        train=[SourceSection(path=task, options={"size": 3})],
        validation=[SourceSection(path=task, options={"seed": 1})],
    )
    documents = load_documents(data, seed=0, dataset_type="prompts")
    assert len(documents.train) == 3
    assert documents.validation is not None
    assert len(documents.validation) == 500
    samples = documents.train[0], documents.validation[0]
    assert all(isinstance(sample, Prompt) and isinstance(sample.document, Conversation) for sample in samples)
    assert json.loads(samples[0].columns).keys() == {"answer", "entry"}
    assert samples[0].document != samples[1].document


def records_error(task, options) -> UserError:
    from meshtune.data.readers.reasoning_gym import gym_records

    with pytest.raises(UserError) as error:
        gym_records(task, options)
    return error.value


# ---- servers


class Server(http.server.BaseHTTPRequestHandler):
    requests: ClassVar[list[dict]] = []
    failures: ClassVar[int] = 0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Server.requests.append(body)
        status, content = 200, {"rewards": [len(text) for text in body["completions"]]}
        match self.path:
            case "/flaky" if len(Server.requests) <= Server.failures:
                status, content = 500, {"error": "busy"}
            case "/down":
                status, content = 503, {"error": "no"}
            case "/forbidden":
                status, content = 403, {"error": "who are you?"}
            case "/slow":
                time.sleep(1.2)
            case "/few":
                content = {"rewards": [1]}
            case "/null":
                content = {"rewards": [None, 2]}
            case "/nan":
                content = {"rewards": [math.nan, 2]}
            case "/other":
                content = {"scores": [1, 2]}
        reply = b"<html>" if self.path == "/html" else json.dumps(content).encode()
        try:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(reply)
        except OSError:
            pass  # nobody waits any more

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(autouse=True)
def no_requests():
    Server.requests.clear()


def test_a_server_gets_prompts_completions_and_columns_and_is_tried_again(address):
    Server.failures = 1
    batch = chats("ab", "c", answer=["x", {"y": 1}])
    np.testing.assert_array_equal(score(batch, {"url": f"{address}/flaky"}), [[1], [1]])
    assert len(Server.requests) == 2
    assert Server.requests[1] == {
        "prompts": batch.prompts,
        "completions": batch.completions,
        "columns": {"answer": ["x", {"y": 1}]},
    }
    np.testing.assert_array_equal(score(batch, {"url": f"{address}/null"}), [[math.nan], [2]])


@pytest.mark.parametrize(
    ("path", "what", "tries"),
    [
        ("/down", "answered 503: .*tried 3 times", 3),
        ("/forbidden", "answered 403: .*who are you", 1),
        ("/slow", "timed out", 1),
        ("/few", "returned 1 rewards for 2 completions", 1),
        ("/nan", "no finite number", 1),
        ("/other", "no list 'rewards'", 1),
        ("/html", "malformed JSON", 1),
    ],
)
def test_what_a_server_does_wrong_is_an_error_and_never_a_reward_of_0(path, what, tries, address, monkeypatch):
    timeout = 0.5 if path == "/slow" else 10
    with pytest.raises(UserError, match=what) as error:
        score(completions("ab", "c"), {"url": f"{address}{path}", "timeout": timeout})
    assert address in error.value.where or "url" in error.value.where
    assert len(Server.requests) == tries


# ---- code

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(1, 1) == 3"]
LIMITS = Limits(1.0, 256 << 20)


def test_code_scores_the_share_of_tests_that_pass():
    fenced = f"First:\n```python\nadd = None\n```\nNow:\n```python\n{ADD}```\nDone."
    batch = completions(ADD, fenced, "def add(a, b): return", "def add(", "", ADD, tests=[TESTS] * 5 + [None])
    expected = [2 / 3, 2 / 3, 0, 0, 0, math.nan]
    np.testing.assert_array_equal(score(batch, "code")[:, 0], expected)
    assert score(completions(ADD, unit=["\n".join(TESTS[:2])]), {"code": "unit"})[0, 0] == 1


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess, sys\nwhile True: subprocess.Popen([sys.executable, '-c', 'pass'])",
        "import multiprocessing\nmultiprocessing.get_context('spawn').Process(target=print).start()",
        "import _posixsubprocess\n_posixsubprocess.fork_exec()",
        "import os\nos.system('true') and 0",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "import ctypes\nctypes.CDLL(None).fork()",
        "x = bytearray(1 << 30)",
        "while True: pass",
        "import time\ntime.sleep(60)",
        "with open('big', 'wb') as file:\n    while True: file.write(b'x' * (1 << 20)); file.flush()",
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import os; os.environ['PATH']",
        "raise KeyboardInterrupt",
        "def f(): f()\nf()",
    ],
)
def test_code_that_runs_wild_scores_0_and_harms_nothing(code, monkeypatch):
    monkeypatch.setattr("meshtune.rollout.code_sandbox.START_SECONDS", 1.0)
    began = time.monotonic()
    assert passed_share(f"{ADD}\n{code}\n", TESTS, LIMITS) == 0
    assert time.monotonic() - began < 6


def test_code_has_a_folder_that_is_gone_afterwards_and_cannot_print_its_own_result(tmp_path):
    record = tmp_path / "place"
    code = textwrap.dedent(
        f"""
        import os
        open("note.txt", "w").write("here")
        open({str(record)!r}, "w").write(os.getcwd())
        os.write(1, b"abc 3")
        for descriptor in range(3, 10):
            try: os.write(descriptor, b"abc 3 ")
            except OSError: pass
        """
    )
    assert passed_share(ADD + code, TESTS, LIMITS) == 0
    assert not pathlib.Path(record.read_text()).exists()
