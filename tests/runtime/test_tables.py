import pytest

from transferry.runtime.tables import table


def test_columns_line_up() -> None:
    assert table(("name", "n"), [("a", 1000), ("longer", None)]).splitlines() == [
        "name    n",
        "------  ----",
        "a       1000",
        "longer  None",
    ]


def test_header_stands_without_rows() -> None:
    assert table(("name", "n"), []) == "name  n\n----  -"


def test_rows_fit_the_header() -> None:
    with pytest.raises(ValueError, match="shorter"):
        table(("name", "n"), [("a",)])
