"""The proof: torch and a bundle answer the same inputs, and every difference is accounted for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import onnx
import torch

from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.config import ModelConfig
from transferry.export.cases import room, source_of, sweep
from transferry.export.judge import SEARCHES, Judge
from transferry.export.tasks import Answers, TaskBudget, token_agreement, translation
from transferry.export.teacher_forcing import TeacherForcing
from transferry.runtime.bundle import Bundle, Variant
from transferry.runtime.compare import Tolerance
from transferry.runtime.divergence import scored_tokens
from transferry.runtime.errors import InputError
from transferry.runtime.hypothesis import Hypothesis
from transferry.runtime.model import open_model
from transferry.runtime.onnx_decoder import OnnxDecoder
from transferry.runtime.onnx_encoder import OnnxEncoder
from transferry.runtime.options import GenerationOptions
from transferry.runtime.report import Decisions, ParityReport, Task
from transferry.runtime.session import SessionOptions

LONGEST_ANSWER = 256


def verify_against(
    checkpoint: Checkpoint,
    bundle: Bundle,
    variant: Variant,
    session: SessionOptions,
    texts: Sequence[str],
    done: Callable[[int, int], None] = lambda done, total: None,
    tolerance: Tolerance | None = None,
    targets: Sequence[str] | None = None,
) -> ParityReport:
    """Compares a bundle, opened as it will be served, with the run that it came from.

    Args:
        checkpoint: The run.
        bundle: The bundle.
        variant: Which variant.
        session: How to open it.
        texts: Sentences to run every search on.
        done: Called with how many of how many pieces of work are done.
        tolerance: What passes; by default what the variant's precision allows.
        targets: The right answers to the texts, for BLEU and perplexity.

    Raises:
        InputError: A text is empty or longer than the model's positions, run and bundle do not
            have the same tokenizer or shape, or targets do not go with the texts.
    """
    tolerance = tolerance or Tolerance.of(variant.precision)
    tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
    _require_same(checkpoint, bundle)
    if targets is not None and (len(targets) != len(texts) or not config.encoder_layers):
        raise InputError(
            f"expected a target for each of {len(texts)} texts of an encoder-decoder, found "
            f"{len(targets)} for a model that is {config.architecture}"
        )
    sources = [
        source_of(text, tokenizer, config, number) for number, text in enumerate(texts, start=1)
    ]
    model = open_model(bundle, variant, session)
    judge = Judge(checkpoint.model, tokenizer.special, tolerance)
    cases = list(sweep(config))
    # Of a decoder the searches, and then all answers fed whole; of an encoder the filling in.
    passes = len(SEARCHES) + 1 if config.decoder_layers else 1
    total = len(cases) + passes * len(sources)
    finished = 0

    def advance(count: int = 1) -> None:
        nonlocal finished
        finished += count
        done(finished, total)

    comparisons = judge.numbers(model, cases, advance)
    decisions: list[Decisions] = []
    tasks: list[Task] = []
    forcing = TeacherForcing()
    budget = TaskBudget.of(variant.precision)
    if sources and isinstance(model, OnnxEncoder):
        compared, filled = judge.fillings(model, sources, forcing, advance)
        comparisons += compared
        decisions.append(filled)
    elif sources and isinstance(model, OnnxDecoder):
        answers = {name: Answers(len(sources)) for name in SEARCHES}
        for name, fields in SEARCHES.items():
            settings = {**bundle.manifest.generation, **fields}
            settings["max_length"] = room(config, sources, LONGEST_ANSWER)
            options = GenerationOptions(**settings)
            decisions.append(
                judge.decisions(model, name, sources, options, advance, answers[name].keep)
            )
        pairs = _fed_whole(checkpoint, texts, sources, targets, answers["greedy"].wanted)
        comparisons += judge.text(model, pairs, forcing, advance)
        tasks.append(token_agreement(answers["greedy"], budget.agreement))
        if targets is not None:
            for name in ("greedy", "beam 4"):
                tasks.append(translation(tokenizer, name, answers[name], targets, budget.bleu))
        if forcing.tokens and (targets is not None or not config.encoder_layers):
            tasks.append(forcing.perplexity(budget.perplexity))
    how = {
        **model.describe(),
        "torch": torch.__version__,
        "onnx": onnx.__version__,
        "against": "the run",
        "run_sha256": checkpoint.sha256,
        "rows": len(texts),
        "text_sha256": hashlib.sha256("\n".join(texts).encode()).hexdigest(),
    }
    return ParityReport(
        str(bundle.folder),
        how,
        tolerance,
        comparisons,
        decisions,
        tasks,
        forcing.growth(),
        forcing.margins(),
    )


def _require_same(checkpoint: Checkpoint, bundle: Bundle) -> None:
    config = checkpoint.model.config
    if ModelConfig.from_dict(dict(bundle.manifest.model)) != config:
        raise InputError(
            f"{bundle.folder} holds a model of shape {dict(bundle.manifest.model)}, but the run "
            f"has {config.to_dict()}; give the run that the bundle was exported from"
        )
    if bundle.tokenizer != checkpoint.tokenizer:
        raise InputError(
            f"{bundle.folder} and the run do not have the same tokenizer; give the run that the "
            "bundle was exported from"
        )


def _fed_whole(
    checkpoint: Checkpoint,
    texts: Sequence[str],
    sources: Sequence[Sequence[int]],
    targets: Sequence[str] | None,
    answers: Sequence[Hypothesis],
) -> list[tuple[list[int], list[int]]]:
    """Of each row what is read and what is then fed: the target, or else what torch answered.

    A decoder alone is fed the text itself.
    """
    tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
    special, most = tokenizer.special, config.max_positions
    if not config.encoder_layers:
        fed = [special.wrap(tokenizer.encode(text))[: most + 1] for text in texts]
        return [([], tokens) for tokens in fed if len(tokens) > 1]
    if targets is None:
        given = [scored_tokens(answer, special.eos_id) for answer in answers]
    else:
        given = [(*tokenizer.encode_target(text), special.eos_id) for text in targets]
    return [
        (list(source), [special.bos_id, *tokens][: most + 1])
        for source, tokens in zip(sources, given, strict=True)
    ]
