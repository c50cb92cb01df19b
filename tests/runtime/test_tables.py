import pytest

from transferry.runtime.tables import WIDTH, facts, table, wrapped


def test_rows_fit_the_header() -> None:
    with pytest.raises(ValueError, match="shorter"):
        table(("name", "n"), [("a",)])


def test_facts_stand_beside_their_names() -> None:
    lines = facts([("made by", "package-a 1.0, " * 8), ("", "more")]).splitlines()
    assert lines[0].startswith("made by     package-a 1.0,")
    assert lines[-1] == " " * 12 + "more"
    assert len(lines) > 2
    assert all(len(line) <= WIDTH and line[11:13].lstrip() == line[12] for line in lines)


def test_words_stay_whole() -> None:
    long = "avx2+fma-" * 12
    assert wrapped(f"a {long} b").splitlines() == ["a", f"  {long}", "  b"]
