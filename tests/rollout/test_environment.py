"""Completions of several turns in an environment, beside trl's loop of tool calls with the same tokenizer and replies.

The model is a real one of random weights whose draws a grammar restricts to scripted replies.
"""

import asyncio
import functools
import json
import threading
import types

import numpy as np
import pytest
from random_model import save_random_model
from scripted_turns import scripted_request
from transformers import AutoTokenizer
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema, get_training_chat_template, parse_response

from data.stock_templates import tokenizer_of_trl
from meshtune.config.load import load_recipe
from meshtune.config.sections import RolloutSection
from meshtune.data.conversation import Origin
from meshtune.data.prompts import PromptRecord
from meshtune.errors import UserError
from meshtune.generate.engine import Engine
from meshtune.generate.text import chat_ids
from meshtune.mesh.processes import Job
from meshtune.mesh.rendezvous import ProcessInfo
from meshtune.model.compute import Compute
from meshtune.rollout.environment import Environments, Episodes, tool_suffix_ids
from meshtune.rollout.generate import generate
from meshtune.rollout.rewards import Rewards
from meshtune.rollout.saved import decode_rollout, encode_rollout, read_rollout
from meshtune.runs.rollouts import read_rollouts
from meshtune.train.run import train
from meshtune.weights.load import load_params, load_spec

ENVIRONMENT = '''
import time


class Counter:
    """Counts, and is asked for the sum."""

    def reset(self, start, **columns):
        self.total, self.calls = start, 0
        return f" It is {start}."

    def add(self, amount: int) -> int:
        """Adds to the count.

        Args:
            amount: What is added.
        """
        self.calls += 1
        self.total += amount
        return self.total

    async def say(self, text: str) -> str:
        """Says a text.

        Args:
            text: The text.
        """
        return text

    def fail(self) -> str:
        """Fails."""
        raise RuntimeError("it is broken")

    def sleep(self) -> str:
        """Sleeps."""
        time.sleep(60)

    def get_reward(self) -> float:
        return self.total / 10

    def _hidden(self):
        return 1


class Adder(Counter):
    say = fail = sleep = None


class Silent:
    def reset(self):
        pass


class Untyped:
    def reset(self):
        pass

    def add(self, amount):
        """Adds."""


class Endless:
    def reset(self):
        raise ValueError("no room")
'''
QUESTION = [{"role": "user", "content": "Count."}]


def call(name, **arguments):
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


# The turns of each completion.
SCRIPTS = [
    [call("add", amount=2), "It is 5."],
    [
        call("add", amount=1) + "\n" + call("say", text="now 4"),
        call("subtract", amount=1),
        "Well, " + call("fail"),
        "4.",
    ],
    ["No tools."],
    [call("add", total=1), call("say", text="long " * 90), "never"],
    [call("add", amount=1), call("add", amount=1), call("add", amount=1), "too many turns"],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory, shared):
    folder = save_random_model(tmp_path_factory.mktemp("random"), shared)
    tokenizer_of_trl("qwen3_instruct_2507", shared).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("environment") / "counter.py"
    path.write_text(ENVIRONMENT)
    return path


@pytest.fixture
def scripted(monkeypatch):
    """Lets replies be those of a function from the ids of all that precedes a turn."""
    return lambda reply: monkeypatch.setattr(Engine, "request", scripted_request(reply))


class Replies:
    """The scripted turns, by the prompts that they answer."""

    def __init__(self, tokenizer, prompt_ids):
        self.prompt_ids, self.turns = prompt_ids, [0] * len(SCRIPTS)
        self.ids = [[tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in script] for script in SCRIPTS]

    def __call__(self, text):
        number = next(n for n, ids in enumerate(self.prompt_ids) if text[: len(ids)] == ids)
        self.turns[number] += 1
        return self.ids[number][self.turns[number] - 1]


def rollout_options(file, name="Counter", **fields):
    return RolloutSection(**{"environment": f"{file}:{name}", "max_tokens": 260, "max_turns": 3, **fields})


