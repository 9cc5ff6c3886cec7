"""LLaMA-Factory's dataset_info.json is understood unchanged; unsupported entries are refused by name."""

from __future__ import annotations

import json
import pathlib

import pytest

from meshtune.config.sections import DataSection, SourceSection
from meshtune.data.conversation import Conversation, Text
from meshtune.data.documents import load_documents
from meshtune.data.registry import Registry, load_registry
from meshtune.errors import UserError

SIZES = {
    "identity": 91,
    "alpaca_en_demo": 999,
    "alpaca_zh_demo": 1000,
    "glaive_toolcall_en_demo": 300,
    "glaive_toolcall_zh_demo": 300,
    "wiki_demo": 30,
    "c4_demo": 300,
}


def load(registry, name: str, **section):
    return load_documents(DataSection(train=[{"name": name, **section}], registry=str(registry)), seed=0)


def refuses(entries, name: str = "mine", **section) -> UserError:
    registry = Registry(path=pathlib.Path("dataset_info.json"), name="dataset_info.json", entries=entries)
    with pytest.raises(UserError) as caught:
        registry.source(SourceSection(name=name, **section))
    return caught.value


@pytest.mark.parametrize("name", SIZES)
def test_every_text_entry_with_a_local_file_loads_completely(shared, name):
    documents = load(shared / "assets/data/llamafactory", name)
    assert len(documents.train) == SIZES[name]
    assert documents.skipped == []


def test_no_text_entry_of_the_shared_registry_is_left_untested(shared):
    folder = shared / "assets/data/llamafactory"
    entries = json.loads((folder / "dataset_info.json").read_text())
    local = {
        name
        for name, entry in entries.items()
        if "file_name" in entry and (folder / entry["file_name"]).exists()
        if not entry.get("ranking") and "kto_tag" not in entry.get("columns", {})
    }
    assert local == set(SIZES)


def test_every_entry_of_the_shared_registry_is_understood_or_refused_with_a_reason(shared):
    """Also those of the hub, whose data are not here; over 60 of the 104 entries are text to tune on."""
    folder = shared / "assets/data/llamafactory"
    registry = load_registry(str(folder / "dataset_info.json"))
    described = 0
    for name in registry.entries:
        entry = registry.entries[name]
        foreign = {"videos", "audios", "kto_tag"} & set(entry.get("columns", {}))
        is_missing = not (folder / entry.get("file_name", "")).exists()
        if foreign or is_missing or entry.get("ranking") or not {"hf_hub_url", "ms_hub_url", "file_name"} & set(entry):
            with pytest.raises(UserError, match=r"preference|videos|audios|OpenMind|only from|no such file"):
                registry.source(SourceSection(name=name))
        else:
            registry.source(SourceSection(name=name))
            described += 1
    assert described > 60


def test_documents_of_the_registry_hold_what_the_files_hold(shared):
    folder = shared / "assets/data/llamafactory"
    raw = json.loads((folder / "alpaca_zh_demo.json").read_text())
    documents = load(folder, "alpaca_zh_demo").train
    for index in (0, 1, 999):
        document = documents[index]
        assert isinstance(document, Conversation)
        question = "\n".join(filter(None, (raw[index]["instruction"], raw[index]["input"])))
        assert [message.content for message in document.messages] == [question, raw[index]["output"]]
    lines = (folder / "wiki_demo.txt").read_text().splitlines()
    wiki = load(folder, "wiki_demo").train
    assert isinstance(wiki[3], Text)
    assert wiki[3].text == lines[3]
    calls = load(folder, "glaive_toolcall_en_demo").train[0]
    assert calls.messages[3].tool_calls[0]["function"]["name"] == "search_recipes"
    assert calls.tools[0]["function"]["name"] == "search_recipes"


def test_an_entry_with_columns_has_only_those_fields(tmp_path):
    """LLaMA-Factory: with `columns`, an input that is not named is not read; without, the defaults are."""
    (tmp_path / "a.json").write_text(json.dumps([{"instruction": "q", "input": "more", "output": "a"}]))
    entries = {
        "named": {"file_name": "a.json", "columns": {"prompt": "instruction", "response": "output"}},
        "plain": {"file_name": "a.json"},
        "text": {"file_name": "a.json", "columns": {"prompt": "output"}},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    assert load(tmp_path, "named").train[0].messages[0].content == "q"
    assert load(tmp_path, "plain").train[0].messages[0].content == "q\nmore"
    assert load(tmp_path, "text").train[0].text == "a"
    assert load(tmp_path, "plain", columns={"input": "output"}).train[0].messages[0].content == "q\na"


def test_tags_and_openai_formatting(tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"chat": turns}))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "chat"}
    entries = {
        "tagged": {"file_name": "a.jsonl", "formatting": "sharegpt", "columns": columns, "tags": tags},
        "openai": {"file_name": "a.jsonl", "formatting": "openai", "columns": columns},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    for name in entries:
        document = load(tmp_path, name).train[0]
        assert [(message.role, message.content) for message in document.messages] == [("user", "q"), ("assistant", "a")]


def test_num_samples_draws_that_many_by_the_seed(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(100)))
    entry = {"file_name": "a.jsonl", "columns": {"prompt": "text"}}
    entries = {"few": entry | {"num_samples": 10}, "many": entry | {"num_samples": 250}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))

    def texts(name, seed):
        section = DataSection(train=[{"name": name}], registry=str(tmp_path))
        return [document.text for document in load_documents(section, seed=seed).train]

    assert len(set(texts("few", 0))) == 10
    assert texts("few", 0) == texts("few", 0) != texts("few", 1)
    many = texts("many", 0)
    assert len(many) == 250
    assert {many.count(str(n)) for n in range(100)} == {2, 3}


