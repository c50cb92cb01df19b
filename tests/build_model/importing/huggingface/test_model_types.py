"""Every model type gives transformers' numbers and tokens, whatever its config.json says.

Configurations are drawn: one of each in `make test`, two in `make test-all`, more with EXAMPLES=….
"""

import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from tests.build_model.importing.huggingface.drawn import (
    ROTARY,
    SEEDS,
    TYPES,
    VOCABULARY,
    Draw,
    Drawn,
    exact,
    require_same_logits,
    transformers,
)
from tests.build_model.importing.huggingface.encoder_types import LIKE_OTHERS, rope
from transferry.build_model.importing.huggingface.folder import CONFIG, Settings
from transferry.build_model.importing.huggingface.importer import FAMILIES
from transferry.build_model.importing.huggingface.rope import read_rotary
from transferry.build_model.importing.huggingface.settings_table import judge
from transferry.export.torch_model import TorchDecoder
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import search
from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

# Tests of single keys draw one configuration, unless EXAMPLES asks for more.
KEYS = SEEDS if len(SEEDS) > 2 else SEEDS[:1]
OF_KEYS = [(kind, seed) for kind in TYPES for seed in KEYS if kind not in LIKE_OTHERS or seed != 1]


@torch.inference_mode()
def generate(model: Any, sources: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """transformers' answer to each source, the tokens around the answer left out."""
    answers, end = [], model.generation_config.eos_token_id
    options = {"do_sample": False, "early_stopping": options["num_beams"] > 1, **options}
    for source in sources:
        prompt = torch.tensor([source])
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0]
        answer = found[1 if model.config.is_encoder_decoder else len(source) :].tolist()
        answers.append(answer[: answer.index(end)] if end in answer else answer)
    return answers


def test_every_type_has_a_case() -> None:
    # GTE as published has the tensors of GTE; test_published_rotary.py.
    assert {*TYPES, "new"} == set(FAMILIES)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", TYPES)
@torch.inference_mode()
def test_logits_and_tokens_are_theirs(kind: str, seed: int, tmp_path: Path) -> None:
    drawn = Drawn(kind, seed, tmp_path)
    require_same_logits(drawn.ours, drawn.theirs)
    both = drawn.shape.architecture == "encoder-decoder"
    if drawn.shape.architecture == "encoder-only":
        return

    prompts = [[3, 5, 7], [9], [3, 4, 5, 6, 7, 8, 9, 10, 11]]
    begin = drawn.config.decoder_start_token_id if both else 3
    special = SpecialTokens(drawn.config.pad_token_id, begin, eos_id=2, after=())
    for beam in (1, 3):
        with exact():
            expected = generate(drawn.theirs, prompts, num_beams=beam, max_new_tokens=12)
        options = GenerationOptions(beam=beam, max_length=12)
        answers = search(TorchDecoder.oracle(drawn.ours), prompts, options, special)
        assert [list(row[0].tokens) for row in answers] == expected


# Keys that other parts of a folder must follow, or that cannot be saved; tuples for outputs.
NOT_DRAWN = (
    *("vocab_size", "decoder_vocab_size", "pad_token_id", "max_position_embeddings"),
    *("output_attentions", "return_dict"),
)
# The error of transformers for an unsupported value.
ILLEGAL = (
    *(ValueError, TypeError, RuntimeError, LookupError, AttributeError, ArithmeticError),
    StrictDataclassError,
)


def is_legal(name: str, config: Any, change: dict[str, Any]) -> bool:
    """Whether transformers computes with a changed configuration."""
    with contextlib.suppress(*ILLEGAL):
        changed = type(config)(**config.to_dict() | change)
        torch.manual_seed(0)
        made = getattr(transformers, name)(changed).eval()
        fed = {"decoder_input_ids": torch.tensor([[5, 6]])} if changed.is_encoder_decoder else {}
        made(torch.tensor([[4, 5, 7]]), **fed)
        return True
    return False


