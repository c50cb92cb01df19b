"""Batches of requests and responses as the OpenAI Batch API has them, and vLLM's `run-batch`.

https://platform.openai.com/docs/api-reference/batch: a line of the input is
`{"custom_id", "method", "url", "body"}`, one of the output `{"id", "custom_id", "response",
"error"}`. Three URLs are known: /v1/chat/completions, /v1/completions and /v1/embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transferry.runtime.engine.result import RowError
from transferry.runtime.errors import UsageError
from transferry.runtime.jobs.formats.cells import json_value, to_json
from transferry.runtime.settings import shown

Endpoint = Literal["chat/completions", "completions", "embeddings"]
# The key of the body that holds the input, and the task that answers it.
INPUTS: dict[Endpoint, tuple[str, str]] = {
    "chat/completions": ("messages", "generate"),
    "completions": ("prompt", "generate"),
    "embeddings": ("input", "embed"),
}
# Fields of GenerationOptions by their names here; the last ones are vLLM's own.
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
    "repetition_penalty": ("repetition_penalty", (int, float)),
}
OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
# Keys of a body that change no answer here. Others are refused unless they are off.
WITHOUT_EFFECT = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("encoding_format", "prompt_cache_key"),
)
OFF: tuple[Any, ...] = (None, False, 0, 0.0, [], {}, "none", "auto")


@dataclass(frozen=True)
class Request:
    """A line of a batch.

    Attributes:
        custom_id: The user's name for it.
        endpoint: Kind of the request.
        model: The user's name for the model, repeated in the response.
        text: The prompt; messages or token ids as JSON.
        kind: Type of a text that is JSON.
        settings: Fields of GenerationOptions.
    """

    custom_id: str
    endpoint: Endpoint
    model: str
    text: str
    kind: Literal["messages", "ids"] | None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """The task that answers it."""
        return INPUTS[self.endpoint][1]


def parse_request(line: Mapping[str, Any]) -> Request | RowError:
    """Returns the request of a line, or its error."""
    custom_id, url, body = (line.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str):
        return RowError("malformed", f"expected custom_id, a text, found {shown(custom_id)}")
    endpoint = str(url).partition("/v1/")[2]
    if endpoint not in INPUTS:
        known = ", ".join(f"/v1/{name}" for name in INPUTS)
        return RowError("malformed", f"expected url to be one of {known}, found {shown(url)}")
    if not isinstance(body, dict):
        return RowError("malformed", f"expected body, an object, found {shown(body)}")
    key, _ = INPUTS[endpoint]
    try:
        text, kind = _input(key, body.get(key))
        settings = _settings({name: value for name, value in body.items() if name != key})
    except UsageError as error:
        return RowError("malformed", str(error))
    return Request(custom_id, endpoint, str(body.get("model", "")), text, kind, settings)


def _input(key: str, value: Any) -> tuple[str, Literal["messages", "ids"] | None]:
    if key == "messages" and isinstance(value, list):
        return to_json([_message(message) for message in value]), "messages"
    if key != "messages" and isinstance(value, str):
        return value, None
    if key == "prompt" and isinstance(value, list) and {type(each) for each in value} == {int}:
        return json.dumps(value), "ids"
    expected = "a list of messages" if key == "messages" else "one text"
    raise UsageError(f"expected {key} to be {expected}, found {shown(value)}")


def _message(message: Any) -> Any:
    """Returns a message whose content may be a list of texts, as one text."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    found = [part.get("text") for part in content if isinstance(part, dict)]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(content):
        raise UsageError("expected a message of texts, found another kind of content")
    return {**message, "content": "".join(texts)}


def _settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a body as fields of GenerationOptions.

    Raises:
        UsageError: One is unknown, or has another type.
    """
    settings: dict[str, Any] = {}
    for name, value in body.items():
        if name in WITHOUT_EFFECT or value is None:
            continue
        if name not in SETTINGS:
            if value in OFF:
                continue
            raise UsageError(f"{name} = {shown(value)} has no counterpart here; leave it out")
        renamed, kind = SETTINGS[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UsageError(f"{name} cannot be {shown(value)}")
        if name == "stop":
            settings[renamed] = (value,) if isinstance(value, str) else tuple(body[name])
        else:
            settings[renamed] = value
    if settings.get("top_k", 1) < 1:  # vLLM's way to say all
        del settings["top_k"]
    if settings.get("temperature") == 0:
        settings = {name: value for name, value in settings.items() if name not in OF_SAMPLING}
        settings["sample"] = False
    elif any(name in settings for name in OF_SAMPLING):
        settings["sample"] = True
    return settings


def response_line(record: Mapping[str, Any]) -> str:
    """Returns the line of the output for the record of a row.

    Nothing in it depends on the time, so that the same batch gives the same bytes.
    """
    number, custom_id = record["number"], record["id"]
    error = record.get("error")
    if error is not None:
        status, body = (
            400,
            {
                "error": {
                    "message": error["message"],
                    "type": "invalid_request_error",
                    "code": error["kind"],
                }
            },
        )
    else:
        status, body = 200, _body(record)
    response = {"status_code": status, "request_id": f"request-{number}", "body": body}
    line = {
        "id": f"batch_req_{number}",
        "custom_id": custom_id,
        "response": response,
        "error": body["error"] if error is not None else None,
    }
    return to_json(line) + "\n"


def _body(record: Mapping[str, Any]) -> dict[str, Any]:
    number, endpoint, model = record["number"], record["endpoint"], record["model"]
    if endpoint == "embeddings":
        data = [{"object": "embedding", "index": 0, "embedding": json_value(record["vector"])}]
        return {"object": "list", "data": data, "model": model}
    chat = endpoint == "chat/completions"
    choices = []
    for index, found in enumerate(record.get("n_best") or [record]):
        text = found["text"]
        answer = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        reason = "length" if found["finish_reason"] == "length" else "stop"
        choices.append({"index": index, **answer, "logprobs": None, "finish_reason": reason})
    read, written = record["source_tokens"], record["target_tokens"]
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        },
    }