def test_hub_entries_take_subset_split_and_folder_which_the_recipe_may_override():
    entry = {"hf_hub_url": "o/n", "ms_hub_url": "x/y", "subset": "en", "split": "full", "folder": "python"}
    registry = Registry(path=pathlib.Path("r"), name="r", entries={"mine": entry})
    source = registry.source(SourceSection(name="mine"))
    assert (source.path, source.hub, source.subset, source.split, source.folder) == (
        "o/n",
        True,
        "en",
        "full",
        "python",
    )
    overridden = registry.source(
        SourceSection(name="mine", split="test", subset="zh", weight=2.0, cap=5, revision="v1")
    )
    assert (overridden.subset, overridden.split, overridden.weight, overridden.cap, overridden.revision) == (
        "zh",
        "test",
        2.0,
        5,
        "v1",
    )


@pytest.mark.parametrize(
    ("entry", "where", "message", "fix"),
    [
        ({"file_nam": "a"}, "entry 'mine'", "unknown key 'file_nam'", "did you mean 'file_name'?"),
        ({"file_name": "a", "colums": {}}, "entry 'mine'", "unknown key 'colums'", "did you mean 'columns'?"),
        ({"file_name": "a", "columns": {"promt": "x"}}, "columns", "unknown column 'promt'", "did you mean 'prompt'?"),
        ({"file_name": "a", "tags": {"roletag": "x"}}, "tags", "unknown tag 'roletag'", "did you mean 'role_tag'?"),
        ({"file_name": "a", "formatting": "sharegp"}, "formatting", "unknown formatting", "did you mean 'sharegpt'?"),
        ({"file_name": 3}, "key 'file_name'", "expected text, found 3", "correct"),
        ({"file_name": "a", "ranking": "yes"}, "key 'ranking'", "expected true or false", "correct"),
        ({"file_name": "a", "num_samples": 0}, "key 'num_samples'", "above 0", "correct"),
        ({"file_name": "a", "columns": {"prompt": 3}}, "columns 'prompt'", "expected the name of a field", "correct"),
        ({"file_name": "a", "columns": {"messages": "m"}}, "columns", "no meaning with formatting alpaca", "response"),
        ({"file_name": "a", "columns": {"videos": "i"}}, "columns", "has videos: only text and", "leave it out"),
        ({"file_name": "a", "columns": {"videos": "v", "audios": "a"}}, "columns", "has videos and audios", "leave"),
        ({"file_name": "a", "ranking": True}, "entry 'mine'", "preference data (ranking: true)", "path"),
        ({"file_name": "a", "columns": {"kto_tag": "l"}}, "entry 'mine'", "preference data (column kto_tag)", "path"),
        ({"om_hub_url": "a/b"}, "om_hub_url", "OpenMind", "download it"),
        ({"script_url": "a"}, "script_url", "run code", "download it"),
        ({"subset": "a"}, "entry 'mine'", "names no data", "add file_name"),
        (["file"], "entry 'mine'", "not an object", "file_name"),
    ],
)
def test_a_wrong_or_unsupported_entry_is_named(entry, where, message, fix):
    error = refuses({"mine": entry})
    assert where in error.where
    assert "dataset_info.json" in error.where
    assert message in error.what
    assert fix in error.fix


def test_an_unknown_entry_suggests_the_nearest():
    error = refuses({"alpaca_en_demo": {"file_name": "a"}}, "alpaca_en_dmo")
    assert "no entry 'alpaca_en_dmo'" in error.what
    assert "did you mean 'alpaca_en_demo'?" in error.fix


def test_a_missing_file_and_a_missing_or_broken_registry_are_named(tmp_path):
    def fails(name: str) -> UserError:
        with pytest.raises(UserError) as caught:
            load(name, "mine")
        return caught.value

    assert fails(str(tmp_path)).where == f"{tmp_path}/dataset_info.json"
    path = tmp_path / "dataset_info.json"
    path.write_text('{"mine": {"file_name": "dta.json"}}')
    (tmp_path / "data.json").write_text("[]")
    error = fails(str(path))
    assert "entry 'mine'" in error.where
    assert "data.json" in error.fix
    path.write_text('{"mine": {\n"file_name" "data.json"}}')
    assert f"{path}, line 2, column 13" in fails(str(path)).where
    path.write_text("[]")
    assert "object of named entries" in fails(str(path)).what
