"""How good a model is on held-out text: loss a token and sacreBLEU of greedy translations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sacrebleu
import torch
import torch.nn.functional as F
from torch import Tensor

from transferry.build_model.data import Example, collate, token_batches
from transferry.build_model.transformer import Transformer, greedy
from transferry.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class Evaluation:
    """A model's marks on a set of sentence pairs.

    Attributes:
        loss: Mean negative log-likelihood of a target token, in nats, without smoothing.
        bleu: sacreBLEU of greedy translations (Post 2018: cased, 13a), 0 to 100.
    """

    loss: float
    bleu: float


def cross_entropy(logits: Tensor, target: Tensor, pad_id: int, smoothing: float = 0.0) -> Tensor:
    """Returns the cross-entropy summed over all tokens that are not padding.

    Args:
        logits: [batch, target, vocabulary]
        target: [batch, target] int64
        pad_id: The id of padding.
        smoothing: Mass taken from the right token and spread evenly (section 5.4 of the paper).
    """
    return F.cross_entropy(
        logits.float().flatten(0, 1),
        target.flatten(),
        ignore_index=pad_id,
        label_smoothing=smoothing,
        reduction="sum",
    )


def evaluate(
    model: Transformer,
    examples: Sequence[Example],
    references: Sequence[str],
    tokenizer: Tokenizer,
    *,
    batch_tokens: int,
    sentences: int,
) -> Evaluation:
    """Scores all examples, and translates the first `sentences` of them.

    The model is left in the mode, training or not, that it came in.
    """
    training = model.training
    model.eval()
    device = model.positions.device
    total, tokens = 0.0, 0
    with torch.inference_mode():
        for indices in token_batches(examples, batch_tokens, seed=0, epoch=0):
            batch = collate([examples[index] for index in indices], device)
            logits = model(batch.source, batch.source_mask, batch.target_input)
            total += cross_entropy(logits, batch.target_output, tokenizer.pad_id).item()
            tokens += sum(len(examples[index].target) for index in indices)

    chosen = list(range(min(sentences, len(examples))))
    chosen.sort(key=lambda index: len(examples[index].source))
    translations = [""] * len(chosen)
    for start in range(0, len(chosen), 64):
        indices = chosen[start : start + 64]
        batch = collate([examples[index] for index in indices], device)
        rows = greedy(
            model,
            batch.source,
            batch.source_mask,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
            max_length=min(2 * batch.source.shape[1] + 10, model.config.max_positions),
        )
        for index, row in zip(indices, rows, strict=True):
            translations[index] = tokenizer.decode(row)
    model.train(training)
    bleu = sacrebleu.corpus_bleu(translations, [list(references[: len(chosen)])]).score
    return Evaluation(total / tokens, bleu)
