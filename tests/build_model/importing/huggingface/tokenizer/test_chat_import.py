"""Chat templates of imported folders give the ids of AutoTokenizer.apply_chat_template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.build_model.importing.huggingface.drawn import tokenizers, transformers
from tests.build_model.importing.huggingface.small_models import require_saved
from tests.commands import call, done
from transferry.build_model.importing.huggingface.folder import PretrainedFolder
from transferry.build_model.importing.huggingface.tokenizer.vocabularies import TOKENIZERS
from transferry.build_model.model.config import ModelConfig
from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.byte_pair import Tokenizer
from transferry.runtime.tokenizer.chat import ChatError
from transferry.runtime.tokenizer.special_tokens import AnyTokenizer

# The constructs of published templates, shortened.
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
        + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- generation %}
            {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- if tools %}{{ tools | tojson }}{% endif %}
"""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token}}{% else %}{% continue %}{% endif %}{% endfor %}"
)
PHI3 = """{% for message in messages %}
{% if message['role'] == 'system' and message['content'] %}{{'<|system|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'user' %}{{'<|user|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>
' + message['content'] + '<|end|>
'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}"""

# Model type, template, special tokens, other added tokens, settings of the special ones.
Case = tuple[str, str, list[str], list[str], dict[str, bool]]
CASES: dict[str, Case] = {
    "llama 3": (
        "llama",
        LLAMA3,
        ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        [],
        {},
    ),
    "qwen": (
        "qwen2",
        QWEN,
        ["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
        ["<think>", "</think>"],
        {},
    ),
    "gemma": (
        "gemma2",
        GEMMA,
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<unk>", "<pad>"],
        ["\n", "  ", "<h1>"],
        {},
    ),
    "mistral": ("mistral", MISTRAL, ["<s>", "</s>"], ["[INST]", "[/INST]"], {}),
    "phi 3": (
        "phi3",
        PHI3,
        ["<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        [],
        {"rstrip": True},
    ),
    "gpt2": (
        "gpt2",
        "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}",
        ["<|endoftext|>", "<|endoftext|>"],
        [],
        {},
    ),
}
BYTE_LEVEL = ("llama 3", "qwen", "gpt2")
CORPUS = ["Straße über Häuser", "hello world, this is a test", "user model assistant system"] * 9
USER = {"role": "user", "content": "  Hello  wörld,\n this is <h1> a test "}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Yes 😀\n", "name": None}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [USER, ASSISTANT, {"role": "user", "content": "日本語 \u000f0000 ?"}],
    [USER, {**ASSISTANT, "reasoning_content": "hm"}, USER],
    [{"role": "user", "content": ""}],
]


def write(folder: Path, name: str, how: str = "jinja") -> int:
    """Writes a folder with a tokenizer.json and the chat template; returns the number of ids."""
    kind, template, special, others, flags = CASES[name]
    bytewise = name in BYTE_LEVEL
    model = tokenizers.models.BPE(
        **({} if bytewise else {"byte_fallback": True, "unk_token": "<unk>"})
    )
    made = tokenizers.Tokenizer(model)
    steps, decoders = tokenizers.pre_tokenizers, tokenizers.decoders
    if bytewise:
        made.pre_tokenizer = steps.ByteLevel(add_prefix_space=False)
        if name == "llama 3":  # as no tiktoken ranks can be
            made.normalizer = tokenizers.normalizers.NFC()
        made.decoder = decoders.ByteLevel()
        first = steps.ByteLevel.alphabet()
    else:
        made.pre_tokenizer = steps.Metaspace("▁", prepend_scheme="first", split=True)
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
        first = []
    bytes_ = [] if bytewise else ["<unk>", *(f"<0x{value:02X}>" for value in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=first, show_progress=False, special_tokens=bytes_
    )
    made.train_from_iterator(CORPUS, trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = []
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    token = tokenizers.AddedToken
    made.add_tokens([token(text, special=True, normalized=False, **flags) for text in special])
    made.add_tokens([token(text, special=False, normalized=False) for text in others])
    made.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": special[0], "eos_token": special[1]}
    if how == "jinja":
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    elif how == "text":
        config["chat_template"] = template
    else:
        named = {"default": template, "rag": "{{ 'rag' }}"}
        config["chat_template"] = [{"name": key, "template": named[key]} for key in named]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ids = {"model_type": kind, "eos_token_id": made.token_to_id(special[1])}
    (folder / "config.json").write_text(json.dumps(ids))
    return int(made.get_vocab_size())


def imported(folder: Path, size: int) -> tuple[AnyTokenizer, list[str]]:
    checkpoint = PretrainedFolder(folder)
    kind = str(checkpoint.config.get("model_type"))
    shape = ModelConfig(size, 8, 2, 0, 1, 8, architecture="decoder-only")
    return require_saved(TOKENIZERS[kind](checkpoint, shape), folder), checkpoint.notes


def outcome(compute: Any) -> Any:
    try:
        return compute()
    except Exception as error:  # noqa: BLE001 - of theirs any
        return type(error) is not TypeError and "raised"


@pytest.mark.parametrize("how", ["jinja", "text", "list"])
@pytest.mark.parametrize("name", CASES)
def test_messages_become_their_ids(name: str, how: str, tmp_path: Path) -> None:
    ours, notes = imported(tmp_path, write(tmp_path, name, how))
    assert isinstance(ours, Tokenizer) is (name == "gpt2")
    assert "chat template kept for --chat and --messages" in notes
    assert any("left out, not being the default: rag" in note for note in notes) is (how == "list")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    if name == "llama 3":  # the day on which the test runs, which ours does not know
        options["chat_template"] = LLAMA3.replace("strftime_now is defined", "false")
    refused = 0
    for chat in CHATS:
        wanted = outcome(lambda chat=chat: theirs.apply_chat_template(chat, **options))
        refused += wanted == "raised"
        found = outcome(lambda chat=chat: ours.encode_chat(chat))
        assert found == wanted, chat
    assert refused == (1 if name == "gemma" else 0)


@pytest.mark.parametrize("name", CASES)
def test_special_tokens_in_a_message_stay_text(name: str, tmp_path: Path) -> None:
    ours, _ = imported(tmp_path, write(tmp_path, name))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.chat is not None
    control = set(ours.chat.control.values())
    assert set(CASES[name][2]) <= ours.chat.control.keys()
    assert {"\n", "  ", "<h1>"}.isdisjoint(ours.chat.control)
    for text in ours.chat.control:
        for content in (text, f"a{text}b", f"x {text}\n y", f"{text}{text}", f"{text[0]}{text}"):
            chat = [{"role": "user", "content": content}]
            found = ours.encode_chat(chat)
            plain = ours.encode_chat([{"role": "user", "content": "plain"}])
            assert [token for token in found if token in control] == [
                token for token in plain if token in control
            ], content
            # transformers makes tokens of them, unless an option forbids it.
            taken = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            assert sum(token in control for token in taken) > sum(t in control for t in found)
            if content == text:
                kept = theirs.apply_chat_template(
                    chat,
                    add_generation_prompt=True,
                    return_dict=False,
                    sanitize_control_tokens=True,
                )
                assert theirs.decode(kept) == theirs.decode(found)


def test_a_template_that_is_none_is_refused(tmp_path: Path) -> None:
    size = write(tmp_path, "qwen")
    (tmp_path / "chat_template.jinja").write_text("{% for x in %}")
    with pytest.raises(InputError, match=r"template\.jinja: expected a chat template .*correct"):
        imported(tmp_path, size)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(InputError, match=r"chat_template is 3, which cannot be imported"):
        imported(tmp_path, size)


def test_a_folder_of_templates_without_a_default_has_no_chat(tmp_path: Path) -> None:
    size = write(tmp_path, "qwen")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (tmp_path / "chat_template.jinja").rename(folder / "tool_use.jinja")
    ours, notes = imported(tmp_path, size)
    assert ours.chat is None
    assert "chat templates left out, not being the default: tool_use" in notes


def test_the_clock_is_refused(tmp_path: Path) -> None:
    size = write(tmp_path, "qwen")
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}")
    ours, _ = imported(tmp_path, size)
    with pytest.raises(ChatError, match="'strftime_now' is undefined"):
        ours.encode_chat(CHATS[0])


def test_a_folder_is_imported_exported_and_answers_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferry.export.oracle.effort.RECORDED_LENGTH", 6)
    theirs, run, bundle = tmp_path / "theirs", tmp_path / "run", tmp_path / "bundle"
    theirs.mkdir()
    size = write(theirs, "qwen") + 5
    end = json.loads((theirs / "config.json").read_text())["eos_token_id"]
    shape = dict(hidden_size=32, num_attention_heads=4, intermediate_size=48, num_hidden_layers=1)
    shape["num_key_value_heads"] = 2
    config = transformers.Qwen2Config(
        vocab_size=size, **shape, max_position_embeddings=256, eos_token_id=end, bos_token_id=end
    )
    torch.manual_seed(3)
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.eval().save_pretrained(theirs)
    said = done("import", theirs, "--out", run).stderr
    assert "tokenizer: chat template kept for --chat and --messages" in said
    assert "config.json, without effect on answers: " in said
    done("export", run, "--out", bundle)
    assert (bundle / "chat_template.jinja").read_text(encoding="utf-8") == QWEN
    lines = tmp_path / "lines.txt"
    lines.write_text("hello world\nStraße <|im_end|>\n", encoding="utf-8")
    command = ("run", bundle, lines, "--chat", "--max-length", "12", "--format", "jsonl")
    found = [json.loads(line) for line in done(*command).stdout.splitlines()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    chat = [{"role": "user", "content": "hello world"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False, return_tensors="pt"
    )
    wanted = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=end)
    answer = tokenizer.decode(wanted[0, prompt.shape[1] :], skip_special_tokens=True)
    assert found[0]["text"] == answer
    assert found[0]["source_tokens"] == prompt.shape[1]
    # The second turn's text has no token of the template in it: the answer has its own prompt.
    assert found[1]["source_tokens"] > prompt.shape[1]
    (bundle / "chat_template.jinja").write_text("other")
    assert call(*command).exit_code == 3
