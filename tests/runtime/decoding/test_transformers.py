"""The search gives the tokens of transformers' `generate` on the same logits, option by option."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.decoding.fakes import FakeDecoder, Logits, Model, Tokens, plain_search
from transferry.export.oracle.plain_search import weights as plain_weights
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.logits_processors import (
    History,
    build_logits_processors,
    prompts_of,
    restrict,
)
from transferry.runtime.decoding.sampling import Sampler
from transferry.runtime.decoding.search import search
from transferry.runtime.decoding.strategy import Request
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

REASON = "a test dependency, which is not installed: it is what the search is held against"
transformers = pytest.importorskip("transformers", reason=REASON)

VOCABULARY, PAD, BOS, EOS = 29, 0, 1, 2
LENGTH = 11
SPECIAL = SpecialTokens(PAD, BOS, EOS, after=())
KINDS = ("encoder-decoder", "decoder-only")


def decoder_of(model: Any) -> FakeDecoder:
    decoder = FakeDecoder(model.next_logits, VOCABULARY)
    decoder.has_encoder = model.config.is_encoder_decoder
    return decoder


def next_logits(model: Any) -> Model:
    """Logits of the next token, without a cache and without padding."""

    @functools.cache
    @torch.inference_mode()
    def found(source: Tokens, history: Tokens) -> Logits:
        if model.config.is_encoder_decoder:
            given = torch.tensor([[BOS, *history]])
            output = model(input_ids=torch.tensor([source]), decoder_input_ids=given)
        else:
            output = model(input_ids=torch.tensor([[*source, *history]]))
        logits: Logits = output.logits[0, -1].float().numpy()
        return logits

    return found


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Random models whose answers repeat themselves, and end now and then."""
    torch.manual_seed(3)
    ids = dict(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    sizes = dict(d_model=16, vocab_size=VOCABULARY, max_position_embeddings=64)
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": 1, "attention_heads": 2, "ffn_dim": 16}.items()
    }
    forced = dict(decoder_start_token_id=BOS, forced_eos_token_id=None)
    config = transformers.MarianConfig(**sizes, **sides, **ids, **forced)
    shape = dict(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    made = {
        "encoder-decoder": transformers.MarianMTModel(config),
        "decoder-only": transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **ids)),
    }
    for model in made.values():
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(0.6 * torch.randn_like(parameter))
        model.eval().next_logits = next_logits(model)
    return made


def sources() -> list[list[int]]:
    lengths = [3, 1, 7, 5, 2]
    rng = np.random.default_rng(7)
    rows = [rng.integers(3, VOCABULARY, length).tolist() for length in lengths]
    # A prompt that repeats itself, so that what counts the prompt shows.
    return [*rows, [5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 9]]


@torch.inference_mode()
def theirs(model: Any, source: Sequence[int], ends: Sequence[int], **options: Any) -> list[int]:
    prompt = torch.tensor([source])
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        eos_token_id=list(ends),
        **{"do_sample": False, "max_new_tokens": LENGTH, **options},
    )[0].tolist()
    answer = found[1:] if model.config.is_encoder_decoder else found[len(source) :]
    stop = next((i for i, token in enumerate(answer) if token in ends), len(answer))
    return [*answer[: stop + 1]]


THEIR_NAMES = {
    "beam": "num_beams",
    "forced_begin": "forced_bos_token_id",
    "forced_end": "forced_eos_token_id",
    "max_length": "max_new_tokens",
    "max_total_length": "max_length",
    "min_length": "min_new_tokens",
    "min_total_length": "min_length",
    "no_repeat_ngram": "no_repeat_ngram_size",
    "renormalise": "renormalize_logits",
    "suppress_begin": "begin_suppress_tokens",
}


def in_their_words(options: dict[str, Any]) -> dict[str, Any]:
    """The same options of `generate`, with n-grams of the prompt, which `generate` counts always.

    `generate` ignores an end token among the words that it forbids.
    """
    left = dict(options)
    words = [[token] for token in left.pop("suppress", ())]
    words += [list(sequence) for sequence in left.pop("suppress_sequences", ())]
    left.pop("prompt_ngrams", None)
    if "max_total_length" in left:  # `generate` takes one of the two
        left["max_length"] = None
    found = {
        THEIR_NAMES.get(name, name): list(value) if isinstance(value, tuple) else value
        for name, value in left.items()
    }
    return found | ({"bad_words_ids": [*words, [EOS]]} if words else {})


