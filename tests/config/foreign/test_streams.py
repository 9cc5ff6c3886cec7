"""Data that other tools read as a stream: translated where ours does the same, else with the reason why not."""

from __future__ import annotations

import pytest
from files import AXOLOTL, LLAMA_FACTORY, QLORA, finding_of, verdicts

STREAMED = {
    "sft": {},
    "dpo": {"stage": "dpo", "pref_loss": "sigmoid"},
    "kto": {"stage": "kto"},
    "rm": {"stage": "rm"},
    "pt": {"stage": "pt"},
}


@pytest.mark.parametrize("stage", STREAMED.values(), ids=list(STREAMED))
def test_a_stream_is_translated_for_every_stage(recipe_of, stage):
    recipe = recipe_of({**LLAMA_FACTORY, **stage, "streaming": True, "max_steps": 100, "val_size": 50})
    assert recipe.data.streaming
    assert (recipe.train.steps, recipe.data.validation) == (100, 50)


def test_a_buffer_and_the_mixture_of_a_stream(translate_file, recipe_of):
    mixed = {"mix_strategy": "interleave_over", "interleave_probs": "0.7,0.3", "buffer_size": 100, "max_steps": 9}
    recipe = recipe_of({**LLAMA_FACTORY, **mixed, "streaming": True, "disable_shuffling": True})
    assert (recipe.data.streaming, recipe.data.mixing, recipe.data.shuffle) == (True, "interleave_over", True)
    assert [source.weight for source in recipe.data.train] == [0.7, 0.3]
    translation = translate_file({**LLAMA_FACTORY, **mixed, "streaming": True, "disable_shuffling": True})
    assert verdicts(translation) | {"buffer_size": "differs", "disable_shuffling": "no effect"} == verdicts(translation)
    assert "not by a buffer" in finding_of(translation, "buffer_size").note
    assert finding_of(translate_file({**LLAMA_FACTORY, "buffer_size": 100}), "buffer_size").verdict == "no effect"
    once = {**LLAMA_FACTORY, "mix_strategy": "interleave_once", "interleave_probs": "0.7,0.3"}
    assert recipe_of(once).data.mixing == "concat"
    assert finding_of(translate_file(once), "mix_strategy").verdict == "translated"
    assert finding_of(translate_file({**once, "disable_shuffling": True}), "mix_strategy").verdict == "differs"


def test_axolotls_streams_are_translated(recipe_of, translate_file):
    plain = {**AXOLOTL, **QLORA, "max_steps": 50}
    data = recipe_of({**plain, "streaming": True, "streaming_multipack_buffer_size": 7}).data
    assert (data.streaming, data.shuffle) == (True, True)
    data = recipe_of({**plain, "streaming": True, "shuffle_merged_datasets": False}).data
    assert (data.streaming, data.shuffle) == (True, False)
    texts = {key: value for key, value in plain.items() if key != "datasets"}
    texts["pretraining_dataset"] = [{"path": "o/first", "type": "pretrain"}, {"path": "o/second", "type": "pretrain"}]
    recipe = recipe_of({**texts, "streaming": True, "pretrain_multipack_buffer_size": 7})
    assert (recipe.stage.kind, recipe.data.streaming) == ("pt", True)
    assert [source.path for source in recipe.data.train] == ["o/first"]
    by_key = verdicts(translate_file({**texts, "streaming": True, "pretrain_multipack_buffer_size": 7}))
    assert {by_key[key] for key in ("pretraining_dataset", "streaming", "pretrain_multipack_buffer_size")} == {
        "differs"
    }
    pairs = {**plain, "rl": "dpo", "datasets": [{"path": "o/n", "type": "chat_template.default"}], "streaming": True}
    assert finding_of(translate_file(pairs), "streaming").verdict == "no effect"
    assert not recipe_of(pairs).data.streaming


@pytest.mark.parametrize(
    ("change", "shuffle", "verdict"),
    [
        ({"shuffle_merged_datasets": False}, True, "no effect"),  # its trainer draws at random
        ({"curriculum_sampling": True, "shuffle_merged_datasets": False}, False, "translated"),
    ],
)
def test_axolotls_order_is_its_samplers(translate_file, recipe_of, change, shuffle, verdict):
    assert recipe_of({**AXOLOTL, **QLORA, **change}).data.shuffle is shuffle
    assert finding_of(translate_file({**AXOLOTL, **QLORA, **change}), "shuffle_merged_datasets").verdict == verdict


def test_trls_streams_are_read_in_their_order(recipe_of, translate_file):
    arguments = {"model_name_or_path": "some/model", "output_dir": "out", "max_steps": 50, "completion_only_loss": True}
    single = {**arguments, "dataset_name": "o/n", "dataset_streaming": True}
    data = recipe_of(single, is_trl=True).data
    assert (data.streaming, data.shuffle) == (True, False)
    assert recipe_of({**single, "shuffle_dataset": True}, is_trl=True).data.shuffle
    mixture = {**single, "datasets": [{"path": "o/a"}, {"path": "o/b"}]}
    data = recipe_of(mixture, is_trl=True).data
    assert ([source.path for source in data.train], data.streaming) == (["o/a", "o/b"], False)
    assert verdicts(translate_file(mixture, is_trl=True))["dataset_streaming"] == "no effect"
    assert recipe_of({**mixture, "streaming": True}, is_trl=True).data.streaming
    assert not recipe_of({**arguments, "dataset_name": "o/n", "streaming": True}, is_trl=True).data.streaming


STOPS = {
    "no length": ({**LLAMA_FACTORY, "streaming": True}, "streaming", "without max_steps"),
    "first records": ({**LLAMA_FACTORY, "streaming": True, "max_steps": 9, "max_samples": 9}, "max_samples", "stops"),
    "a share": ({**LLAMA_FACTORY, "streaming": True, "max_steps": 9, "val_size": 0.1}, "val_size", "stops"),
    "axolotl, no length": ({**AXOLOTL, "streaming": True}, "streaming", "without max_steps"),
    "axolotl, a share": ({**AXOLOTL, "streaming": True, "max_steps": 9, "val_set_size": 0.1}, "val_set_size", "stops"),
    "axolotl, packed": (
        {**AXOLOTL, "datasets": AXOLOTL["datasets"] * 2, "streaming": True, "max_steps": 9, "sample_packing": True},
        "datasets",
        "stops",
    ),
    "axolotl, texts": (
        {**AXOLOTL, "pretraining_dataset": "o/n", "learning_rate": 1e-5},
        "pretraining_dataset",
        "without max_steps",
    ),
}


@pytest.mark.parametrize("case", STOPS.values(), ids=list(STOPS))
def test_a_stream_at_which_the_peer_stops_is_refused(translate_file, case):
    content, key, reason = case
    finding = finding_of(translate_file(content), key)
    assert finding.verdict == "refused"
    assert reason in finding.note


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"stage": "dpo", "finetuning_type": "full"}, "computed before training"),
        ({"stage": "dpo", "ref_model": "other/model"}, "computed before training"),
        ({"stage": "pt", "packing": False}, "fills its rows"),
    ],
)
def test_a_stream_that_is_not_possible_here_says_why(translate_file, change, reason):
    translation = translate_file({**LLAMA_FACTORY, "streaming": True, "max_steps": 100, **change})
    finding = finding_of(translation, "streaming")
    assert finding.verdict == "differs"
    assert reason in finding.note
