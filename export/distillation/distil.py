"""Sequence-level knowledge distillation (Kim and Rush 2016): a student learns a teacher's answers.

    OUT/distilled/rows.jsonl      texts with references, while the teacher answers
    OUT/distilled/answers.jsonl   the teacher's answers, the output of a job
    OUT/distilled/valid.jsonl     pairs held out, where there are no validation pairs
    OUT/distilled/pairs.jsonl     training pairs of the student

Each file appears whole and in this order; then training begins. The same call continues after any
interruption with the first step that is missing.
"""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, cast

from sacrebleu.metrics.bleu import BLEU

from transferry.build_model import checkpoint_folder as run_folder
from transferry.build_model.model.shape import TransformerConfig
from transferry.build_model.train.data import ReadReport, SentencePair
from transferry.build_model.train.distributed import Process
from transferry.build_model.train.evaluation import Evaluation
from transferry.build_model.train.follow import follow, hold_out, read_files
from transferry.build_model.train.recipe import PairFiles, TrainingRecipe
from transferry.build_model.train.train_config import TrainConfig
from transferry.export.distillation import OF_JOB
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.console.progress import progress, teller
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.atomic import atomic_file
from transferry.runtime.io.lines import read_lines
from transferry.runtime.io.outputs import STANDARD_STREAM
from transferry.runtime.io.whole import sha256
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.settings import read_made, read_settings
from transferry.runtime.tokenizer.byte_pair import SOURCES, Tokenizer

Show = Callable[..., None]
CORPUS = ("source", "target", "pairs")
# Fields of SessionOptions that are options of a distillation.
SESSION = ("runtime", "provider", "threads", "optimisation")
# Fields of ModelConfig that are no options: the tokenizer sizes a student, an encoder-decoder.
NOT_OF_STUDENT = ("vocabulary_size", "architecture")
# Finish reasons of whole answers; others were cut off at the longest length.
WHOLE = ("end", "stop")
_SENTENCE_BLEU = BLEU(effective_order=True)


