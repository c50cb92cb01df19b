"""The site of `transferry page` in headless Chromium: the answers of `run`, and offline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    with Engine(bundle_folder, variant=variant) as engine:
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
    with Engine(reader_bundle_folder, variant="portable") as engine:
        (wanted,) = engine.fill_mask(["the [MASK] and a [MASK]"])
    with served(tmp_path / "site") as url:
        browser.open(url)
        found = browser.answer("the [MASK] and a [MASK]")
        assert found.startswith(f"{wanted.text}\n\nMask 1\n")
        assert len(found.rstrip("\n").split("\n")) == 1 + 2 * (2 + 5)
        browser.answer("none")
        assert browser.status() == "there is no [MASK] to fill in"
        several = browser.answer("a [MASK]\n\nnone\n[MASK] b")
        assert [several.count(each) for each in ("Mask 1", "Mask 2", "no [MASK] to fill in")] == [
            2,
            0,
            1,
        ]
        assert browser.status().endswith("3 texts. 1 without an answer")
        assert browser.evaluate("document.querySelectorAll('meter').length") == 10
    assert browser.errors == []


def test_a_long_text_is_answered_by_sentence(
    tmp_path: Path, bundle_folder: Path, writer_bundle_folder: Path, browser: Chromium
) -> None:
    write_site(bundle_folder, tmp_path / "site", webgpu=False)
    write_site(writer_bundle_folder, tmp_path / "writer", webgpu=False)
    with Engine(bundle_folder, variant="portable") as engine:
        sentences = ["The cat sees a dog. "] * (engine.bundle.manifest.model["max_positions"] // 6)
        texts = ["".join(sentences), "b" * 3000]
        # Sentences of this kind are cut alike by sentencex and the browser.
        wanted = [each.text for each in engine.generate(texts, long_rows="split")]
    with served(tmp_path) as url:
        browser.open(f"{url}site/")
        for text, answer in zip(texts, wanted, strict=True):
            assert browser.answer(text) == answer
            assert "Answered in pieces" in browser.status()
        browser.open(f"{url}writer/")
        assert browser.answer("the cat " * 1500) == ""
        assert "shorten or split the text" in browser.status()
    assert browser.errors == []


def _with(bundle: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Returns a copy of a bundle with another manifest."""
    shutil.copytree(bundle, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_long_lines_are_joined_where_the_model_reads_them_whole(
    tmp_path: Path, bundle_folder: Path, browser: Chromium
) -> None:
    whole = _with(
        bundle_folder, tmp_path / "whole", lambda made: made["generation"].update(split_lines=False)
    )
    write_site(whole, tmp_path / "site", webgpu=False)
    with served(tmp_path / "site") as url:
        browser.open(url)
        assert browser.answer("the cat\n" * 60)
        assert "Answered in pieces" in browser.status()
    assert browser.errors == []


def test_the_page_is_used_by_keyboard(
    tmp_path: Path, ranker_bundle_folder: Path, browser: Chromium
) -> None:
    numbers = _with(
        ranker_bundle_folder,
        tmp_path / "numbers",
        lambda made: made["head"].update(probabilities="none"),
    )
    write_site(numbers, tmp_path / "site", webgpu=False)
    with served(tmp_path / "site") as url:
        browser.open(url)
        browser.evaluate("document.getElementById('input').value = 'a cat'")
        for key, code, text in (("Tab", 9, ""), ("Enter", 13, "\r")):
            pressed = {"key": key, "windowsVirtualKeyCode": code, "text": text}
            for kind in ("keyDown", "keyUp"):
                browser.call("Input.dispatchKeyEvent", type=kind, **pressed)
        browser.until("document.getElementById('output').textContent !== ''")
        browser.until("document.body.dataset.state === 'ready'")
        assert browser.evaluate("document.activeElement.id") == "go"
        # A number has no likeliest label, which was an empty line.
        output = browser.evaluate("document.getElementById('output').textContent")
        assert output.endswith("  LABEL_0") and "\n" not in output
    assert browser.errors == []


def test_texts_are_ranked_and_compared(
    tmp_path: Path, ranker_bundle_folder: Path, reader_bundle_folder: Path, browser: Chromium
) -> None:
    query, *others = "anna", "a cat", "one two three", "the dog"
    write_site(ranker_bundle_folder, tmp_path / "ranker", webgpu=False)
    with Engine(ranker_bundle_folder, variant="portable") as engine:
        found = list(engine.rank([(query, other) for other in others]))
    wanted = sorted(zip(found, others, strict=True), key=lambda each: -each[0].score)
    with served(tmp_path) as url:
        browser.open(f"{url}ranker/")
        lines = browser.answer("\n".join([query, *others])).split("\n")
        assert [line.split("  ")[1] for line in lines] == [other for _, other in wanted]
        for line, (result, _) in zip(lines, wanted, strict=True):
            assert abs(float(line.split("  ")[0]) - result.score) < 1e-3
        assert len(browser.answer(query).split("\n")) == 2


def test_a_missing_file_is_named(tmp_path: Path, bundle_folder: Path, browser: Chromium) -> None:
    names = ["site.json", "transferry/engine.js", "transferry/ort/graph.js", "bundle/manifest.json"]
    names += ["onnxruntime/ort.wasm.min.mjs", "onnxruntime/ort-wasm-simd-threaded.wasm"]
    for number, name in enumerate(names):
        site = tmp_path / str(number)
        write_site(bundle_folder, site, webgpu=False)
        (site / name).unlink()
        with served(site) as url:
            browser.call("Page.navigate", url=url)
            browser.until(f"document.getElementById('status')?.textContent.includes({name!r})")
            assert browser.evaluate("document.getElementById('go').disabled")
    browser.errors.clear()


def test_pages_of_one_origin_keep_their_copies_and_drop_their_old_ones(
    tmp_path: Path, bundle_folder: Path, browser: Chromium
) -> None:
    active = "navigator.serviceWorker.ready.then(({ active }) => active.state === 'activated')"
    keys = "caches.keys().then((all) => all.filter((each) => each.includes(location.origin)))"
    first, second = tmp_path / "first", tmp_path / "second"
    for site in (first, second):
        write_site(bundle_folder, site, title="a", webgpu=False)
    with served(tmp_path) as url:
        # As a version before kept the first page, and another project's page of the same name.
        browser.open(f"{url}second/")
        for name, page in (("0" * 16, "first"), ("1" * 16, "other")):
            kept = f"cache.put('{url}{page}/site.json', new Response(''))"
            browser.evaluate(f"caches.open('transferry-{name}').then((cache) => {kept})")
        browser.until(active)
        browser.open(f"{url}first/")
        browser.until(active)
        before = browser.evaluate(keys)
        assert len(before) == 2
        assert browser.evaluate("caches.has('transferry-' + '0'.repeat(16))") is False
        assert browser.evaluate("caches.has('transferry-' + '1'.repeat(16))") is True
        write_site(bundle_folder, first, title="b", webgpu=False, force=True)
        browser.open(f"{url}first/")
        browser.until(
            f"{keys}.then((names) => names.length === 2 && names.join() !== {','.join(before)!r})"
        )
        browser.open(f"{url}first/")
        assert browser.evaluate("document.title") == "b"
    browser.open(f"{url}second/")
    assert browser.evaluate("document.title") == "a"
    assert browser.errors == []


def test_the_page_tags_with_a_tokenizer_of_its_own(
    tmp_path: Path, tagger_bundle_folder: Path, browser: Chromium
) -> None:
    text = "anna and the cat, Häuser 日本語"
    write_site(tagger_bundle_folder, tmp_path / "site", webgpu=False)
    with Engine(tagger_bundle_folder, variant="portable") as engine:
        (wanted,) = engine.tag([text], aggregation="simple")
    with served(tmp_path / "site") as url:
        browser.open(url)
        lines = [line.split("  ", 2) for line in browser.answer(text).split("\n")]
    assert [line[1:] for line in lines] == [[tag.label, tag.text] for tag in wanted.tags]
    for line, tag in zip(lines, wanted.tags, strict=True):
        assert abs(float(line[0]) - tag.score) < 1e-5
    assert browser.errors == []
