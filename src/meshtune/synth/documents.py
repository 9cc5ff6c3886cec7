"""Reads documents as text, and splits them into passages whose places are known.

Markdown and plain text are decoded; markitdown reads PDF, DOCX, PPTX, HTML and EPUB.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import os
import pathlib
import re
import zipfile
from collections.abc import Iterator, Sequence

from meshtune.data.sources import missing_path_error
from meshtune.errors import UserError, amount
from meshtune.evaluate.metrics import CJK
from meshtune.json_text import file_size, read_bytes
from meshtune.synth.kinds import package

PLAIN = (".md", ".markdown", ".txt", ".rst")
CONVERTED = (".pdf", ".docx", ".pptx", ".html", ".htm", ".epub")
ARCHIVES = (".docx", ".pptx", ".epub")
DOCUMENT_TYPES = (*PLAIN, *CONVERTED)
MOST_BYTES = 256 << 20  # of a document
MOST_UNPACKED = 1 << 30  # bytes of the files in a DOCX, PPTX or EPUB
FEWEST_WORDS = 10  # of a passage: fewer hold no question
WORDS = re.compile(rf"[{CJK}]|[^\s{CJK}]+")
HEADING = re.compile(r"#{1,6}\s+(.*\S)")
GAP = re.compile(r"\n[ \t\r\f]*\n\s*|\f\s*|\Z")  # between paragraphs
SENTENCE = re.compile(r".+?(?:[.!?]['\")\]]*\s+|[。！？]|\Z)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class SourceDocument:
    """A document as text. `pages` are the characters at which its pages begin, where they are known."""

    name: str
    sha256: str
    text: str
    pages: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Passage:
    """The characters `start` to `end` of a document's text, below a heading ("": none)."""

    document: SourceDocument
    start: int
    end: int
    heading: str

    @property
    def text(self) -> str:
        """The text."""
        return self.document.text[self.start : self.end]

    @property
    def place(self) -> str:
        """The place in the document, for people."""
        page = bisect.bisect_right(self.document.pages, self.start)
        return f"{f'page {page}, ' if page else ''}characters {self.start}-{self.end}"


@dataclasses.dataclass(frozen=True)
class Library:
    """The documents that were read, and those that were left out with the reason."""

    documents: tuple[SourceDocument, ...]
    skipped: tuple[tuple[str, str], ...] = ()


def read_library(paths: Sequence[str], *, skip_bad: bool = False) -> Library:
    """Reads all documents. Raises UserError for a path that is missing or has none, and, without `skip_bad`, for a
    document without text."""
    documents: list[SourceDocument] = []
    skipped: list[tuple[str, str]] = []
    for file in document_files(paths):
        try:
            documents.append(read_document(file))
        except UserError as problem:
            if not skip_bad:
                fix = f"{problem.fix}; or set on_bad: skip" if problem.fix else "remove it, or set on_bad: skip"
                raise UserError(problem.what, where=problem.where, fix=fix) from problem
            skipped.append((str(file), problem.what))
    if not documents:
        raise UserError("no document could be read", where=", ".join(paths), fix="leave on_bad out to see why")
    return Library(tuple(documents), tuple(skipped))


def document_files(paths: Sequence[str]) -> list[pathlib.Path]:
    """The files that paths name, in the order of their names; of a folder, those of a known type. Raises UserError."""
    files: dict[pathlib.Path, None] = {}
    known = ", ".join(DOCUMENT_TYPES)
    for name in paths:
        path = pathlib.Path(name)
        if not os.path.lexists(path):
            raise missing_path_error(path, name)
        if not path.is_dir():
            if path.suffix.lower() not in DOCUMENT_TYPES:
                fix = f"give a folder, or a file that ends with one of {known}"
                raise UserError("this is no type of document that can be read", where=name, fix=fix)
            file_size(path)
            files[path] = None
            continue
        entries = sorted(entry for entry in files_below(path) if entry.suffix.lower() in DOCUMENT_TYPES)
        entries = [entry for entry in entries if not is_hidden(entry.relative_to(path))]
        if not entries:
            raise UserError("the folder has no documents", where=name, fix=f"put files there: {known}")
        files |= dict.fromkeys(entries)
    return list(files)


def files_below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """All files below a folder. Raises UserError for a folder that may not be read, where files would be missing."""

    def refuse(error: OSError) -> None:
        fix = "allow it to be read, or name the other folders and files in the recipe"
        raise UserError(f"the folder cannot be read: {error.strerror}", where=str(error.filename), fix=fix) from error

    for place, _, names in os.walk(folder, onerror=refuse):
        yield from (file for name in names if (file := pathlib.Path(place, name)).is_file())


def is_hidden(path: pathlib.Path) -> bool:
    """Whether a file, or a folder that it is in, is hidden."""
    return any(part.startswith(".") for part in path.parts)


