"""Kinds of files, told by their first bytes."""

import codecs
import re

from transferry.runtime.errors import InputError

# Beginnings of files that are no text, as patterns, and what to do with each.
_KINDS = {
    rb"PAR1": ("a Parquet file", "let its name end in .parquet"),
    rb"ARROW1|FEA1": ("an Arrow file", "let its name end in .arrow"),
    rb"PK\x03\x04|PK\x05\x06": (
        "a zip archive or an office document",
        "unpack it, or let its name end as it is, such as .xlsx",
    ),
    rb"\xd0\xcf\x11\xe0": (
        "an old or encrypted office document",
        "let its name end as it is, such as .xls, or save it without a password",
    ),
    rb"%PDF-": ("a PDF file", "convert it: pdftotext OLD NEW.txt"),
    rb"ORC": ("an ORC file", "convert it to Parquet or CSV"),
    rb"Obj\x01": ("an Avro file", "convert it to Parquet or JSONL"),
    rb"SQLite format 3": ("an SQLite database", "export a table as CSV"),
    rb"7z\xbc\xaf|Rar!|\x04\x22\x4d\x18": ("a packed file", "unpack it"),
}
_PAGE = re.compile(
    rb"\s*(<\?xml[^>]*>\s*)?(<!--.{0,999}?-->\s*)?<(!doctype html|html)\b", re.I | re.S
)
# Control characters that no text has; NUL is counted apart.
_CONTROLS = re.compile(rb"[\x01-\x08\x0e-\x1a\x1c-\x1f]")


def refuse_other_content(head: bytes, shown: str, encoding: str, *, pages: bool) -> None:
    """Raises InputError for first bytes that are not those of lines of text.

    `shown` is the file's name in messages; with `pages` a page in HTML is as good as other text.
    """
    if not pages and _PAGE.match(head):
        raise InputError(
            f"{shown}: expected rows, found a page in HTML, such as of a log-in or an error; check "
            "address and credentials, or add --format-in text"
        )
    if not _is_binary(head, encoding):
        return
    for pattern, (kind, remedy) in _KINDS.items():
        if re.match(pattern, head):
            raise InputError(f"{shown}: expected text, found {kind}; {remedy}")
    raise InputError(
        f"{shown}: expected UTF-8 text, found a NUL byte: this is a binary file or UTF-16. "
        "Convert it to UTF-8 text, or name its encoding."
    )


def _is_binary(head: bytes, encoding: str) -> bool:
    """Whether bytes are no text; text with a stray NUL is text."""
    nuls = head.count(0)
    try:
        codecs.getincrementaldecoder(encoding)().decode(head)
        is_text = True
    except UnicodeDecodeError:
        is_text = False
    known = any(re.match(pattern, head) for pattern in _KINDS)
    if known and (not is_text or _CONTROLS.search(head) or head.startswith(b"%PDF-")):
        return True
    return nuls > 0 and (not is_text or nuls * 5 >= len(head) * 2 or bool(_CONTROLS.search(head)))
