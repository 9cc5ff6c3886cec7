"""Records of parquet and Arrow files and of saved data sets are those that `datasets` itself gives, for every type.

The oracle is load_dataset and load_from_disk. Two differences are meant: fields of structs that are null are left out,
and media are not decoded.
"""

from __future__ import annotations

import datetime
import decimal
import gzip
import os
import shutil
import uuid

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Array2D, Array3D, ClassLabel, Features, Image, Json, LargeList, List, Pdf, Value, Video
from datasets.features.features import _FEATURE_TYPES

from data.reading import fails, read
from meshtune.data.checking import check_source
from meshtune.data.readers.parquet import RunCache
from meshtune.data.sources import DataSource, open_path
from meshtune.errors import UserError

TIME = datetime.datetime(2020, 1, 2, 3, 4, 5)
MEDIA = [{"bytes": b"x", "path": "a"}, None]
TURNS = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}],
    [{"role": "user", "content": [{"type": "text", "text": "x", "n": None}]}],
]
# Every type of `datasets`: two values, of which the second may be null.
VALUES = {
    "string": (Value("string"), ["a", None]),
    "large_string": (Value("large_string"), ["a", None]),
    "int8": (Value("int8"), [1, None]),
    "uint64": (Value("uint64"), [2**62, None]),
    "float16": (Value("float16"), [1.5, None]),
    "float64": (Value("float64"), [0.1, None]),
    "bool": (Value("bool"), [True, None]),
    "null": (Value("null"), [None, None]),
    "timestamp[s]": (Value("timestamp[s]"), [TIME, None]),
    "timestamp[ns]": (Value("timestamp[ns]"), [TIME, None]),
    "timestamp[us, tz=UTC]": (Value("timestamp[us, tz=UTC]"), [TIME.replace(tzinfo=datetime.UTC), None]),
    "date32": (Value("date32"), [TIME.date(), None]),
    "date64": (Value("date64"), [TIME.date(), None]),
    "time32": (Value("time32[s]"), [TIME.time(), None]),
    "time64": (Value("time64[us]"), [TIME.time(), None]),
    "duration": (Value("duration[s]"), [datetime.timedelta(seconds=5), None]),
    "decimal128": (Value("decimal128(10, 2)"), [decimal.Decimal("1.25"), None]),
    "decimal256": (Value("decimal256(40, 2)"), [decimal.Decimal("1.25"), None]),
    "binary": (Value("binary"), [b"\0a", None]),
    "large_binary": (Value("large_binary"), [b"\0a", None]),
    "ClassLabel": (ClassLabel(names=["no", "yes"]), [1, None]),
    "Translation": (datasets.Translation(languages=["de", "en"]), [{"de": "ja", "en": "yes"}, {"de": "x", "en": "y"}]),
    "TranslationVariableLanguages": (
        datasets.TranslationVariableLanguages(languages=["de", "en"]),
        [{"de": "ja", "en": ["yes", "yep"]}, {"en": "y"}],
    ),
    "List": (List(Value("string")), [["a", None], None]),
    "List of fixed length": (List(Value("int32"), length=2), [[1, 2], [3, 4]]),
    "LargeList": (LargeList(Value("string")), [["a"], []]),
    "Sequence of structs": (datasets.Sequence({"a": Value("string")}), [{"a": ["x", "y"]}, {"a": []}]),
    "struct": ({"a": Value("string"), "b": {"c": Value("int32")}}, [{"a": "x", "b": {"c": 1}}, {"a": None, "b": None}]),
    "List of structs": (List({"a": Value("string"), "b": Value("int32")}), [[{"a": "x", "b": None}], []]),
    "Json": (Json(), [{"a": None, "b": [1, "x"]}, "text"]),
    "Json, null": (Json(), [[None, {"a": {}}], None]),
    "Json, not decoded": (Json(decode=False), [{"a": 1}, "text"]),
    "List of Json": (List(Json()), [[{"a": 1}, "text", None], [[1, 2]]]),
    "LargeList of Json": (LargeList(Json()), [[{"a": 1}, "text"], []]),
    "struct with Json": ({"j": Json(), "s": Value("string")}, [{"j": {"a": None}, "s": "x"}, {"j": [1], "s": "y"}]),
    "List of structs with Json": (List({"role": Value("string"), "content": Json()}), TURNS),
    "Array2D": (Array2D((2, 2), "int32"), [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
    "Array2D of any length": (Array2D((None, 2), "int32"), [[[1, 2], [3, 4]], [[5, 6]]]),
    "Array3D": (Array3D((1, 2, 2), "float32"), [[[[1, 2], [3, 4]]], [[[5, 6], [7, 8]]]]),
    "List of Array2D": (List(Array2D((1, 2), "int32")), [[[[1, 2]]], []]),
    "Image": (Image(decode=False), MEDIA),
    "Image, decoded": (Image(), MEDIA),
    "Video": (Video(decode=False), MEDIA),
    "Pdf": (Pdf(decode=False), MEDIA),
}
# Of media and larger arrays, which go as those above, and need packages of their own to be written.
AS_THOSE_ABOVE = {"Array4D", "Array5D", "Audio", "BioSequence", "BioStructure", "Mesh", "Nifti"}
FILES = ("a.parquet", "saved", "file.arrow", "stream.arrow")


def test_every_type_of_datasets_is_compared():
    compared = {type(feature).__name__ for feature, _ in VALUES.values()}
    assert set(_FEATURE_TYPES) - compared <= AS_THOSE_ABOVE | {"dict"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    datasets.disable_progress_bars()
    yield tmp_path
    datasets.enable_progress_bars()


def write_arrow(table: pyarrow.Table, folder) -> None:
    for name, writer in (("file.arrow", pyarrow.ipc.new_file), ("stream.arrow", pyarrow.ipc.new_stream)):
        with writer(str(folder / name), table.schema) as stream:
            stream.write_table(table)


def theirs(path) -> datasets.Dataset:
    if path.is_dir():
        table = datasets.load_from_disk(str(path))
    else:
        kind = "parquet" if path.suffix == ".parquet" else "arrow"
        table = datasets.load_dataset(kind, data_files=str(path), split="train")
    feature = table.features["x"]
    return table.cast_column("x", Image(decode=False)) if isinstance(feature, Image) else table


def without_null_fields(value: object, feature: object) -> object:
    """The value with the null fields of its structs left out, but not those of JSON."""
    if isinstance(feature, dict) and isinstance(value, dict):
        return {name: without_null_fields(value[name], feature[name]) for name in value if value[name] is not None}
    if isinstance(feature, List | LargeList) and isinstance(value, list):
        return [without_null_fields(item, feature.feature) for item in value]
    return value


@pytest.mark.parametrize("name", VALUES)
def test_records_are_those_of_datasets(cache, name):
    feature, values = VALUES[name]
    features = Features({"x": feature, "id": Value("string")})
    table = datasets.Dataset.from_dict({"x": values, "id": ["0", "1"]}, features=features)
    table.to_parquet(cache / "a.parquet")
    table.save_to_disk(cache / "saved")
    write_arrow(table.with_format("arrow")[:], cache)
    for file in FILES:
        expected = theirs(cache / file)
        records = [
            {"x": without_null_fields(x, expected.features["x"]), "id": id_}
            for x, id_ in zip(*expected[:].values(), strict=True)
        ]
        assert repr(read(cache / file)) == repr(records), file
    stream = open_path(cache / "a.parquet", "a").random_access(RunCache()).select(np.arange(2))
    assert repr([*stream.sweep()]) == repr(read(cache / "a.parquet"))


def extension(kind, storage):
    return pyarrow.ExtensionArray.from_storage(kind, storage)


# Written by pyarrow, without what `datasets` notes of its types.
RAW = {
    "json": extension(pyarrow.json_(), pyarrow.array(['{"a": null}', '"text"'])),
    "list of json": pyarrow.ListArray.from_arrays([0, 1, 2], extension(pyarrow.json_(), pyarrow.array(["[1]", "2"]))),
    "dictionary": pyarrow.array(["a", "b"]).dictionary_encode(),
    "string_view": pyarrow.array(["a", "b"], pyarrow.string_view()),
    "binary_view": pyarrow.array([b"a", b"b"], pyarrow.binary_view()),
    "fixed binary": pyarrow.array([b"ab", b"cd"], pyarrow.binary(2)),
    "duration": pyarrow.array([1, 2], pyarrow.duration("ns")),
    "uuid": extension(pyarrow.uuid(), pyarrow.array([uuid.UUID(int=1).bytes] * 2, pyarrow.binary(16))),
    "bool8": extension(pyarrow.bool8(), pyarrow.array([1, 0], pyarrow.int8())),
    "tensor": pyarrow.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8).reshape(2, 2, 2)),
    "map": pyarrow.array([[("k", 1)], [("q", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int32())),
    "list view": pyarrow.array([["a"], ["b"]], pyarrow.list_view(pyarrow.string())),
    "decimal32": pyarrow.array([decimal.Decimal("1.2")] * 2, pyarrow.decimal32(5, 2)),
}


@pytest.mark.parametrize("name", RAW)
def test_a_type_that_datasets_lacks_is_refused_by_column_and_others_are_equal(cache, name):
    table = pyarrow.table({"text": ["a", "b"], "x": RAW[name]})
    pyarrow.parquet.write_table(table, cache / "a.parquet")
    write_arrow(table, cache)
    for file in ("a.parquet", "file.arrow", "stream.arrow"):
        try:
            expected = theirs(cache / file)[:]["x"]
        except (datasets.exceptions.DatasetGenerationError, ValueError):
            error = fails(cache / file)
            assert error.what.startswith("the column 'x' is of the type ")
            assert "table.drop_columns(['x'])" in error.fix
        else:
            assert [record["x"] for record in read(cache / file)] == expected
    # The fix that is offered.
    pyarrow.parquet.write_table(table.drop_columns(["x"]), cache / "b.parquet")
    assert read(cache / "b.parquet") == [{"text": "a"}, {"text": "b"}]


def test_json_that_is_none_is_named_with_its_record(cache):
    for text in ("{", "[" * 200 + "]" * 200):
        values = extension(pyarrow.json_(), pyarrow.array(['"fine"', text]))
        pyarrow.parquet.write_table(pyarrow.table({"x": values}), cache / "a.parquet")
        first, second = read(cache / "a.parquet")
        assert first == {"x": "fine"}
        assert isinstance(second, UserError)
        assert second.where == "a.parquet, record 1, field 'x'"


TEXT = ("string", "large_string", "null", "Json, not decoded")


@pytest.mark.parametrize("name", [name for name in VALUES if name not in TEXT])
def test_what_is_not_text_is_refused_by_name_where_text_is_read(cache, name):
    feature, values = VALUES[name]
    features = Features({"prompt": Value("string"), "completion": feature})
    table = datasets.Dataset.from_dict({"prompt": ["q"], "completion": values[:1]}, features=features)
    table.to_parquet(cache / "a.parquet")
    source = DataSource(path=str(cache / "a.parquet"), format="prompt_completion")
    with pytest.raises(UserError) as caught:
        check_source(source, "error", 0, [], "documents")
    assert "completion" in (caught.value.where or "")


DEEP = "[" * 100_000 + "]" * 100_000
STATE = (
    '{"_data_files": [%s], "_fingerprint": "x", "_format_columns": null, "_format_kwargs": {}, "_format_type": null}'
)
WRONG = ["[]", "{}", "3", DEEP, "\udcff", '{"features": 3}', '{"splits": 3}', STATE % "", STATE % "3", STATE % "{}"]


def records_or_error(path):
    try:
        return read(path)
    except UserError as error:
        return error.where, error.what.partition(":")[0]


@pytest.mark.parametrize("file", ["state.json", "dataset_info.json"])
@pytest.mark.parametrize("content", WRONG)
def test_a_saved_data_set_of_wrong_json_is_an_error_of_its_folder(cache, file, content):
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(cache / "saved")
    (cache / "saved" / file).write_bytes(content.encode("utf-8", "surrogateescape"))
    records = records_or_error(cache / "saved")  # what it does not need may be anything
    assert records in ([{"text": "a"}], ("saved", "cannot read the saved data set"))


@pytest.mark.parametrize("content", [*WRONG, '{"info": 3}', '{"info": {"features": 3}}', "{"])
def test_metadata_of_wrong_json_is_an_error_of_the_file(cache, content):
    metadata = {"huggingface": content.encode("utf-8", "surrogateescape")}
    table = pyarrow.table({"text": ["a"]}).replace_schema_metadata(metadata)
    pyarrow.parquet.write_table(table, cache / "a.parquet")
    write_arrow(table, cache)
    for file in ("a.parquet", "file.arrow", "stream.arrow"):
        assert records_or_error(cache / file) in (
            [{"text": "a"}],
            (file, f"cannot read the {file.partition('.')[2]} file"),
        )


@pytest.mark.parametrize(
    "kind", ["parquet", "arrow", "stream", "saved", "jsonl", "json", "csv", "tsv", "txt", "jsonl.gz"]
)
def test_a_file_replaced_by_one_of_equal_size_and_time_is_read_anew(cache, kind):
    """As by builds with one time for all files, cp -p, rsync -t, and checkouts of dvc."""
    path = cache / ("saved" if kind == "saved" else "data.arrow" if kind == "stream" else f"data.{kind}")
    sizes = []
    for text in ("old answer", "new answer"):
        table = pyarrow.table({"text": [text]})
        if path.is_dir():
            shutil.rmtree(path)
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path)
        elif kind in ("arrow", "stream"):
            with (pyarrow.ipc.new_file if kind == "arrow" else pyarrow.ipc.new_stream)(str(path), table.schema) as sink:
                sink.write_table(table)
        elif kind == "saved":
            datasets.Dataset.from_dict({"text": [text]}).save_to_disk(path)
        else:
            content = {
                "csv": f"text\n{text}\n",
                "tsv": f"text\n{text}\n",
                "txt": f"{text}\n",
                "json": f'[{{"text": "{text}"}}]',
            }
            content = content.get(kind, f'{{"text": "{text}"}}\n').encode()
            path.write_bytes(gzip.compress(content, mtime=0) if kind.endswith(".gz") else content)
        for file in path.iterdir() if path.is_dir() else [path]:
            os.utime(file, (1e9, 1e9))
        sizes.append(path.stat().st_size)
        assert read(path) == [{"text": text}]
    assert kind == "saved" or sizes[0] == sizes[1]
