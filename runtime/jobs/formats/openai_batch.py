"""Batches of requests and responses as the OpenAI Batch API has them, and vLLM's `run-batch`.

https://platform.openai.com/docs/api-reference/batch: a line of the input is
`{"custom_id", "method", "url", "body"}`, one of the output `{"id", "custom_id", "response",
"error"}`. Three URLs are known: /v1/chat/completions, /v1/completions and /v1/embeddings.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transferry.runtime.engine.prompts import template_variables
from transferry.runtime.engine.result import PartsResult, RowError, RowResult
from transferry.runtime.errors import UsageError
from transferry.runtime.jobs.formats.cells import JSON, json_value, to_json

Endpoint = Literal["chat/completions", "completions", "embeddings"]
# The key of the body that holds the input, and the task that answers it.
INPUTS: dict[Endpoint, tuple[str, str]] = {
    "chat/completions": ("messages", "generate"),
    "completions": ("prompt", "generate"),
    "embeddings": ("input", "embed"),
}
# Fields of GenerationOptions by their names here, later ones first; the last ones are vLLM's own.
SETTINGS: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "max_tokens": ("max_length", int),
    "max_completion_tokens": ("max_length", int),
    "temperature": ("temperature", (int, float)),
    "top_p": ("top_p", (int, float)),
    "seed": ("seed", int),
    "n": ("n_best", int),
    "stop": ("stop", (str, list)),
    "top_k": ("top_k", int),
    "min_p": ("min_p", (int, float)),
    "min_tokens": ("min_length", int),
    "repetition_penalty": ("repetition_penalty", (int, float)),
}
# Fields that ask for sampling, with the values that do not.
OF_SAMPLING = {"temperature": None, "top_p": 1, "top_k": 0, "min_p": 0}
KWARGS = "chat_template_kwargs"  # vLLM's
# Keys that change no answer here.
WITHOUT_EFFECT = frozenset(
    (
        # Names that a user gives, and affairs of a service
        *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "priority"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt"),
        *("request_id", "session_id"),
        # Parts of others, which are refused: streams, tools, truncation, rendering
        *("stream_options", "stream_interval", "parallel_tool_calls", "truncation_side"),
        *("include_reasoning", "return_mm_kwargs", "return_token_offsets"),
        "routed_experts_prompt_start",
    )
)
# Other keys with the values that ask for nothing; null always does.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), (0,)),
    **dict.fromkeys(("logprobs", "echo", "stream", "use_beam_search", "ignore_eos"), (False,)),
    **dict.fromkeys(("include_stop_str_in_output", "continue_final_message"), (False,)),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "watermarking"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("tools", "functions", "stop_token_ids", "bad_words", "documents"), ([],)),
    **dict.fromkeys(("logit_bias", KWARGS, "vllm_xargs"), ({},)),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs"), ({},)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("audio", "prediction", "moderation", "web_search_options"), ()),
    **dict.fromkeys(("structured_outputs", "truncate_prompt_tokens", "chat_template"), ()),
    **dict.fromkeys(("prompt_logprobs", "logprob_token_ids", "allowed_token_ids"), ()),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "repetition_detection"), ()),
    **dict.fromkeys(("reasoning_effort", "prompt_embeds", "normalize", "use_activation"), ()),
    "thinking_token_budget": (-1,),
    "best_of": (1,),
    "length_penalty": (1,),
    "suffix": ("",),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "response_format": ({"type": "text"},),
    "add_generation_prompt": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}
# Whether a prompt has the tokenizer's special tokens around it; a chat's are the template's.
SPECIAL_TOKENS = {"chat/completions": False, "completions": True, "embeddings": True}

# Key of the text in a part of a message, by its type.
_TEXTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    **{name: name for name in ("refusal", "thinking")},
}
MOST_SHOWN = 60  # characters of a value in a message
# Ids that are remembered, some 40 MB.
MOST_IDS = 1 << 19


@dataclass(frozen=True)
class Request:
    """A line of a batch.

    Attributes:
        model: The user's name for the model, repeated in the response.
        inputs: The prompts, at least one; messages or token ids as JSON.
        kind: Type of inputs that are JSON.
        settings: Fields of GenerationOptions.
        variables: Further variables of the chat template.
        dimensions: Length of vectors; 0 is the model's.
        packed: Whether vectors are base64 of little-endian float32.
        error: Why it has no answer; None if it can have one.
    """

    custom_id: str
    endpoint: Endpoint
    model: str
    inputs: tuple[str, ...] = ()
    kind: Literal["messages", "ids"] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    dimensions: int = 0
    packed: bool = False
    error: RowError | None = None

    @property
    def task(self) -> str:
        """The task that answers it."""
        return INPUTS[self.endpoint][1]

    @property
    def text(self) -> str | RowError:
        """Its input as one text: several as JSON."""
        return self.error or (self.inputs[0] if len(self.inputs) == 1 else to_json(self.inputs))


class Seen:
    """Recognises values that come again, by their hashes: of the first 524,288 at most."""

    def __init__(self) -> None:
        self._hashes = set[int]()

    def again(self, value: Any) -> bool:
        """Whether an equal value was given before."""
        if (key := hash(value)) in self._hashes:
            return True
        if len(self._hashes) < MOST_IDS:
            self._hashes.add(key)
        return False


def parse_request(line: Mapping[str, Any]) -> Request | RowError:
    """Returns the request of a line, or the error of a line that holds no request."""
    custom_id, url, body = (line.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str):
        return RowError("malformed", f"expected custom_id, a text, found {_shown(custom_id)}")
    endpoint = str(url).partition("/v1/")[2]
    if endpoint not in INPUTS:
        known = ", ".join(f"/v1/{name}" for name in INPUTS)
        return RowError("malformed", f"expected url to be one of {known}, found {_shown(url)}")
    if not isinstance(body, dict):
        return RowError("malformed", f"expected body, an object, found {_shown(body)}")
    named = custom_id, endpoint, str(body.get("model") or "")
    key, _ = INPUTS[endpoint]
    try:
        inputs, kind = _inputs(key, body.get(key))
        asked = {name: body[name] for name in body if name != key and body[name] is not None}
        given = _embedding(asked) if endpoint == "embeddings" else {"settings": _settings(asked)}
        if key == "messages" and isinstance(variables := asked.get(KWARGS), dict):
            template_variables(asked.pop(KWARGS))
            given["variables"] = variables
        _require_neutral(asked, endpoint)
    except UsageError as error:
        return Request(*named, error=RowError("malformed", str(error)))
    return Request(*named, inputs, kind, **given)


def _inputs(key: str, value: Any) -> tuple[tuple[str, ...], Literal["messages", "ids"] | None]:
    """Returns the inputs of a body as texts, and their type if they are JSON."""
    if key == "messages":
        if not isinstance(value, list):
            raise UsageError(f"expected messages to be a list of messages, found {_shown(value)}")
        return (to_json([_message(message) for message in value]),), "messages"
    if isinstance(value, str):
        return (value,), None
    items = value if isinstance(value, list) else []
    if items and all(isinstance(item, str) for item in items):
        return tuple(items), None
    lists = [items] if items and not isinstance(items[0], list) else items
    if lists and all(_is_ids(item) for item in lists):
        return tuple(map(to_json, lists)), "ids"
    raise UsageError(
        f"expected {key} to be a text, token ids, or a list of these, found {_shown(value)}"
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _message(message: Any) -> Any:
    """Returns a message as chat templates expect it, by the rules of vLLM's `chat_utils.py`."""
    if not isinstance(message, dict):
        return message
    found, content = dict(message), message.get("content")
    if content is None:
        found["content"] = ""
    elif isinstance(content, list):
        texts = [_text(part) for part in content]
        parts = [{"type": "text", "text": text} for text in texts]
        found["content"] = "\n".join(texts) if message.get("role") == "tool" else parts
    if isinstance(calls := found.pop("tool_calls", None), list) and calls:
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _text(part: Any) -> str:
    """Returns the text of a part of a message; raises UsageError if it has none."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(_TEXTS.get(kind, "")) if kind else part
    if not isinstance(text, str):
        raise UsageError(f"expected a message of texts, found {_shown(part)}")
    return text


def _call(call: Any) -> Any:
    """Returns a tool call whose arguments are an object and no longer JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = JSON.decode(arguments.strip() or "{}")
        except (ValueError, RecursionError) as error:
            raise UsageError(f"expected JSON as arguments, found {_shown(arguments)}") from error
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _settings(body: dict[str, Any]) -> dict[str, Any]:
    """Takes the settings of a body; returns them as fields of GenerationOptions.

    Raises:
        UsageError: One has another type.
    """
    settings: dict[str, Any] = {}
    for name, (renamed, kind) in SETTINGS.items():
        if name not in body:
            continue
        value = body.pop(name)
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        texts = not isinstance(value, list) or all(isinstance(each, str) for each in value)
        if not isinstance(value, kind) or isinstance(value, bool) or not texts:
            raise UsageError(f"{name} cannot be {_shown(value)}")
        settings[renamed] = value
    if "stop" in settings:
        stop = settings.pop("stop")
        if stops := tuple(dict.fromkeys([stop] if isinstance(stop, str) else stop)):
            settings["stop"] = stops
    if "seed" in settings:
        settings["seed"] %= 2**64
    if settings.get("top_k", 0) < 0:  # vLLM's way to say all
        settings["top_k"] = 0
    if _is(body.get("best_of"), settings.get("n_best", 1)):
        del body["best_of"]
    if settings.get("temperature") == 0:
        settings = {name: value for name, value in settings.items() if name not in OF_SAMPLING}
        settings["sample"] = False
    elif any(settings.get(name, off) != off for name, off in OF_SAMPLING.items()):
        settings["sample"] = True
    return settings


