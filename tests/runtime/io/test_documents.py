"""Documents are parsed once: duplicate keys are found by counting keys and colons."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferry.runtime.io.documents import decode

TEXTS = st.text(st.sampled_from('ab:"\\{},[] \né'), max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.booleans())
def test_a_document_without_duplicate_keys_is_its_value(value: object, ascii_only: bool) -> None:
    assert decode(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(TEXTS, VALUES, VALUES, st.booleans())
def test_a_duplicate_key_is_named_at_any_depth(
    key: str, first: object, second: object, nested: bool
) -> None:
    name, before, after = (json.dumps(each) for each in (key, first, second))
    text = f"{{{name}: {before}, {name} : {after}}}"
    text = f'[{{"a:\\"": {text}}}]' if nested else text
    with pytest.raises(ValueError, match=re.escape(f"Duplicate key {key!r}")):
        decode(text.encode())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'{"a": 1, "\\u0061": 2}', "Duplicate key 'a'"),
        # Read without its escape, the quote hides as many colons as there are keys too many.
        (b'{"a": 1, "a": 2, "b\\"": 3}', "Duplicate key 'a'"),
        (b'{"a": 1, "a": 2, "b\\\\\\"": 3}', "Duplicate key 'a'"),
        (b"[NaN]", "malformed"),
        (b"[1e999]", "out of range"),
        (b'{"a": 1} {"a": 2}', "malformed"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_another_text_is_refused(text: bytes, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        decode(text)
