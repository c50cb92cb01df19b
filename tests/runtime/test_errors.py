"""The command that installs an extra works where this installation came from."""

import importlib.metadata
from pathlib import Path

import pytest

from transferry.runtime import errors
from transferry.runtime.errors import install_command


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
