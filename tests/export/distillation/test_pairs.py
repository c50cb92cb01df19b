"""The choice of training pairs, and of those held out."""

import json
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from transferry.build_model.train.data import ReadReport, SentencePair, read_pair_file
from transferry.export.distillation.distil import (
    DistilledPair,
    best_hypothesis,
    distilled,
    write_pairs,
)
from transferry.runtime.errors import InputError

REFERENCE = "Zwei Hunde laufen über eine grüne Wiese ."
NEAR, NEARER = "Zwei Hunde laufen über die Wiese .", "Zwei Hunde laufen über eine Wiese ."


def answer(*hypotheses: str | tuple[str, str], source: str = "two dogs") -> dict[str, Any]:
    """A record of a job, hypotheses best first; the second of a tuple is the finish reason."""
    pairs = [(each, "end") if isinstance(each, str) else each for each in hypotheses]
    listed = [{"text": text, "finish_reason": reason} for text, reason in pairs]
    return {"source": source, **listed[0], **({"n_best": listed} if listed[1:] else {})}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_best_by_sentence_bleu_is_taken_wherever_it_stands(place: int) -> None:
    texts = ["Ein Hund schläft .", NEAR]
    texts.insert(place, NEARER)
    pair = best_hypothesis(answer(*texts), REFERENCE)
    assert pair is not None
    bleu = sacrebleu.sentence_bleu(NEARER, [REFERENCE]).score
    assert pair == DistilledPair("two dogs", NEARER, "teacher", place + 1, round(bleu, 3))
    others = [sacrebleu.sentence_bleu(text, [REFERENCE]).score for text in texts]
    assert sorted(others)[-2] < max(others) == bleu


def test_of_equals_and_without_a_reference_the_likeliest_is_taken() -> None:
    equals = answer("Nichts davon", "Gar nichts", "Zwei")
    for reference, expected in (("ganz anders", 1), (None, 1), ("Zwei", 3)):
        pair = best_hypothesis(equals, reference)
        assert pair is not None
        assert pair.rank == expected


@pytest.mark.parametrize("reference", [None, "a b c d"])
def test_an_answer_that_is_empty_or_cut_off_is_not_taken(reference: str | None) -> None:
    pair = best_hypothesis(answer(("a b c d", "length"), " ", "a b"), reference)
    assert pair is not None
    assert (pair.target, pair.rank) == ("a b", 3)
    assert best_hypothesis(answer(("a b c d", "length"), ""), reference) is None


def written(folder: Path, *answers: dict[str, Any]) -> Path:
    path = folder / "answers.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in answers))
    return path


def test_rows_with_errors_are_dropped_and_counted(tmp_path: Path) -> None:
    error = {"text": "", "finish_reason": "error", "error": {"kind": "too-long", "message": "x"}}
    answers = written(
        tmp_path,
        answer("eins", source="one"),
        {"source": "", **error, "n_best": []},
        answer(("zwei zwei", "length"), source="two"),
        answer("vier", "drei", source="three"),
    )
    shown: list[int] = []
    pairs, report = distilled(answers, ["eins", "-", "zwei", "drei"], shown.append)
    assert [(pair.source, pair.target) for pair in pairs] == [("one", "eins"), ("three", "drei")]
    assert report == ReadReport(4, 2, {"too-long": 1, "without a whole answer": 1})
    assert str(report) == "2 of 4 kept, 1 too-long, 1 without a whole answer"
    assert shown == [1, 2, 3, 4]
    answers = written(tmp_path, {"source": "", **error})
    with pytest.raises(InputError, match=r"at least one usable answer, found 0 of 1 kept, 1 too-"):
        distilled(answers, None, shown.append)


def test_a_source_that_is_held_out_is_trained_on_with_no_target(tmp_path: Path) -> None:
    corpus = [SentencePair(f"s{number}", f"t{number}") for number in range(20)]
    taught = [DistilledPair(pair.source, f"{pair.target} too", "teacher", 1) for pair in corpus]
    train, valid = tmp_path / "pairs.jsonl", tmp_path / "valid.jsonl"
    write_pairs(taught, corpus, train, valid)
    held, _ = read_pair_file(valid)
    kept, _ = read_pair_file(train)
    assert held == [("s0", "t0"), ("s10", "t10")]
    assert len(kept) == 2 * 18
    assert not {pair.source for pair in held} & {pair.source for pair in kept}
    origins = [json.loads(line)["origin"] for line in train.read_text().splitlines()]
    assert origins == ["reference"] * 18 + ["teacher"] * 18
    write_pairs(taught, corpus, train, None)
    assert len(train.read_text().splitlines()) == 40
    write_pairs(taught, [], train, valid)
    assert read_pair_file(valid)[0] == [("s0", "t0 too"), ("s10", "t10 too")]
    with pytest.raises(InputError, match="give more, or --valid-pairs"):
        write_pairs(taught[:3], [], train, valid)
