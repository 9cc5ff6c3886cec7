"""The schema describes exactly the recipes that load, and its keys change only on purpose."""

from __future__ import annotations

import json

from meshtune.config.fields import json_schema, keys, markdown

# The public keys of 0.1. A key that leaves this list breaks somebody's recipe.
KEYS = """
model.path model.revision model.tokenizer model.chat_template
data.train data.train.N.path data.train.N.name data.train.N.subset data.train.N.split data.train.N.revision
data.train.N.format data.train.N.columns data.train.N.tags data.train.N.weight data.train.N.cap
data.validation data.registry data.mixing data.max_length data.packing data.overlong data.on_bad
data.train_on_prompt data.last_turn_only data.system data.shuffle
output
method method.rank method.alpha method.dropout method.targets method.rslora method.train_modules
method.last_layers method.first_layers method.modules
train.epochs train.steps train.batch_size train.micro_batch
optimizer.name optimizer.learning_rate optimizer.schedule optimizer.warmup_ratio optimizer.warmup_steps
optimizer.min_lr_ratio optimizer.decay_ratio optimizer.weight_decay optimizer.no_decay optimizer.beta1 optimizer.beta2
optimizer.eps optimizer.momentum optimizer.max_grad_norm optimizer.in_backward optimizer.match_rms optimizer.rank
optimizer.update_gap optimizer.scale optimizer.scaling optimizer.switch_every optimizer.block_order optimizer.d_coef
compute.precision compute.remat compute.attention compute.loss_chunk compute.scan_layers
eval.every eval.at_start eval.early_stopping eval.min_delta
sample.every sample.prompts sample.max_tokens sample.temperature
log.every log.plot_every log.trackers log.project
checkpoint.every checkpoint.keep checkpoint.keep_best
seed resume overwrite
""".split()


def test_no_public_key_is_lost_or_renamed():
    names = [key.name for key in keys()]
    assert [key for key in KEYS if key not in names] == []


def test_every_key_is_described():
    assert [key.name for key in keys() if not key.description and key.name != "method"] == []


def test_the_json_schema_is_json_and_closed():
    schema = json.loads(json.dumps(json_schema()))
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["additionalProperties"] is False
    assert all(part.get("additionalProperties") is False for part in schema["$defs"].values())
    assert set(schema["required"]) == {"model", "data", "output"}


def test_the_reference_has_an_item_for_every_key():
    items = [line for line in markdown().splitlines() if line.startswith("- ")]
    assert [item.split("`")[1] for item in items] == [key.name for key in keys()]
    assert "- `method.rank` (integer > 0; default 8): R, the adapters' inner dimension." in items
    assert "- `output` (text; required): " in markdown()
