"""The training of `transferry train`: from the files of a recipe to a checkpoint."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transferry.build_model import checkpoint
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.train.corpus import write_corpus
from transferry.build_model.train.data import (
    BadPair,
    Example,
    MaskedWindows,
    ReadReport,
    SentencePair,
    Windows,
    encode_pairs,
    read_pair_file,
    read_pairs,
    read_text,
)
from transferry.build_model.train.distributed import Process
from transferry.build_model.train.evaluation import Evaluation, Validation
from transferry.build_model.train.loop import Trainer
from transferry.build_model.train.recipe import PairFiles, TrainingRecipe
from transferry.build_model.train.train_config import TrainConfig
from transferry.build_model.train.vocabulary import cut_encoding, train_bpe
from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.byte_pair import (
    PASSAGES,
    PROMPTS,
    SOURCES,
    SpecialTokens,
    Tokenizer,
)

# Number and length of the validation texts kept with the checkpoint.
SAMPLES, SAMPLE_CHARACTERS = 100, 200
# Without a validation text, one in so many tokens or pairs is held out, and at most so many pairs.
HELD_OUT, MOST_HELD_OUT = 10, 1000
BUILTIN = ("train", "valid")


@dataclass(frozen=True)
class Learned:
    """Text of a recipe, prepared for training; export records the answers to its samples."""

    tokenizer: Tokenizer
    examples: Sequence[Example]
    validation: Validation
    samples: Sequence[str]


def follow(
    recipe: TrainingRecipe,
    folder: Path,
    *,
    device: str,
    resume: bool,
    say: Callable[[str], None],
    show: Callable[..., None] | None = None,
    begun: Callable[[], None] = lambda: None,
) -> Evaluation | None:
    """Trains into `folder`, or continues the training there; see `Trainer.run`.

    `say` receives lines about data, vocabulary and model, and each validation.
    """
    process = Process.start(device)
    try:
        trainer = _trainer(
            recipe, folder, process, resume, say if process.rank == 0 else lambda line: None
        )
        return trainer.run(resume=resume, begun=begun, say=say, show=show)
    finally:
        process.stop()


def _trainer(
    recipe: TrainingRecipe, folder: Path, process: Process, resume: bool, say: Callable[[str], None]
) -> Trainer:
    corpus = folder / "corpus"
    fresh = None if resume else recipe.configs()  # before the text, which takes its time
    if process.rank == 0 and not resume and recipe.train is None:
        write_corpus(corpus)
    process.wait()
    if fresh is not None:
        model_config, train_config = ModelConfig.from_dict(fresh[0].to_dict()), fresh[1]
    else:
        model_config, stored = checkpoint.load_config(folder)
        ends = {"max_steps", "max_minutes"} & recipe.train_changes.keys()
        train_config = TrainConfig.from_dict(
            stored.to_dict() | {name: recipe.train_changes[name] for name in ends}
        )
    tokenizer = Tokenizer.load(folder) if resume else None
    longest = min(model_config.max_positions, train_config.batch_tokens)
    if model_config.architecture == "encoder-decoder":
        learned = _pairs(recipe, corpus, tokenizer, longest, say)
    else:
        learned = _text(recipe, corpus, tokenizer, longest, model_config, say)
    tokenizer = learned.tokenizer
    say(f"vocabulary: {tokenizer.vocabulary_size} ids")
    model_config = dataclasses.replace(model_config, vocabulary_size=tokenizer.vocabulary_size)
    trainer = Trainer(
        folder,
        model_config,
        train_config,
        tokenizer,
        learned.examples,
        learned.validation,
        process,
    )
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    if process.rank == 0 and not resume:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.save_samples(folder, learned.samples)
    say(f"model: {parameters:,} parameters, on {process.device}")
    return trainer


def _pairs(
    recipe: TrainingRecipe,
    corpus: Path,
    tokenizer: Tokenizer | None,
    longest: int,
    say: Callable[[str], None],
) -> Learned:
    """Prepares pairs for an encoder-decoder."""
    builtin = [PairFiles(corpus / f"{name}.en", corpus / f"{name}.de") for name in BUILTIN]
    train, valid = (recipe.train, recipe.valid) if recipe.train is not None else builtin
    assert isinstance(train, PairFiles)
    assert not isinstance(valid, Path)
    pairs, report = read_files(train, skip_bad=recipe.skip_bad)
    say(f"training pairs: {report}")
    if valid is None:
        pairs, valid_pairs = hold_out(pairs)
    else:
        valid_pairs, report = read_files(valid, skip_bad=recipe.skip_bad)
        say(f"validation pairs: {report}")
    if tokenizer is None:
        tokenizer = _tokenizer(recipe, [text for pair in pairs for text in pair], SOURCES)
    examples, report = encode_pairs(pairs, tokenizer, longest, skip_bad=recipe.skip_bad)
    if report.dropped:
        say(f"training pairs: {report}")
    if (valid is None or valid.held_out) and recipe.skip_bad:
        valid_pairs = [pair for pair in valid_pairs if _encodable(pair, tokenizer, longest)]
    if valid is None:
        say(f"validation pairs: {len(valid_pairs):,} of these, held out")
    # Not skipping: references and examples must stay aligned.
    valid_examples, _ = encode_pairs(valid_pairs, tokenizer, longest)
    return Learned(
        tokenizer,
        examples,
        Validation(valid_examples, [pair.target for pair in valid_pairs]),
        [pair.source for pair in valid_pairs[:SAMPLES]],
    )


def _text(
    recipe: TrainingRecipe,
    corpus: Path,
    tokenizer: Tokenizer | None,
    longest: int,
    model_config: ModelConfig,
    say: Callable[[str], None],
) -> Learned:
    """Prepares plain text for a decoder-only or encoder-only model."""
    masked = model_config.architecture == "encoder-only"
    train, valid = recipe.train or corpus / "train.en", recipe.valid
    if recipe.train is None:
        valid = corpus / "valid.en"
    assert isinstance(train, Path)
    assert not isinstance(valid, PairFiles)
    text = read_text(train)
    if tokenizer is None:
        tokenizer = _tokenizer(recipe, [text], PASSAGES if masked else PROMPTS)
    tokens = tokenizer.encode(text)
    say(f"training text: {tokenizer.describe(tokens)}")
    if valid is None:
        # The end of the text, so that no training window overlaps it.
        cut = len(tokens) - len(tokens) // HELD_OUT
        tokens, valid_tokens = tokens[:cut], tokens[cut:]
        valid_text = tokenizer.decode(valid_tokens)
        held, also = f"{train}, the last tenth, held out for validation", " or --valid-text"
    else:
        valid_text, held, also = read_text(valid), str(valid), ""
        valid_tokens = tokenizer.encode(valid_text)
    say(f"validation text: {len(valid_tokens):,} tokens")
    for place, found, remedy in ((str(train), tokens, ""), (held, valid_tokens, also)):
        if len(found) < 2:
            raise InputError(
                f"{place}: expected at least 2 tokens, found {len(found)}; give more text{remedy}"
            )

    def windows(tokens: Sequence[int]) -> Windows:
        if masked:
            ordinary = range(tokenizer.first_ordinary_id, tokenizer.vocabulary_size)
            return MaskedWindows(tokens, longest, tokenizer.special, ordinary)
        return Windows(tokens, longest)

    lines = [line[:SAMPLE_CHARACTERS] for line in valid_text.splitlines() if line.strip()]
    return Learned(tokenizer, windows(tokens), Validation(windows(valid_tokens)), lines[:SAMPLES])


def _tokenizer(recipe: TrainingRecipe, lines: Sequence[str], special: SpecialTokens) -> Tokenizer:
    encoding = recipe.encoding
    if encoding is None and recipe.vocabulary_size is None:
        if recipe.tokenizer is not None:
            return recipe.tokenizer
        encoding = recipe.preset.encoding
    if encoding is not None:
        return cut_encoding(encoding, lines, special)
    return train_bpe(lines, recipe.vocabulary_size or recipe.preset.vocabulary_size, special)


def read_files(files: PairFiles, *, skip_bad: bool) -> tuple[list[SentencePair], ReadReport]:
    """Reads pairs from two files or one; raises as `read_pairs` and `read_pair_file`."""
    if files.target is None:
        return read_pair_file(files.source, skip_bad=skip_bad)
    return read_pairs(files.source, files.target, skip_bad=skip_bad)


def hold_out(pairs: Sequence[SentencePair]) -> tuple[list[SentencePair], list[SentencePair]]:
    """Splits pairs into those for training and those for validation, evenly spread.

    A pair that occurs again is on one side alone.

    Raises:
        InputError: There are too few pairs.
    """
    different = list(dict.fromkeys(pairs))
    count = min(len(different) // HELD_OUT, MOST_HELD_OUT)
    if not count:
        raise InputError(
            f"expected at least {HELD_OUT} different pairs to hold out a part for validation, "
            f"found {len(different)}; give more, or --valid-pairs"
        )
    held = {different[number * len(different) // count] for number in range(count)}
    return [pair for pair in pairs if pair not in held], [p for p in different if p in held]


def _encodable(pair: SentencePair, tokenizer: Tokenizer, longest: int) -> bool:
    try:
        encode_pairs([pair], tokenizer, longest)
    except BadPair:
        return False
    return True
