"""Pictures of odd shapes and addresses, for every family: they are read, or refused by the name of their record."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from PIL import Image

from data.pictures import MODELS, file_of, make_model, picture, reader_of
from data.test_pictures import chat, prepare
from meshtune.data.pictures.expansion import read_pictures
from meshtune.errors import UserError

every_family = pytest.mark.parametrize("family", MODELS)


@every_family
def test_a_picture_of_any_shape_is_read_or_refused_by_its_record(model, tmp_path, family):
    """Those that are read have the patches that their header promised."""
    reader, refused = reader_of(model(family)), 0
    for size in ((1, 1), (1, 2), (10_000, 1), (1, 10_000), (3, 700), (900, 5)):
        (tmp_path / "odd.png").write_bytes(file_of(Image.new("RGB", size, (200, 30, 60))))
        try:
            layout = reader.layout(*size)
        except UserError:
            refused += 1
            with pytest.raises(UserError, match="takes none of such a shape") as caught:
                prepare(model(family), [chat("odd.png")], tmp_path, max_length=4096)
            assert "record 0" in caught.value.where
            assert caught.value.fix
            continue
        patches, segments, grid = reader.patches(Image.open(tmp_path / "odd.png"))
        assert len(patches) == len(segments) == len(grid) == layout.patches > 0
        assert 0 < layout.visual.max() <= layout.features
        assert len(layout.ids) == len(layout.visual)
        assert np.isfinite(patches).all()
    assert refused <= 4


@every_family
def test_every_text_that_stands_for_pictures_is_refused_in_a_turn(model, tmp_path, family):
    """In a question about a picture, in a record of text, and in an answer."""
    (tmp_path / "a.png").write_bytes(file_of(picture(56, 56)))
    directory = model(family)
    reserved = reader_of(directory).reserved
    assert reserved
    for token in reserved:
        records = [chat("a.png", text=f"a {token}?"), chat(text=f"a {token}?"), chat("a.png", answer=f"a {token}.")]
        for record in records:
            with pytest.raises(UserError) as caught:
                prepare(directory, [chat("a.png"), record], tmp_path, data={"shuffle": False})
            assert token in caught.value.what
            assert "record 1" in caught.value.where
            assert caught.value.fix


def test_links_lead_to_pictures_below_the_folder_only(model, tmp_path):
    """A link out of it is refused; a snapshot of the hub's cache is links into the repository's blobs."""
    repository, elsewhere = tmp_path / "datasets--a--b", tmp_path / "elsewhere"
    snapshot, blobs = repository / "snapshots/123", repository / "blobs"
    for folder in (snapshot / "inner", blobs, elsewhere):
        folder.mkdir(parents=True)
    for folder in (blobs, elsewhere):
        (folder / "picture").write_bytes(file_of(picture(56, 56)))
    (snapshot / "inner/hub.png").symlink_to("../../../blobs/picture")
    (snapshot / "again.png").symlink_to("inner/hub.png")
    (snapshot / "out.png").symlink_to(elsewhere / "picture")
    (snapshot / "folder").symlink_to(elsewhere)
    directory = model("internvl")
    store = prepare(directory, [chat("inner/hub.png", "again.png")], snapshot).train.store
    assert len(read_pictures(store[0].extra)) == 2
    for name in ("out.png", "folder/picture"):
        with pytest.raises(UserError, match="a link out of the folder") as caught:
            prepare(directory, [chat(name)], snapshot)
        assert "record 0" in caught.value.where
    way_out = [chat(str(elsewhere / "picture"))]
    assert len(prepare(directory, way_out, snapshot, media_dir=str(elsewhere)).train.store) == 1


def uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_the_content_of_a_data_uri_counts_and_not_its_type(model, tmp_path):
    png = file_of(picture(56, 56))
    stores = [
        prepare(model("internvl"), [chat(uri(png, kind))], tmp_path / str(n)).train.store
        for n, kind in enumerate(("image/png", "image/jpeg", "image/webp"))
    ]
    assert len({read_pictures(store[0].extra)[0].picture.digest for store in stores}) == 1
    for data, kind, problem in (
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml", "none of PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/png", "none of PNG"),
        (b"", "image/png", "empty"),
        (png, "application/pdf", "not a data URI of a picture"),
    ):
        with pytest.raises(UserError, match=problem) as caught:
            prepare(model("internvl"), [chat(uri(data, kind))], tmp_path)
        assert "record 0" in caught.value.where


def test_transparency_in_a_palette_is_dropped_as_transformers_drops_it(tmp_path):
    from transformers.image_utils import load_image

    from meshtune.data.pictures.files import decode_picture

    image = picture(30, 20).convert("P", palette=Image.Palette.ADAPTIVE, colors=8)
    data = file_of(image, transparency=3)
    (tmp_path / "a.png").write_bytes(data)
    assert np.array_equal(decode_picture(data, "here"), load_image(str(tmp_path / "a.png")))


@every_family
def test_too_few_pixels_for_one_feature_are_refused_for_every_family(model, family):
    reader = reader_of(model(family))
    side = reader.family.patch * reader.merge
    with pytest.raises(UserError, match="less than one feature") as caught:
        reader_of(model(family), max_pixels=side**2 - 1)
    assert caught.value.where == "vision.max_pixels"
    assert reader_of(model(family), max_pixels=side**2).layout(300, 200).patches > 0


def test_a_model_without_its_picture_tokens_or_processor_is_named(tmp_path):
    directory = make_model(tmp_path / "model", "qwen2_vl")
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "OtherImageProcessor"}))
    with pytest.raises(UserError, match=r"OtherImageProcessor(.|\n)*known: Qwen2VLImageProcessor"):
        reader_of(directory)
    (directory / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match=r"no preprocessor_config\.json"):
        reader_of(directory)


@every_family
@pytest.mark.parametrize(
    "settings",
    [{"size": "large", "crop_size": "large", "tile_size": "large"}, {"image_mean": "grey", "do_normalize": True}],
    ids=["size", "mean"],
)
def test_settings_that_no_processor_can_follow_are_named(tmp_path, family, settings):
    directory = make_model(tmp_path / "model", family)
    file = directory / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    if family.startswith("gemma4"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_soft_tokens": "many"}))
    with pytest.raises(UserError) as caught:
        reader_of(directory)
    assert caught.value.where == str(file)
    assert caught.value.fix
