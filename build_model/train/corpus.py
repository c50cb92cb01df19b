"""The built-in corpus: generated English sentences, each with its one German translation.

Three kinds of lines, of increasing difficulty: dates ("5 March" becomes "5. März"), number names
(units and tens swap, blanks and hyphens vanish) and short sentences with both (the date moves to
the front, the verb stays second, the article agrees with the noun's gender). Number names come from
num2words, names of days and months from the Unicode CLDR.
"""

import random
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from zlib import crc32

from transferry.build_model.train.data import SentencePair
from transferry.runtime.errors import InputError
from transferry.runtime.io.atomic import atomic_file

_PAIRS = 22_000

_FIRST_DAY = date(1950, 1, 1)
_LAST_DAY = date(2049, 12, 31)

_BUYERS = {
    "the bakery": "die Bäckerei",
    "the farmer": "der Bauer",
    "the hotel": "das Hotel",
    "the library": "die Bibliothek",
    "the museum": "das Museum",
    "the neighbour": "der Nachbar",
    "the school": "die Schule",
    "the village": "das Dorf",
}
_DEEDS = {
    "bought": "kaufte",
    "counted": "zählte",
    "found": "fand",
    "needed": "brauchte",
    "ordered": "bestellte",
    "sold": "verkaufte",
}
_GOODS = {
    "apples": "Äpfel",
    "books": "Bücher",
    "bottles": "Flaschen",
    "chairs": "Stühle",
    "clocks": "Uhren",
    "flowers": "Blumen",
    "keys": "Schlüssel",
    "letters": "Briefe",
}


@dataclass(frozen=True)
class Corpus:
    """Three sets of pairs without a source line in common."""

    train: list[SentencePair]
    valid: list[SentencePair]
    test: list[SentencePair]


def builtin_corpus() -> Corpus:
    """Generates the corpus: about 21,000 training pairs, and 450 in each of the other sets.

    One source line in twenty is held out, by its checksum. Short numbers occur many times in the
    training set, as in real text; the other sets have each line once.
    """
    pairs = builtin_pairs(_PAIRS, 0)
    held_out = {pair.source: pair for pair in pairs if crc32(pair.source.encode()) % 20 == 0}
    train = [pair for pair in pairs if pair.source not in held_out]
    unseen = list(held_out.values())
    return Corpus(train, valid=unseen[::2], test=unseen[1::2])


def write_corpus(folder: Path) -> None:
    """Writes `train.en`, `train.de`, `valid.en`, ... into a folder, which is created if missing.

    Raises:
        InputError: The folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be created: {error.strerror or error}; choose another folder"
        ) from error
    corpus = builtin_corpus()
    for name, pairs in (("train", corpus.train), ("valid", corpus.valid), ("test", corpus.test)):
        sides = zip(*pairs, strict=True)
        for language, lines in zip(("en", "de"), sides, strict=True):
            with atomic_file(folder / f"{name}.{language}") as file:
                file.writelines(f"{line}\n".encode() for line in lines)


def builtin_pairs(count: int, seed: int) -> list[SentencePair]:
    """Draws pairs of the three kinds, reproducibly for a seed."""
    draw = random.Random(seed)
    kinds = (_date, _number, _sentence)
    return [draw.choice(kinds)(draw) for _ in range(count)]


def _date(draw: random.Random) -> SentencePair:
    """Wednesday, 5 March 2031 -> Mittwoch, 5. März 2031."""
    (weekday, day), (wochentag, tag) = _spell_date(draw)
    return SentencePair(f"{weekday}, {day}", f"{wochentag}, {tag}")


def _number(draw: random.Random) -> SentencePair:
    """Three hundred and forty-two -> dreihundertzweiundvierzig, up to six digits."""
    return SentencePair(*_spell_number(draw.randrange(10 ** draw.randint(1, 6))))


def _sentence(draw: random.Random) -> SentencePair:
    """The farmer sold two books on Friday, 5 May 2006. -> Am Freitag, dem 5. Mai 2006, ..."""
    # From two on, and without "...eins", which would have to agree with the noun.
    number = draw.randrange(2, 100) + 100 * draw.randrange(100)
    (weekday, day), (wochentag, tag) = _spell_date(draw)
    count, anzahl = _spell_number(number)
    buyer, käufer = draw.choice(list(_BUYERS.items()))
    deed, tat = draw.choice(list(_DEEDS.items()))
    goods, ware = draw.choice(list(_GOODS.items()))
    return SentencePair(
        f"{buyer.capitalize()} {deed} {count} {goods} on {weekday}, {day}.",
        f"Am {wochentag}, dem {tag}, {tat} {käufer} {anzahl} {ware}.",
    )


def _spell_date(draw: random.Random) -> tuple[tuple[str, str], tuple[str, str]]:
    """Weekday and date, in English and in German."""
    from babel.dates import get_day_names, get_month_names

    day = date.fromordinal(draw.randint(_FIRST_DAY.toordinal(), _LAST_DAY.toordinal()))
    weekday, wochentag = (get_day_names(locale=name)[day.weekday()] for name in ("en_GB", "de"))
    month, monat = (get_month_names(locale=name)[day.month] for name in ("en_GB", "de"))
    return (weekday, f"{day.day} {month} {day.year}"), (wochentag, f"{day.day}. {monat} {day.year}")


def _spell_number(number: int) -> tuple[str, str]:
    from num2words import num2words

    return num2words(number, lang="en_GB"), num2words(number, lang="de")
