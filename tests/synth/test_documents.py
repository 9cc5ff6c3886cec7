"""Documents are read as text with their places; what has no text says why."""

from __future__ import annotations

import os
import pathlib
import tempfile
import zipfile

import pytest
from made_documents import TOPICS, docx, epub, html, page, pdf, write_documents

from meshtune.errors import UserError
from meshtune.synth.documents import (
    MOST_BYTES,
    SourceDocument,
    count_words,
    document_files,
    passages,
    read_document,
    read_library,
)

WORDS = "Its wheel turns twelve times a minute"


def read_error(file: pathlib.Path) -> UserError:
    with pytest.raises(UserError) as caught:
        read_document(file)
    return caught.value


@pytest.fixture
def converter():
    return pytest.importorskip("markitdown", reason="the extra synth is not installed")


def test_markdown_is_read_as_it_is(tmp_path: pathlib.Path):
    file = tmp_path / "a.md"
    file.write_bytes(b"\xef\xbb\xbf# One\r\n\r\nTwo\r\n")
    assert read_document(file).text == "# One\n\nTwo\n"


def test_every_type_gives_its_words(tmp_path: pathlib.Path, converter):
    from pptx import Presentation

    title, sentences = next(iter(TOPICS.items()))
    docx(tmp_path / "a.docx", [("Heading1", title), ("", sentences)])
    epub(tmp_path / "a.epub", title, sentences)
    (tmp_path / "a.html").write_text(html(title, sentences), encoding="utf-8")
    (tmp_path / "a.pdf").write_bytes(pdf([[title, sentences]]))
    slides = Presentation()
    slide = slides.slides.add_slide(slides.slide_layouts[1])
    slide.shapes.title.text, slide.placeholders[1].text = title, sentences
    slides.save(str(tmp_path / "a.pptx"))
    texts = {document.name[-4:]: document.text for document in read_library([str(tmp_path)]).documents}
    assert set(texts) == {"docx", "epub", "html", ".pdf", "pptx"}
    for text in texts.values():
        assert WORDS in text
        assert "alert" not in text
    assert f"# {title}" in texts["docx"]
    assert f"# {title}" in texts["html"]


def test_a_passage_of_a_pdf_knows_its_page(tmp_path: pathlib.Path, converter):
    file = tmp_path / "a.pdf"
    lines = [[title, *text.split(". ")] for title, text in TOPICS.items()]
    file.write_bytes(pdf(lines))
    found = {passage.text.split("\n")[0]: passage.place for passage in passages(read_document(file), 30)}
    for number, title in enumerate(TOPICS, 1):
        assert found[title].startswith(f"page {number}, characters ")


def test_hidden_files_and_other_types_are_not_read(tmp_path: pathlib.Path):
    write_documents(tmp_path / "docs")
    (tmp_path / "docs/data.csv").write_text("a,b\n")
    names = [file.name for file in document_files([str(tmp_path / "docs")])]
    assert names == ["0.docx", "0.html", "0.md", "1.docx", "1.html", "1.md", "2.md", "3.md", "all.pdf"]


def test_a_scanned_pdf_says_that_it_has_no_text(tmp_path: pathlib.Path, converter):
    file = tmp_path / "a.pdf"
    file.write_bytes(pdf([[], []]))
    problem = read_error(file)
    assert "scanned" in problem.what
    assert "ocrmypdf" in (problem.fix or "")


def test_an_encrypted_pdf_says_so(tmp_path: pathlib.Path, converter):
    file = tmp_path / "a.pdf"
    file.write_bytes(pdf([["secret"]], encrypted=True))
    problem = read_error(file)
    assert problem.what == "the document is encrypted"
    assert problem.where == str(file)


def test_a_damaged_docx_says_so(tmp_path: pathlib.Path, converter):
    (tmp_path / "a.docx").write_bytes(b"\xd0\xcf\x11\xe0" + bytes(5000))  # as an encrypted DOCX begins
    assert "encrypted one needs a copy without a password" in (read_error(tmp_path / "a.docx").fix or "")


