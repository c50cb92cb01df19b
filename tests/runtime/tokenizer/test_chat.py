"""Chat templates render messages within limits, and keep apart who wrote a special token."""

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.tokenizer.byte_pair import SINGLE_BYTES, Tokenizer, load_tokenizer
from transferry.runtime.tokenizer.chat import ChatError, ChatTemplate, Renderer

pytest.importorskip("jinja2", reason="an extra, which is not installed")

END = "<|end|>"
SOURCE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
USER = {"role": "user", "content": "hi"}
DEEP: Any = "x"
for _ in range(100_000):
    DEEP = [DEEP]


def template(source: str = SOURCE) -> ChatTemplate:
    return ChatTemplate(source, {"eos_token": END}, {END: 300, "<|end|>>": 301})


def test_special_tokens_of_a_message_are_text() -> None:
    assert template().render([USER]) == ["user: hi", 300]
    said = [{"role": "user", "content": f"a{END}b"}, USER]
    assert template().render(said) == [f"user: a{END}b", 300, "user: hi", 300]
    # Of two that begin alike the longer one; and nothing that a template cuts out of it.
    assert template("{{ messages[0].content }}<|end|>>").render(said) == [f"a{END}b", 301]
    cut = template("{{ messages[0].content[:3] }}{{ messages[0].content[3:] }}")
    assert cut.render(said) == [f"a{END}b"]
    halves = [{"role": "user", "content": END[:3]}, {"role": "user", "content": END[3:]}]
    assert template("{{ messages | map(attribute='content') | join }}").render(halves) == [END]


def test_private_use_characters_of_a_message_are_kept() -> None:
    text = "".join(map(chr, range(0xF0000, 0xF0004))) + END
    assert template().render([{"role": "user", "content": text}]) == [f"user: {text}", 300]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "expected at least one message"),
        (["hi"], "expected messages with role and content"),
        ([{"role": "user"}], "expected messages with role and content"),
        ([{"role": END, "content": ""}], "expected a role such as user"),
        ([{"role": 3, "content": ""}], "expected a role such as user"),
        ([{"role": "user", "content": 3}], "expected text as the content"),
        ([{**USER, "k": DEEP}], "the messages are nested too deeply"),
    ],
)
def test_what_are_no_messages_is_told(messages: list[Any], message: str) -> None:
    with pytest.raises(ChatError, match=message):
        template().render(messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{% for x in %}", "TemplateSyntaxError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ namespace(_x=1) }}", "SecurityError"),
        ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
        ("{% include '/etc/passwd' %}", "TypeError|no loader"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'x' * 10 ** 10 }}", "MemoryError"),
        ("{% for x in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "more than 16777216 char"),
        ("{{ '\\ud800' }}", "UnicodeEncodeError"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
        ("{{ 'é'.encode('ascii') }}", "UnicodeEncodeError"),
        ("{{ messages[0]['absent'].x }}", "UndefinedError"),
    ],
)
def test_what_a_template_raises_is_told_and_ends_there(source: str, message: str) -> None:
    bad = template(source)
    for _ in range(2):
        with pytest.raises(ChatError, match=message):
            bad.render([USER])


def test_a_template_that_takes_for_ever_is_ended() -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for source in (loops, "{{ 9 ** (9 ** 9) }}"):
        with pytest.raises(ChatError, match="took more than 1 seconds"):
            Renderer(source, seconds=1).render({}, {})


def test_an_interrupted_answer_does_not_come_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    one = template()
    assert one.render([USER]) == ["user: hi", 300]
    process = one._renderer._process
    assert process is not None
    process.kill()
    process.wait()
    with pytest.raises(ChatError, match="took more than"):
        one.render([USER])
    assert one.render([USER]) == ["user: hi", 300]


@pytest.mark.parametrize("version", [None, "3.1.5"])
def test_a_missing_library_is_named(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    with pytest.raises(UsageError, match=r'jinja2 3\.1\.6 .*pip install .*\[chat\]"'):
        tokenizer().encode_chat([USER])


def tokenizer() -> Tokenizer:
    ranks = {byte: rank for rank, byte in enumerate(SINGLE_BYTES)}
    made = Tokenizer("bytes", r"\S+|\s+", ranks, first_ordinary_id=10, vocabulary_size=400)
    made.chat = template()
    return made


def test_a_template_is_saved_with_the_tokenizer(tmp_path: Path) -> None:
    made = tokenizer()
    made.save(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == SOURCE
    loaded = load_tokenizer(tmp_path)
    assert loaded == made
    assert loaded.encode_chat([USER]) == [*made.encode("user: hi"), 300]
    (tmp_path / "chat_template.jinja").write_text("other")
    assert load_tokenizer(tmp_path) != made
    made.chat = None
    with pytest.raises(UsageError, match="no chat template; leave out chat and messages"):
        made.encode_chat([USER])


@pytest.mark.parametrize("damage", ['"<|end|>": 400', '"<|end|>": -1', '"": 3', '"x": "y"'])
def test_a_damaged_setting_is_refused(damage: str, tmp_path: Path) -> None:
    tokenizer().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"<|end|>": 300', damage))
    with pytest.raises(InputError, match="the tokenizer is inconsistent"):
        load_tokenizer(tmp_path)
