"""Strength of certificates, their searches and rows, and strange files among them."""

from pathlib import Path

import pytest

from tests.runtime.proof.certified import DATE, certified, file_of, rewrite, verified
from tests.runtime.proof.test_certificate import against_the_run, status
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import ParityError, UsageError
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.certificates.certificate import Cell
from transferry.runtime.proof.certificates.envelope import FOLDER
from transferry.runtime.proof.certificates.stored import certificates, describe
from transferry.runtime.proof.certificates.strength import GRAPHS, Strength


@pytest.mark.parametrize("claims", [{GRAPHS: "exported with torch 1.0"}, {}])
def test_a_claim_that_was_not_made_lowers_the_strength(
    folder: Path, claims: dict[str, str]
) -> None:
    """Or that somebody left out of the certificate."""
    against_the_run(folder)
    with pytest.raises(
        UsageError, match=r"is against the checkpoint, and the new one is weaker \(checkpoint wi"
    ):
        certified(folder, claims=claims)
    rewrite(file_of(folder), claims=claims)
    (found,) = certificates(Bundle.load(folder))
    assert found.strength == "checkpoint without fresh graphs"
    weaker: tuple[Strength, ...] = ("checkpoint without fresh graphs", "recorded")
    for strength in weaker:
        cited = Engine(folder, require_certificate=strength).certificate
        assert f"of {DATE} against the checkpoint without fresh graphs (variant" in cited
    named = claims.get(GRAPHS, "")
    with pytest.raises(
        ParityError, match=f"against the checkpoint without fresh graphs alone.*{named}"
    ):
        Engine(folder, require_certificate=True)
    row = describe(Bundle.load(folder))[0]
    told = f"; not compared: graphs ({named})" if named else ""
    assert (row[1], row[-1]) == ("the checkpoint without fresh graphs", f"holds{told}")


def test_the_strongest_certificate_of_a_session_counts(folder: Path) -> None:
    weak = file_of(folder).read_bytes()
    against_the_run(folder)
    for name in ("a.json", "z.json"):
        (folder / FOLDER / name).write_bytes(weak)
    assert Engine(folder, require_certificate=True)


def test_a_stray_file_among_certificates_stops_nothing_and_is_told(folder: Path) -> None:
    strays = {".DS_Store": "x", "notes.txt": "x", "other.json": "{", "x.json": "{}"}
    for name, text in strays.items():
        (folder / FOLDER / name).write_text(text, encoding="utf-8")
    (folder / FOLDER / "dir.json").mkdir()
    assert Engine(folder, require_certificate="recorded")
    verified(folder)
    told = {row[2]: row[-1] for row in describe(Bundle.load(folder)) if not row[0]}
    assert told.keys() == {*strays, "dir.json"}
    assert told["notes.txt"] == told[".DS_Store"] == "is no certificate"
    assert "is not a certificate" in told["x.json"]
    own = Cell.of(Bundle.load(folder).variant(), SessionOptions())
    (folder / FOLDER / own.file_name).unlink()
    assert "certificates/other.json cannot be read" in Engine(folder).certificate


def test_a_certificate_of_no_search_covers_no_decoder(folder: Path) -> None:
    rewrite(file_of(folder), searches=[])
    assert status(folder) == ("none", f"of {DATE}: it covers no search, and the model generates")
    with pytest.raises(ParityError, match="covers no search"):
        Engine(folder, require_certificate="recorded")
    with pytest.raises(UsageError, match="no search was verified"):
        certified(folder, searches=[], force=True)


def test_equal_lines_count_once(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"30 different rows.*found 1 among 30"):
        certified(folder, settings={"rows": 30, "distinct_rows": 1}, force=False)
    certified(folder, settings={"rows": 31, "distinct_rows": 30}, force=True)
    assert describe(Bundle.load(folder))[0][3] == "31 (30 different)"
