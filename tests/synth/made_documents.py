"""Documents of every type that is read, made by small code: their text is ours, their bytes the same every time."""

from __future__ import annotations

import pathlib
import zipfile
import zlib

TOPICS = {
    "The mill": "The mill of Brandow grinds rye and spelt. Its wheel turns twelve times a minute while water runs.",
    "The ferry": "The ferry crosses the river every twenty minutes. It carries nine cars, and it does not run in fog.",
    "The orchard": "The orchard has ninety apple trees and four pear trees. The harvest begins in September.",
    "The bridge": "The bridge was built of granite in 1871. Lorries above seven tonnes use the road by the quarry.",
    "The library": "The library lends books for four weeks. Maps and newspapers may be read there, but are not lent.",
    "The tower": "The tower has two hundred and six steps. Its bell weighs three tonnes and rings at noon and at six.",
}


def page(title: str, sentences: str, number: int) -> str:
    """A page of Markdown with a heading."""
    more = (
        f"This is page {number} about {title.lower()}, which visitors ask about often, in summer more than in winter."
    )
    return f"# {title}\n\n{sentences}\n\n{more}\n"


def pdf(pages: list[list[str]], *, encrypted: bool = False) -> bytes:
    """A PDF with lines of text on each page; without lines a page is blank, as a scanned one without its picture."""
    objects: list[bytes] = [b"<< /Type /Catalog /Pages 2 0 R >>", b""]
    objects.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    kids: list[int] = []
    for lines in pages:
        shown = "".join(f"({line}) Tj 0 -16 Td " for line in lines)
        stream = zlib.compress(f"BT /F1 11 Tf 60 780 Td {shown}ET".encode("latin-1"))
        objects.append(b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(stream), stream))
        contents = len(objects)
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % contents
        )
        kids.append(len(objects))
    listed = b" ".join(b"%d 0 R" % kid for kid in kids)
    objects[1] = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (listed, len(kids))
    trailer = b""
    if encrypted:
        owner = b"<" + b"ab" * 32 + b">"
        objects.append(b"<< /Filter /Standard /V 1 /R 2 /O %s /U %s /P -4 >>" % (owner, owner))
        trailer = b" /Encrypt %d 0 R /ID [<0123> <0123>]" % len(objects)
    content, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(content))
        content += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(content)
    content += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    content += b"".join(b"%010d 00000 n \n" % place for place in places)
    return content + b"trailer\n<< /Size %d /Root 1 0 R%s >>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1, trailer, start,
    )  # fmt: skip


def docx(file: pathlib.Path, paragraphs: list[tuple[str, str]]) -> None:
    """A DOCX of (style, text) paragraphs; the style is Heading1 or empty."""
    body = ""
    for style, text in paragraphs:
        properties = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
        body += f"<w:p>{properties}<w:r><w:t>{text}</w:t></w:r></w:p>"
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    types = "http://schemas.openxmlformats.org/package/2006/content-types"
    relations = "http://schemas.openxmlformats.org/package/2006/relationships"
    main = "application/vnd.openxmlformats-officedocument.wordprocessingml"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(
            zipfile.ZipInfo("[Content_Types].xml"),
            f'<Types xmlns="{types}"><Default Extension="xml" ContentType="application/xml"/><Default Extension="rels" '
            'ContentType="application/vnd.openxmlformats-package.relationships+xml"/><Override '
            f'PartName="/word/document.xml" ContentType="{main}.document.main+xml"/><Override '
            f'PartName="/word/styles.xml" ContentType="{main}.styles+xml"/></Types>',
        )
        archive.writestr(
            zipfile.ZipInfo("_rels/.rels"),
            f'<Relationships xmlns="{relations}"><Relationship Id="r1" Type="{office}/officeDocument" '
            'Target="word/document.xml"/></Relationships>',
        )
        archive.writestr(
            zipfile.ZipInfo("word/_rels/document.xml.rels"),
            f'<Relationships xmlns="{relations}"><Relationship Id="r1" Type="{office}/styles" '
            'Target="styles.xml"/></Relationships>',
        )
        archive.writestr(
            zipfile.ZipInfo("word/styles.xml"),
            f'<w:styles xmlns:w="{word}"><w:style w:type="paragraph" w:styleId="Heading1"><w:name w:val="heading 1"/>'
            "</w:style></w:styles>",
        )
        archive.writestr(
            zipfile.ZipInfo("word/document.xml"), f'<w:document xmlns:w="{word}"><w:body>{body}</w:body></w:document>'
        )


def html(title: str, sentences: str) -> str:
    """A page of HTML with scripts and styles."""
    return (
        f"<!doctype html><html><head><title>{title}</title><style>p {{color: red}}</style></head><body>"
        f"<script>alert(1)</script><h1>{title}</h1><p>{sentences}</p><ul><li>Open every day.</li></ul></body></html>"
    )


def epub(file: pathlib.Path, title: str, sentences: str) -> None:
    """An EPUB of one chapter."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("mimetype"), "application/epub+zip")
        archive.writestr(
            zipfile.ZipInfo("META-INF/container.xml"),
            '<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles><rootfile '
            'full-path="book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>',
        )
        archive.writestr(
            zipfile.ZipInfo("book.opf"),
            '<package xmlns="http://www.idpf.org/2007/opf" version="3.0"><metadata '
            f'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>{title}</dc:title></metadata><manifest>'
            '<item id="c" href="c.xhtml" media-type="application/xhtml+xml"/></manifest>'
            '<spine><itemref idref="c"/></spine></package>',
        )
        archive.writestr(zipfile.ZipInfo("c.xhtml"), html(title, sentences))


def write_documents(folder: pathlib.Path) -> list[str]:
    """Twelve pages: four of Markdown, two of HTML, two of DOCX and four of PDF, with hidden files that are not read."""
    folder.mkdir(parents=True)
    topics = list(TOPICS.items())
    for number, (title, sentences) in enumerate(topics[:4]):
        (folder / f"{number}.md").write_text(page(title, sentences, number), encoding="utf-8")
    for number, (title, sentences) in enumerate(topics[4:]):
        (folder / f"{number}.html").write_text(html(title, sentences), encoding="utf-8")
    for number, (title, sentences) in enumerate(topics[2:4]):
        docx(folder / f"{number}.docx", [("Heading1", f"More of {title.lower()}"), ("", sentences)])
    lines = [[title, *sentences.replace(". ", ".\n").split("\n")] for title, sentences in topics[:4]]
    (folder / "all.pdf").write_bytes(pdf(lines))
    (folder / ".hidden").mkdir()
    (folder / ".hidden/x.md").write_text("hidden", encoding="utf-8")
    return [title for title, _ in topics]