def distil(
    teacher: Path | str,
    out: Path | str,
    *,
    beam: int = 4,
    n_best: int | None = None,
    preset: str = "student",
    device: str = "auto",
    force: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Evaluation:
    """Trains a student on a teacher's answers; the same call continues after an interruption.

    Args:
        teacher: Bundle of an encoder-decoder.
        out: Checkpoint of the student.
        beam: Beam of the teacher.
        n_best: Hypotheses to choose from by sentence BLEU. Default: as many as the beam where there
            are references, else 1.
        preset: Shape and training settings of the student.
        device: Device to train on: "cpu", "cuda" or "auto".
        force: Replace the checkpoint in `out`.
        quiet: Print no progress.
        **options: Other options of `transferry distil`, such as `source="train.en"`.

    Returns:
        Validation scores of the student.

    Raises:
        InputError: The bundle, the text, the interrupted checkpoint or every answer is unusable.
        KeyboardInterrupt: The message says how to continue.
        ProviderError: A device cannot run here.
        UsageError: Options do not fit each other or the bundle, or `out` holds something else.
    """
    teacher, out = Path(teacher), Path(out)
    named = dict(beam=beam, n_best=n_best, preset=preset, device=device, force=force, quiet=quiet)
    chosen = _with_defaults({"teacher": teacher, "out": out, **named, **options})
    corpus = _corpus(chosen)
    n_best = _n_best(chosen)
    bundle = _teacher(teacher)
    recipe = _recipe(out, chosen, bundle)
    recipe.configs()
    Process.start(device)
    hashes = _hashes(chosen)
    settings = out / run_folder.SETTINGS
    if continues := not force and settings.is_file() and "teacher" in read_settings(settings):
        run_folder.recall(out, chosen, chosen, "distil")
        _require_unchanged(out, chosen, hashes)
    remember = partial(run_folder.remember, out, chosen, hashes)
    with run_folder.training(out, force=force, resume=continues, command="distil"):
        if not continues:
            remember()
        _make_pairs(out, corpus, recipe, chosen, n_best)
        run = partial(follow, recipe, out, device=device, say=teller(quiet), begun=remember)
        with progress(quiet, "steps") as show:
            scores = run(resume=(out / run_folder.STATE).exists(), show=show)
    assert scores is not None  # this is the only process
    return scores


def _make_pairs(
    out: Path,
    corpus: PairFiles | Path,
    recipe: TrainingRecipe,
    options: Mapping[str, Any],
    n_best: int,
) -> None:
    """Makes the training pairs that are missing: answers the corpus, then chooses."""
    quiet, say = options["quiet"], teller(options["quiet"])
    (out / run_folder.DISTILLED).mkdir(exist_ok=True)
    paths = out / run_folder.PAIRS, out / run_folder.VALID
    if [path.exists() for path in paths] != [True, _holds_out(recipe)]:
        references = None if isinstance(corpus, Path) else _read(corpus, say)
        with progress(quiet, "rows") as show:
            _answer(out, corpus, references, options, n_best, show, say)
            _choose(out, recipe, references, show, say)
    (out / run_folder.ROWS).unlink(missing_ok=True)


def _with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all options of a distillation; raises UsageError for an unknown one."""
    fields = [*dataclasses.fields(TrainConfig), *dataclasses.fields(TransformerConfig)]
    names = [field.name for field in fields if field.name not in NOT_OF_STUDENT]
    session = {field.name: field.default for field in dataclasses.fields(SessionOptions)}
    known: dict[str, Any] = {
        **dict.fromkeys(("teacher", *CORPUS, *(f"valid_{name}" for name in CORPUS))),
        **dict.fromkeys(("beam", "n_best", *OF_JOB, "variant")),
        **{name: session[name] for name in SESSION},
        **dict.fromkeys(("preset", "vocabulary_size", "encoding")),
        **dict.fromkeys(("out", "device", "force", "quiet", *names)),
    }
    if unknown := sorted(options.keys() - known.keys()):
        raise UsageError(f"distil has no option {unknown[0]}; it knows {', '.join(known)}")
    return {**known, **options}


def _corpus(options: Mapping[str, Any]) -> PairFiles | Path:
    """Returns the pairs to distil, or the text where there are no references."""
    source, target, pairs = (options[name] and Path(options[name]) for name in CORPUS)
    if STANDARD_STREAM in (source, target, pairs):
        raise UsageError("the text is read more than once, and stdin only once; name a file")
    if (pairs and (source or target)) or not (text := pairs or source):
        raise UsageError("give --source, with --target where there are references, or --pairs")
    if next(read_lines(text), None) is None:  # before `out` is made
        raise InputError(f"{text}: expected at least one line, found none; give another file")
    return PairFiles(text, target) if pairs or target else text


def _n_best(options: Mapping[str, Any]) -> int:
    given = options["n_best"]
    if not (options["target"] or options["pairs"]):
        if given is not None:
            raise UsageError(
                "--n-best needs references to choose by; add --target, or leave it out"
            )
        return 1
    n_best: int = options["beam"] if given is None else given
    GenerationOptions(beam=options["beam"], n_best=n_best)
    return n_best


def _teacher(folder: Path) -> Bundle:
    """Opens the teacher's bundle."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "distil is one process; for several GPUs, train on OUT/distilled/pairs.jsonl: "
            "torchrun ... transferry.cli train --pairs"
        )
    bundle = Bundle.load(folder)
    if (architecture := bundle.manifest.architecture) != "encoder-decoder":
        raise UsageError(
            f"{folder}: expected the bundle of an encoder-decoder as the teacher, found "
            f"{architecture}; name another"
        )
    return bundle


