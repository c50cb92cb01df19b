"""Each setting of each model type, away from its default: carried, without effect, or refused."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError

from tests.build_model.importing.huggingface.drawn import (
    TYPES,
    Drawn,
    require_same_logits,
    transformers,
)
from transferry.build_model.importing.huggingface.folder import CONFIG, TOKENIZER_CONFIG, Settings
from transferry.build_model.importing.huggingface.generation import (
    SAME_TOKENS,
    SEARCH_SETTINGS,
    TOKENS,
)
from transferry.build_model.importing.huggingface.settings_table import (
    NEUTRAL,
    NOT_READ,
    WITHOUT_EFFECT,
    judge,
)
from transferry.runtime.errors import InputError, UsageError

# 2,900 settings, in twelve minutes; test_model_types.py draws one of each type.
LONG = os.environ.get("FUZZ") == "long"
# The errors of transformers for an unsupported value.
ILLEGAL = (
    *(TypeError, ValueError, RuntimeError, LookupError, AttributeError),
    StrictDataclassError,
)
WORDS = {"gelu": "relu", "relu": "gelu", "silu": "gelu", "gelu_new": "gelu", "swish": "relu"}
# Sizes of tensors, which a file of weights decides, and names that are no settings.
LEFT = {
    *("vocab_size", "model_type", "transformers_version", "architectures", "torch_dtype"),
    *("return_dict", "is_encoder_decoder"),  # other outputs, another class
}
LISTS: dict[str, Any] = {
    "id2label": {"0": "a", "1": "b"},
    "label2id": {"a": 0, "b": 1},
    "layer_types": None,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
}


# Settings of other types, which code that types share may read all the same.
OF_OTHERS = {*WITHOUT_EFFECT[CONFIG][NOT_READ].split(), *NEUTRAL[CONFIG]}


def keys(kind: str) -> list[str]:
    made = getattr(transformers, TYPES[kind][0]).config_class().to_dict()
    generation = {*SEARCH_SETTINGS, *SAME_TOKENS, *TOKENS}
    found = sorted((made.keys() | OF_OTHERS) - generation - LEFT)
    return found if LONG else ["head_dim"] * (kind in ("gpt_neox", "phi3"))


def other(key: str, value: Any) -> Any:
    """Another value than a model has."""
    if key in LISTS:
        return LISTS[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value * 2 or 1
    if isinstance(value, float):
        return value / 2 or 0.25
    if isinstance(value, str):
        return WORDS.get(value, f"{value}x")
    return 4 if value is None else value


CASES: list[tuple[str, str, Any]] = [(kind, key, ...) for kind in TYPES for key in keys(kind)]
# Values that are taken to have no effect have none in any type.
CASES += [
    (kind, key, value)
    for kind in TYPES
    for key, values in NEUTRAL[CONFIG].items()
    for value in values
    if LONG or (kind, key) in (("bert", "is_causal"), ("bart", "is_causal"))
]


@pytest.mark.parametrize(("kind", "key", "value"), CASES)
def test_a_changed_setting_gives_their_logits_or_a_refusal(
    kind: str, key: str, value: Any, tmp_path: Path
) -> None:
    usual = getattr(transformers, TYPES[kind][0]).config_class().to_dict()

    def rewrite(record: dict[str, Any]) -> None:
        changed = other(key, record.get(key, usual.get(key)))
        record[key] = changed if value is ... else value

    try:
        drawn = Drawn(kind, 0, tmp_path, rewrite=rewrite)
        judge(CONFIG, drawn.settings)
    except InputError as error:
        assert str(tmp_path) in str(error)
        return
    except UsageError:  # of a shape, to which import adds the file
        return
    except ILLEGAL as error:
        pytest.skip(f"transformers refuses it: {error}"[:200])
    try:
        require_same_logits(drawn.ours, drawn.theirs)
    except (TypeError, LookupError) as error:
        pytest.skip(f"transformers fails: {error}"[:200])


def test_no_key_stands_twice() -> None:
    for file, reasons in WITHOUT_EFFECT.items():
        named = [key for group in reasons.values() for key in group.split()]
        assert len(set(named)) == len(named), file
        # A value without effect may be one of several.
        assert not set(named) & NEUTRAL.get(file, {}).keys() - {"attention_bias"}, file


@pytest.mark.parametrize("file", WITHOUT_EFFECT)
def test_a_key_that_stands_nowhere_is_refused(file: str, tmp_path: Path) -> None:
    settings = Settings(tmp_path / "x.json", {"novelty": 1})
    expected: Any = contextlib.nullcontext()
    if "*" not in json.dumps(WITHOUT_EFFECT[file]):
        message = r"found novelty \(1\), .*--ignore-setting novelty"
        expected = pytest.raises(InputError, match=message)
    with expected:
        judge(file, settings)
    settings.get("novelty")
    assert judge(file, settings) == []


def test_what_transformers_4_writes_for_a_sentencepiece_model_is_read(tmp_path: Path) -> None:
    def judged(value: Any) -> list[str]:
        settings = Settings(tmp_path / TOKENIZER_CONFIG, {"extra_special_tokens": value})
        return judge(TOKENIZER_CONFIG, settings)

    assert judged({}) == ["extra_special_tokens (the value without effect)"]
    with pytest.raises(InputError, match="found extra_special_tokens"):
        judged({"image_token": "<image>"})
