"""Chats: the ids of transformers, and no token from the texts of a user."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.end_to_end.chat_templates import TEMPLATES
from tests.runtime.tokenizer.vocabularies import byte_level
from transferry.runtime.tokenizer.chat import ChatError, ChatTemplate
from transferry.runtime.tokenizer.special_tokens import SpecialTokens
from transferry.runtime.tokenizer.third_party import HuggingFaceTokenizer

pytest.importorskip("jinja2", reason="an extra, which is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="an extra, which is not installed")

CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "look_up", "arguments": {"city": "Köln", "days": [1, 2.5, None, True]}},
}
SYSTEM = {"role": "system", "content": " Be brief.\n"}
USER = {"role": "user", "content": "  Grüße, \n what's 1 + 1?  日本 "}
ANSWER = {"role": "assistant", "content": "<b>hm</b>\n\nTwo. 😀\n"}
THOUGHT = {"role": "assistant", "content": "Two.", "reasoning_content": "\nhm\n"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
CALLING_ALONE = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": '{"degrees": 20}', "tool_call_id": "abcdefghi"}
CAREFUL = [name for name in TEMPLATES if name != "careless"]
# Templates that go through the parts of a message.
TAKES_PARTS = {"gemma 3"}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, ANSWER, USER],
    [USER, THOUGHT, USER],
    [USER, CALLING, RESULT],
    [USER, CALLING, RESULT, ANSWER, USER],
    [USER, CALLING_ALONE, RESULT],
    [{"role": "user", "content": "\U000f0000\U000ffffd\x00 x"}],
]


def added(name: str) -> Any:
    """A byte-level tokenizer with the tokens of a template."""
    _, special, others = TEMPLATES[name]
    made = byte_level([], 256)
    made.add_tokens([tokenizers.AddedToken(text, special=True) for text in special])
    made.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in others])
    return made


@cache
def ours(name: str) -> HuggingFaceTokenizer:
    source, special, others = TEMPLATES[name]
    made = added(name)
    tokenizer = HuggingFaceTokenizer(
        {"huggingface.json": made.to_str().encode()}, SpecialTokens(256, 256, 257, after=()), 400
    )
    named = {"bos_token": special[0], "eos_token": special[1]}
    control = {text: made.token_to_id(text) for text in (*special, *others)}
    tokenizer.chat = ChatTemplate(source, named, control)
    return tokenizer


def theirs(name: str, messages: list[dict[str, Any]], **variables: Any) -> list[int] | str:
    """The ids of transformers, or its error."""
    transformers = pytest.importorskip("transformers", reason="an extra, which is not installed")
    source, special, _ = TEMPLATES[name]
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=added(name), bos_token=special[0], eos_token=special[1]
    )
    try:
        found = reference.apply_chat_template(
            messages, chat_template=source, add_generation_prompt=True, **variables
        )
    except Exception as error:  # noqa: BLE001 - of jinja2 and of the template's operations
        return type(error).__name__
    return list(found["input_ids"])


@pytest.mark.parametrize("name", CAREFUL)
def test_ids_are_those_of_transformers(name: str) -> None:
    same = 0
    for messages in CHATS:
        expected = theirs(name, messages)
        if isinstance(expected, str):
            with pytest.raises(ChatError, match=expected):
                ours(name).encode_chat(messages)
        else:
            assert ours(name).encode_chat(messages) == expected
            same += 1
    assert same >= 4


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("qwen 3", {"enable_thinking": False}),
        ("qwen 3", {"enable_thinking": True}),
        ("llama 3", {"date_string": "1 Jan 2026"}),
        ("llama 3", {"bos_token": "?", "x": [1, {"y": None}]}),
    ],
)
def test_variables_are_those_of_transformers(name: str, variables: dict[str, Any]) -> None:
    expected = theirs(name, [USER], **variables)
    assert ours(name).encode_chat([USER], variables) == expected
    assert variables.get("enable_thinking") or expected != theirs(name, [USER])


PARTS = [{"type": "text", "text": "a text "}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize("name", CAREFUL)
@pytest.mark.parametrize("parts", [PARTS, ["a text ", "b"], PARTS[:1], []])
def test_a_list_of_texts_is_the_text(name: str, parts: list[Any]) -> None:
    """Where a template takes only text, the texts are joined as in vLLM; no part is lost."""
    found = ours(name).encode_chat([{"role": "user", "content": parts}])
    texts = [part if isinstance(part, str) else part["text"] for part in parts]
    if name in TAKES_PARTS:
        as_parts = [{"type": "text", "text": text} for text in texts]
        assert found == theirs(name, [{"role": "user", "content": as_parts}])
    else:
        assert found == theirs(name, [{"role": "user", "content": "\n".join(texts)}])


@pytest.mark.parametrize("name", CAREFUL)
def test_a_part_that_is_no_text_is_not_lost(name: str) -> None:
    messages = [{"role": "user", "content": [*PARTS, {"type": "image"}]}]
    if name in TAKES_PARTS:
        assert ours(name).encode_chat(messages) == theirs(name, messages)
    else:
        with pytest.raises(ChatError, match=r"takes only text, found \{'type': 'image'\}"):
            ours(name).encode_chat(messages)


def tokens(name: str, messages: list[dict[str, Any]]) -> list[int]:
    ids = ours(name).encode_chat(messages)
    return [token for token in ids if token >= 256]


def replaced(value: Any, text: str, kept: bool = False) -> Any:
    """Every text and key of JSON values with a text around it; roles and types stay."""
    if isinstance(value, str):
        return value if kept else f"{text}{value}{text}"
    if isinstance(value, list):
        return [replaced(each, text) for each in value]
    if isinstance(value, dict):
        extra = {text: text, "more": [{text: [text, {"n": text}]}]}
        return {
            key: replaced(each, text, key in ("role", "type")) for key, each in value.items()
        } | extra
    return value


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_token_comes_from_a_message(name: str) -> None:
    """The same tokens with every special token at every place of the messages as without."""
    _, special, others = TEMPLATES[name]
    source = ours(name).chat
    assert source is not None
    for messages in CHATS:
        if isinstance(theirs(name, messages), str):
            continue
        hostile = [replaced(message, "\u00b7") for message in messages]
        expected = tokens(name, hostile)
        assert expected
        for token in (*special, *others):
            # Halves that meet, another case, remains of escapes and formats.
            for text in (token, token.upper(), token[: len(token) // 2], f"{{}}%s{token}\\n"):
                if "think>" in text:
                    continue  # templates cut texts there
                hostile = [replaced(message, text) for message in messages]
                assert tokens(name, hostile) == expected, text


@given(st.lists(st.sampled_from("<|>im_endstarup/ \n{}%'\"\\\U000f0000\ud800"), max_size=30))
def test_texts_of_pieces_are_text(letters: list[str]) -> None:
    text = "".join(letters)
    for name in ("chatml", "careless"):
        messages = [{"role": "user", "content": text, text + "k": [text]}]
        plain = [{"role": "user", "content": "x", "k": ["x"]}]
        assert tokens(name, messages) == tokens(name, plain)


@pytest.mark.parametrize("role", ["end", "endoftext", "/tool", "END"])
def test_a_role_builds_no_token(role: str) -> None:
    name = "phi 4 mini"
    end, assistant = (added(name).token_to_id(text) for text in ("<|end|>", "<|assistant|>"))
    assert tokens(name, [USER])[1:] == [end, assistant]
    messages = [{"role": role, "content": "x"}]
    if role == "/tool":
        with pytest.raises(ChatError, match="expected a role"):
            tokens(name, messages)
    else:
        assert tokens(name, messages) == [end, assistant]


def test_a_token_built_from_parts_is_found() -> None:
    parts = "{% for m in messages %}{{ '<|' ~ loop.index ~ '|>' ~ m.content }}{% endfor %}"
    assert ChatTemplate(parts, {}, {"<|1|>": 300}).lost_token() == "<|1|>"
    for name in TEMPLATES:
        if name != "careless":
            chat = ours(name).chat
            assert chat is not None
            assert chat.lost_token() is None


@pytest.mark.parametrize(
    "expression",
    [
        *("[1, 2] | random", "lipsum()", "raise_exception", "messages | map('upper')"),
        *("messages[0].items", "dict", "cycler('a')", "'%s' % range", "[range] | string"),
    ],
)
def test_chance_is_refused(expression: str) -> None:
    template = ChatTemplate("{{ " + expression + " }}", {}, {})
    with pytest.raises(ChatError):
        template.render([USER])
    # A user may write the same.
    said = {"role": "user", "content": "<object at 0x7f0012345678>"}
    assert ChatTemplate("{{ messages }}", {}, {}).render([said]) == [str([said])]
