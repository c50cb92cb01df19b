"""Written settings are read unchanged, and every value stands for itself in TOML."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from transferry.runtime.errors import InputError
from transferry.runtime.settings import read_settings, write_settings

# A quote, a backslash, controls, DEL (which only TOML escapes), a separator and, with an emoji, a
# character that JSON would write as a surrogate pair, which TOML refuses.
AWKWARD = 'a "quoted" C:\\new\n\t\x00\x1f\x7f \u2028 Grüße 東京 \U0001f600'


NUMBERS = [0, -7, 2**53, 0.5, 1e-05, 1e22, -0.1, True, False]


@pytest.mark.parametrize("value", ["", AWKWARD, *NUMBERS, [], [1, 2], ["a", AWKWARD], [0.1, 1e-7]])
def test_round_trip(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "settings.toml"
    write_settings(path, {"value": value}, {})
    (found,) = read_settings(path).values()
    assert found == value
    assert type(found) is type(value)


def test_what_was_not_given_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    write_settings(path, {"beam": 4, "device_id": None}, {})
    assert read_settings(path) == {"beam": 4}


def test_what_was_made_is_written_but_not_read_as_an_option(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    made = {"version": "1.0", "rows": 3, "rate": 0.5, "nodes": ["CPU 7", AWKWARD]}
    write_settings(path, {"beam": 4}, made)
    assert read_settings(path) == {"beam": 4}
    assert tomllib.loads(path.read_text(encoding="utf-8"))["made"] == made


def test_names_may_be_hyphenated(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("length-penalty = 0.6\nmax_length = 9\n")
    assert read_settings(path) == {"length_penalty": 0.6, "max_length": 9}


def test_bytes_that_are_no_utf8_do_not_stop_the_record(tmp_path: Path) -> None:
    """As in the name of a file, which Python decodes to surrogates."""
    path = tmp_path / "settings.toml"
    write_settings(path, {"text": b"caf\xe9.txt".decode(errors="surrogateescape"), "beam": 4}, {})
    assert read_settings(path) == {"text": f"caf{3 * chr(0xFFFD)}.txt", "beam": 4}


@pytest.mark.parametrize("content", [b"beam 4", b"beam = ", b'name = "caf\xe9"', b"a = 1\na = 2"])
def test_what_is_not_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"settings\.toml is not TOML"):
        read_settings(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"settings\.toml: cannot be read: No such file"):
        read_settings(tmp_path / "settings.toml")
