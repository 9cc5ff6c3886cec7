"""Answers about pictures: those of transformers' greedy generation, whatever else is in the batch; float32."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import types

import numpy as np
import peft
import pytest
import torch
import transformers

from families.case import torch_model
from families.vision.cases import CASES, PALIGEMMA2
from families.vision.sights import (
    Document,
    Sight,
    VisionCase,
    ids_of,
    load,
    picture,
    prompt_length,
    torch_inputs,
    torch_run,
    turns_of,
    words,
)
from families.vision.test_parity import documents_of
from generate.test_meshes import on_four_devices
from meshtune.data.pictures.positions import reach_positions
from meshtune.errors import UserError
from meshtune.generate import programs, weights
from meshtune.generate.engine import Engine
from meshtune.generate.pictures import LoadedPicture, PatchArrays, PromptPicture, PromptPictures
from meshtune.generate.request import Generation, GenerationRequest
from meshtune.generate.target_log_probs import TargetText, target_log_probs
from meshtune.model.compute import Compute
from seeing_model import save_seeing_model

NEW = 7  # tokens of an answer

FAST = {("internvl", 7), ("qwen2_vl", 7)}  # the others compile for minutes


def prompt_pictures(case: VisionCase, document: Document) -> PromptPictures | None:
    """The pictures of a document as a request has them."""
    placed, start = [], 0
    for part in document:
        if isinstance(part, Sight):
            arrays = PatchArrays(part.patches, part.tiles.astype(np.int32), part.grid)
            layout = types.SimpleNamespace(
                visual=np.asarray(part.visual, np.int32),
                features=len(part.patches) // case.merge**2,
                patches=len(part.patches),
            )
            digest = hashlib.sha256(part.patches.tobytes()).hexdigest()
            placed.append(PromptPicture(start, LoadedPicture(digest, (0, 0), layout, lambda arrays=arrays: arrays)))  # pyright: ignore[reportArgumentType]
        start += len(part.tokens) if isinstance(part, Sight) else len(part)
    if not placed:
        return None
    pictures = PromptPictures(tuple(placed))
    if all(part.turns is not None for part in document if isinstance(part, Sight)):
        turns = turns_of(document)
        offset = int(turns[-1].max()) + 1 - start
        pictures = dataclasses.replace(pictures, rope_positions=turns.astype(np.int32), offset=offset)
    if any(part.mutual for part in document if isinstance(part, Sight)):
        pictures = dataclasses.replace(pictures, reach=reach_positions(pictures.index(0, 0, start)))
    return pictures


def request(engine: Engine, case: VisionCase, document: Document) -> GenerationRequest:
    return engine.request(ids_of(document), max_tokens=NEW, stop_ids=[], pictures=prompt_pictures(case, document))


def expected(case: VisionCase, document: Document) -> list[int]:
    """The greedy answer of transformers, which no token ends."""
    inputs, model = torch_inputs(document), torch_model(case.case)
    mask = torch.ones_like(inputs["input_ids"])
    if case.prefix:
        inputs["token_type_ids"] = torch.zeros_like(mask)
    model.generation_config.eos_token_id = None
    # Over another cache Gemma 4 12B makes the mask of its forward (see sights.mask_of_unified).
    cache = "static" if case.name == "gemma4_unified" else None
    out = model.generate(**inputs, attention_mask=mask, max_new_tokens=NEW, do_sample=False, cache_implementation=cache)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def answers(engine: Engine, case: VisionCase, documents: list[Document], rows: int) -> list[list[int]]:
    scheduler = engine.scheduler(rows=rows)
    generations: list[Generation] = []
    for document in documents:  # let in one after another, while others decode
        generations.append(scheduler.submit(request(engine, case, document)))
        scheduler.step(2)
    while not scheduler.idle:
        scheduler.step()
    assert not scheduler._caches.features, "features of pictures that were read are freed"
    return [generation.ids for generation in generations]


def tokens_read(monkeypatch) -> list[int]:
    """The number of prompt tokens that each later call reads."""
    counts: list[int] = []

    def count(*args, original=programs.read, **options):
        counts.append(int(np.sum(options["count"])))
        return original(*args, **options)

    monkeypatch.setattr(programs, "read", count)
    return counts


@pytest.mark.parametrize(
    ("case", "budget"),
    [
        pytest.param(
            case, budget, id=f"{case.name}-{budget}", marks=[] if (case.name, budget) in FAST else [pytest.mark.slow]
        )
        for case in CASES
        for budget in (4096, 7)
    ],
)
def test_answers_equal_transformers(case: VisionCase, budget: int, monkeypatch):
    """Requests of two pictures of different sizes, of one and of none share a batch; prompts are read whole, and in
    pieces that end inside of pictures."""
    monkeypatch.setattr("meshtune.generate.rows.READ_TOKENS", budget)
    monkeypatch.setattr("meshtune.generate.rows.READ_TOKENS_IDLE", budget)
    # LLaVA-NeXT's pictures of a prompt have as many tiles in transformers' form: it pads the others.
    wide, tall = (
        case.read(picture(60, 30, 1)),
        case.read(picture(*((24, 50) if case.name == "llava_next" else (40, 50)), 2)),
    )
    documents: list[Document] = [
        [words(5, 3), wide, words(4, 4), tall, words(6, 5)],
        [words(17, 6)],
        [tall, words(3, 7)],
        [words(5, 3), tall, words(4, 4)],
    ]
    spec, params = load(case)
    engine = Engine(params, dataclasses.replace(spec, max_length=256), Compute())  # LLaVA-NeXT's pictures are long
    assert answers(engine, case, documents, rows=3) == [expected(case, document) for document in documents]


def test_two_pictures_after_the_same_words_never_share_a_prefix(monkeypatch):
    """The cached prefix of one picture serves requests with the same one, and none with another."""
    case = CASES[0]
    spec, params = load(case)
    engine, counts = Engine(params, spec, Compute()), tokens_read(monkeypatch)
    cat, dog = case.read(picture(60, 30, 1)), case.read(picture(60, 30, 2))
    assert cat.tokens == dog.tokens
    before, after = words(20, 3), words(9, 4)
    texts: list[Document] = [[before, cat, after], [before, dog, after]]
    length = len(ids_of(texts[0])) - 1  # the last token is decoded
    encoded: list[int] = []
    encode = weights.encode
    monkeypatch.setattr(weights, "encode", lambda *args, **options: encoded.append(1) or encode(*args, **options))
    golden = [expected(case, text) for text in texts]
    assert golden[0] != golden[1]
    for order, read, pictures in (
        ([0, 0], length, 1),
        ([1, 0, 1, 0], 2 * length - 20, 2),
    ):
        counts.clear()
        encoded.clear()
        scheduler = engine.scheduler(rows=4)
        generations = [scheduler.submit(request(engine, case, texts[number])) for number in order]
        while not scheduler.idle:
            scheduler.step()
        assert [generation.ids for generation in generations] == [golden[number] for number in order]
        assert (sum(counts), len(encoded)) == (read, pictures)


@pytest.mark.slow
def test_prompts_that_see_themselves_share_all_or_nothing(monkeypatch):
    """Keys and values of their first tokens depend on their last one."""
    case = PALIGEMMA2
    spec, params = load(case)
    engine, counts = Engine(params, spec, Compute()), tokens_read(monkeypatch)
    begin: Document = [words(20, 3), case.read(picture(60, 30, 1)), words(9, 4)]
    texts: list[Document] = [[*begin, [7]], [*begin, [8]]]
    golden, length = [expected(case, text) for text in texts], len(ids_of(texts[0]))
    for order, read in (([0, 0], length), ([0, 1, 0], 2 * length)):
        counts.clear()
        scheduler = engine.scheduler(rows=3)
        generations = [scheduler.submit(request(engine, case, texts[number])) for number in order]
        while not scheduler.idle:
            scheduler.step()
        assert [generation.ids for generation in generations] == [golden[number] for number in order]
        assert sum(counts) == read


@pytest.mark.slow
def test_log_probabilities_of_answers_to_prompts_that_see_themselves_equal_transformers():
    """Of texts with pictures and of words alone."""
    case = PALIGEMMA2
    spec, params = load(case)
    documents = documents_of(case)
    texts = []
    for document in documents:
        prompt = prompt_length(document)
        assert prompt is not None
        texts.append(TargetText(tuple(ids_of(document)), prompt, prompt_pictures(case, document)))
    with torch.no_grad():
        golden, _ = torch_run(torch_model(case.case), documents)
    for text, ours, logits in zip(texts, target_log_probs(params, spec, Compute(), texts), golden, strict=True):
        places = np.arange(text.first, len(text.ids))
        theirs = torch.tensor(logits).log_softmax(-1).numpy()[places - 1, np.asarray(text.ids)[places]]
        np.testing.assert_allclose(ours.log_probabilities, theirs, atol=1e-5, rtol=1e-5)


def test_replaced_parameters_see_pictures_anew():
    """A request under way reads its picture again by the new tower."""
    case = CASES[0]
    spec, params = load(case)
    document: Document = [words(5, 3), case.read(picture(60, 30, 1)), words(4, 4)]
    engine, other = Engine(params, spec, Compute()), Engine(doubled(params), spec, Compute())
    scheduler = engine.scheduler(rows=1)
    generation = scheduler.submit(request(engine, case, document))
    scheduler.step(3)
    old = list(generation.ids)
    engine.replace_params(doubled(params))
    while not scheduler.idle:
        scheduler.step()
    pictures = prompt_pictures(case, document)
    rest = other.request([*ids_of(document), *old], max_tokens=NEW - len(old), stop_ids=[], pictures=pictures)
    scheduler = other.scheduler(rows=1)
    continued = scheduler.submit(rest)
    while not scheduler.idle:
        scheduler.step()
    assert generation.ids == old + continued.ids
    assert continued.ids != expected(case, document)[len(old) :]


def doubled(params: dict) -> dict:
    """The parameters with another projector."""
    projector = {name: {key: 2 * leaf for key, leaf in node.items()} for name, node in params["projector"].items()}
    return params | {"projector": projector}


def test_a_prompt_that_ends_with_a_picture_is_refused():
    case = CASES[0]
    spec, params = load(case)
    with pytest.raises(UserError, match="ends with a picture"):
        request(Engine(params, spec, Compute()), case, [words(3, 1), case.read(picture(60, 30, 1))])


@pytest.mark.slow
def test_adapters_over_one_base_and_meshes_see_the_same(shared, tmp_path):
    """Adapters of peft in the decoder, and in the tower; on four devices, in a process of their own."""
    base = save_seeing_model(tmp_path / "base", shared)
    targets = {"reads": r".*language_model.*v_proj", "looks": r".*vision_tower.*v_proj"}
    for seed, (name, modules) in enumerate(targets.items()):
        torch.manual_seed(seed)
        model = transformers.AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
        config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=modules, init_lora_weights=False)
        peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapters" / name)
    on_four_devices(pathlib.Path(__file__).with_name("picture_cases.py"), base, tmp_path / "adapters")