def records_of(tokenizer):
    ids = chat_ids(tokenizer, QUESTION)
    return [PromptRecord(n, ids, QUESTION, {"start": n}, Origin("data.jsonl", n)) for n in range(len(SCRIPTS))]


def start_episodes(environments, tokenizer, records):
    stop_ids = frozenset({tokenizer.eos_token_id})
    return Episodes(environments, tokenizer, stop_ids, records, Job(ProcessInfo()), "rollout", 1500)


def trl_episodes(tokenizer, environments, prompt_ids, options, context):
    """(ids, masks, messages, calls, failures) of trl's loop, from the same replies and new environments."""
    add_response_schema(tokenizer)
    replies, loop = Replies(tokenizer, prompt_ids), asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    tools = [
        {name: getattr(instance, name) for name in ("add", "fail", "say", "sleep")}
        for instance in environments.instances
    ]
    trl = types.SimpleNamespace(
        processing_class=tokenizer, _tokenizer=tokenizer, _is_vlm=False, chat_template_kwargs={}, chat_template=None,
        use_vllm=False, environment_factories=None, max_completion_length=options.max_tokens, async_loop=loop,
        max_tool_calling_iterations=options.max_turns, tools=list(tools[0].values()),
        model=types.SimpleNamespace(config=types.SimpleNamespace(max_position_embeddings=context)),
        _sync_tool_dicts=[{name: tool for name, tool in entry.items() if name != "say"} for entry in tools],
        _async_tool_dicts=[{"say": entry["say"]} for entry in tools],
        _generate_single_turn=lambda texts, *_, **__: ([list(replies(text)) for text in texts], None),
    )  # fmt: skip
    trl._get_tool_suffix_ids = functools.partial(GRPOTrainer._get_tool_suffix_ids, trl)
    ids = [list(replies(prompt)) for prompt in prompt_ids]
    messages = [[parse_response(tokenizer, *pair)] for pair in zip(ids, prompt_ids, strict=True)]
    prompts = [list(QUESTION) for _ in ids]
    mask, messages, ids, _, calls, failures, _ = GRPOTrainer._tool_call_loop(
        trl, prompts, prompt_ids, ids, messages, None, None, {}
    )
    loop.call_soon_threadsafe(loop.stop)
    return ids, mask, messages, calls, failures


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "lfm2"])
def test_the_ids_of_results_are_those_of_trl(name, shared):
    tokenizer = tokenizer_of_trl(name, shared)
    trl = types.SimpleNamespace(
        processing_class=tokenizer, _tokenizer=tokenizer, _is_vlm=False, chat_template_kwargs={}, chat_template=None
    )
    if name == "qwen3":  # whose own template writes earlier turns in another way, which trl cannot cut
        trl.chat_template = get_training_chat_template(tokenizer)
    for results in ([("add", "5")], [("add", "{'error': 'no'}"), ("say", "Grüße\n")]):
        messages = [{"role": "tool", "name": tool, "content": text} for tool, text in results]
        if name == "llama3_1" and len(messages) > 1:
            continue  # its template refuses two calls in a turn
        expected = GRPOTrainer._get_tool_suffix_ids(trl, messages)
        assert tool_suffix_ids(tokenizer, messages, frozenset({tokenizer.eos_token_id})) == expected


