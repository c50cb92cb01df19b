"""The built-in corpus: right by hand-checked examples, the same every time, no line in two sets."""

import random
import re
from datetime import date
from pathlib import Path

import pytest

from transferry.build_model.train import corpus
from transferry.build_model.train.corpus import builtin_corpus, builtin_pairs, write_corpus
from transferry.build_model.train.data import SentencePair, read_pairs
from transferry.runtime.errors import InputError


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (0, "zero", "null"),
        (21, "twenty-one", "einundzwanzig"),
        (101, "one hundred and one", "einhunderteins"),
        (
            342_817,
            "three hundred and forty-two thousand, eight hundred and seventeen",
            "dreihundertzweiundvierzigtausendachthundertsiebzehn",
        ),
    ],
)
def test_numbers(number: int, english: str, german: str) -> None:
    assert corpus._spell_number(number) == (english, german)


def test_dates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_FIRST_DAY", date(2031, 3, 5))
    monkeypatch.setattr(corpus, "_LAST_DAY", date(2031, 3, 5))
    assert corpus._date(random.Random(0)) == SentencePair(
        "Wednesday, 5 March 2031", "Mittwoch, 5. März 2031"
    )


def test_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_FIRST_DAY", date(2031, 3, 5))
    monkeypatch.setattr(corpus, "_LAST_DAY", date(2031, 3, 5))
    monkeypatch.setattr(corpus, "_BUYERS", {"the bakery": "die Bäckerei"})
    monkeypatch.setattr(corpus, "_DEEDS", {"sold": "verkaufte"})
    monkeypatch.setattr(corpus, "_GOODS", {"apples": "Äpfel"})
    monkeypatch.setattr(corpus, "_spell_number", lambda number: ("twelve", "zwölf"))
    assert corpus._sentence(random.Random(0)) == SentencePair(
        "The bakery sold twelve apples on Wednesday, 5 March 2031.",
        "Am Mittwoch, dem 5. März 2031, verkaufte die Bäckerei zwölf Äpfel.",
    )


def test_no_number_has_to_agree_with_its_noun() -> None:
    sentences = [pair for pair in builtin_pairs(2000, 0) if pair.source.endswith(".")]
    assert len(sentences) > 500
    assert not [pair for pair in sentences if re.search("eins |null ", pair.target)]


def test_pairs_are_a_function_of_count_and_seed() -> None:
    assert builtin_pairs(300, 1) == builtin_pairs(300, 1)
    assert builtin_pairs(300, 1) == builtin_pairs(400, 1)[:300]
    assert builtin_pairs(300, 1) != builtin_pairs(300, 2)


def test_sets_share_no_source_and_files_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_PAIRS", 2000)
    sets = builtin_corpus()
    train, valid, test = (
        [pair.source for pair in pairs] for pairs in (sets.train, sets.valid, sets.test)
    )
    assert len({*valid, *test}) == len(valid) + len(test)
    assert not set(train) & {*valid, *test}
    assert len(train) > 1800
    assert min(len(valid), len(test)) > 30

    folder = tmp_path / "made" / "here"
    write_corpus(folder)
    for name, pairs in (("train", sets.train), ("valid", sets.valid), ("test", sets.test)):
        assert read_pairs(folder / f"{name}.en", folder / f"{name}.de")[0] == pairs


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(InputError, match="taken: cannot be created"):
        write_corpus(tmp_path / "taken")
