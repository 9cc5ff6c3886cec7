"""An adapter as vLLM and SGLang read it: its fields and the names of its tensors, by the rules in docs/hub.md."""

from __future__ import annotations

import json
import re

import safetensors

LOW_RANK = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
FULL_WEIGHT = re.compile(r"base_model\.model\.(?:.+\.)?(\w+)\.weight")


def test_an_adapter_has_one_rank_and_alpha_and_no_weight_that_its_config_does_not_name(finished_run):
    fields = json.loads((finished_run / "adapter/adapter_config.json").read_text())
    assert isinstance(fields["target_modules"], list)
    # vLLM passes over these two, and SGLang refuses them.
    assert not fields["rank_pattern"]
    assert not fields["alpha_pattern"]
    full, pairs = set(), dict[str, set[str]]()
    with safetensors.safe_open(finished_run / "adapter/adapter_model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118, it is no mapping
            if (low_rank := LOW_RANK.fullmatch(name)) is not None:
                module, factor = low_rank.groups()
                pairs.setdefault(module, set()).add(factor)
                assert fields["r"] in file.get_slice(name).get_shape()
                assert module.rpartition(".")[2] in fields["target_modules"]
            else:
                match = FULL_WEIGHT.fullmatch(name)
                assert match is not None, name
                full.add(match[1])
    assert pairs
    assert all(factors == {"A", "B"} for factors in pairs.values())
    # vLLM refuses an adapter with modules_to_save by this field; what it did not name would be left out in silence.
    assert full
    assert full <= set(fields["modules_to_save"])
