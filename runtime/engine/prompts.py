"""Inputs to generate from that are no plain text: chats, and token ids."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal, TypeAlias

from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.preprocess import (
    EncodedRow,
    InLanguages,
    LongRows,
    Preprocessor,
    no_text,
    require_several,
    too_long,
)
from transferry.runtime.engine.result import RowError
from transferry.runtime.errors import Option, UsageError
from transferry.runtime.settings import shown
from transferry.runtime.tokenizer.chat import RESERVED, ChatError, Message
from transferry.runtime.tokenizer.special_tokens import AnyTokenizer, TextError

PromptKind: TypeAlias = Literal["turn", "messages", "ids"]


@dataclass(frozen=True)
class Prompt:
    """An input other than a plain text.

    Attributes:
        text: The text of a user's turn; messages or token ids as JSON. Results cite it as source.
        kind: Which of these it is.
        system: System message before a turn.
        variables: Further variables of the chat template, as a JSON object; empty for none.
    """

    text: str
    kind: PromptKind
    system: str | None = None
    variables: str = ""

    def encode(self, tokenizer: AnyTokenizer) -> list[int]:
        """Returns the token ids, special tokens included.

        Raises:
            ChatError: The chat template refuses the messages, or an id is not in the vocabulary.
            TextError: The tokenizer cannot encode the text.
            UsageError: There is no chat template, or jinja2 is not installed.
        """
        if self.kind == "ids":
            return _checked_ids(json.loads(self.text), tokenizer.source_size)
        variables = json.loads(self.variables) if self.variables else {}
        if self.kind == "messages":
            return tokenizer.encode_chat(json.loads(self.text), variables)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return tokenizer.encode_chat([*system, {"role": "user", "content": self.text}], variables)


# Inputs that are encoded without changes, and inputs of `generate`.
Encodable: TypeAlias = str | RowError | Prompt | InLanguages
Source: TypeAlias = "Encodable | Asked | Sequence[Message] | Sequence[int]"


@dataclass(frozen=True)
class Asked:
    """An input with settings of its own.

    Attributes:
        source: The input.
        options: Of `generate`: its options; their prefix and forced_begin are those of the call.
        row_id: Of `generate`: seeds its samples.
        dimensions: Of `embed`: length of its vector; 0 is the whole vector.
    """

    source: Encodable
    options: GenerationOptions | None = None
    row_id: int = 0
    dimensions: int = 0


def _checked_ids(ids: list[Any], size: int) -> list[int]:
    for token in ids:
        if type(token) is not int or not 0 <= token < size:
            raise ChatError(f"expected token ids from 0 to {size - 1}, found {shown(token)}")
    return ids


@dataclass(frozen=True)
class Parts:
    """The inputs of a row that has several.

    Attributes:
        inputs: The inputs, in order.
        cells: Whether they are cells of a table: an empty one among others is no error.
    """

    inputs: tuple[Any, ...]
    cells: bool = False


def deciding_part(given: Any, options: GenerationOptions | None) -> Any:
    """Returns the part of an input that decides its answer: samples depend on the row too.

    Among inputs of one call, whose options are `options`; hashing these takes 3 microseconds.
    """
    if isinstance(given, Parts):
        keys = tuple(deciding_part(each, options) for each in given.inputs)
        return None if None in keys else keys
    source, own = given, None
    if isinstance(given, Asked):
        source, own = given.source, given.options
    used = own or options
    return None if used and used.sample else (source, None if own is options else own)


def template_variables(given: object) -> str:
    """Returns variables of a chat template as JSON, of a mapping or of JSON; "" for none.

    Raises:
        UsageError: They are no such object, or one of them is not the user's.
    """
    try:
        found = json.loads(given) if isinstance(given, str) else given
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        found, text = None, ""
    option = Option("chat_template_kwargs")
    if not isinstance(found, dict):
        told = f' must be a JSON object, such as {{"enable_thinking": false}}, found {shown(given)}'
        raise UsageError(option, told)
    if taken := sorted(RESERVED & found.keys()):
        raise UsageError(option, f" cannot set {taken[0]}, which the chat decides; leave it out")
    return text if found else ""


def checked_prompts(texts: Iterable[Source], variables: str = "") -> Iterator[Encodable | Asked]:
    """Yields texts and errors, and chats and token ids as prompts; see `checked_texts`."""
    return map(partial(_prompt, variables), require_several(texts), count(1))


def _prompt(variables: str, source: Any, number: int) -> Encodable | Asked:
    if isinstance(source, Prompt | InLanguages | Asked):
        return source
    if isinstance(source, Sequence) and not isinstance(source, str | bytes | bytearray):
        if not source:
            return RowError("prompt", f"expected messages or token ids in row {number}, found none")
        kinds: dict[Any, PromptKind] = {Mapping: "messages", int: "ids"}
        for type_, kind in kinds.items():
            if all(isinstance(each, type_) for each in source):
                return _as_prompt(source, kind, number, variables)
    return source if isinstance(source, str | RowError) else no_text(source, number)


def _as_prompt(
    values: Sequence[Any], kind: PromptKind, number: int, variables: str
) -> Prompt | RowError:
    try:
        text = json.dumps(list(values), ensure_ascii=False, allow_nan=False)
        return Prompt(text, kind, variables=variables)
    except (TypeError, ValueError, RecursionError) as error:
        return RowError("prompt", f"expected JSON values in row {number}, found others: {error}")


def encode_inputs(
    inputs: Sequence[Encodable],
    tokenizer: AnyTokenizer,
    preprocessor: Preprocessor,
    long_rows: LongRows,
    reserve: int = 0,
) -> list[EncodedRow]:
    """Encodes texts as `Preprocessor.encode` does, and prompts among them, in order."""
    texts = [each for each in inputs if not isinstance(each, Prompt)]
    rows = iter(preprocessor.encode(texts, long_rows, reserve))
    around = tokenizer, preprocessor.positions, long_rows, reserve
    return [
        encode_prompt(each, *around) if isinstance(each, Prompt) else next(rows) for each in inputs
    ]


def encode_prompt(
    prompt: Prompt, tokenizer: AnyTokenizer, positions: int, long_rows: LongRows, reserve: int
) -> EncodedRow:
    """Encodes a prompt of at most `positions` tokens; its result may be an error.

    "truncate" cuts token ids and leaves `reserve` positions free. A chat ends with the turn to be
    answered, so it is never cut. Raises UsageError without a chat template or jinja2.
    """
    if not prompt.text.strip():
        return EncodedRow(prompt.text, error=RowError("empty", "there is no text to work on"))
    try:
        ids = prompt.encode(tokenizer)
    except ChatError as error:
        return EncodedRow(prompt.text, error=RowError("prompt", str(error)))
    except TextError as error:
        return EncodedRow(prompt.text, error=RowError("tokenizer", str(error)))
    if not ids:
        return EncodedRow(prompt.text, error=RowError("empty", "there are no tokens to work on"))
    tokens = len(ids)
    if long_rows == "truncate" and prompt.kind == "ids" and tokens > positions - reserve > 0:
        kept = tokenizer.special.cut(ids, positions - reserve)
        return EncodedRow(prompt.text, kept, tokens, truncated=True)
    if tokens > positions:
        return EncodedRow(prompt.text, (), tokens, too_long(tokens, positions))
    return EncodedRow(prompt.text, ids, tokens)
