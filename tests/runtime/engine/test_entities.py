"""Entities are those of transformers' token-classification pipeline."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.build_model.importing.huggingface.drawn import transformers
from tests.build_model.importing.huggingface.tokenizer.test_tokenizer_classes import (
    imported,
    write_folder,
)
from tests.build_model.importing.huggingface.tokenizer.test_tokenizers import SEEDS
from transferry.runtime.bundle.head import Aggregation
from transferry.runtime.engine.tasks.tag import tags_of

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC", "X-LOC")
TEXTS = [
    *(
        "Straße über die Häuser",
        "hello  world, the cat's 12345 didn't",
        "日本語 😀 Uber ﬁx",
        " a",
        "",
    ),
]


def theirs(tokenizer: Any, text: str, rows: Any, aggregation: str) -> list[tuple[Any, ...]]:
    """Label, places and score of each entity, by the pipeline's own methods."""
    from transformers.pipelines.token_classification import (
        AggregationStrategy,
        TokenClassificationPipeline,
    )

    pipeline: Any = TokenClassificationPipeline.__new__(TokenClassificationPipeline)
    pipeline.tokenizer = tokenizer
    pipeline.model = SimpleNamespace(config=SimpleNamespace(id2label=dict(enumerate(LABELS))))
    read = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    mask = np.array(read["special_tokens_mask"])
    scores = np.zeros((len(mask), len(LABELS)))
    scores[mask == 0] = rows
    strategy = AggregationStrategy(aggregation)
    found = pipeline.aggregate(
        pipeline.gather_pre_entities(
            text, read["input_ids"], scores, read["offset_mapping"], mask, strategy
        ),
        strategy,
    )
    named = [(each.get("entity_group", each.get("entity")), each) for each in found]
    return [
        (label, each["start"], each["end"], each["score"])
        for label, each in named
        if aggregation == "none" or label != "O"
    ]


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["BERT", "RoBERTa", "XLM-R"])
def test_entities_are_those_of_the_pipeline(kind: str, seed: int, tmp_path: Path) -> None:
    write_folder(tmp_path, kind)
    ours, _ = imported(tmp_path, kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    draw = np.random.default_rng(seed)
    joined = 0
    for text in TEXTS:
        places = ours.places(text)
        rows = draw.dirichlet(np.full(len(LABELS), 0.3), len(places))
        aggregation: Aggregation
        for aggregation in ("none", "simple", "first", "average", "max"):
            tags = tags_of(text, places, rows, LABELS, aggregation)
            wanted = theirs(tokenizer, text, rows, aggregation)
            assert [(tag.label, tag.start, tag.end) for tag in tags] == [
                each[:3] for each in wanted
            ], (text, aggregation)
            scores = [each[3] for each in wanted]
            assert np.allclose([tag.score for tag in tags], scores, rtol=1e-12)
            assert all(tag.text == text[tag.start : tag.end] for tag in tags)
            joined += aggregation != "none" and len(wanted) < len(places)
    assert joined > 4
    # A text that was cut has fewer rows than places.
    assert len(tags_of(TEXTS[0], ours.places(TEXTS[0]), rows[:0], LABELS, "first")) == 0


def test_a_word_continues_where_no_blank_begins_it(tmp_path: Path) -> None:
    write_folder(tmp_path, "BERT")
    ours, _ = imported(tmp_path, "BERT")
    text = "hello world"
    words = [place for place in ours.places(text) if not place.continues]
    assert {text[place.start :].split()[0] for place in words} == {"hello", "world"}