def test_turns_are_those_of_trl(model, file, scripted):
    """Ids, the mask of tool tokens, messages and counts, for good calls, several in a turn, async ones, unknown tools,
    wrong arguments, exceptions, results without room, and more turns than there may be."""
    tokenizer, options = AutoTokenizer.from_pretrained(model), rollout_options(file)
    spec, _ = load_spec(model, "float32")
    records, environments = records_of(tokenizer), Environments(options)
    episodes = start_episodes(environments, tokenizer, records)
    scripted(Replies(tokenizer, episodes.prompt_ids))
    drawn = generate(
        load_params(model, spec),
        spec,
        Compute(),
        episodes.prompt_ids,
        1,
        options,
        frozenset({tokenizer.eos_token_id}),
        lambda prompt, sample: prompt,
        [str(record.origin) for record in records],
        follow_turns=episodes.follow,
    )
    completions = episodes.complete([completion for (completion,) in drawn])
    totals = [instance.total for instance in environments.instances]
    environments.reset(records)
    ids, mask, messages, calls, failures = trl_episodes(
        tokenizer, environments, episodes.prompt_ids, options, spec.max_length
    )
    assert [completion.ids for completion in completions] == ids
    assert [list(map(int, completion.drawn)) for completion in completions] == mask
    assert [completion.episode.messages for completion in completions] == messages
    assert sum(completion.episode.calls for completion in completions) == calls == 10
    assert sum(completion.episode.failures for completion in completions) == failures == 3
    assert [instance.total for instance in environments.instances] == totals == [2, 2, 2, 3, 7]
    assert [len(completion.episode.messages) for completion in completions] == [3, 8, 1, 3, 7]
    assert all(0 in row for row in mask[:2])


def test_prompts_show_the_tools_and_the_text_of_reset(model, file):
    tokenizer = AutoTokenizer.from_pretrained(model)
    environments = Environments(rollout_options(file))
    episodes = start_episodes(environments, tokenizer, records_of(tokenizer))
    kind = environments.kind_of(records_of(tokenizer)[0])
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Count. It is 1."}],
        tools=[getattr(kind.type, name) for name in ("add", "fail", "say", "sleep")],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert episodes.prompt_ids[1] == expected
    assert list(environments.rewards) == ["Counter"]


def test_a_run_with_an_environment_trains_on_what_the_model_drew(model, file, scripted, tmp_path):
    tokenizer, count = AutoTokenizer.from_pretrained(model), iter(range(100))
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": QUESTION, "start": n}) + "\n" for n in range(2))
    )

    def reply(prompt):
        called = "<tool_response>" in tokenizer.decode(prompt)
        return tokenizer("Done." if called else call("add", amount=next(count)))["input_ids"] + [tokenizer.eos_token_id]

    scripted(reply)
    recipe = {
        "model": str(model),
        "data": {"train": str(tmp_path / "prompts.jsonl"), "max_length": 320},
        "stage": {"kind": "grpo"},
        "rollout": {"environment": f"{file}:Adder", "prompts": 2, "samples": 2, "max_tokens": 100, "iterations": 2},
        "method": {"kind": "lora", "rank": 2},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 0},
        "train": {"steps": 2},
        "output": str(tmp_path / "run"),
    }
    train(load_recipe(recipe, []))
    content = read_rollout(tmp_path / "run/rollouts", 0)
    rollout = decode_rollout(content)
    assert encode_rollout(rollout) == content
    for n, completion in enumerate(rollout.completions):
        drawn = np.array(completion.drawn)
        assert 0 < np.sum(~drawn) < np.sum(drawn)
        for name in ("weights", "advantages", "sampled", "old"):
            values = rollout.per_completion(name)[n]
            assert np.all(values[~drawn] == 0)
        assert np.all(rollout.per_completion("weights")[n][drawn] > 0)
        assert np.all(rollout.per_completion("advantages")[n][drawn] != 0)
    rows = read_rollouts(tmp_path / "run")
    asked = [int(row["prompt"][-1]["content"].removeprefix("Count. It is ").removesuffix(".")) for row in rows]
    added = [
        completion.episode.messages[0]["tool_calls"][0]["function"]["arguments"] for completion in rollout.completions
    ]
    assert sorted(asked) == [0, 0, 1, 1]
    for row, start, arguments in zip(rows, asked, added, strict=True):
        assert row["rewards"] == {"Adder": (start + arguments["amount"]) / 10}
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(row["tools/call_frequency"], row["tools/failure_frequency"]) for row in metrics] == [(1.0, 0.0)] * 2
    assert metrics[0]["completions/mean_length"] == np.mean([sum(c.drawn) for c in rollout.completions])


