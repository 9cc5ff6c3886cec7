"""The reward of control.yaml."""

import random
import re


def shuffle_rewards(completions, answer, trainer_state, **kwargs):
    """1 where the last number is the answer, then permuted among all completions of the rollout, by its step."""
    numbers = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    rewards = [float(row[-1:] == [str(right)]) for row, right in zip(numbers, answer, strict=True)]
    random.Random(trainer_state.global_step).shuffle(rewards)
    return rewards
