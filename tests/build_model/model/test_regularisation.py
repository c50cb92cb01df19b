"""R-Drop and BPE dropout follow their papers, and training with them is resumable."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.build_model.train.small import LAYERS
from tests.threads import torch_threads
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.train.data import SentencePair, collate, encode_pairs
from transferry.build_model.train.distributed import Process
from transferry.build_model.train.evaluation import Validation, cross_entropy, divergence
from transferry.build_model.train.loop import Trainer
from transferry.build_model.train.metrics import Metrics
from transferry.build_model.train.train_config import TrainConfig
from transferry.build_model.train.vocabulary import MergeDropout, train_bpe
from transferry.runtime.errors import UsageError

WORDS = ["null", "eins", "zwei", "drei", "vier", "fünf"]
PAIRS = [
    SentencePair(f"{a} und {b}", f"{WORDS[a]} und {WORDS[b]}") for a in range(6) for b in range(6)
]
TOKENIZER = train_bpe([text for pair in PAIRS for text in pair], 300)
EXAMPLES, _ = encode_pairs(PAIRS, TOKENIZER, 64)
SHAPE = LAYERS | dict(vocabulary_size=TOKENIZER.vocabulary_size, max_positions=64)
SETTINGS: dict[str, Any] = dict(
    batch_tokens=200, warmup_steps=4, max_steps=6, validate_every=5, save_every=2
)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The picture has tests of its own."""
    monkeypatch.setattr(Metrics, "draw", lambda self: None)
    with torch_threads(1):
        yield


def trainer(folder: Path, dropout: float = 0.1, **changes: Any) -> Trainer:
    return Trainer(
        folder,
        ModelConfig(**SHAPE, dropout=dropout),
        TrainConfig(**{**SETTINGS, **changes}),
        TOKENIZER,
        EXAMPLES,
        Validation(EXAMPLES[:4], [pair.target for pair in PAIRS[:4]]),
        Process.start("cpu"),
    )


@pytest.mark.parametrize("text", ["vier und fünf", "  zwei\teins 5\n", "Über 日本 🎉", ""])
def test_dropped_merges_spell_the_same_text(text: str) -> None:
    draw = random.Random(1)
    assert MergeDropout(TOKENIZER, 0.0).encode(text, draw) == TOKENIZER.encode(text)
    single = MergeDropout(TOKENIZER, 1.0).encode(text, draw)
    assert single == [TOKENIZER._byte_ids[byte] for byte in text.encode()]
    found = {tuple(MergeDropout(TOKENIZER, 0.3).encode(text, draw)) for _ in range(50)}
    assert {TOKENIZER.decode(ids) for ids in found} == {text}


def test_each_possible_merge_is_left_out_with_the_probability() -> None:
    tokenizer = train_bpe(["ab ab ab"], 262)
    assert len(tokenizer.encode("ab")) == 1
    draw, dropout = random.Random(2), MergeDropout(tokenizer, 0.2)
    split = sum(len(dropout.encode("ab", draw)) == 2 for _ in range(4000))
    assert abs(split / 4000 - 0.2) < 4 * (0.2 * 0.8 / 4000) ** 0.5


def test_examples_differ_from_step_to_step_and_not_between_runs(tmp_path: Path) -> None:
    one, other = trainer(tmp_path, bpe_dropout=0.3), trainer(tmp_path, bpe_dropout=0.3)
    drawn = []
    for step in (1, 2):
        one.progress.step = other.progress.step = step
        drawn.append([one._example(index) for index in range(36)])
        assert drawn[-1] == [other._example(index) for index in reversed(range(36))][::-1]
    assert drawn[0] != drawn[1]
    for example, plain in zip(drawn[0], EXAMPLES, strict=True):
        assert TOKENIZER.decode(example.target) == TOKENIZER.decode(plain.target)
        assert example.target_input[1:] == example.target[:-1]
    assert trainer(tmp_path)._example(3) is EXAMPLES[3]


def test_a_side_never_exceeds_the_positions(tmp_path: Path) -> None:
    long = trainer(tmp_path, bpe_dropout=0.99)
    assert len(long._example(0).target) > len(EXAMPLES[0].target)
    long.longest = max(len(side) for example in EXAMPLES for side in example[:2])
    drawn = [long._example(index) for index in range(36)]
    assert max(len(side) for example in drawn for side in example[:2]) <= long.longest
    assert any(
        example.target == plain.target for example, plain in zip(drawn, EXAMPLES, strict=True)
    )


def test_divergence_is_the_papers_and_leaves_out_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(2, 3, 5, generator=generator) for _ in range(2))
    target = torch.tensor([[1, 2, 0], [3, 0, 0]])
    p, q = first.softmax(-1), second.softmax(-1)
    both = (p * (p / q).log() + q * (q / p).log()).sum(-1) / 2
    torch.testing.assert_close(divergence(first, second, target, 0), both[target != 0].sum())
    assert divergence(first, first, target, 0) == 0


def test_r_drop_reads_each_batch_twice(tmp_path: Path) -> None:
    alpha = 3.0
    one = trainer(tmp_path, r_drop=alpha)
    batch = collate(EXAMPLES[:5], TOKENIZER.special.pad_id, "cpu")
    one.model.train()
    torch.manual_seed(0)
    loss = one._loss(one.model, batch)
    torch.manual_seed(0)
    twice = [torch.cat([each, each]) for each in batch]
    logits = one.model(twice[0], twice[1], twice[2])
    pad_id, target = TOKENIZER.special.pad_id, batch.target_output
    entropies = [cross_entropy(half, target, pad_id, 0.1) for half in logits.chunk(2)]
    first, second = logits.chunk(2)
    assert not torch.equal(first, second)
    apart = divergence(first, second, target, pad_id)
    torch.testing.assert_close(loss, (entropies[0] + entropies[1] + alpha * apart) / 2)


def test_what_would_do_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="r_drop"):
        trainer(tmp_path, dropout=0.0, r_drop=1.0)
    text = ModelConfig(**{**SHAPE, "architecture": "decoder-only", "encoder_layers": 0})
    config = TrainConfig(**SETTINGS, bpe_dropout=0.1)
    with pytest.raises(UsageError, match="bpe_dropout"):
        Trainer(tmp_path, text, config, TOKENIZER, [], Validation([]), Process.start("cpu"))
