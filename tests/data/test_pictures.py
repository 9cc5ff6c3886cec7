"""Data with pictures: rows, masks, formats, and files and records that are bad."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from data.pictures import file_of, make_model, picture, processed_by, reader_of
from meshtune.config.recipe import Recipe
from meshtune.config.sections import VisionSection
from meshtune.data import prepare as prepare_module
from meshtune.data.conversation import Conversation, Origin
from meshtune.data.inspection import inspect_data
from meshtune.data.pictures.expansion import read_pictures
from meshtune.data.pictures.files import decode_picture, read_size
from meshtune.data.pictures.rows import Segment
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError
from meshtune.rollout.batch import completion_rows


def recipe_of(directory, file, **vision):
    options = {"max_length": vision.pop("max_length", 256), "overlong": vision.pop("overlong", "truncate")}
    sections = {"model": str(directory), "data": {"train": str(file), **options, **vision.pop("data", {})}}
    online = {name: vision.pop(name) for name in ("rollout", "rewards") if name in vision}
    fields = {"stage": vision.pop("stage", "sft"), "train": {} if online else {"batch_size": 2}} | online
    return Recipe.model_validate({**sections, **fields, "output": str(file.parent / "out"), "vision": vision})


def prepare(directory, records, folder, **vision):
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    recipe = recipe_of(directory, data, **vision)
    return prepare_data(recipe, load_tokenizer(directory), cache=folder / "cache")


def chat(*pictures, text="what is it?", answer="a circle", mark="<image>"):
    turns = [{"role": "user", "content": mark * len(pictures) + text}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": list(pictures)} if pictures else {"messages": turns}


@pytest.fixture
def folder(tmp_path):
    for name, size in {"a.png": (56, 56), "b.png": (150, 60), "c.png": (40, 130)}.items():
        (tmp_path / name).write_bytes(file_of(picture(*size)))
    return tmp_path


@pytest.mark.parametrize("family", ["internvl", "smolvlm", "qwen3_vl", "gemma3", "paligemma", "llava_next"])
def test_a_row_has_the_pictures_of_its_documents(model, folder, family):
    directory = model(family)
    reader, tokenizer = reader_of(directory), load_tokenizer(directory)
    records = [chat("a.png", "b.png"), chat(), chat("c.png", text="which colour?")]
    data = prepare(directory, records, folder, max_length=2048, data={"shuffle": False})
    batch = data.train.batch(0)
    arrays = {name: array[0, 0] for name, array in batch.arrays.items()}
    assert batch.arrays["patches"].shape[2] in data.train.pictures.sizes
    names = {"a.png": (56, 56), "b.png": (150, 60), "c.png": (40, 130)}
    expected = [reader.patches(picture(*size)) for size in names.values()]
    total = sum(len(patches) for patches, *_ in expected)
    assert np.array_equal(arrays["patches"][:total], np.concatenate([patches for patches, *_ in expected]))
    assert not arrays["patches"][total:].any()
    assert not arrays["patch_segments"][total:].any()
    changes = np.diff(arrays["patch_segments"][:total])
    assert set(changes.tolist()) <= {0, 1}
    assert arrays["patch_segments"][total - 1] == sum(int(segments[-1]) for _, segments, _ in expected)
    visual, first, number = arrays["visual"], 0, 0
    places = np.flatnonzero(visual != 0)
    for size in names.values():
        layout = reader.layout(*size)
        features = layout.visual[layout.visual != 0]
        chosen = visual[places[number : number + len(features)]]
        assert chosen.tolist() == np.where(features > 0, features + first, features).tolist()
        number, first = number + len(features), first + layout.features
    assert number == len(places)
    assert not arrays["weights"][places].any()  # what follows a feature, or is one, is not trained on
    trained = arrays["targets"][arrays["weights"] > 0]
    assert tokenizer.decode(trained).count("a circle") == 3
    if reader.mrope:
        for segment in (1, 2, 3):
            own = arrays["segment_ids"] == segment
            assert arrays["mrope_positions"][own][0].tolist() == [0, 0, 0]
        text = arrays["segment_ids"] == 2
        assert (arrays["mrope_positions"][text] == arrays["positions"][text][:, None]).all()
    assert ("mrope_positions" in arrays, "reach" in arrays) == (reader.mrope, reader.reach or reader.prefix)


def test_prompts_see_each_other_as_paligemmas_processor_says(model, folder):
    """Tokens, the two types of them and labels are those of PaliGemmaProcessor, with pictures and without."""
    from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor

    directory = model("paligemma")
    pixels = processed_by(reader_of(directory))
    pixels.image_seq_length = 16
    with mock.patch.object(PaliGemmaProcessor, "check_argument_for_proper_class"):  # it asks for torchvision's class
        processor = PaliGemmaProcessor(pixels, load_tokenizer(directory))
    records = [chat("a.png", "b.png", answer="\n a"), chat(text="what?\n"), chat("c.png", text="which\n\ncolour?")]
    data = prepare(directory, records, folder, max_length=2048, data={"shuffle": False})
    arrays = {name: array[0, 0] for name, array in data.train.batch(0).arrays.items()}
    for segment, record in enumerate(records, 1):
        prompt, answer = (turn["content"] for turn in record["messages"])
        images = [Image.open(folder / name) for name in record.get("images", ())]
        if images:
            inputs = processor(images=images, text=prompt, suffix=answer)
        else:  # the processor wants a picture
            inputs = processor.tokenizer(f"<s>{prompt}\n", answer + "</s>", return_token_type_ids=True)
        ids, types = (np.asarray(inputs[name]).ravel() for name in ("input_ids", "token_type_ids"))
        own = arrays["segment_ids"] == segment
        assert arrays["tokens"][own].tolist() == ids[:-1].tolist()
        assert arrays["targets"][own].tolist() == ids[1:].tolist()
        assert arrays["weights"][own].tolist() == types[1:].tolist()
        sees = (types == 0)[:, None] & (types == 0) | (np.arange(len(ids))[:, None] >= np.arange(len(ids)))
        reach = np.maximum(arrays["reach"][own], arrays["positions"][own])
        assert np.array_equal(arrays["positions"][own] <= reach[:, None], sees[:-1, :-1])


@pytest.mark.parametrize(
    ("turns", "options", "problem"),
    [
        ([("user", "what?"), ("assistant", "a"), ("user", "why?"), ("assistant", "b")], {}, "one question"),
        ([("system", "be"), ("user", "what?"), ("assistant", "a")], {}, "one question"),
        ([("user", "what?"), ("assistant", "a")], {"train_on_prompt": True}, "would teach nothing"),
        ([("user", "what?", 1), ("assistant", "a")], {}, "a turn of the prompt has a weight"),
    ],
)
def test_what_a_prompt_that_sees_itself_cannot_have_is_refused(model, folder, turns, options, problem):
    record = {"messages": [dict(zip(("role", "content", "weight"), turn, strict=False)) for turn in turns]}
    with pytest.raises(UserError, match=problem):
        prepare(model("paligemma"), [record], folder, data=options)


@pytest.mark.parametrize(
    ("pictures", "sizes"),
    [
        ([0, 1, 1, 3], (3, 2, 0)),  # in multiples of a tile
        ([0, 3, 3, 3], (3, 0)),
        ([1, 1, 3, 3], (3, 2)),
        ([3] * 15 + [1], (3,)),
        ([3] * 15 + [0], (3,)),  # rare: the empty arrays of the larger program
    ],
)
def test_fewer_patches_are_another_shape_where_that_saves_a_tenth(model, folder, pictures, sizes):
    """Two rows a batch, each with as many pictures."""
    directory, counts = model("internvl"), [count for count in pictures for _ in range(2)]
    tile = reader_of(directory).layout(56, 56).patches
    records = [chat(*["a.png"] * count, text=f"{number}?") for number, count in enumerate(counts)]
    loader = prepare(directory, records, folder, data={"shuffle": False, "packing": False}).train
    assert loader.pictures.sizes == tuple(tile * size for size in sizes)
    shapes = [loader.batch(step).arrays for step in range(len(pictures))]
    compiled = [arrays["patches"].shape[2] // tile if "patches" in arrays else 0 for arrays in shapes]
    assert compiled == [min(size for size in sizes if size >= count) for count in pictures]
    kinds = [
        arrays.get("patches", np.zeros((1, 1, 0))).shape[2] // tile for arrays in loader.pictures.batches(shapes[0])
    ]
    assert kinds == list(sizes)


@pytest.mark.parametrize("family", ["internvl", "qwen2_vl", "gemma3"])
@pytest.mark.parametrize("shared", [True, False])
def test_completions_have_the_positions_of_their_prompt_with_pictures(model, folder, family, shared):
    """Rows of completions, with a prompt for each or one for all, have what rows of the documents would have."""
    directory = model(family)
    reader, records = reader_of(directory), [chat("a.png", "b.png"), chat(), chat("c.png", text="which colour?")]
    rewards = {"rollout": {"prompts": 3, "samples": 2, "max_tokens": 8}, "rewards": ["a.py:b"], "stage": "grpo"}
    data = prepare(directory, records, folder, max_length=600, data={"shuffle": False}, **rewards)
    loader = data.train
    prompts, completions = (
        [loader.record(n) for n in range(3)],
        [[[7] * 3, [8] * 5], [[9], [7] * 8], [[8] * 2, [9] * 4]],
    )
    assert [record.columns.get("images") for record in prompts] == [
        [str(folder / "a.png"), str(folder / "b.png")], None, [str(folder / "c.png")],
    ]  # fmt: skip
    maker, counts = loader.pictures, [loader.pictures.count(record.pictures) for record in prompts]
    sizes = {"batch": 6, "length": loader.row_length, "units": 9}
    rows = completion_rows(
        [record.ids for record in prompts],
        completions,
        sizes,
        shared=shared,
        patches=counts,
        max_patches=maker.sizes[0],
    )
    of_completion = [record for record in prompts for _ in range(2)]
    segments = [
        [Segment(of_completion[n].pictures, stop, of_completion[n].origin, start) for n, start, stop in row]
        for row in rows.documents()
    ]
    arrays = rows.arrays | maker.segment_arrays(segments, loader.row_length)
    used = (arrays["patch_segments"] > 0).sum(1)
    assert used.max() <= maker.sizes[0]
    assert used.sum() >= sum(counts) * (1 if shared else 2)
    flat = [ids for group in completions for ids in group]
    for record, ids, span in zip(of_completion, flat, rows.spans, strict=True):
        document = [Segment(record.pictures, len(record.ids) + len(ids) - 1, record.origin)]
        alone = maker.segment_arrays([document], loader.row_length)
        place = slice(len(record.ids) - 1, len(record.ids) - 1 + len(ids))
        own = slice(span.start, span.stop)
        parent = arrays["parent_ids"][span.row, span.start] if shared else span.segment
        before = arrays["segment_ids"][span.row] == parent
        visual = arrays["visual"][span.row, before][: len(record.ids) - 1]
        patches = arrays["patches"][span.row]
        assert not arrays["visual"][span.row, own].any()
        theirs, size = alone["visual"][0, : len(record.ids) - 1], reader.merge**2
        assert np.array_equal(visual != 0, theirs != 0)
        for target, source in zip(visual[theirs > 0], theirs[theirs > 0], strict=True):
            target, source = (slice((n - 1) * size, n * size) for n in (target, source))
            assert np.array_equal(patches[target], alone["patches"][0, source])
        for name in ("mrope_positions", "reach"):
            if name in arrays:
                assert np.array_equal(arrays[name][span.row, own], alone[name][0, place])


def test_rows_keep_within_both_budgets(model, folder):
    directory = model("internvl")
    patches = reader_of(directory).layout(56, 56).patches
    records = [chat("a.png", text=f"{n}?") for n in range(40)]
    data = prepare(directory, records, folder, max_length=256, max_patches=3 * patches)
    assert data.train.pictures.sizes == (3 * patches,)
    rows = data.train.rows(0)
    assert sorted(rows.documents.tolist()) == list(range(40))
    assert max(len(rows[row]) for row in range(len(rows))) == 3
    with pytest.raises(UserError, match=r"record 1(.|\n)*max_patches"):
        prepare(directory, [chat("a.png"), chat("b.png")], folder / "x", max_patches=patches, media_dir=str(folder))


def test_a_picture_is_cut_as_a_whole(model, folder):
    directory = model("qwen2_vl")
    record = chat("a.png", "b.png", answer="a circle " * 30)
    tokenizer, reader = load_tokenizer(directory), reader_of(directory)
    complete = prepare(directory, [record], folder / "1", media_dir=str(folder), max_length=1024).train.store[0]
    for length in range(9, len(complete.ids), 6):
        data = prepare(
            directory, [record], folder / str(length), media_dir=str(folder), max_length=length, overlong="turns"
        )
        example = data.train.store[0]
        items, pads = read_pictures(example.extra), int((example.ids == reader.placeholder_id).sum())
        assert pads == sum(len(reader.layout(*item.picture.size).ids) for item in items)
        for item in items:
            assert example.ids[item.start - 1] == tokenizer.convert_tokens_to_ids("<|vision_start|>")
        assert data.report.counts.pictures_cut == 2 - len(items)
        assert (example.ids == tokenizer.convert_tokens_to_ids("<|vision_end|>")).sum() == len(items)


def test_parts_marks_and_bytes_are_the_same_data(model, folder):
    """OpenAI's parts, with paths and data URIs, LLaMA-Factory's marks, and data sets with bytes."""
    import datasets

    directory, records = model("internvl"), [chat("a.png", "b.png")]
    uri = f"data:image/png;base64,{base64.b64encode((folder / 'a.png').read_bytes()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "image_url", "image_url": {"url": "b.png"}}]
    answer = {"role": "assistant", "content": "a circle"}
    openai = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}, answer]}
    expected = prepare(directory, records, folder).train.store[0]
    for number, record in enumerate([openai, {**records[0], "messages": records[0]["messages"]}]):
        store = prepare(directory, [record], folder / str(number), media_dir=str(folder)).train.store
        assert store[0].ids.tolist() == expected.ids.tolist()
    rows = {"question": ["what is it?"], "answer": ["a circle"], "image": [str(folder / "a.png")]}
    table = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    table.to_parquet(folder / "hub.parquet")
    source = {"path": str(folder / "hub.parquet"), "columns": {"instruction": "question", "output": "answer"}}
    recipe = Recipe.model_validate(
        {
            "model": str(directory),
            "data": {"train": [source], "max_length": 256},
            "output": "o",
            "vision": {},
            "train": {"batch_size": 2},
        }
    )
    data = prepare_data(recipe, load_tokenizer(directory), cache=folder / "cache")
    alone = prepare(directory, [chat("a.png")], folder / "alone", media_dir=str(folder)).train
    assert data.train.store[0].ids.tolist() == alone.store[0].ids.tolist()
    assert np.array_equal(data.train.batch(0).arrays["patches"], alone.batch(0).arrays["patches"])


def test_pairs_have_their_pictures_on_both_sides(model, folder):
    sides = {side: {"role": "assistant", "content": side} for side in ("chosen", "rejected")}
    question = {"role": "user", "content": "<image>what is it?"}
    record = {"messages": [question], **sides, "images": ["b.png"]}
    data = prepare(model("internvl"), [record], folder, stage="dpo")
    store = data.train.store
    assert [len(read_pictures(store[side].extra)) for side in (0, 1)] == [1, 1]
    batch = data.train.batch(0).arrays
    half = int(batch["patch_segments"].max()) // 2
    assert half
    assert np.array_equal(
        batch["patches"][0, 0][batch["patch_segments"][0, 0] == 1],
        batch["patches"][0, 0][batch["patch_segments"][0, 0] == half + 1],
    )


def test_companions_of_labelled_answers_have_the_pictures_of_their_prompt(model, folder):
    directory = model("internvl")
    records = [chat(name, answer=f"a {name}") | {"label": name == "a.png"} for name in ("a.png", "b.png")]
    store = prepare(directory, records, folder, stage="kto").train.store
    pictures = [read_pictures(store[document].extra) for document in range(4)]
    assert [[item.picture.size for item in items] for items in pictures] == [[(56, 56)]] * 2 + [[(150, 60)]] * 2
    reader = reader_of(directory)
    for document, (item,) in enumerate(pictures):
        layout = reader.layout(*item.picture.size)
        assert store[document].ids[item.start : item.start + len(layout.ids)].tolist() == layout.ids.tolist()


def test_a_registry_of_llama_factory_names_pictures(model, folder):
    (folder / "data.json").write_text(json.dumps([chat("a.png")]))
    columns = {"messages": "messages", "images": "images"}
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    entry = {"file_name": "data.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps({"demo": entry}))
    data = {"train": [{"name": "demo"}], "registry": str(folder)}
    recipe = Recipe.model_validate(
        {"model": str(model("internvl")), "data": data, "output": str(folder / "o"), "vision": {}}
    )
    prepared = prepare_data(recipe, load_tokenizer(model("internvl")), cache=folder / "cache")
    assert prepared.report.counts.pictures == 1


def test_a_changed_picture_is_another_data_set_and_is_noticed_while_training(model, folder):
    first = prepare(model("internvl"), [chat("a.png")], folder)
    (folder / "a.png").write_bytes(file_of(picture(56, 56, seed=1)))
    with pytest.raises(UserError, match=r"has changed(.|\n)*record 0"):
        first.train.batch(0)
    assert prepare(model("internvl"), [chat("a.png")], folder).fingerprint != first.fingerprint
    assert prepare(model("internvl"), [chat("a.png")], folder, max_pixels=900).fingerprint != first.fingerprint


def test_prepared_pictures_are_opened_by_the_manifest_until_a_file_changes(model, folder, monkeypatch):
    records, reads, load = [chat("a.png"), chat("b.png", "c.png")], [], prepare_module.load_documents
    monkeypatch.setattr(
        prepare_module, "load_documents", lambda *args, **options: (reads.append(1), load(*args, **options))[1]
    )
    directory = model("internvl")
    first, again = (prepare(directory, records, folder) for _ in range(2))
    assert len(reads) == 1
    assert again.fingerprint == first.fingerprint
    assert again.report == first.report
    before, after = first.train.batch(0).arrays, again.train.batch(0).arrays
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    (folder / "b.png").write_bytes(file_of(picture(150, 60, seed=1)))
    changed = prepare(directory, records, folder)
    assert len(reads) == 2
    assert changed.report.changed == (str(folder / "b.png"),)
    assert changed.fingerprint != first.fingerprint
    (folder / "other").mkdir()
    for name in ("a.png", "b.png", "c.png"):
        (folder / "other" / name).write_bytes((folder / name).read_bytes())
    prepare(directory, records, folder, media_dir=str(folder / "other"))
    assert len(reads) == 3, "pictures of another folder are others"


def test_pictures_are_scaled_before_the_models_own_resize(model, folder):
    reader = reader_of(model("qwen2_vl"), max_pixels=100 * 50)
    assert reader.scale(200, 100) == (100, 50)
    assert reader.layout(200, 100).patches == reader.layout(100, 50).patches
    image = picture(200, 100)
    assert np.array_equal(reader.patches(image)[0], reader.patches(image.resize((100, 50)))[0])
    assert reader_of(model("qwen2_vl"), min_pixels=400 * 100).scale(200, 50) == (400, 100)
    for family in ("internvl", "smolvlm"):
        assert len(reader_of(model(family), crops=1).layout(200, 100).tiles) == 1
        assert len(reader_of(model(family)).layout(200, 100).tiles) > 1


ROTATED = Image.Exif()
ROTATED[0x0112] = 6


@pytest.mark.parametrize(
    ("image", "kind", "options"),
    [
        (picture(30, 20), "JPEG", {"exif": ROTATED}),
        (picture(30, 20), "PNG", {"exif": ROTATED}),
        (picture(30, 20), "WEBP", {"exif": ROTATED, "lossless": True}),
        (picture(30, 20).convert("CMYK"), "JPEG", {}),
        (picture(30, 20).convert("P"), "PNG", {}),
        (picture(30, 20).convert("LA"), "PNG", {}),
        (picture(30, 20).convert("1"), "PNG", {}),
    ],
)
def test_files_are_decoded_as_transformers_does(tmp_path, image, kind, options):
    from transformers.image_utils import load_image

    (tmp_path / "file").write_bytes(data := file_of(image, kind, **options))
    expected, decoded = load_image(str(tmp_path / "file")), decode_picture(data, "here")
    assert np.array_equal(decoded, expected)
    assert read_size(data, "here") == decoded.size == (((20, 30)) if "exif" in options else (30, 20))


def test_filler_between_the_segments_of_a_jpeg_is_no_damage():
    data = file_of(picture(30, 20), "JPEG")
    assert read_size(data[:2] + b"\xff\xff" + data[2:], "here") == (30, 20)
    with pytest.raises(UserError, match="truncated"):
        read_size(data[:2] + b"\xff\xff" + data[2:-2], "here")


def bomb():
    import struct
    import zlib

    head = struct.pack(">IIBBBBB", 20_000, 6_000, 8, 2, 0, 0, 0)
    block = lambda name, body: struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))  # noqa: E731
    return b"\x89PNG\r\n\x1a\n" + block(b"IHDR", head) + block(b"IDAT", b"") + block(b"IEND", b"")


FRAMES = {"save_all": True, "append_images": [picture(9, 9, seed=2)]}
BAD_FILES = {
    "truncated.png": (file_of(picture(90, 90))[:-30], "truncated"),
    "truncated.jpg": (file_of(picture(90, 90), "JPEG")[:-30], "truncated"),
    "truncated.webp": (file_of(picture(90, 90), "WEBP")[:-30], "truncated|damaged"),
    "animated.png": (file_of(picture(9, 9), "PNG", **FRAMES), "animation of 2 frames"),
    "animated.webp": (file_of(picture(9, 9), "WEBP", **FRAMES), "animation of 2 frames"),
    "deep.png": (file_of(Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20))), "more than 8 bits"),
    "bomb.png": (bomb(), "more than|exceeds limit"),
    "gif.png": (file_of(picture(9, 9), "GIF"), "none of PNG"),
    "text.png": (b"no picture", "none of PNG"),
    "empty.png": (b"", "empty"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_with_its_record(model, folder, name):
    data, problem = BAD_FILES[name]
    (folder / name).write_bytes(data)
    with pytest.raises(UserError, match=problem) as caught:
        prepare(model("internvl"), [chat("a.png"), chat("b.png", name)], folder)
    assert "data.jsonl" in caught.value.where
    assert "turn 0, picture 1" in caught.value.where
    assert name in caught.value.where
    skipped = prepare(model("internvl"), [chat("a.png"), chat(name)], folder, data={"on_bad": "skip"})
    assert skipped.report.counts.pictures == 1
    assert len(skipped.report.skipped) == 1


def test_a_picture_that_is_too_large_is_refused_without_a_warning_of_pillow(tmp_path):
    (tmp_path / "bomb.png").write_bytes(bomb())
    program = "import pathlib, sys; from meshtune.data.pictures.files import read_size\n"
    program += "read_size(pathlib.Path(sys.argv[1]).read_bytes(), 'here')"
    command = [sys.executable, "-c", program, str(tmp_path / "bomb.png")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "UserError: the picture has 20,000 x 6,000 pixels" in done.stderr
    assert "Warning" not in done.stderr


BAD_RECORDS = [
    (chat("a.png", "b.png", mark="") | {"images": ["a.png"], "messages": chat("a.png", "b.png")["messages"]},
     "2 marks <image>, and the record has 1 picture", "images"),
    (chat() | {"messages": chat("a.png")["messages"]}, "mark <image>, and the record no picture", "record 0"),
    (chat("a.png", text="what is <IMG_CONTEXT>?"), "has <IMG_CONTEXT>, which stands for a picture", "record 0"),
    (chat("missing.png"), "cannot be read: No such file", "picture 0"),
    (chat("https://x.org/a.png"), "never fetched", "picture 0"),
    (chat("file:///etc/a.png"), "never fetched", "picture 0"),
    (chat("../a.png"), "not below the folder of pictures", "picture 0"),
    (chat("/etc/hostname"), "not below the folder of pictures", "picture 0"),
    (chat("data:text/plain;base64,aaaa"), "not a data URI of a picture", "picture 0"),
    (chat("data:image/png;base64,?"), "not base64", "picture 0"),
    (chat("a.png") | {"images": [3]}, "expected the path of a picture", "images[0]"),
    (chat("a.png", answer="<image>"), "2 marks", "images"),
    ({"messages": chat("a.png")["messages"], "videos": ["a.mp4"]}, "frames of a video", "videos"),
    ({"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}, "type 'video'", "content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "type 'input_audio'", "content[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "problem", "where"), BAD_RECORDS)
def test_a_bad_record_is_named(model, folder, record, problem, where):
    with pytest.raises(UserError) as caught:
        prepare(model("internvl"), [record], folder)
    assert problem in caught.value.what
    assert where in caught.value.where
    assert "record 0" in caught.value.where or "line 1" in caught.value.where
    assert caught.value.fix


@pytest.mark.parametrize(("record", "problem", "where"), [BAD_RECORDS[n] for n in (0, 2, 3, 4, 6)])
def test_a_bad_prompt_is_named(model, folder, record, problem, where):
    online = {"stage": "grpo", "rollout": {"prompts": 1, "samples": 2, "max_tokens": 8}, "rewards": ["a.py:b"]}
    with pytest.raises(UserError) as caught:
        prepare(model("internvl"), [record], folder, **online)
    assert problem in caught.value.what
    assert where in caught.value.where


def test_a_picture_in_a_recipe_of_text_is_refused_with_a_way_out(model, folder):
    (folder / "data.jsonl").write_text(json.dumps(chat("a.png")))
    raw = {"model": str(model("internvl")), "data": str(folder / "data.jsonl"), "output": str(folder / "o")}
    with pytest.raises(UserError, match=r"reads text only(.|\n)*vision: \{\}"):
        prepare_data(Recipe.model_validate(raw), load_tokenizer(model("internvl")), cache=folder / "cache")


def test_a_text_model_and_limits_below_a_patch_are_refused(model, tmp_path):
    directory = make_model(tmp_path / "text", "internvl")
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match="llama models read text only"):
        reader_of(directory)
    with pytest.raises(UserError, match="less than one feature"):
        reader_of(model("qwen2_vl"), max_pixels=100)
    with pytest.raises(UserError, match="does not cut"):
        reader_of(model("gemma3"), crops=2)
    with pytest.raises(ValueError, match="min_pixels 5 must not be above"):
        VisionSection(max_pixels=4, min_pixels=5)
    with pytest.raises(ValueError, match="pixel"):
        VisionSection(pixel=4)


def test_the_repr_of_a_conversation_without_pictures_is_that_of_earlier_versions(model):
    from meshtune.data.conversation import Message

    message = Message("user", "quid", 0.5, (), (("name", "n"),))
    assert repr(Conversation((message,), Origin("a", 0))) == (
        "Conversation(messages=(Message(role='user', content='quid', weight=0.5, tool_calls=(), "
        "extra=(('name', 'n'),)),), origin=Origin(source='a', record=0), tools=())"
    )


def test_streaming_data_with_pictures_is_refused(model, folder):
    with pytest.raises(UserError, match="streaming is not possible"):
        prepare(model("internvl"), [chat("a.png")], folder, data={"streaming": True})


def test_inspection_says_what_pictures_take(model, folder):
    console = Console(width=160, force_terminal=True, color_system="truecolor", file=io.StringIO())
    (folder / "data.jsonl").write_text(f"{json.dumps(chat('a.png', 'b.png'))}\n{json.dumps(chat())}\n")
    inspect_data(recipe_of(model("internvl"), folder / "data.jsonl"), console=console)
    text = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
    layout = reader_of(model("internvl")).layout(150, 60)
    assert (
        f"b.png: 150 x 60 pixels, {len(layout.tiles)} tiles, {layout.patches} patches, {len(layout.ids)} tokens" in text
    )
    assert re.search(r"pictures +2 +\d+ patches and \d+ tokens each", text)
    assert re.search(r"rows with pictures +1 +of [\d or,]+ patches, [\d.]+% of them used", text)
    assert "▀" * 32 in text
    assert text.count("IMG_CONTEXT") == 2