def other_values(key: str, value: Any) -> list[Any]:
    """Values of the same type; some may be illegal."""
    if type(value) is bool:
        return [not value]
    if type(value) is int:
        return [value + 1, 2 * value, value // 2]
    if type(value) is float:
        return [value / 2, value + 0.25]
    if type(value) is str and "act" in key:
        return [other for other in ("relu", "gelu", "silu", "tanh") if other != value]
    return []


@pytest.mark.parametrize(("kind", "seed"), OF_KEYS)
@torch.inference_mode()
def test_a_changed_key_is_carried_told_or_refused(kind: str, seed: int, tmp_path: Path) -> None:
    name, _ = TYPES[kind]
    drawn = Drawn(kind, seed, tmp_path / "before")
    settings = {
        key: values
        for key, value in drawn.config.to_dict().items()
        if key not in NOT_DRAWN and (values := other_values(key, value))
    }
    draw = Draw(f"changed {kind} {seed}")
    for key in draw.sample(sorted(settings), 6):
        change = {key: draw.choice(settings[key])}
        if is_legal(name, drawn.config, change):
            break
    else:
        pytest.fail("no legal change was drawn")
    try:
        changed = Drawn(kind, seed, tmp_path / "after", **change)
        judge(CONFIG, changed.settings)
    except InputError as error:
        # By the key, or by the tensors that the change brought into the file.
        assert key in str(error) or "tensor" in str(error), change
        return
    require_same_logits(changed.ours, changed.theirs)


# Whole numbers that are no sizes, so that their default fits a small model.
NO_SIZES = (
    *("original_max_position_embeddings", "sliding_window", "max_window_layers"),
    *("query_pre_attn_scalar", "local_attention", "global_attn_every_n_layers"),
    *("relative_attention_num_buckets", "relative_attention_max_distance"),
    *("no_rope_layer_interval", "layer_types", "no_rope_layers", "rope_parameters"),
)


@pytest.mark.parametrize(("kind", "seed"), OF_KEYS)
@torch.inference_mode()
def test_an_absent_key_has_their_default(kind: str, seed: int, tmp_path: Path) -> None:
    """As in files of older versions, and of others; null has it too, or one of its own."""
    name, _ = TYPES[kind]
    written = getattr(transformers, name).config_class().to_dict()
    keys = [
        key
        for key, value in written.items()
        if (type(value) in (bool, float, str) or key in NO_SIZES) and key not in NOT_DRAWN
    ]
    keys = sorted({*keys} - {"model_type", "transformers_version", "is_encoder_decoder"})
    drawn, draw = Drawn(kind, seed, tmp_path / "before"), Draw(f"absent {kind} {seed}")
    for key in draw.sample(keys, 1 + len(SEEDS)):
        change: dict[str, Any] = {key: None if isinstance(written[key], list) else written[key]}
        rewrite = draw.choice([without, nulled])
        read = change if rewrite is without else {key: None}
        if not all(is_legal(name, drawn.config, each) for each in (change, read)):
            continue
        try:
            changed = Drawn(kind, seed, tmp_path / key, rewrite=rewrite(key), **change)
        except InputError as error:
            assert key in str(error) or "tensor" in str(error), key
        else:
            require_same_logits(changed.ours, changed.theirs)


def without(key: str) -> Callable[[dict[str, Any]], None]:
    def rewrite(record: dict[str, Any]) -> None:
        record.pop(key, None)

    return rewrite


def nulled(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda record: record.update({key: None})


# Settings of rotary positions outside of rope_parameters, with values; by type, else `rope_theta`.
THETA: dict[str, Any] = {"rope_theta": (7.0, 100, 1e6)}
PARTIAL: dict[str, Any] = {**THETA, "partial_rotary_factor": (0.5, 1.0)}
OUTSIDE: dict[str, dict[str, Any]] = {
    "gpt_neox": {"rotary_emb_base": (100, 5e3), "rotary_pct": (0.5, 1.0)},
    "gemma3_text": {**THETA, "rope_local_base_freq": (50.0, 1000)},
    "modernbert": {"global_rope_theta": (1e3, 5000), "local_rope_theta": (10.0, 100)},
    "phi3": {**PARTIAL, "original_max_position_embeddings": (16, 32)},
    **dict.fromkeys(("phi", "stablelm"), PARTIAL),
}
SHARES = ("partial_rotary_factor", "rotary_pct")
LAYERED = ("gemma3_text", "modernbert", "olmo3")
WRITTEN = [("rope_parameters",), ("rope_scaling",), ("rope_parameters", "rope_scaling"), ()]


def in_any_words(kind: str, draw: Draw) -> Callable[[dict[str, Any]], None]:
    """Writes rotary positions under their newer name, their older name, both or neither."""

    def drawn() -> dict[str, Any]:
        found = rope(draw, share=draw.random() < 0.15)
        if draw.random() < 0.5:
            del found["rope_theta"]
        if draw.random() < 0.4:
            found["type"] = found.pop("rope_type")
        return found

    def rewrite(record: dict[str, Any]) -> None:
        outside = OUTSIDE.get(kind, THETA)
        for name in ("rope_parameters", "rope_scaling", *outside):
            record.pop(name, None)
        for name in draw.choice(WRITTEN):
            layers = ("sliding_attention", "full_attention") if kind in LAYERED else ()
            apart: Any = draw.random() < 0.5 and {each: drawn() for each in layers}
            record[name] = apart or draw.choice([None, drawn(), drawn(), drawn()])
        for name, values in outside.items():
            if draw.random() < 0.4:
                record[name] = draw.choice(values)
        # Names of other types, which transformers does not read.
        others = PARTIAL if kind == "gpt_neox" else {"rotary_pct": (0.1,)}
        record |= {name: values[0] for name, values in others.items()}

    return rewrite


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ROTARY)
@torch.inference_mode()
def test_rotary_positions_may_stand_under_any_name(kind: str, seed: int, tmp_path: Path) -> None:
    rewrite = in_any_words(kind, Draw(f"words {kind} {seed}"))
    try:
        drawn = Drawn(kind, seed, tmp_path, depth=2, rewrite=rewrite)
    except InputError as error:
        assert re.search("rope|rotary|factor", str(error))
    except ILLEGAL:  # of transformers; our errors are InputError alone
        pass
    else:
        require_same_logits(drawn.ours, drawn.theirs)


@pytest.mark.parametrize(
    "kind", [each for each in ROTARY if OUTSIDE.get(each, THETA).keys().isdisjoint(SHARES)]
)
@torch.inference_mode()
def test_a_share_that_turns_is_told_where_transformers_turns_all(kind: str, tmp_path: Path) -> None:
    own = {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5}
    both = {"sliding_attention": own, "full_attention": own}
    drawn = Drawn(kind, 0, tmp_path, rope_parameters=both if kind in LAYERED else own)
    assert "partial_rotary_factor 0.5" in drawn.settings.left
    require_same_logits(drawn.ours, drawn.theirs)
    own |= {"rope_type": "linear", "factor": 2.0}  # transformers scales half of them
    config = Settings(tmp_path / "config.json", {"rope_parameters": own})
    with pytest.raises(InputError, match=r"partial_rotary_factor is 0.5, .* supported: 1 for"):
        read_rotary(config, 8, 64)


@pytest.mark.parametrize(
    ("kind", "beside"),
    [(kind, False) for kind in LAYERED] + [("gemma3_text", True), ("olmo3", True)],
)
@torch.inference_mode()
def test_whether_yarn_rounds_stands_beside_the_kinds_of_layers(
    kind: str, beside: bool, tmp_path: Path
) -> None:
    own = {"rope_theta": 100.0, "rope_type": "default"}
    yarn = own | {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    both: dict[str, Any] = {"sliding_attention": own, "full_attention": yarn}
    (both if beside else yarn)["truncate"] = False
    kinds = ["sliding_attention", "full_attention"]
    more: dict[str, Any] = dict(layer_types=kinds, num_hidden_layers=2, rope_parameters=both)
    drawn = Drawn(kind, 0, tmp_path, rewrite=lambda record: record.update(more), **more)
    assert beside or "truncate of full_attention false" in drawn.settings.left
    require_same_logits(drawn.ours, drawn.theirs)


@pytest.mark.parametrize("kind", ["gpt2", "bart", "t5", "distilbert"])
def test_another_number_of_heads_under_the_other_name_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="num_attention_heads is 1, which cannot be imported"):
        Drawn(kind, 0, tmp_path, rewrite=lambda record: record.update(num_attention_heads=1))


@pytest.mark.parametrize("kind", ["bart", "marian", "pegasus", "m2m_100"])
@torch.inference_mode()
def test_untied_sides_have_embeddings_of_their_own(kind: str, tmp_path: Path) -> None:
    own: dict[str, Any] = {"share_encoder_decoder_embeddings": True} if kind == "marian" else {}
    drawn = Drawn(kind, 0, tmp_path, tie_word_embeddings=False, **own)
    assert drawn.shape.source_vocabulary_size == VOCABULARY
    require_same_logits(drawn.ours, drawn.theirs)
