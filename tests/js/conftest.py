"""Bundles with heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Once, make_bundle, make_run
from tests.js.test_tokenizers import word_piece
from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.tokenizer.special_tokens import SpecialTokens
from transferry.runtime.tokenizer.third_party import HuggingFaceTokenizer

ENCODER: dict[str, Any] = dict(
    architecture="encoder-only",
    decoder_layers=0,
    positions="learned",
    activation="gelu",
    embedding_norm=True,
    lm_head=False,
)


@pytest.fixture(scope="session")
def ranker_bundle_folder(once: Once, traces: None) -> Path:
    """A bundle that scores a text or a pair of texts with one label, of rows of 12 tokens."""
    head = HeadSettings("classify", ("LABEL_0",), "sigmoid", "sigmoid", longest=12)
    special = SpecialTokens(before=(1,), after=(2,), between=(2, 2))
    layers = dict(pooling=("first",), head_widths=(8, 1), head_activations=("tanh", "none"))
    options: dict[str, Any] = dict(
        head=head, **layers, head_biases=(True, True), segments=2, segment_end=2
    )
    run = once("ranker-run", lambda folder: make_run(folder, special, **ENCODER, **options))
    return once("ranker-bundle", lambda folder: make_bundle(run, folder))


@pytest.fixture(scope="session")
def tagger_bundle_folder(once: Once, traces: None) -> Path:
    """A bundle that tags the words of a WordPiece vocabulary."""
    made = word_piece(pytest.importorskip("tokenizers"), cased=True)
    files = {"huggingface.json": made.to_str().encode()}
    special = SpecialTokens(pad_id=0, bos_id=1, eos_id=2, before=(1,), after=(2,))
    tokenizer = HuggingFaceTokenizer(files, special, made.get_vocab_size())
    head = HeadSettings("tag", ("O", "B-PER", "I-PER", "B-LOC", "I-LOC"))
    layers = dict(head_widths=(5,), head_activations=("none",), head_biases=(True,))
    options: dict[str, Any] = dict(head=head, tokenizer=tokenizer, **layers)
    run = once("tagger-run", lambda folder: make_run(folder, special, **ENCODER, **options))
    return once("tagger-bundle", lambda folder: make_bundle(run, folder))
