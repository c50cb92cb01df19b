"""The site of `transferry page` in headless Chromium: the answers of `run`, and offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.js.chromium import Chromium, served
from transferry import Engine
from transferry.runtime.page.site import write_site

pytestmark = pytest.mark.optional("chromium", "onnxruntime-web")
LINES = ["anna", "the cat sees a dog", "Straße 😀 日本語", "one two three"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    made = Chromium(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("fixture", "variant"),
    [
        ("bundle_folder", "portable"),
        ("writer_bundle_folder", "portable"),
        ("weight_only_bundle_folder", "portable-int8"),
    ],
)
def test_the_page_answers_as_run_and_then_offline(
    fixture: str, variant: str, tmp_path: Path, browser: Chromium, request: pytest.FixtureRequest
) -> None:
    bundle_folder: Path = request.getfixturevalue(fixture)
    write_site(bundle_folder, tmp_path / "site", variant=variant, webgpu=False)
    with Engine.load(bundle_folder, variant=variant) as engine:
        wanted = [each.text for each in engine.generate(LINES, long_rows="truncate")]
    assert any(wanted)
    with served(tmp_path / "site") as url:
        browser.open(url)
        assert [browser.answer(line) for line in LINES] == wanted
        assert "ertificate" in browser.evaluate("document.getElementById('standing').textContent")
        # The worker is active once it has kept every file.
        assert browser.evaluate("navigator.serviceWorker.ready.then(({ active }) => !!active)")
    browser.open(url)
    assert [browser.answer(line) for line in LINES[1:]] == wanted[1:]
    assert browser.errors == []


def test_the_page_fills_masks(
    tmp_path: Path, reader_bundle_folder: Path, browser: Chromium
) -> None:
    write_site(reader_bundle_folder, tmp_path / "site", webgpu=False)
    with Engine.load(reader_bundle_folder, variant="portable") as engine:
        (wanted,) = engine.fill_mask(["the [MASK] and a [MASK]"])
    with served(tmp_path / "site") as url:
        browser.open(url)
        found = browser.answer("the [MASK] and a [MASK]")
        assert found.startswith(f"{wanted.text}\n\nMask 1\n")
        assert len(found.rstrip("\n").split("\n")) == 1 + 2 * (2 + 5)
        browser.answer("none")
        status = browser.evaluate("document.getElementById('status').textContent")
        assert status == "there is no [MASK] to fill in"
    assert browser.errors == []


def test_the_page_tags_with_a_tokenizer_of_its_own(
    tmp_path: Path, tagger_bundle_folder: Path, browser: Chromium
) -> None:
    text = "anna and the cat, Häuser 日本語"
    write_site(tagger_bundle_folder, tmp_path / "site", webgpu=False)
    with Engine.load(tagger_bundle_folder, variant="portable") as engine:
        (wanted,) = engine.tag([text], aggregation="simple")
    with served(tmp_path / "site") as url:
        browser.open(url)
        lines = [line.split("  ", 2) for line in browser.answer(text).split("\n")]
    assert [line[1:] for line in lines] == [[tag.label, tag.text] for tag in wanted.tags]
    for line, tag in zip(lines, wanted.tags, strict=True):
        assert abs(float(line[0]) - tag.score) < 1e-5
    assert browser.errors == []
