"""The loss equals each sentence's alone; BLEU sets each translation beside its own reference."""

import pytest
import torch
from torch import Tensor

from tests.build_model.train.small import BYTES, SHAPE
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.build_model.train import evaluation
from transferry.build_model.train.data import SentencePair, collate, encode_pairs
from transferry.build_model.train.evaluation import Evaluation, cross_entropy, evaluate

# The longest source comes first, so that sorting by length has something to put back.
PAIRS = [
    SentencePair("one two three four five", "eins zwei drei vier fünf"),
    SentencePair("six", "sechs und sieben und acht"),
    SentencePair("seven eight", "neun ist nicht zehn"),
]
EXAMPLES, _ = encode_pairs(PAIRS, BYTES, 64)
REFERENCES = [pair.target for pair in PAIRS]


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(**SHAPE, dropout=0.5, max_positions=64))


def run(model: Transformer, *, batch_tokens: int = 64, sentences: int = 10) -> Evaluation:
    return evaluate(
        model, EXAMPLES, REFERENCES, BYTES, batch_tokens=batch_tokens, sentences=sentences
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_by_hand(smoothing: float) -> None:
    """Section 5.4 of the paper: the right token keeps 1 - e, and e is spread over all."""
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([[4, 2, 0], [3, 0, 0]])
    logs = torch.log_softmax(logits, dim=-1)
    expected = torch.zeros(())
    for row, column in ((0, 0), (0, 1), (1, 0)):
        right = -logs[row, column, target[row, column]]
        expected += (1 - smoothing) * right - smoothing * logs[row, column].mean()
    torch.testing.assert_close(cross_entropy(logits, target, 0, smoothing), expected)


@pytest.mark.parametrize("batch_tokens", [27, 1000])
def test_the_loss_is_that_of_each_sentence_alone(model: Transformer, batch_tokens: int) -> None:
    model.eval()
    total = 0.0
    with torch.no_grad():
        for example in EXAMPLES:
            batch = collate([example], BYTES.special.pad_id, "cpu")
            logs = model(batch.source, batch.source_mask, batch.target_input).log_softmax(-1)
            total -= logs[0, torch.arange(len(example.target)), batch.target_output[0]].sum().item()
    mean = total / sum(len(example.target) for example in EXAMPLES)
    assert run(model, batch_tokens=batch_tokens).loss == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_keeps_its_mode(model: Transformer, training: bool) -> None:
    model.train(training)
    assert run(model) == run(model)
    assert model.training is training


@pytest.mark.parametrize("sentences", [1, 2, 3, 10])
def test_each_translation_meets_its_own_reference(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, sentences: int
) -> None:
    answers = {tuple(example.source): example.target[:-1] for example in EXAMPLES}
    asked: list[tuple[int, ...]] = []

    def perfect(model: Transformer, source: Tensor, mask: Tensor, **_: object) -> list[list[int]]:
        rows = [tuple(row[seen].tolist()) for row, seen in zip(source, mask, strict=True)]
        asked.extend(rows)
        return [answers[row] for row in rows]

    monkeypatch.setattr(evaluation, "greedy", perfect)
    assert run(model, sentences=sentences).bleu == pytest.approx(100.0)
    assert sorted(asked) == sorted(tuple(example.source) for example in EXAMPLES[:sentences])
    answers[tuple(EXAMPLES[0].source)] = EXAMPLES[1].target[:-1]
    worse = run(model, sentences=sentences).bleu
    assert worse is not None
    assert worse < 90.0