def sha256_of(file: pathlib.Path) -> str:
    """The SHA-256 of a document's bytes. Raises UserError."""
    return hashlib.sha256(_content(file)).hexdigest()


def read_document(file: pathlib.Path) -> SourceDocument:
    """Reads one document. Raises UserError where it is too large, damaged, encrypted, or has no text."""
    content = _content(file)
    digest = hashlib.sha256(content).hexdigest()
    text = _decode(content, file) if file.suffix.lower() in PLAIN else _convert(file)
    pages = tuple(match.end() for match in re.finditer("\f", text)) if file.suffix.lower() == ".pdf" else ()
    pages = (0, *pages) if pages else ()
    if not text.strip():
        problem, fix = "the document has no text", "leave it out"
        if file.suffix.lower() == ".pdf":
            problem = "the PDF has no text: its pages are pictures (scanned), or it is empty"
            fix = "recognise its text first, for example with: ocrmypdf IN.pdf OUT.pdf"
        raise UserError(problem, where=str(file), fix=fix)
    return SourceDocument(file.as_posix(), digest, text, pages)


def _content(file: pathlib.Path) -> bytes:
    size = file_size(file)
    if size > MOST_BYTES:
        problem = f"the document has {size:,} bytes, and at most {MOST_BYTES:,} are read"
        raise UserError(problem, where=str(file), fix="split it, for example by chapters")
    return read_bytes(file, max_bytes=MOST_BYTES)


def _decode(content: bytes, file: pathlib.Path) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"the document is not UTF-8 text (byte {error.start})"
        raise UserError(problem, where=str(file), fix="save it as UTF-8") from error
    if "\0" in text:
        raise UserError("the document is no text: it holds null characters", where=str(file), fix="leave it out")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _convert(file: pathlib.Path) -> str:
    """The text of a file by markitdown."""
    markitdown = package("markitdown", f"{file.suffix} documents are read")
    if file.suffix.lower() in ARCHIVES:
        _check_unpacked(file)
    try:
        return markitdown.MarkItDown(enable_plugins=False).convert_local(file).markdown
    except (markitdown.MarkItDownException, OSError, ValueError, RecursionError) as problem:
        reason = " ".join(str(problem).split())
        if re.search("PDFPassword|PDFEncryption|password|encrypt", reason, re.IGNORECASE):
            message, fix = "the document is encrypted", "save a copy without a password"
        else:
            message, fix = f"the document cannot be read: {reason[-200:]}", "open it, and save it again"
        raise UserError(message, where=str(file), fix=fix) from problem


def _check_unpacked(file: pathlib.Path) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as problem:
        message = f"the document cannot be read: it is no {file.suffix[1:].upper()} file"
        fix = "open it, and save it again; an encrypted one needs a copy without a password"
        raise UserError(message, where=str(file), fix=fix) from problem
    if size > MOST_UNPACKED:
        problem = f"the document unpacks to {size:,} bytes, and at most {MOST_UNPACKED:,} are read"
        raise UserError(problem, where=str(file), fix="split it, for example by chapters")


def count_words(text: str) -> int:
    """The number of words; a Chinese, Japanese or Korean character counts as one."""
    return sum(1 for _ in WORDS.finditer(text))


def passages(document: SourceDocument, size: int) -> list[Passage]:
    """The passages of a document: whole paragraphs, or sentences where one is longer, of at most `size` words. A
    heading begins a new one. Those of fewer than FEWEST_WORDS words are left out."""
    result: list[Passage] = []
    start = end = count = 0
    heading = current = ""

    def finish() -> None:
        if count >= FEWEST_WORDS:
            result.append(Passage(document, start, end, current))

    for piece_start, piece_end in _pieces(document.text, size):
        piece = document.text[piece_start:piece_end]
        length = count_words(piece)
        title = HEADING.match(piece)
        if title is not None:
            heading = title[1]
        if count and (count + length > size or (title is not None and count >= FEWEST_WORDS)):
            finish()
            count = 0
        if not count:
            start, current = piece_start, heading
        end, count = piece_end, count + length
    finish()
    return result


def _pieces(text: str, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of paragraphs; of sentences, or runs of words, of one that is too long."""
    start = 0
    for gap in GAP.finditer(text):
        text_end = start + len(text[start : gap.start()].rstrip())
        block, start = (start, text_end), gap.end()
        length = count_words(text[slice(*block)])
        if length <= size:
            if length:
                yield block
            continue
        for sentence in SENTENCE.finditer(text, *block):
            tokens = list(WORDS.finditer(text, sentence.start(), sentence.end()))
            for first in range(0, len(tokens), size):
                part = tokens[first : first + size]
                yield part[0].start(), part[-1].end()


def describe_library(library: Library, count: int) -> str:
    """One line about the documents."""
    text = f"{amount(len(library.documents), 'document')}, {amount(count, 'passage')}"
    return f"{text}, {amount(len(library.skipped), 'document')} left out" if library.skipped else text