def _recipe(out: Path, options: Mapping[str, Any], teacher: Bundle) -> TrainingRecipe:
    """Returns the training recipe of the student."""
    paths = {**dict.fromkeys(CORPUS), "pairs": out / run_folder.PAIRS}
    absent = dict.fromkeys(("text", "valid_text", "architecture"))
    fixed = {"builtin": False, "skip_bad": True}
    recipe = TrainingRecipe.from_options({**options, **paths, **absent, **fixed})
    # An imported tokenizer may have special tokens that training does not know, and a vocabulary
    # that is large for a student.
    shared = isinstance(teacher.tokenizer, Tokenizer) and teacher.tokenizer.special == SOURCES
    return dataclasses.replace(
        recipe,
        valid=recipe.valid or PairFiles(out / run_folder.VALID, held_out=True),
        tokenizer=cast(Tokenizer, teacher.tokenizer) if shared else None,
    )


def _hashes(options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the hashes of teacher and corpus, by option."""
    files = {name: Path(options[name]) for name in CORPUS if options[name] is not None}
    files["teacher"] = Path(options["teacher"]) / MANIFEST
    return {f"{name}_sha256": sha256(path) for name, path in files.items()}


def _require_unchanged(out: Path, options: Mapping[str, Any], hashes: Mapping[str, str]) -> None:
    made = read_made(out / run_folder.SETTINGS)
    before = {name: value for name, value in made.items() if name.endswith("_sha256")}
    for name in sorted(before.keys() | hashes.keys()):
        if before.get(name) != hashes.get(name):
            option = name.removesuffix("_sha256")
            raise InputError(
                f"{out} was begun with another {option}, found {options[option]}; restore it, or "
                "start over with --force"
            )


def _holds_out(recipe: TrainingRecipe) -> bool:
    """Whether a part of the pairs is held out."""
    return isinstance(recipe.valid, PairFiles) and recipe.valid.held_out


def _read(corpus: PairFiles, say: Callable[[str], None]) -> list[SentencePair]:
    pairs, report = read_files(corpus, skip_bad=True)
    say(f"pairs to distil: {report}")
    return pairs


def _answer(
    out: Path,
    corpus: PairFiles | Path,
    references: Sequence[SentencePair] | None,
    options: Mapping[str, Any],
    n_best: int,
    show: Show,
    say: Callable[[str], None],
) -> None:
    """Runs the teacher on every row; continues an interrupted job."""
    rows = out / run_folder.ROWS
    if references is not None and not rows.exists():
        with atomic_file(rows) as file:
            for pair in references:
                record = {"source": pair.source, "reference": pair.target}
                file.write(f"{json.dumps(record, ensure_ascii=False)}\n".encode())
    chosen = JobOptions(
        generation={"beam": options["beam"], "n_best": n_best},
        column=() if references is None else ("source",),
        format_in="text" if references is None else "jsonl",
        **{name: options[name] for name in OF_JOB if options[name] is not None},
    )
    session = SessionOptions(**{name: options[name] for name in SESSION})
    with Engine(options["teacher"], session, variant=options["variant"]) as engine:
        text = corpus if isinstance(corpus, Path) else rows
        job = Job(engine, text, out / run_folder.ANSWERS, chosen)
        answers = "the teacher's answers"
        job.run(lambda summary: show(answers, summary.rows, summary.total), say=say)


def _choose(
    out: Path,
    recipe: TrainingRecipe,
    references: Sequence[SentencePair] | None,
    show: Show,
    say: Callable[[str], None],
) -> None:
    """Makes the training pairs of the answers."""
    targets = None if references is None else [pair.target for pair in references]
    total = None if targets is None else len(targets)
    taught, report = distilled(
        out / run_folder.ANSWERS, targets, lambda number: show("choosing answers", number, total)
    )
    say(f"distilled pairs: {report}")
    if targets is not None:
        mean = sum(pair.bleu or 0.0 for pair in taught) / len(taught)
        others = sum(pair.rank != 1 for pair in taught)
        say(f"sentence BLEU {mean:.1f} on average; {others:,} of them are not the likeliest")
    valid = out / run_folder.VALID
    valid.unlink(missing_ok=True)
    held = valid if _holds_out(recipe) else None
    write_pairs(taught, references or [], out / run_folder.PAIRS, held)


@dataclass(frozen=True)
class DistilledPair:
    """A pair that the student is trained on: a line of pairs.jsonl.

    Attributes:
        origin: Who wrote the translation.
        rank: Of the teacher, the hypothesis's place in its search, from 1.
        bleu: Of the teacher, the sentence BLEU against the reference, if there is one.
    """

    source: str
    target: str
    origin: Literal["reference", "teacher"]
    rank: int | None = None
    bleu: float | None = None

    @property
    def pair(self) -> SentencePair:
        """The texts alone."""
        return SentencePair(self.source, self.target)

    def line(self) -> bytes:
        """Returns the pair as a line of JSON."""
        record = {name: value for name, value in asdict(self).items() if value is not None}
        return f"{json.dumps(record, ensure_ascii=False)}\n".encode()


def distilled(
    answers: Path, references: Sequence[str] | None, show: Callable[[int], None]
) -> tuple[list[DistilledPair], ReadReport]:
    """Chooses one hypothesis of each answer: see `best_hypothesis`.

    Returns:
        The pairs in order, and counts. Rows that hold an error are dropped, and so are those whose
        hypotheses are all empty or cut off.

    Raises:
        InputError: No pair remains.
    """
    made: list[DistilledPair] = []
    dropped: Counter[str] = Counter()
    number = 0
    records = map(json.loads, read_lines(answers))
    rows = zip(records, references or repeat(None), strict=references is not None)
    for number, (answer, reference) in enumerate(rows, start=1):
        show(number)
        if "error" in answer:
            dropped[answer["error"]["kind"]] += 1
        elif (pair := best_hypothesis(answer, reference)) is None:
            dropped["without a whole answer"] += 1
        else:
            made.append(pair)
    report = ReadReport(number, len(made), dict(dropped))
    if not made:
        raise InputError(f"{answers}: expected at least one usable answer, found {report}")
    return made, report


def best_hypothesis(answer: dict[str, Any], reference: str | None) -> DistilledPair | None:
    """Returns the hypothesis with the highest sentence BLEU, or without a reference the likeliest.

    `sacrebleu.sentence_bleu` computes the sentence BLEU; of equal hypotheses the likelier is taken.
    Returns None if every hypothesis is empty or was cut off before its end.
    """
    best: DistilledPair | None = None
    for rank, hypothesis in enumerate(answer.get("n_best", [answer]), start=1):
        text = hypothesis["text"]
        if not text.strip() or hypothesis["finish_reason"] not in WHOLE:
            continue
        if reference is None:
            return DistilledPair(answer["source"], text, "teacher", rank)
        bleu = round(_SENTENCE_BLEU.sentence_score(text, [reference]).score, 3)
        if best is None or bleu > (best.bleu or 0.0):
            best = DistilledPair(answer["source"], text, "teacher", rank, bleu)
    return best


def write_pairs(
    taught: Sequence[DistilledPair], corpus: Sequence[SentencePair], pairs: Path, valid: Path | None
) -> None:
    """Writes the training pairs of the student: first the corpus, then the teacher's answers.

    Held-out pairs are of the corpus if there is one, and their sources in no training pair; `pairs`
    appears last.

    Raises:
        InputError: There are too few pairs to hold out a part.
    """
    originals = [DistilledPair(*pair, "reference") for pair in corpus]
    held: frozenset[str] = frozenset()
    if valid is not None:
        base = {pair.pair: pair for pair in originals or taught}
        _, chosen = hold_out(list(base))
        held = frozenset(pair.source for pair in chosen)
        _write(valid, (base[pair] for pair in chosen))
    _write(pairs, (pair for pair in (*originals, *taught) if pair.source not in held))


def _write(path: Path, pairs: Iterable[DistilledPair]) -> None:
    with atomic_file(path) as file:
        file.writelines(pair.line() for pair in pairs)
