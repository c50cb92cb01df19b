"""The command that installs an extra works where this installation came from."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from transferry.runtime import errors
from transferry.runtime.errors import UsageError, from_extra, install_command


def test_in_a_checkout_it_is_the_checkouts() -> None:
    root = Path(errors.__file__).resolve().parent.parent
    assert install_command("ray") == f'pip install --editable "{root}[ray]"'
    assert install_command("cuda", "--pre").startswith("pip install --pre --editable ")


@pytest.mark.parametrize(
    ("record", "source"),
    [
        ('{"url": "file:///wheels/my%20files/transferry.whl"}', "/wheels/my files/transferry.whl"),
        ('{"url": "https://host/transferry.whl"}', "transferry"),
        ("{", "transferry"),
        (None, "transferry"),
    ],
)
def test_elsewhere_it_is_what_pip_recorded(
    record: str | None, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            return record

    monkeypatch.setattr(errors, "_ROOT", tmp_path)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    assert install_command("export") == f'pip install "{source}[export]"'


def test_an_older_package_than_declared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with from_extra("jobs", "Parquet needs pyarrow"):
        pass
    versions = {"pyarrow": "25.9.1", "zstandard": "99"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    errors._outdated.cache_clear()
    try:
        told = r"Parquet needs pyarrow 26 or later, found 25\.9\.1; pip install"
        with pytest.raises(UsageError, match=told), from_extra("jobs", "Parquet needs pyarrow"):
            pass
        with from_extra("jobs", "zstd needs zstandard"):
            pass
    finally:
        errors._outdated.cache_clear()


def test_each_package_that_is_needed_is_declared() -> None:
    """The last word before the comma of `from_extra` names it."""
    root = Path(errors.__file__).parents[1]
    sources = [
        path.read_text()
        for part in ("runtime", "build_model")
        for path in (root / part).rglob("*.py")
    ]
    needs = r'from_extra\(\s*"(\w+)",(?: Option\([^)]*\)|[^)])*? needs? ([\w-]+)"'
    found = {match for source in sources for match in re.findall(needs, source)}
    assert len(found) >= 10
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra, package in found:
        assert any(re.match(rf"{package}\b.*>=", each, re.I) for each in extras[extra]), package
