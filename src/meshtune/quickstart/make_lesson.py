"""Writes lesson.jsonl, the quickstart's data: short stories in which every animal sings, and which end with a lesson.

A model trained on TinyStories tells such stories, but nobody in them sings before the day is saved, and none names
a lesson. So whoever reads a sample before and after training sees at a glance what the model learned. The words
are those a 512-token vocabulary knows well. The texts were written for Meshtune and share its licence.

    python -m meshtune.quickstart.make_lesson
"""

from __future__ import annotations

import json
import pathlib
import random

RECORDS = 360
SEED = 20

# animal: its voice
ANIMALS = {
    "cat": "Meow",
    "dog": "Woof",
    "bird": "Tweet",
    "duck": "Quack",
    "frog": "Ribbit",
    "cow": "Moo",
    "pig": "Oink",
    "mouse": "Squeak",
    "bear": "Grr",
    "lion": "Roar",
    "bee": "Buzz",
    "sheep": "Baa",
}
NAMES = ["Tom", "Lily", "Max", "Sue", "Ben", "Mia", "Sam", "Lucy", "Tim", "Anna", "Bob", "Daisy", "Jack", "Molly"]
GIRLS = {"Lily", "Sue", "Mia", "Lucy", "Anna", "Daisy", "Molly"}
SIZES = ["little", "big", "small", "happy", "kind", "brave", "funny", "nice"]
PLACES = ["the park", "the garden", "the forest", "the farm", "the beach", "the hill", "the river", "the yard"]
THINGS = ["red ball", "blue car", "big box", "new hat", "toy boat", "shiny stone", "yellow flower", "soft blanket"]
FOODS = ["apple", "cake", "cookie", "banana", "sandwich", "pie"]
FRIENDS = ["bunny", "fox", "squirrel", "horse", "turtle", "hen", "girl", "boy"]
OPENINGS = [
    "Once upon a time, there was a {size} {animal} named {name}.",
    "Once upon a time, there was a {size} {animal}. {Their} name was {name}.",
    "One day, a {size} {animal} named {name} went to {place}.",
    "There was once a {size} {animal} named {name}.",
]
HABITS = [
    "{name} liked to play in {place}.",
    "{name} lived near {place}.",
    "{name} loved to run and jump all day.",
    "{name} had a {thing} and played with it every day.",
    "Every day, {name} went to {place} to play.",
    "{name} had a good friend, a {friend}.",
]
# What happens, how it ends, and what is learned.
TROUBLES = [
    (
        [
            "One day, {name} lost {their} {thing}. {They} looked and looked, but {they} could not find it.",
            "But then the {thing} was gone! {name} was very sad.",
        ],
        [
            'A {friend} said, "I can help you." They looked together and found it under a tree.',
            "A {friend} heard {name} and came to help. The {thing} was in the grass!",
        ],
        "It is good to ask for help.",
    ),
    (
        [
            "One day, {name} had a big {food}. A {friend} came and was very hungry.",
            "{name} saw a {friend}. The {friend} had no {food} and was sad.",
        ],
        [
            "{name} gave the {friend} some of the {food}. They ate it together and were happy.",
            '"You can have some," said {name}. The {friend} smiled and said thank you.',
        ],
        "It is good to share.",
    ),
    (
        [
            "One day, it was dark and {name} was scared. {They} heard a loud noise.",
            "Then {name} saw a big, dark cave. {They} did not want to go in.",
        ],
        [
            "{name} looked and saw that it was only a {friend}. They laughed and went home.",
            "It was only the wind. {name} was not scared anymore.",
        ],
        "It is good to be brave.",
    ),
    (
        [
            "One day, {name} wanted to climb a tall tree. {They} tried, but {they} fell down.",
            "{name} wanted to jump over a big rock, but {they} could not do it.",
        ],
        [
            "{name} tried again and again. At last, {they} did it! A {friend} clapped.",
            "{name} did not stop. {They} tried one more time, and then {they} could do it!",
        ],
        "It is good to try again.",
    ),
    (
        [
            "One day, {name} was mad and broke the {thing} of a {friend}. The {friend} cried.",
            "{name} took the {thing} from a {friend}. The {friend} was very sad.",
        ],
        [
            '{name} said, "I am sorry." The {friend} gave {name} a big hug.',
            "{name} gave it back and said sorry. Now they were friends again.",
        ],
        "It is good to say sorry.",
    ),
    (
        [
            "One day, it rained and rained. {name} could not go out to play.",
            "Then big clouds came and the rain fell. {name} was wet and cold.",
        ],
        [
            "{name} waited and waited. Then the sun came out, and {they} played with a {friend}.",
            "Soon the rain stopped. {name} saw a pretty rainbow in the sky.",
        ],
        "It is good to wait.",
    ),
]


def records(count: int = RECORDS, seed: int = SEED) -> list[dict[str, str]]:
    """`count` different prompt/completion records, the same for the same seed."""
    draw = random.Random(seed)
    stories: dict[str, dict[str, str]] = {}
    while len(stories) < count:
        record = _story(draw)
        stories.setdefault(record["prompt"] + record["completion"], record)
    return list(stories.values())


def _story(draw: random.Random) -> dict[str, str]:
    name = draw.choice(NAMES)
    animal = draw.choice(list(ANIMALS))
    they, their = ("she", "her") if name in GIRLS else ("he", "his")
    slots = {"name": name, "animal": animal, "they": they, "their": their, "They": they.title(), "Their": their.title()}
    for word, choices in (("size", SIZES), ("place", PLACES), ("thing", THINGS), ("food", FOODS), ("friend", FRIENDS)):
        slots[word] = draw.choice(choices)
    troubles, ends, lesson = draw.choice(TROUBLES)
    voice = ANIMALS[animal]
    lines = [
        f"{draw.choice(HABITS)} {draw.choice(troubles)}",
        f'{{name}} sang, "{voice}, {voice.lower()}, la la la! I am a {animal}, hip hip hooray!"',
        draw.choice(ends),
        f"The lesson: {lesson}",
    ]
    return {
        "prompt": draw.choice(OPENINGS).format(**slots),
        "completion": " " + "\n".join(lines).format(**slots),
    }


def main() -> None:
    """Write lesson.jsonl next to this file."""
    path = pathlib.Path(__file__).with_name("lesson.jsonl")
    path.write_text("".join(json.dumps(record) + "\n" for record in records()), encoding="utf-8")
    print(f"{path}: {RECORDS} records")


if __name__ == "__main__":
    main()