def test_a_docx_that_unpacks_to_too_much_is_refused(tmp_path: pathlib.Path, converter, monkeypatch):
    monkeypatch.setattr("meshtune.synth.documents.MOST_UNPACKED", 1 << 20)
    with zipfile.ZipFile(tmp_path / "a.docx", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", bytes(2 << 20))
    assert "unpacks to 2,097,152 bytes" in read_error(tmp_path / "a.docx").what


def test_a_document_of_two_gigabytes_is_refused_before_it_is_read(tmp_path: pathlib.Path):
    file = tmp_path / "a.txt"
    with file.open("wb") as stream:
        stream.truncate(2 << 30)
    problem = read_error(file)
    assert "2,147,483,648 bytes" in problem.what
    assert f"{MOST_BYTES:,}" in problem.what
    assert "split it" in (problem.fix or "")


@pytest.mark.parametrize(
    ("content", "words"), [(b"\xff\xfe\x00", "not UTF-8"), (b"a\0b", "null characters"), (b" \n ", "has no text")]
)
def test_a_file_without_text_is_refused(tmp_path: pathlib.Path, content: bytes, words: str):
    (tmp_path / "a.txt").write_bytes(content)
    assert words in read_error(tmp_path / "a.txt").what


def test_bad_documents_can_be_left_out(tmp_path: pathlib.Path):
    (tmp_path / "a.md").write_text(page("The mill", TOPICS["The mill"], 1))
    (tmp_path / "b.md").write_text("")
    with pytest.raises(UserError, match="set on_bad: skip"):
        read_library([str(tmp_path)])
    library = read_library([str(tmp_path)], skip_bad=True)
    assert [pathlib.Path(document.name).name for document in library.documents] == ["a.md"]
    assert [reason for _, reason in library.skipped] == ["the document has no text"]


@pytest.mark.parametrize(
    ("path", "words"),
    [("nothing", "no such file or folder"), ("a.md", "no such file or folder"), ("a.exe", "no type of document")],
)
def test_a_path_without_documents_is_refused(tmp_path: pathlib.Path, path: str, words: str):
    (tmp_path / "a.exe").touch()
    with pytest.raises(UserError, match=words):
        document_files([str(tmp_path / path)])


def test_a_folder_that_may_not_be_read_is_refused_and_not_left_out():
    with tempfile.TemporaryDirectory() as place:  # that of pytest is closed to other users
        inner = pathlib.Path(place, "docs/private")
        inner.mkdir(parents=True)
        (inner.parent / "a.md").write_text("text")
        os.chmod(place, 0o755)
        inner.chmod(0)
        user = os.geteuid()
        os.seteuid(65534 if user == 0 else user)  # root may read everything
        try:
            with pytest.raises(UserError, match=r"Permission denied[\s\S]*docs/private"):
                document_files([str(inner.parent)])
        finally:
            os.seteuid(user)
            inner.chmod(0o755)


def test_links_that_lead_in_circles_are_passed_over_or_named(tmp_path: pathlib.Path):
    (tmp_path / "a.md").write_text("text")
    (tmp_path / "self").symlink_to(tmp_path)
    (tmp_path / "b.md").symlink_to(tmp_path / "c.md")
    (tmp_path / "c.md").symlink_to(tmp_path / "b.md")
    assert document_files([str(tmp_path)]) == [tmp_path / "a.md"]
    with pytest.raises(UserError, match=r"levels of symbolic links[\s\S]*b.md"):
        document_files([str(tmp_path / "b.md")])


def test_an_empty_folder_is_refused(tmp_path: pathlib.Path):
    with pytest.raises(UserError, match="has no documents"):
        document_files([str(tmp_path)])


def test_passages_are_whole_paragraphs_below_their_heading():
    text = "".join(page(title, sentences, number) + "\n" for number, (title, sentences) in enumerate(TOPICS.items()))
    document = SourceDocument("a.md", "", text)
    for passage, title in zip(passages(document, 60), TOPICS, strict=True):
        assert passage.heading == title
        assert passage.text.startswith(f"# {title}\n\n{TOPICS[title]}")
        assert text[passage.start : passage.end] == passage.text


def test_a_long_paragraph_is_split_at_sentences_and_nothing_is_lost():
    sentences = [f"Sentence number {n} has a few words, as sentences have." for n in range(50)]
    document = SourceDocument("a.txt", "", " ".join(sentences) + "\n\n" + " ".join(f"w{n}" for n in range(100)))
    parts = passages(document, 40)
    assert max(count_words(part.text) for part in parts) <= 40
    assert " ".join(part.text for part in parts).split() == document.text.split()
    assert all(part.text.endswith(".") for part in parts[:12])


def test_chinese_characters_count_as_words():
    document = SourceDocument("a.txt", "", "磨坊每天早晨磨黑麦。渡船每二十分钟过河一次。" * 20)
    parts = passages(document, 50)
    assert len(parts) > 5
    assert all(part.text.endswith("。") for part in parts)