def _embedding(body: dict[str, Any]) -> dict[str, Any]:
    """Takes the settings of vectors of a body; returns them as fields of Request."""
    form, dimensions = body.pop("encoding_format", "float"), body.pop("dimensions", None)
    if form not in ("float", "base64"):
        raise UsageError(f"expected encoding_format to be float or base64, found {_shown(form)}")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise UsageError(f"expected dimensions to be at least 1, found {_shown(dimensions)}")
    return {"packed": form == "base64", "dimensions": dimensions or 0}


def _require_neutral(body: Mapping[str, Any], endpoint: Endpoint) -> None:
    """Raises UsageError for a key that asks for something that there is not."""
    special = SPECIAL_TOKENS[endpoint]
    for name, value in body.items():
        neutral = NEUTRAL.get(name, ())
        if name == "add_special_tokens":
            neutral = (special,)
        if name not in WITHOUT_EFFECT and not any(_is(value, each) for each in neutral):
            raise UsageError(f"{name} = {_shown(value)} has no counterpart here; leave it out")


def _shown(value: Any) -> str:
    """Returns the beginning of a value as JSON."""
    text = to_json(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _is(value: Any, other: Any) -> bool:
    """Whether two values of JSON are the same: 1 is 1.0, and not true."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def response_line(record: Mapping[str, Any]) -> str:
    """Returns the line of the output for a row.

    A line that is no request gets an `error`, every request a `response`, perhaps of an error.
    Nothing depends on the time, so that the same batch gives the same bytes. A record has `number`
    and `id` of the row, its `request` or None, and the `result`.
    """
    number, request, result = record["number"], record["request"], record["result"]
    custom_id, error = record["id"] if isinstance(record["id"], str) else None, result.error
    line: dict[str, Any] = {"id": f"batch_req_{number}", "custom_id": custom_id}
    line |= {"response": None, "error": None}
    if request is None:
        assert error is not None
        line["error"] = {"code": error.kind, "message": error.message}
        return to_json(line) + "\n"
    status, body = 200, {}
    if error is None:
        body = _body(request, number, result)
    else:
        ours = error.kind == "not-finite"
        status, type = (500, "server_error") if ours else (400, "invalid_request_error")
        told = {"message": error.message, "type": type, "param": None, "code": error.kind}
        body["error"] = told
    line["response"] = {"status_code": status, "request_id": f"request-{number}", "body": body}
    return to_json(line) + "\n"


def _body(request: Request, number: int, result: RowResult) -> dict[str, Any]:
    parts: Any = result.parts if isinstance(result, PartsResult) else (result,)
    read = result.source_tokens
    if request.endpoint == "embeddings":
        data = [
            {"object": "embedding", "index": index, "embedding": _vector(part.vector, request)}
            for index, part in enumerate(parts)
        ]
        usage = {"prompt_tokens": read, "total_tokens": read}
        return {"object": "list", "data": data, "model": request.model, "usage": usage}
    chat = request.endpoint == "chat/completions"
    written = sum(len(one.tokens) for part in parts for one in part.hypotheses)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": request.model,
        "choices": list(_choices(parts, chat=chat)),
        "usage": {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        },
    }


def _choices(parts: Iterable[Any], *, chat: bool) -> Iterator[dict[str, Any]]:
    """Yields all answers to the first prompt, then those to the next."""
    found = (one for part in parts for one in part.hypotheses)
    for index, one in enumerate(found):
        answer: dict[str, Any] = {"text": one.text}
        if chat:
            answer = {"message": {"role": "assistant", "content": one.text, "refusal": None}}
        reason = "length" if one.finish_reason == "length" else "stop"
        yield {"index": index, **answer, "logprobs": None, "finish_reason": reason}


def _vector(vector: Any, request: Request) -> Any:
    if request.packed:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return json_value(vector)
