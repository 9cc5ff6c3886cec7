"""What vLLM and SGLang read of an adapter: its fields and the names of its tensors, by the rules in docs/hub.md."""

from __future__ import annotations

import json
import re

import safetensors

LOW_RANK = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
WHOLE = re.compile(r"base_model\.model\.(?:.+\.)?(\w+)\.weight")


def test_an_adapter_has_one_rank_and_alpha_and_no_weight_that_its_config_does_not_name(finished):
    fields = json.loads((finished / "adapter/adapter_config.json").read_text())
    assert isinstance(fields["target_modules"], list)
    # vLLM passes over these two, and SGLang refuses them.
    assert not fields["rank_pattern"]
    assert not fields["alpha_pattern"]
    whole, pairs = set(), dict[str, set[str]]()
    with safetensors.safe_open(finished / "adapter/adapter_model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118, it is no mapping
            if (low_rank := LOW_RANK.fullmatch(name)) is not None:
                module, factor = low_rank.groups()
                pairs.setdefault(module, set()).add(factor)
                assert fields["r"] in file.get_slice(name).get_shape()
                assert module.rpartition(".")[2] in fields["target_modules"]
            else:
                kept = WHOLE.fullmatch(name)
                assert kept is not None, name
                whole.add(kept[1])
    assert pairs
    assert all(factors == {"A", "B"} for factors in pairs.values())
    # vLLM refuses an adapter with modules_to_save by this field; what it did not name would be left out in silence.
    assert whole
    assert whole <= set(fields["modules_to_save"])
