"""A downloaded folder becomes a bundle in one command, and other folders are refused in words."""

import json
from pathlib import Path

import pytest

from tests.commands import call, done
from tests.fuzz.models import gpt2
from transferry.runtime.bundle.bundle import Bundle

pytestmark = pytest.mark.usefixtures("traces")


@pytest.fixture(scope="module")
def downloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("downloaded") / "gpt2"
    gpt2(folder)
    return folder


def test_a_folder_is_exported_without_a_checkpoint(downloaded: Path, tmp_path: Path) -> None:
    out, kept = tmp_path / "bundle", tmp_path / "kept"
    made = done("export", downloaded, "--out", out, "--variant", "portable", "--keep", kept)
    assert "gpt2, decoder-only: imported 24,448 of 24,448 parameters" in made.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "kept"}
    done("import", downloaded, "--out", tmp_path / "checkpoint")
    for name in ("model.safetensors", "config.json"):
        assert (kept / name).read_bytes() == (tmp_path / "checkpoint" / name).read_bytes()
    model = json.loads((kept / "config.json").read_text())["model"]
    assert Bundle.load(out).manifest.model == model
    verified = done("verify", out, "--checkpoint", downloaded, "--json", "--quiet")
    assert json.loads(verified.stdout)["passed"]


def test_keep_is_for_an_import(run_folder: Path, tmp_path: Path) -> None:
    refused = call("export", run_folder, "--out", tmp_path / "b", "--keep", tmp_path / "k")
    assert refused.exit_code == 2
    assert "is a checkpoint, so none is kept; leave --keep out" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_run_of_a_folder_names_the_command(downloaded: Path) -> None:
    refused = call("run", downloaded, "-")
    assert refused.exit_code == 3
    found = f"found a folder of Hugging Face; export it: transferry export {downloaded} --out"
    assert found in refused.stderr