def require_theirs(
    model: Any, options: dict[str, Any], special: SpecialTokens = SPECIAL
) -> list[list[int]]:
    """Requires the tokens of `generate`, end tokens included; returns them."""
    rows = sources()
    wanted = [theirs(model, row, special.ends, **in_their_words(options)) for row in rows]
    settings = GenerationOptions(**{"max_length": LENGTH, **options})
    found = search(decoder_of(model), rows, settings, special)
    assert [list(row[0].scored_tokens) for row in found] == wanted
    some = [0, len(rows) - 2, len(rows) - 1]  # with a prompt that repeats itself
    plain = plainly(model, [rows[row] for row in some], settings, special)
    assert [list(row[0].scored_tokens) for row in plain] == [wanted[row] for row in some]
    require_alike(plain, [found[row] for row in some])
    alone = [search(decoder_of(model), [row], settings, special)[0] for row in rows[:2]]
    assert [[item.tokens for item in row] for row in found[:2]] == [
        [item.tokens for item in row] for row in alone
    ]
    return wanted


def require_alike(plain: list[list[Hypothesis]], found: list[list[Hypothesis]]) -> None:
    """Requires the same hypotheses, up to rounding of their scores."""
    exact, rounded = (
        [[(one.tokens, one.finish_reason, one.end) for one in row] for row in side]
        for side in (plain, found)
    )
    assert exact == rounded
    for name in ("score", "log_probability"):
        scores = [[getattr(one, name) for row in side for one in row] for side in (plain, found)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-5, abs=1e-5)


def text(ids: Iterable[int]) -> str:
    return "".join(f"<{token}>" for token in ids)


def plainly(
    model: Any, rows: list[list[int]], options: GenerationOptions, special: SpecialTokens = SPECIAL
) -> list[list[Hypothesis]]:
    """Answers by the plain rules of `verify`."""
    kind = model.config.is_encoder_decoder
    return [
        plain_search(model.next_logits, tuple(source), options, number, kind, special.ends, text)
        for number, source in enumerate(rows)
    ]


BEAMS: dict[str, dict[str, Any]] = {"greedy": {}, "beam": {"beam": 3, "early_stopping": True}}


@pytest.mark.parametrize("search", BEAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_of_several_end_tokens_ends(kind: str, search: str, models: dict[str, Any]) -> None:
    model, options = models[kind], BEAMS[search]
    longer = require_theirs(model, options)
    special = replace(SPECIAL, more_ends=(longer[2][3], longer[-2][2]))
    wanted = require_theirs(model, options, special)
    assert len({row[-1] for row in wanted} & set(special.ends)) > 1
    later = require_theirs(model, options | {"min_length": 4}, special)
    assert min(map(len, later)) > 4 > min(map(len, wanted))


# Options beside those of `BEAMS`.
RULES: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "repetition reward": {"repetition_penalty": 0.8},
    "n-grams": {"no_repeat_ngram": 2, "prompt_ngrams": True},
    "tokens that must not repeat": {"no_repeat_ngram": 1, "prompt_ngrams": True},
    "sequences": {
        "suppress": (23,),
        "suppress_sequences": ((6, 6), (12, 0), (9, 12), (6, 10), (0, 0, 21)),
    },
    "first tokens": {"suppress_begin": (0, 6, 10, 12, 1, 9)},
    "last tokens": {"forced_end": (EOS,)},
    "one of two last tokens": {"forced_end": (5, EOS)},
    "lengths": {"min_length": 7, "max_length": 9},
    "renormalised": {"suppress": (0, 6, 10), "renormalise": True},
    "several at once": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram": 3,
        "prompt_ngrams": True,
        "min_length": 3,
        "suppress_begin": (6,),
        "forced_end": (EOS,),
        "renormalise": True,
    },
}


@pytest.fixture(scope="module")
def unruled(models: dict[str, Any]) -> dict[tuple[str, str], list[list[int]]]:
    """Their answers without a rule."""
    return {
        (kind, search): [
            theirs(models[kind], row, SPECIAL.ends, **in_their_words(options)) for row in sources()
        ]
        for kind in KINDS
        for search, options in BEAMS.items()
    }


@pytest.mark.parametrize(
    ("kind", "rule", "search"),
    [
        # A rule is the same code for both kinds: by default it meets each kind and each search.
        pytest.param(*case, marks=pytest.mark.thorough if (number + sum(place)) % 2 else ())
        for number, rule in enumerate(RULES)
        for place in ((0, 0), (0, 1), (1, 0), (1, 1))
        for case in [(KINDS[place[0]], rule, [*BEAMS][place[1]])]
        # Of equally likely candidates torch.topk takes any.
        if case[1:] != ("one of two last tokens", "beam")
    ],
)
def test_rules_give_their_tokens(
    kind: str,
    rule: str,
    search: str,
    models: dict[str, Any],
    unruled: dict[tuple[str, str], list[list[int]]],
) -> None:
    found = require_theirs(models[kind], BEAMS[search] | RULES[rule])
    if search == "beam" or rule != "renormalised":
        assert found != unruled[kind, search], "the rule has no effect here"


