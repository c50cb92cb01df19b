"""Quality of a model on held-out text: loss per token, and sacreBLEU for translation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sacrebleu
import torch
import torch.nn.functional as F
from torch import Tensor

from transferry.build_model.model.transformer import Transformer, greedy
from transferry.build_model.train.data import Example, collate, token_batches
from transferry.runtime.tokenizer.byte_pair import Tokenizer


@dataclass(frozen=True)
class Validation:
    """Held-out examples; for pairs, their target sentences as references for BLEU."""

    examples: Sequence[Example]
    references: Sequence[str] = ()


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on held-out text.

    Attributes:
        loss: Mean negative log-likelihood per target token in nats, without smoothing.
        bleu: sacreBLEU of greedy translations (Post 2018: cased, 13a), 0 to 100; None if the model
            does not translate.
    """

    loss: float
    bleu: float | None

    @property
    def score(self) -> float:
        """Score that ranks models; larger is better."""
        return -self.loss if self.bleu is None else self.bleu

    def record(self, prefix: str) -> dict[str, float]:
        """Returns the scores under their names in metrics.jsonl."""
        scores = {f"{prefix}_loss": round(self.loss, 6)}
        if self.bleu is not None:
            scores[f"{prefix}_bleu"] = round(self.bleu, 3)
        return scores

    def __str__(self) -> str:
        if self.bleu is None:
            return f"validation loss {self.loss:.4f}, perplexity {math.exp(self.loss):.2f}"
        return f"validation loss {self.loss:.4f}, BLEU {self.bleu:.2f}"


def cross_entropy(logits: Tensor, target: Tensor, pad_id: int, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy in nats, summed over all tokens except padding.

    Logits `[batch, target, vocabulary]`, target `[batch, target]` int64, label smoothing as in
    Vaswani et al. (2017), section 5.4.
    """
    return F.cross_entropy(
        logits.float().flatten(0, 1),
        target.flatten(),
        ignore_index=pad_id,
        label_smoothing=smoothing,
        reduction="sum",
    )


def divergence(first: Tensor, second: Tensor, target: Tensor, pad_id: int) -> Tensor:
    """Mean of both Kullback-Leibler divergences in nats, summed over all tokens except padding.

    (KL(P1 || P2) + KL(P2 || P1)) / 2, eq. 2 of R-Drop (Wu et al. 2021), of logits `[batch, target,
    vocabulary]` and a target `[batch, target]` int64.
    """
    one, other = (F.log_softmax(logits.float(), dim=-1) for logits in (first, second))
    apart = ((one.exp() - other.exp()) * (one - other)).sum(dim=-1)
    # Left out here, not before: choosing rows of logits costs more than the padding.
    return 0.5 * apart[target != pad_id].sum()


def evaluate(
    model: Transformer,
    examples: Sequence[Example],
    references: Sequence[str],
    tokenizer: Tokenizer,
    *,
    batch_tokens: int,
    sentences: int,
    check: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Computes the loss of all examples, and BLEU of the first `sentences` with references.

    Keeps the model's training mode. Calls `check` before each batch and each token of
    a translation.
    """
    training = model.training
    model.eval()
    device, special = model.embedding.weight.device, tokenizer.special
    total, tokens = 0.0, 0
    with torch.inference_mode():
        for indices in token_batches(examples, batch_tokens, seed=0, epoch=0):
            check()
            chosen = [examples[index] for index in indices]
            batch = collate(chosen, special.pad_id, device)
            logits = model(batch.source, batch.source_mask, batch.target_input)
            total += cross_entropy(logits, batch.target_output, special.pad_id).item()
            tokens += sum(example.target_tokens(special.pad_id) for example in chosen)
    bleu = None
    if references:
        translations = _translate(model, examples[:sentences], tokenizer, check)
        bleu = sacrebleu.corpus_bleu(translations, [list(references[: len(translations)])]).score
    model.train(training)
    return Evaluation(total / tokens, bleu)


def _translate(
    model: Transformer,
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    check: Callable[[], None],
) -> list[str]:
    device, special = model.embedding.weight.device, tokenizer.special
    order = sorted(range(len(examples)), key=lambda index: len(examples[index].source))
    translations = [""] * len(examples)
    for start in range(0, len(order), 64):
        indices = order[start : start + 64]
        batch = collate([examples[index] for index in indices], special.pad_id, device)
        rows = greedy(
            model,
            batch.source,
            batch.source_mask,
            bos_id=special.bos_id,
            eos_id=special.eos_id,
            max_length=min(2 * batch.source.shape[1] + 10, model.config.max_positions),
            check=check,
        )
        for index, row in zip(indices, rows, strict=True):
            translations[index] = tokenizer.decode(row)
    return translations
