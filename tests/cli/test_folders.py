"""A downloaded folder becomes a bundle in one command, and other folders are refused in words."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.commands import call, done, fails
from tests.fuzz.models import gpt2
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.huggingface.importer import read_card
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.card import UNKNOWN, ModelCard
from transferry.runtime.bundle.manifest import Manifest
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.outputs import require_own
from transferry.runtime.proof.certificates.envelope import Envelope

CARD = """---
license: other
license_name: llama3
language: [en, no]
datasets:
- wikitext
base_model: gpt2
---
# A model
"""


@pytest.fixture(scope="module")
def downloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("downloaded") / "gpt2"
    gpt2(folder)
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    return folder


def test_a_folder_is_exported_without_a_checkpoint(downloaded: Path, tmp_path: Path) -> None:
    out, kept = tmp_path / "bundle", tmp_path / "kept"
    command = ("export", downloaded, "--out", out, "--variant", "portable", "--keep", kept)
    made = done(*command, "--name", "tiny \u2603")
    assert "gpt2, decoder-only: imported 24,448 of 24,448 parameters" in made.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "kept"}
    done("import", downloaded, "--out", tmp_path / "checkpoint")
    made_apart = [load_checkpoint(each) for each in (kept, tmp_path / "checkpoint")]
    assert made_apart[0].sha256 == made_apart[1].sha256
    stated = ModelCard("gpt2", "made from gpt2", "other: llama3", ("en", "no"), ("wikitext",))
    assert made_apart[1].card == stated
    manifest = Bundle.load(out).manifest
    assert manifest.card == stated.stating(name="tiny \u2603")
    assert Manifest.from_json(manifest.to_json(), "again") == manifest
    shown = done("inspect", out).stdout
    for name, text in manifest.card.facts().items():
        assert re.search(f"^{name.replace('_', ' ')} +{text}$", shown, re.MULTILINE)
    date = ("--certify", "2026-11-26", "--force")
    verified = done("verify", out, "--json", "--quiet", *date)
    settings = json.loads(verified.stdout)["settings"]
    assert (settings["model"], settings["licence"]) == ("tiny \u2603", "other: llama3")
    (certificate,) = (out / "certificates").iterdir()
    statement = Envelope.parse(certificate.read_bytes()).payload
    assert (
        json.loads(statement)["predicate"]["transferry_certificate"]["result"]["card"]["licence"]
        == "other: llama3"
    )


@pytest.mark.parametrize(
    "content",
    [b"---\nlicense: [\n---\n", b"---\n- a\n---\n", b"\xff", b"---\nlicense: {a: b}\n---\n", b""],
)
def test_a_damaged_card_states_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "README.md").write_bytes(content)
    assert read_card(tmp_path) == ModelCard(name=tmp_path.name)


def test_the_cache_of_the_hub_names_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de"
    folder.mkdir(parents=True)
    assert read_card(folder).facts() == {
        "name": "Qwen/Qwen3-0.6B",
        "source": "huggingface.co/Qwen/Qwen3-0.6B at c1899de",
    }
    with pytest.raises(UsageError, match="name must be at most 1,000 characters, found 1,001"):
        UNKNOWN.stating(name="x" * 1001)


def test_run_of_a_folder_names_the_command(downloaded: Path) -> None:
    refused = call("run", downloaded, "-")
    assert refused.exit_code == 3
    found = f"found a folder of Hugging Face; export it: transferry export {downloaded} --out"
    assert found in refused.stderr


def test_a_name_of_the_hub_is_told_how_to_download(tmp_path: Path) -> None:
    fails(3, "hf download MODEL", "import", "Helsinki-NLP/opus-mt-en-de", "--out", tmp_path / "run")


def test_a_folder_without_permission_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.X_OK)  # root may do all
    new = str(tmp_path / "new")
    for arguments in (["inspect", str(tmp_path)], ["export", str(tmp_path), "--out", new]):
        result = call(*arguments)
        assert result.exit_code == 3
        assert "cannot be used: Permission denied" in result.output

    def unreadable(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    with pytest.raises(InputError, match="cannot be written: Permission denied; nothing was"):
        require_own(tmp_path, unreadable)