@pytest.mark.parametrize(
    ("name", "message"),
    [("Missing", "has no class 'Missing'"), ("Untyped", "cannot be a tool"), ("json", "no method 'reset'")],
)
def test_an_environment_that_cannot_be_one_is_named(file, name, message):
    text = "collections:OrderedDict" if name == "json" else f"{file}:{name}"
    with pytest.raises(UserError, match=message):
        Environments(RolloutSection(environment=text))


@pytest.mark.parametrize("stage", ["ppo", "distill"])
def test_stages_that_train_on_every_token_refuse_environments(stage, file):
    """GAE passes rewards back through every token, and a teacher's predictions of a tool's result teach nothing."""
    fields = {
        "model": "m", "data": {"train": "d.jsonl", "max_length": 512}, "output": "o",
        "stage": {"kind": stage} | ({"on_policy": 1.0} if stage == "distill" else {}),
        "rollout": {"prompts": 2, "samples": 1, "max_tokens": 64, "environment": f"{file}:Counter"},
    } | ({"teacher": "t"} if stage == "distill" else {})  # fmt: skip
    with pytest.raises(UserError, match=f"rollout.environment is not possible with stage {stage}.*use grpo or rloo"):
        load_recipe(fields)
    load_recipe(fields | {"stage": "grpo", "teacher": None, "rollout": fields["rollout"] | {"samples": 2}})


def test_what_ends_a_run_is_named(model, file):
    tokenizer = AutoTokenizer.from_pretrained(model)
    records = records_of(tokenizer)
    with pytest.raises(UserError, match="reset' \\(Endless\\) raised ValueError: no room") as error:
        start_episodes(Environments(rollout_options(file, "Endless")), tokenizer, records)
    assert "data.jsonl" in error.value.where
    assert "counter.py" in error.value.where
    environments = Environments(rollout_options(file, tool_timeout=0.2))
    environments.reset(records)
    with pytest.raises(UserError, match="'sleep' did not return within"):
        environments.call_tools(0, [types.SimpleNamespace(name="sleep", arguments="{}")], "record 1")
    with pytest.raises(UserError, match="there is no reward"):
        Rewards([], environments=Environments(rollout_options(file, "Silent")))
    named = RolloutSection(environment={"counter": f"{file}:Counter", "silent": f"{file}:Silent"})
    with pytest.raises(UserError, match=r"which rollout\.environment does not have"):
        start_episodes(Environments(named), tokenizer, records)
    text = PromptRecord(0, records[0].ids, "Count.", {"start": 0}, records[0].origin)
    with pytest.raises(UserError, match="needs a conversation"):
        start_episodes(Environments(rollout_options(file)), tokenizer, [text])
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer.chat_template = turns + "<|im_start|>assistant\n"
    with pytest.raises(UserError, match="tools or variables of its own"):
        start_episodes(Environments(rollout_options(file)), tokenizer, records)
    with pytest.raises(UserError, match="does not show tools"):
        start_episodes(Environments(rollout_options(file)), tokenizer, records_of(tokenizer))


def test_a_record_chooses_among_environments_by_name(model, file):
    tokenizer = AutoTokenizer.from_pretrained(model)
    environments = Environments(
        RolloutSection(environment={"counter": f"{file}:Counter", "silent": f"{file}:Silent"}, max_tokens=100)
    )
    names = ["silent", "counter", "silent", "counter"]
    records = [
        PromptRecord(n, chat_ids(tokenizer, QUESTION), QUESTION, {"start": n, "environment": name}, Origin("d", n))
        for n, name in enumerate(names)
    ]
    start_episodes(environments, tokenizer, records)
    first = environments.instances
    assert [type(instance).__name__.lower() for instance in first] == names
    assert len(set(map(id, first))) == 4
    start_episodes(environments, tokenizer, records)
    assert environments.instances == first, "objects are used again, after a reset"
