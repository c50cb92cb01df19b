"""The package in fresh apps: bundled by esbuild, Vite and webpack, opened in Chromium, typed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import PATIENCE
from tests.js.cases import JS, NODE
from tests.js.chromium import Chromium, served
from tests.optional import PACKAGES, program
from transferry import Engine

TEXTS = ["anna", "the cat sees a dog"]
# The page answers in itself and in a worker.
APP = f"""
import {{ Engine }} from "transferry";
const engine = await Engine.load("bundle/");
const here = [];
for await (const record of engine.generate({json.dumps(TEXTS)})) here.push(record.text);
await engine.close();
const worker = new Worker(new URL("./worker.js", import.meta.url), {{ type: "module" }});
worker.onmessage = ({{ data }}) => {{
  window.found = [here, data];
  document.body.dataset.state = "ready";
}};
"""
WORKER = f"""
import {{ pipeline }} from "transferry";
const place = new URL("/bundle/", self.location.href);
const answer = await pipeline("generate", place, {{ device: "wasm" }});
postMessage((await answer({json.dumps(TEXTS)})).map(({{ text }}) => text));
"""
TOKENIZER = 'import { Bundle } from "transferry"; await Bundle.open("bundle/");\n'
TYPED = (Path(__file__).parent / "typed.ts").read_text(encoding="utf-8")
HTML = '<!doctype html><body><script type="module" src="{}"></script></body>\n'
PACKAGE = {"private": True, "type": "module"}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, bundle_folder: Path) -> Path:
    """An app that installed the package as npm packs it."""
    folder = tmp_path_factory.mktemp("app")
    npm = program("npm")
    assert npm is not None
    run([npm, "pack", str(JS), "--silent", "--ignore-scripts"], folder)
    packages = folder / "node_modules"
    packages.mkdir()
    for path in PACKAGES.iterdir():
        (packages / path.name).symlink_to(path)
    (packages / "transferry").mkdir()
    (packed,) = folder.glob("*.tgz")
    unpack = ["tar", "-xzf", str(packed), "--strip-components=1", "-C", "node_modules/transferry"]
    run(unpack, folder)
    source = folder / "src"
    source.mkdir()
    scripts = {"main.js": APP, "worker.js": WORKER, "tokenizer.js": TOKENIZER, "typed.ts": TYPED}
    for name, content in scripts.items():
        (source / name).write_text(content)
    (folder / "package.json").write_text(json.dumps(PACKAGE))
    (folder / "index.html").write_text(HTML.format("/src/main.js"))
    shutil.copytree(bundle_folder, folder / "public" / "bundle")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    made = Chromium(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


def run(command: list[str], folder: Path) -> str:
    made = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    return made.stdout


def node(folder: Path, *arguments: str) -> str:
    assert NODE is not None
    return run([NODE, *arguments], folder)


def with_esbuild(app: Path, out: Path) -> None:
    program = ["node_modules/esbuild/bin/esbuild", "src/main.js", "src/worker.js"]
    run([*program, "--bundle", "--format=esm", "--splitting", f"--outdir={out}"], app)
    # esbuild leaves `new URL(file, import.meta.url)` alone.
    wasm = "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm"
    shutil.copy(app / "node_modules" / wasm, out)
    (out / "index.html").write_text(HTML.format("main.js"))
    shutil.copytree(app / "public" / "bundle", out / "bundle")


def with_vite(app: Path, out: Path) -> None:
    # A worker that loads onnxruntime on demand is a module.
    (app / "vite.config.js").write_text('export default { worker: { format: "es" } };')
    options = ["--outDir", str(out), "--minify", "false", "--logLevel", "error"]
    node(app, "node_modules/vite/bin/vite.js", "build", *options)


def with_webpack(app: Path, out: Path) -> None:
    options = {
        "mode": "development",
        "devtool": False,
        "context": str(app),
        "entry": "./src/main.js",
        "output": {"path": str(out), "publicPath": "/"},
    }
    script = f"""
import webpack from "webpack";
webpack({json.dumps(options)}, (error, stats) => {{
  if (error || stats.hasErrors()) throw error ?? new Error(stats.toString("errors-only"));
}});
"""
    (app / "build.mjs").write_text(script)
    node(app, "build.mjs")
    (out / "index.html").write_text(HTML.format("main.js"))
    shutil.copytree(app / "public" / "bundle", out / "bundle")


@pytest.mark.optional("chromium", "npm", "onnxruntime-web", "esbuild", "vite", "webpack")
@pytest.mark.parametrize("build", [with_esbuild, with_vite, with_webpack])
def test_a_bundled_app_answers_as_run(
    build: object, app: Path, bundle_folder: Path, browser: Chromium, tmp_path: Path
) -> None:
    assert callable(build)
    build(app, tmp_path / "out")
    with Engine(bundle_folder, variant="portable") as engine:
        wanted = [each.text for each in engine.generate(TEXTS)]
    with served(tmp_path / "out") as url:
        browser.open(url)
        assert browser.evaluate("window.found") == [wanted, wanted]
    assert browser.errors == []


@pytest.mark.optional("npm", "node", "onnxruntime-web", "esbuild")
def test_a_tokenizer_alone_brings_no_onnxruntime(app: Path, tmp_path: Path) -> None:
    program = ["node_modules/esbuild/bin/esbuild", "src/tokenizer.js", "--bundle", "--minify"]
    run([*program, "--format=esm", f"--outfile={tmp_path / 'out.js'}"], app)
    assert (tmp_path / "out.js").stat().st_size < 80_000
    assert "executionProviders" not in (tmp_path / "out.js").read_text()


@pytest.mark.optional("npm", "node", "typescript")
@pytest.mark.parametrize(
    "resolution", [("nodenext", "nodenext"), ("esnext", "bundler")], ids=["nodenext", "bundler"]
)
def test_types_resolve(app: Path, resolution: tuple[str, str]) -> None:
    module, kind = resolution
    options = ["--noEmit", "--strict", "--target", "esnext", "--lib", "esnext,dom"]
    options += ["--module", module, "--moduleResolution", kind]
    node(app, "node_modules/typescript/bin/tsc", *options, "src/typed.ts")
