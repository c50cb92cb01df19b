"""Rerankers that are causal language models: two tokens' logits score a query and a document.

As LogitScore of sentence-transformers: the logit of one token, such as "yes", less that of another,
at the last position of a chat template that holds both texts.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from transferry.build_model.importing.huggingface.folder import PretrainedFolder, Settings
from transferry.build_model.importing.huggingface.heads import HEAD
from transferry.build_model.importing.huggingface.tables import Classifier, Family, Move
from transferry.build_model.importing.huggingface.tokenizer.fast_tokenizer import (
    read_fast_tokenizer,
)
from transferry.build_model.importing.toolkits.sentence_transformers import SentenceModules
from transferry.build_model.model.config import ModelConfig
from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.chat import ChatError, ChatTemplate, Message
from transferry.runtime.tokenizer.special_tokens import AnyTokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The template of Qwen3-Reranker's model card, whose folder has a chat template without pairs.
QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {{ messages[0].content }}\n<Query>: {{ messages[1].content }}\n"
    "<Document>: {{ messages[2].content }}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>"
    "\n\n\n"  # jinja drops the last
)
# Texts in the place of both, which no template holds.
MARKS = {"query": "\ue0f1", "document": "\ue0f2"}
FIRST, SECOND = "head.layers.0.linear.weight", "head.layers.1.linear.weight"


def score_of(
    config: Settings,
    family: Family,
    shape: ModelConfig,
    names: Collection[str],
    tokens: Sequence[int],
    rank: Literal["sigmoid", "none"],
) -> tuple[Family, Classifier]:
    """Returns a decoder-only type, as `as_reader` returns it, with a head in place of logits.

    `tokens` are the token whose logit counts, and another to be subtracted, if any.
    """
    if shape.output_softcap or shape.output_bias or shape.embedding_width:
        kind = config.get("model_type")
        config.refuse("model_type", kind, "types whose logits are a product, for a reranker")
    if not all(type(token) is int and 0 <= token < shape.vocabulary_size for token in tokens):
        raise InputError(
            f"{config.path}: expected ids of tokens below {shape.vocabulary_size}, found "
            f"{list(tokens)}; take the tokenizer of this model"
        )

    def rows(tensor: Tensor, config: ModelConfig) -> tuple[Tensor, ...]:
        return (tensor[list(tokens)],)

    def both(tensor: Tensor, config: ModelConfig) -> tuple[Tensor, ...]:
        return tensor, *rows(tensor, config)

    table = dict(family.table)
    output = next(theirs for theirs, ours in family.table.items() if ours == HEAD)
    if shape.tied and output not in names:
        output = next(theirs for theirs, ours in table.items() if ours == "embedding.weight")
        table[output] = Move(("embedding.weight", FIRST), both)
    else:
        table[output] = Move((FIRST,), rows)
    computed = family.computes
    several = len(tokens) > 1
    last = {SECOND: torch.tensor([[1.0, -1.0]])} if several else {}
    fields: dict[str, Any] = {
        "pooling": ("last",),
        "head_widths": (2, 1) if several else (1,),
        "head_activations": ("none",) * len(tokens),
        "head_biases": (False,) * len(tokens),
    }
    head = Classifier(fields, table, HeadSettings("classify", ("score",), "none", rank))
    return replace(family, computes=lambda config: computed(config) | last), head


def scored_by(pretrained: PretrainedFolder, texts: Sequence[str]) -> SentenceModules:
    """Returns a folder without modules as CrossEncoder of sentence-transformers makes one."""
    made = read_fast_tokenizer(pretrained).tokenizer
    ids = [made.token_to_id(text) for text in texts]
    if lacking := [text for text, token in zip(texts, ids, strict=True) if token is None]:
        raise InputError(
            f"{pretrained.folder}: expected tokens after --score-tokens, found {lacking[0]!r}, "
            "which the vocabulary lacks"
        )
    settings = HeadSettings("classify", rank="sigmoid")
    return SentenceModules(pretrained.folder, {}, [], settings, False, tuple(ids))


def joined_by(
    pretrained: PretrainedFolder, tokenizer: AnyTokenizer, modules: SentenceModules
) -> tuple[str, ...]:
    """Returns the template of a pair, and gives the tokenizer the tokens around it."""
    chat, prompt = tokenizer.chat, modules.settings.prompt(None)
    structured = modules.structured
    plain = not modules.files and pretrained.config.get("model_type") == "qwen3"
    for source in ("", *[QWEN3] * plain):
        if chat is None:
            break
        if source:
            chat, prompt = replace(chat, source=source), prompt or INSTRUCTION
        for parts in (False, True) if structured is None else (structured,):
            found = _pieces(chat, prompt, parts, modules.answer)
            if found is not None:
                return _split(pretrained, tokenizer, found)
    raise InputError(
        f"{pretrained.folder}: expected a chat template that renders messages of the roles query "
        "and document between the same special tokens, found none; add it as chat_template.jinja"
    )


def _pieces(chat: ChatTemplate, prompt: str, parts: bool, answer: bool) -> list[str | int] | None:
    """Renders marks; None where the template does not hold each once."""

    def message(role: str, text: str) -> Message:
        return {"role": role, "content": [{"type": "text", "text": text}] if parts else text}

    messages = [message("system", prompt)] if prompt else []
    messages += [message(role, mark) for role, mark in MARKS.items()]
    try:
        pieces = chat.render(messages, answer=answer)
    except ChatError:
        return None
    return pieces if sum(map(_holds_both, pieces)) == 1 else None


def _holds_both(piece: str | int) -> bool:
    return isinstance(piece, str) and all(piece.count(mark) == 1 for mark in MARKS.values())


def _split(
    pretrained: PretrainedFolder, tokenizer: AnyTokenizer, pieces: list[str | int]
) -> tuple[str, ...]:
    """Splits a rendered template at the special tokens around both texts."""
    place = next(number for number, each in enumerate(pieces) if _holds_both(each))
    body = str(pieces[place])
    around = [tokenizer.encode_pieces(each) for each in (pieces[:place], pieces[place + 1 :])]
    names = sorted(MARKS, key=lambda name: body.index(MARKS[name]))
    template: list[str] = []
    for name in names:
        before, body = body.split(MARKS[name])
        template += [before, name]
    template.append(body)
    sample = HeadSettings("classify", template=tuple(template)).filled("a b", "c")
    whole = tokenizer.encode_pieces([*pieces[:place], sample, *pieces[place + 1 :]])
    if [*around[0], *tokenizer.encode(sample), *around[1]] != whole:
        raise InputError(
            f"{pretrained.folder}: the tokenizer joins texts with the special tokens before them, "
            "which cannot be imported for a reranker"
        )
    special = replace(tokenizer.special, before=tuple(around[0]), after=tuple(around[1]))
    tokenizer.special = special
    tokenizer.chat = None
    return tuple(template)
