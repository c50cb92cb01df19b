import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.page.site import SCRIPTS, WASM, WEBGPU, page_of, write_site


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """A stand-in for onnxruntime-web; nothing of it is run here."""
    folder = tmp_path / "node_modules" / "onnxruntime-web" / "dist"
    folder.mkdir(parents=True)
    for name in (*WASM, *WEBGPU):
        (folder / name).write_text(name)
    return tmp_path


def kept(site: Path) -> list[str]:
    script = (site / "service-worker.js").read_text()
    listed = re.search(r"FILES = (\[.*\]);", script)
    assert listed is not None
    files: list[str] = json.loads(listed[1])
    return files


def test_the_site_holds_what_its_page_needs(
    tmp_path: Path, runtime: Path, bundle_folder: Path
) -> None:
    out = tmp_path / "site"
    site = write_site(bundle_folder, out, title="A & B", runtime=runtime)
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert set(site.sizes) == found
    on_gpu = {f"onnxruntime/{name}" for name in WEBGPU}
    assert set(kept(out)) == found - {"service-worker.js", *on_gpu} | {"./"}
    files = json.loads((bundle_folder / "manifest.json").read_text())["files"]
    needed = [name for name in files if re.search(r"coder\.onnx|portable/we|ranks|izer.json", name)]
    assert {name for name in found if name.startswith("bundle/")} == {
        f"bundle/{name}" for name in ("manifest.json", *needed) if "fused" not in name
    }
    settings = json.loads((out / "site.json").read_text())
    expected = {"title": "A & B", "method": "generate", "webgpu": True}
    assert settings | expected == settings
    assert any("ertificate" in line for line in settings["standing"])
    assert "for a visitor" in site.summary() and "with WebGPU" in site.summary()


@pytest.mark.parametrize(
    ("head", "lacking"),
    [
        (HeadSettings("answer", ("start", "end")), "task answer"),
        (HeadSettings("embed", vectors="sparse"), "sparse vectors"),
        (HeadSettings("embed", vectors="tokens"), "vectors of tokens"),
    ],
)
def test_a_task_that_browsers_lack_is_refused(head: HeadSettings, lacking: str) -> None:
    manifest = SimpleNamespace(head=head)
    bundle: Any = SimpleNamespace(
        manifest=manifest, tasks=list(dict.fromkeys(["embed", head.task]))
    )
    with pytest.raises(UsageError, match=f"a page has no {lacking}; serve the bundle with"):
        page_of(bundle)


def test_without_webgpu_its_files_stay_away(
    tmp_path: Path, runtime: Path, reader_bundle_folder: Path
) -> None:
    site = write_site(reader_bundle_folder, tmp_path / "site", runtime=runtime, webgpu=False)
    assert not [name for name in site.sizes if "webgpu" in name or "asyncify" in name]
    assert json.loads((tmp_path / "site" / "site.json").read_text())["method"] == "fillMask"
    assert "WebGPU" not in site.summary()


def test_a_changed_file_is_a_new_version(
    tmp_path: Path, runtime: Path, bundle_folder: Path
) -> None:
    def version(title: str) -> str:
        write_site(bundle_folder, tmp_path / "site", title=title, runtime=runtime, force=True)
        found = re.search(
            r"SCOPE\}([0-9a-f]{16})", (tmp_path / "site/service-worker.js").read_text()
        )
        assert found is not None
        return found[1]

    assert version("a") == version("a") != version("b")


def with_a_file_of_mine(out: Path) -> None:
    out.mkdir()
    (out / "site.json").write_text('{"files": []}')
    (out / "mine.txt").write_text("")


def test_force_replaces_a_site_alone(tmp_path: Path, runtime: Path, bundle_folder: Path) -> None:
    wrong: dict[Callable[[Path], object], str]
    wrong = {Path.mkdir: "exists and is no site", with_a_file_of_mine: "holds mine.txt"}
    for number, (spoil, message) in enumerate(wrong.items()):
        out = tmp_path / f"site{number}"
        spoil(out)
        with pytest.raises(UsageError, match="add force"):
            write_site(bundle_folder, out, runtime=runtime)
        with pytest.raises((UsageError, InputError), match=message):
            write_site(bundle_folder, out, runtime=runtime, force=True)


def test_without_onnxruntime_web_says_how_to_get_it(tmp_path: Path, bundle_folder: Path) -> None:
    with pytest.raises(UsageError, match="npm install onnxruntime-web"):
        write_site(bundle_folder, tmp_path / "site", runtime=tmp_path)
    assert not (tmp_path / "site").exists()


def test_the_page_asks_no_other_host() -> None:
    for path in (SCRIPTS / "page").iterdir():
        assert "http://" not in path.read_text() and "https://" not in path.read_text(), path
