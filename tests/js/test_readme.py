"""The examples of js/README.md run as they stand, in Node, with bundles of these names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.commands import PATIENCE
from tests.js.cases import JS, NODE
from tests.optional import PACKAGES

# Names that the page takes from the program around.
GIVEN = """
import { Engine } from "transferry";
const [lines, texts] = [["a cat"], ["a cat sees. ".repeat(30)]];
const { signal } = new AbortController();
"""
EXAMPLES = re.findall(
    r"^```js\n(.*?)^```", (JS / "README.md").read_text(encoding="utf-8"), re.M | re.S
)


@pytest.mark.optional("node", "onnxruntime-node", "sentencex-wasm", "@huggingface/jinja")
@pytest.mark.parametrize("example", EXAMPLES, ids=["pipeline", "engine", "chat", "split"])
def test_an_example_runs(
    example: str, tmp_path: Path, bundle_folder: Path, chat_bundle_folder: Path
) -> None:
    assert NODE is not None
    (tmp_path / "node_modules").mkdir()
    for package in PACKAGES.iterdir():
        (tmp_path / "node_modules" / package.name).symlink_to(package)
    (tmp_path / "node_modules" / "transferry").symlink_to(JS)
    (tmp_path / "bundles").mkdir()
    for name, folder in (("ende", bundle_folder), ("qwen", chat_bundle_folder)):
        (tmp_path / "bundles" / name).symlink_to(folder)
    imported = 'import { Engine } from "transferry";\n'
    text = GIVEN + example.replace(imported, "")
    (tmp_path / "example.mjs").write_text(text, encoding="utf-8")
    command = [NODE, str(tmp_path / "example.mjs")]
    made = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.strip()
