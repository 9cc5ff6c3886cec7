"""The subjects of requests that a recipe names: passages of documents, examples, tools, pictures."""

from __future__ import annotations

import hashlib
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.config.data_recipe import DataRecipe
from meshtune.config.sections import SourceSection
from meshtune.data.chat import as_dicts
from meshtune.data.conversation import Conversation
from meshtune.errors import UserError
from meshtune.json_text import parse_json, read_bytes
from meshtune.synth.documents import Library, is_hidden, passages, sha256_of
from meshtune.synth.filters import load_sources
from meshtune.synth.kinds import Subject, check_schema, conversation_text

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")


def passage_subjects(library: Library, size: int) -> list[Subject]:
    """The passages of all documents. Raises UserError where they are too short for one."""
    subjects = [
        Subject(
            "passage",
            document.name,
            passage.place,
            document.sha256,
            {"passage": passage.text.strip(), "heading": passage.heading},
            passage=passage.text.strip(),
        )
        for document in library.documents
        for passage in passages(document, size)
    ]
    if not subjects:
        where = ", ".join(document.name for document in library.documents[:3])
        raise UserError("the documents are too short for a passage", where=where, fix="give longer ones")
    return subjects


def read_conversations(sources: Sequence[SourceSection], key: str, *, first: bool = False) -> list[Conversation]:
    """All conversations of the sources that a key names, or only the first. Raises UserError for records that are
    none."""
    documents = load_sources(sources, key)
    conversations: list[Conversation] = []
    for document in itertools.islice(documents, 1 if first else None):
        if not isinstance(document, Conversation):
            fix = "give conversations, such as messages with a user's and an assistant's"
            raise UserError("this is a text, and no conversation", where=f"{key}, {document.origin}", fix=fix)
        conversations.append(document)
    return conversations


def example_subjects(sources: Sequence[SourceSection]) -> list[Subject]:
    """The conversations that kinds of examples begin with."""
    subjects: list[Subject] = []
    for conversation in read_conversations(sources, "examples"):
        messages: Sequence[Mapping[str, Any]] = as_dicts(conversation)
        question, answer = (
            next((str(m["content"]) for m in reversed(messages) if m["role"] == role), "")
            for role in ("user", "assistant")
        )
        text = conversation_text(messages)
        origin = conversation.origin
        variables = {"question": question, "answer": answer, "conversation": text}
        digest = hashlib.sha256(text.encode()).hexdigest()
        subjects.append(Subject("example", origin.source, f"record {origin.record}", digest, variables))
    return subjects


def tool_subjects(path: str) -> list[Subject]:
    """One subject for each tool of a file. Raises UserError for anything but a list of OpenAI's tool schemas."""
    file = pathlib.Path(path)
    content = read_bytes(file)
    entries = parse_json(content, path)
    fix = 'write [{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}]'
    if not isinstance(entries, list) or not entries:
        raise UserError("the tools are no list", where=path, fix=fix)
    tools: list[dict[str, Any]] = []
    for number, entry in enumerate(entries):
        tool = entry.get("function", entry) if isinstance(entry, dict) else {}
        parameters = tool.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(tool.get("name"), str) or not isinstance(parameters, dict):
            raise UserError(f"tool {number} has no name or no parameters", where=path, fix=fix)
        check_schema(parameters, f"{path}, tool {number} ({tool['name']}), parameters")
        tools.append({"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters})
    digest = hashlib.sha256(content).hexdigest()
    return [
        Subject("tool", path, f"tool {tool['name']}", digest, {"tool": tool, "tools": tools}, tools=tuple(tools))
        for tool in tools
    ]


def picture_subjects(paths: Sequence[str]) -> list[Subject]:
    """One subject for each picture. Raises UserError for a path without any, and for a damaged one."""
    from meshtune.data.pictures.files import read_size

    files: list[pathlib.Path] = []
    for name in paths:
        path = pathlib.Path(name)
        entries = sorted(path.rglob("*")) if path.is_dir() else [path]
        chosen = [entry for entry in entries if entry.suffix.lower() in PICTURES and entry.is_file()]
        chosen = [entry for entry in chosen if entry == path or not is_hidden(entry.relative_to(path))]
        if not chosen:
            raise UserError("there is no picture", where=name, fix=f"give a folder of {', '.join(PICTURES)}, or a file")
        files += chosen
    for file in files:
        read_size(read_bytes(file, max_bytes=64 << 20), str(file))
    return [
        Subject("picture", file.as_posix(), "", sha256_of(file), {}, pictures=(str(file.resolve()),)) for file in files
    ]


def all_subjects(recipe: DataRecipe, library: Library | None) -> list[Subject]:
    """The subjects that a recipe names."""
    subjects = passage_subjects(library, recipe.passage_words) if library is not None else []
    subjects += example_subjects(recipe.examples) if recipe.examples else []
    subjects += tool_subjects(recipe.tools) if recipe.tools is not None else []
    subjects += picture_subjects(recipe.pictures) if recipe.pictures else []
    if not subjects:
        fix = "give documents, examples, tools or pictures"
        raise UserError("there is nothing to make records of", where="documents", fix=fix)
    return subjects


def source_digests(recipe: DataRecipe) -> dict[str, str]:
    """The SHA-256 of each document and file that records are made of, of their present bytes."""
    from meshtune.synth.documents import document_files

    files = document_files(recipe.documents) if recipe.documents else []
    files += [pathlib.Path(recipe.tools)] if recipe.tools is not None else []
    files += [
        pathlib.Path(source.path) for source in recipe.examples if source.path and pathlib.Path(source.path).is_file()
    ]
    digests: dict[str, str] = {}
    for file in files:
        try:
            digests[file.as_posix()] = sha256_of(file)
        except UserError:  # too large, which reading it says
            continue
    return digests
