"""Every search setting of a checkpoint becomes a default of the bundle, or is reported."""

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.build_model.importing.huggingface.drawn import transformers
from tests.runtime.decoding.test_transformers import (
    BOS,
    EOS,
    PAD,
    VOCABULARY,
    decoder_of,
    models,
    sources,
)
from transferry.build_model.importing.huggingface import generation
from transferry.build_model.importing.huggingface.folder import PretrainedFolder
from transferry.build_model.importing.huggingface.generation import generation_defaults
from transferry.build_model.importing.huggingface.importer import FAMILIES
from transferry.build_model.model.config import ModelConfig
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import search
from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

__all__ = ["models"]  # the fixture
SHAPES = {
    kind: ModelConfig(
        vocabulary_size=VOCABULARY,
        architecture=kind,
        max_positions=64,
        d_model=16,
        d_ff=16,
        heads=2,
        encoder_layers=int(kind == "encoder-decoder"),
        decoder_layers=1,
    )
    for kind in ("encoder-decoder", "decoder-only")
}
Folder = Callable[..., PretrainedFolder]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Makes a folder with these settings in the one file or the other."""

    def make(config: dict[str, Any] | None = None, **settings: Any) -> PretrainedFolder:
        ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
        (tmp_path / "config.json").write_text(json.dumps({**ids, **(config or {})}))
        path = tmp_path / "generation_config.json"
        path.unlink(missing_ok=True)
        if settings:
            path.write_text(json.dumps({**ids, **settings}))
        return PretrainedFolder(tmp_path)

    return make


def test_every_setting_of_transformers_is_treated() -> None:
    known = set(vars(transformers.GenerationConfig())) - {"_original_object_hash"}
    treated = [
        *generation.CARRIED,
        *generation.TOKENS,
        *generation.SAME_TOKENS,
        *generation.UNSUPPORTED,
    ]
    assert known - set(treated) == set()
    assert len(treated) == len(set(treated))


def test_values_that_need_not_be_said_are_the_defaults() -> None:
    assert dict(generation.PLAIN).items() <= vars(GenerationOptions()).items()
    plain = transformers.GenerationConfig._get_default_generation_params()
    assert (plain["max_length"], plain["top_k"]) == (generation.NEW_TOKENS, generation.TOP_K)
    for name, nothing in generation.UNSUPPORTED.items():
        assert plain.get(name) in (None, nothing)


SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "Marian's": {
        "num_beams": 4,
        "max_length": 12,
        "bad_words_ids": [[6]],
        "forced_eos_token_id": EOS,
        "renormalize_logits": True,
    },
    "BART's": {
        "num_beams": 3,
        "early_stopping": True,
        "no_repeat_ngram_size": 3,
        "max_length": 14,
        "min_length": 6,
        "length_penalty": 2.0,
        "forced_bos_token_id": 7,
        "forced_eos_token_id": EOS,
    },
    "a language model's": {
        "eos_token_id": [EOS, 12, 16],
        "max_new_tokens": 9,
        "repetition_penalty": 1.3,
        "temperature": 0.7,
        "top_p": 0.9,
        "min_new_tokens": 2,
    },
    "old": {"max_length": 15, "min_length": 11, "num_beams": 2, "early_stopping": "never"},
    "words": {
        "bad_words_ids": [[6], [9, 10], [EOS]],
        "suppress_tokens": [23],
        "begin_suppress_tokens": [10, 0],
        "max_new_tokens": 8,
    },
    "ends": {"forced_eos_token_id": [1, 5], "suppress_tokens": [1], "max_new_tokens": 4},
}
CHOICES: dict[str, list[Any]] = {
    "num_beams": [1, 2, 3, 5],
    "early_stopping": [True, False, "never"],
    "max_length": [10, 15, 30],
    "max_new_tokens": [2, 5, 9],
    "min_length": [0, 5, 12],
    "min_new_tokens": [0, 4, 8],
    "length_penalty": [0.0, 0.6, -1.0, 2.0],
    "repetition_penalty": [0.7, 1.2, 2.0],
    "no_repeat_ngram_size": [1, 2, 3],
    "bad_words_ids": [[[6], [9, 10]], [[EOS]], [[5, 6, 7]], [[EOS, 4]], [[BOS]]],
    "suppress_tokens": [[23], [5, 6, 7]],
    "begin_suppress_tokens": [[10, 0], [EOS], [5, 6, 7, 8, 9]],
    "forced_eos_token_id": [12, [12]],
    "renormalize_logits": [True],
    "eos_token_id": [[EOS, 12, 16], [EOS, 5], 12],
}
# The lengths alone contradict each other, or count the prompt, in many ways.
SEEDS = range(16, 16 + int(os.environ.get("EXAMPLES", "1")))
DRAWN = [(kind, seed) for kind in SHAPES for seed in SEEDS]


@pytest.mark.parametrize(("kind", "seed"), DRAWN)
@torch.inference_mode()
def test_drawn_settings_give_the_answers_of_generate(
    kind: str, seed: int, folder: Folder, models: dict[str, Any]
) -> None:
    draw = random.Random(seed)
    lengths = [name for name in CHOICES if name.startswith(("min_", "max_"))]
    names = {*draw.sample(lengths, 2), *draw.sample([*CHOICES], 5)}
    made = folder(**{name: draw.choice(CHOICES[name]) for name in sorted(names)})
    require_their_answers(kind, made, models)


def require_their_answers(kind: str, made: PretrainedFolder, models: dict[str, Any]) -> set[str]:
    """Compares with `generate` of a folder; returns the settings that the import leaves out."""
    fields, left_out = generation_defaults(made, SHAPES[kind])
    model, ends = models[kind], made.tokens("eos_token_id")
    in_config = not made.generation.path.exists()
    path = made.config.path if in_config else made.generation.path
    theirs = transformers.GenerationConfig.from_pretrained(
        path.parent, path.name, _from_model_config=in_config
    )
    theirs.decoder_start_token_id = BOS
    special = SpecialTokens(PAD, BOS, ends[0], after=(), more_ends=tuple(ends[1:]))
    # transformers forces the first token after a prompt of one token, too.
    rows = [row for row in sources()[:5] if theirs.forced_bos_token_id is None or len(row) > 1]
    found = search(decoder_of(model), rows, GenerationOptions(**fields), special)
    previous, model.generation_config = model.generation_config, theirs
    try:
        for row, hypotheses in zip(rows, found, strict=True):
            ids = torch.tensor([row])
            answer = model.generate(ids, attention_mask=torch.ones_like(ids))[0].tolist()
            answer = answer[1 if model.config.is_encoder_decoder else len(row) :]
            stop = next((i for i, token in enumerate(answer) if token in ends), len(answer))
            assert list(hypotheses[0].scored_tokens) == answer[: stop + 1]
    finally:
        model.generation_config = previous
    return {*left_out}


PLACED = [(name, "generation_config.json") for name in SETTINGS]
PLACED += [(name, "config.json") for name in ("none", "BART's", "old")]


@pytest.mark.parametrize(("name", "place"), PLACED)
@pytest.mark.parametrize("kind", SHAPES)
@torch.inference_mode()
def test_without_options_the_answers_are_those_of_generate(
    kind: str, name: str, place: str, folder: Folder, models: dict[str, Any]
) -> None:
    settings = SETTINGS[name]
    in_config = place == "config.json"
    made = folder(settings) if in_config else folder(**settings, use_cache=True)
    wanted_left = {"temperature", "top_p"} if name == "a language model's" else set()
    if name == "BART's" and kind == "decoder-only":
        wanted_left = {"forced_bos_token_id"}
    assert require_their_answers(kind, made, models) == wanted_left


@pytest.mark.parametrize(("begin", "bos"), [(7, 5), (7, None), (None, 5)])
@torch.inference_mode()
def test_an_answer_begins_as_that_of_generate(
    begin: int | None, bos: int | None, folder: Folder, models: dict[str, Any]
) -> None:
    made = folder({"decoder_start_token_id": 9}, decoder_start_token_id=begin, bos_token_id=bos)
    model = copy.copy(models["encoder-decoder"])
    model.generation_config = transformers.GenerationConfig.from_pretrained(made.folder)
    assert made.begin() == model.generate(torch.tensor([[4]]))[0, 0]


def test_no_type_has_a_default_of_the_search() -> None:
    """`generate` reads config.json without the defaults of the type, such as a forced end."""
    named = {name for family in FAMILIES.values() for name in family.defaults}
    assert named.isdisjoint(generation.SEARCH_SETTINGS)


def test_a_sampling_default_stays_one(folder: Folder) -> None:
    fields, left_out = generation_defaults(
        folder(do_sample=True, temperature=0.6, top_p=0.9, num_beams=4, num_return_sequences=2),
        SHAPES["decoder-only"],
    )
    assert fields == {
        "early_stopping": False,
        "max_length": 20,
        "sample": True,
        "n_best": 2,
        "temperature": 0.6,
        "top_k": 50,
        "top_p": 0.9,
    }
    assert left_out == {"num_beams": "4 (beams are not sampled; do_sample is kept)"}
    GenerationOptions(**fields)


@pytest.mark.parametrize("name", generation.UNSUPPORTED)
def test_what_is_not_supported_is_refused(name: str, folder: Folder) -> None:
    with pytest.raises(InputError, match=rf"{name} is 3, .* --ignore-setting {name}"):
        generation_defaults(folder(do_sample=True, **{name: 3}), SHAPES["encoder-decoder"])
    none: Any
    for none in (generation.UNSUPPORTED[name], [], {}):
        assert generation_defaults(folder(**{name: none}), SHAPES["encoder-decoder"])[1] == {}


def test_settings_that_lose_are_told(folder: Folder) -> None:
    made = folder({"num_beams": 5, "max_length": 9}, max_new_tokens=99, max_length=9)
    fields, left_out = generation_defaults(made, SHAPES["decoder-only"])
    assert fields == {"early_stopping": False, "max_length": 64}
    assert left_out == {
        "config.json: num_beams": "5 (of before the other file)",
        "max_length": "9 (max_new_tokens takes its place)",
        "max_new_tokens": "99 (limited to the 64 positions of the model)",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 0.5),
        ("num_beams", 0),
        ("early_stopping", "soon"),
        ("do_sample", 2),
        ("length_penalty", -11.0),
        ("temperature", 0.0),
        ("repetition_penalty", 0.0),
        ("top_p", 1.5),
        ("bad_words_ids", [[]]),
        ("bad_words_ids", [[3, VOCABULARY]]),
        ("suppress_tokens", [-1]),
        ("forced_eos_token_id", VOCABULARY),
        ("forced_bos_token_id", EOS),
        ("forced_bos_token_id", [7, 8]),
        ("stop_strings", [1]),
        ("stop_strings", [""]),
    ],
)
def test_a_value_of_another_type_or_range_is_refused_by_name(
    name: str, value: Any, folder: Folder
) -> None:
    sampled = {"do_sample": True} if name in generation.OF_SAMPLING else {}
    with pytest.raises(InputError, match=rf"generation_config\.json: {name} (is|must be) "):
        generation_defaults(folder(**sampled, **{name: value}), SHAPES["encoder-decoder"])


def test_what_greedy_search_does_not_read_may_have_any_value(folder: Folder) -> None:
    """As `"temperature": 0.0` of published folders, which transformers only warns of."""
    settings = {"temperature": 0.0, "top_p": 0.0, "top_k": -1, "epsilon_cutoff": 0.0003}
    made = folder(**settings)
    fields, left_out = generation_defaults(made, SHAPES["decoder-only"])
    assert not fields.keys() & generation.OF_SAMPLING.keys()
    assert left_out == {
        name: f"{value} (no effect without do_sample)" for name, value in settings.items()
    }


@pytest.mark.parametrize("kind", SHAPES)
def test_settings_that_contradict_each_other_make_options(kind: str, folder: Folder) -> None:
    made = folder(min_length=30, max_length=20, num_return_sequences=3, num_beams=2)
    fields, left_out = generation_defaults(made, SHAPES[kind])
    options = GenerationOptions(**fields)
    assert (options.n_best, options.beam) == (2, 2)
    assert left_out == {
        "min_length": "30 (limited to max_length)",
        "num_return_sequences": "3 (limited to num_beams, 2)",
    }
    fields, left_out = generation_defaults(folder(min_new_tokens=30), SHAPES[kind])
    assert GenerationOptions(**fields).min_length == 20
    assert left_out == {"min_new_tokens": "30 (limited to max_length)"}


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("of_model", [True, False])
def test_the_first_files_of_bart_force_their_begin_token(
    of_model: bool, place: str, folder: Folder
) -> None:
    settings = {"force_bos_token_to_be_generated": True, "_from_model_config": of_model}
    in_config = place == "config.json"
    made = folder(settings) if in_config else folder(**settings)
    theirs = transformers.GenerationConfig.from_pretrained(
        made.folder, place, **({"_from_model_config": True} if in_config else {})
    )
    fields, _ = generation_defaults(made, SHAPES["encoder-decoder"])
    assert fields.get("forced_begin") == theirs.forced_bos_token_id