@pytest.mark.parametrize("search", BEAMS)
def test_a_forced_first_token_is_theirs(search: str, models: dict[str, Any]) -> None:
    model, options = models["encoder-decoder"], {**BEAMS[search], "forced_begin": 17}
    found = require_theirs(model, options)
    assert {row[0] for row in found} == {17}
    later = require_theirs(model, {**options, "suppress_begin": tuple(row[1] for row in found)})
    assert {row[0] for row in later} == {17}
    assert not {row[1] for row in found} & {row[1] for row in later}


@pytest.mark.parametrize("search", BEAMS)
def test_total_lengths_are_theirs(search: str, models: dict[str, Any]) -> None:
    special = replace(SPECIAL, more_ends=(12, 24))
    total = {"max_length": 256, "max_total_length": 13, "min_total_length": 9}
    found = require_theirs(models["decoder-only"], BEAMS[search] | total, special)
    lengths = [len(row) + len(source) for row, source in zip(found, sources(), strict=True)]
    assert max(lengths) == 13
    assert 9 < min(lengths) < 13


@pytest.mark.parametrize("penalty", [-1.0, 3.0])
@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_early_stopping_is_theirs(
    kind: str, early: bool | str, penalty: float, models: dict[str, Any]
) -> None:
    special = replace(SPECIAL, more_ends=(23, 12, 6))
    options = {"beam": 4, "early_stopping": early, "length_penalty": penalty}
    require_theirs(models[kind], options, special)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 2},
        {"top_p": 0.4},
        {"top_k": 3, "top_p": 0.6},
        {"temperature": 0.5, "top_p": 0.8},
        {"min_p": 0.2},
        {"typical_p": 0.6},
        {"typical_p": 0.05},
        {"temperature": 1.7, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8},
        {"repetition_penalty": 2.5, "min_p": 0.1},
    ],
)
@torch.inference_mode()
def test_sampling_admits_their_tokens(options: dict[str, Any], models: dict[str, Any]) -> None:
    model, prompts = models["decoder-only"], sources()
    config = transformers.GenerationConfig(do_sample=True, **{"top_k": 0, **options})
    settings = GenerationOptions(sample=True, **options)
    counts = set()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        logits = model(ids).logits[:, -1].float()
        processors = model._get_logits_processor(config, len(prompt), None)
        wanted = torch.isfinite(processors(ids, logits.clone()))[0].nonzero()[:, 0].tolist()
        request = Request(0, prompt, 9)
        rules = build_logits_processors(settings, [request], [EOS], has_encoder=False)
        outputs = np.empty((1, 0), np.int64)
        history = History(np.zeros(1, np.int64), outputs, prompts_of([prompt]))
        ruled = restrict(logits.numpy(), rules, history)
        weights = Sampler(settings, np.zeros((0, 0))).weights(ruled)
        plain = plain_weights(ruled[0].astype(np.float64), settings)
        assert plain.tolist() == pytest.approx(weights[0].tolist(), rel=1e-12)
        assert np.flatnonzero(weights[0]).tolist() == wanted
        counts.add(len(wanted))
    assert max(counts) < VOCABULARY
    assert len(counts) > 1 or options in ({"top_k": 2}, {"typical_p": 0.05})


@pytest.mark.parametrize(
    "options",
    [
        {"beam": 4, "n_best": 4, "early_stopping": False, "length_penalty": 0.6, "prefix": (9, 5)},
        {"sample": True, "n_best": 3, "seed": 7, "temperature": 1.3},
        {"sample": True, "n_best": 2, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.8},
        {"stop": ("<6>", "0><1"), "min_length": 2},
        {"beam": 3, "n_best": 2, "stop": ("<6>", "2"), "renormalise": True, "suppress_begin": (6,)},
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_rules_give_the_answers_of_the_search(
    kind: str, options: dict[str, Any], models: dict[str, Any]
) -> None:
    """Also where transformers has no such option, or other random numbers."""
    settings, rows = GenerationOptions(max_length=LENGTH, **options), sources()[::3]

    found = search(decoder_of(models[kind]), rows, settings, SPECIAL, decode=text)
    require_alike(plainly(models[kind], rows, settings), found)
