"""Replies of a model that are told beforehand; their log-probabilities, and what is learned of them, are real.

As a script before a run (run_and_die.py) it lets every completion call the tool `add` twice, each time with the number
that it was shown last, and then end.
"""

import json
import re
import sys
import types

import numpy as np

from meshtune.generate.engine import Engine


class Script:
    """A constraint (generate.request.Constraint) that allows one text."""

    finished = False

    def __init__(self, ids, vocab):
        self.ids, self.words = list(ids), -(-vocab // 32)

    def mask(self):
        mask = np.zeros(self.words, np.uint32)
        mask[self.ids[0] // 32] = np.uint32(1) << np.uint32(self.ids[0] % 32)
        return mask

    def accept(self, token):
        assert token == self.ids.pop(0)


def scripted_request(reply):
    """Engine.request with the replies of a function from the ids of all that precedes a turn."""
    request = Engine.request

    def with_script(self, prompt, *args, **options):
        ids = reply(list(prompt))
        grammar = types.SimpleNamespace(start=lambda: Script(ids, self.spec.vocab))
        return request(self, prompt, *args, grammar=grammar, **options)

    return with_script


def call_twice(tokenizer):
    """Replies that add the number that was shown last, twice."""

    def reply(ids):
        text = tokenizer.decode(ids)
        text = text[text.rindex("Count.") :]
        amount = re.findall(r"\d+", text)[-1]
        call = f'<tool_call>\n{{"name": "add", "arguments": {{"amount": {amount}}}}}\n</tool_call>'
        done = text.count("<tool_response>") == 2
        return tokenizer("Done." if done else call)["input_ids"] + [tokenizer.eos_token_id]

    return reply


if __name__ == "__main__":
    from transformers import AutoTokenizer

    with open(sys.argv[1]) as recipe:
        model = json.load(recipe)["model"]
    Engine.request = scripted_request(call_twice(AutoTokenizer.from_pretrained(model)))
