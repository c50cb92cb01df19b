"""Writes js/schema.js, the types of a bundle's documents as Python declares them: `make docs`."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from transferry.runtime.bundle.manifest import FORMAT, Manifest, ModelLimits
from transferry.runtime.bundle.specs import ANSWERS, GRAPHS, IN_PLACE
from transferry.runtime.io.documents import MOST_JSON
from transferry.runtime.tokenizer.chat import REASONING, RESERVED
from transferry.runtime.tokenizer.chat_worker import ROLES
from transferry.runtime.tokenizer.special_tokens import NEEDED, SpecialTokens

PAGE = Path(__file__).parent.parent / "js" / "schema.js"
Id = Annotated[int, Meta(ge=0, le=1 << 28)]


class TokenizerSettings(msgspec.Struct):
    """Fields of tokenizer.json: those of every kind, then those of byte-pair ranks."""

    special: SpecialTokens
    kind: str = "tiktoken"
    vocabulary_size: Id | None = None
    pattern: Annotated[str, Meta(min_length=1, max_length=10_000)] = ""
    first_ordinary_id: Id | None = None
    kept_ranks: list[Id] | None = None


def _plain(schema: Any) -> Any:
    """Returns a schema without descriptions."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema.replace(r"\Z", "$") if isinstance(schema, str) else schema
    named = {"title", "description"} if "type" in schema else set()
    return {key: _plain(each) for key, each in schema.items() if key not in named}


def _one_of(names: Iterable[str]) -> dict[str, str]:
    return {"pattern": f"^({'|'.join(names)})$"}


def page() -> str:
    """Returns the module."""
    kinds = (Manifest, ModelLimits, TokenizerSettings)
    _, found = msgspec.json.schema_components(kinds, ref_template="{name}")
    schemas = {name: _plain(schema) for name, schema in found.items()}
    special = schemas["SpecialTokens"]
    special |= {"required": sorted(NEEDED), "propertyNames": _one_of(special["properties"])}
    constants = {
        "FORMAT": FORMAT,
        "MOST_JSON": MOST_JSON,
        "GRAPHS": GRAPHS,
        "IN_PLACE": IN_PLACE,
        "ANSWERS": ANSWERS,
        "REASONING": REASONING,
        "RESERVED": sorted(RESERVED),
        "ROLES": sorted(ROLES),
        "SCHEMAS": schemas,
    }
    lines = [f"export const {name} = {json.dumps(each)};" for name, each in constants.items()]
    return "\n".join(["// Generated from the classes of runtime/: make docs", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
