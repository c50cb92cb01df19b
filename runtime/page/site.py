"""A static site that runs a bundle in the browser: its files, copied into one folder.

The site is the package of `js/`, the page of `js/page`, onnxruntime-web, and the graphs of a
variant with standard operators. It asks no other host for anything.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.bundle.specs import PORTABLE, STANDARD, Variant
from transferry.runtime.engine.tasks.table import TASKS
from transferry.runtime.engine.tasks.task import Page, Task
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.documents import read_document
from transferry.runtime.io.folders import replace_folder, staged_folder
from transferry.runtime.io.outputs import foreign_member, require_apart, require_new
from transferry.runtime.proof.certificates.stored import certificates

SCRIPTS = Path(__file__).resolve().parents[2] / "js"
# Folders of the package; the others hold its tests, the page, and npm's packages.
ROOMS = ("decoding", "ort", "tasks", "tokenizer")
RUNTIME = PurePosixPath("onnxruntime-web", "dist")
WASM = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
WEBGPU = (
    *("ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.mjs"),
    "ort-wasm-simd-threaded.asyncify.wasm",
)
# Placeholders in service-worker.js.
FILES, GPU_FILES, VERSION = '"FILES"', '"GPU_FILES"', "VERSION"
SERVICE_WORKER, SETTINGS = "service-worker.js", "site.json"


@dataclass(frozen=True)
class Site:
    """A written site: bytes of each file by path, and sentences about the bundle's certificates."""

    sizes: Mapping[str, int]
    standing: tuple[str, ...]

    def summary(self) -> str:
        """Returns the size of the site and of a visitor's download, as a sentence."""
        on_gpu = sum(size for name, size in self.sizes.items() if _for_gpu(name))
        loaded = {name: size for name, size in self.sizes.items() if not _for_gpu(name)}
        shares = ", ".join(
            f"{_size(size for name, size in loaded.items() if name.startswith(place))} {what}"
            for what, place in (("onnxruntime-web", "onnxruntime/"), ("the model", "bundle/"))
        )
        gpu = f"; with WebGPU {_size([on_gpu])} of onnxruntime-web instead" if on_gpu else ""
        return f"{len(self.sizes)} files, {_size(loaded.values())} for a visitor ({shares}){gpu}"


def write_site(
    bundle_folder: Path,
    out: Path,
    *,
    title: str = "",
    variant: str = PORTABLE,
    runtime: Path | None = None,
    webgpu: bool = True,
    force: bool = False,
) -> Site:
    """Writes the site of a bundle.

    Args:
        bundle_folder: The bundle.
        out: Folder of the site.
        title: Heading of the page. Default: the name of the bundle's folder.
        variant: One of `STANDARD`.
        runtime: Folder that holds onnxruntime-web, or node_modules around it. Default: that of
            `find_runtime`.
        webgpu: Whether browsers with WebGPU use it; their answers may differ by rounding.
        force: Replace a site in `out`.

    Raises:
        UsageError: `out` exists, onnxruntime-web is not found, the bundle has no such variant, or
            js/ lacks its task.
        InputError: The bundle is damaged, or the site cannot be written.
    """
    require_new(out, foreign_site, force=force)
    require_apart([out], [bundle_folder])
    bundle = Bundle.load(bundle_folder)
    if variant not in STANDARD:
        raise UsageError(
            f"a page runs variant {' or '.join(STANDARD)}, whose operators are standard, not "
            f"{variant}; choose one of them"
        )
    chosen = bundle.variant(variant)
    page_of(bundle)
    dist = find_runtime(runtime, (*WASM, *(WEBGPU if webgpu else ())))
    files = _model_files(bundle, chosen)
    standing = certified(bundle, chosen)
    with staged_folder(out) as folder:
        for name in (*WASM, *(WEBGPU if webgpu else ())):
            _copy(dist / name, folder / "onnxruntime" / name)
        for path in package_scripts():
            _copy(path, folder / "transferry" / path.relative_to(SCRIPTS))
        for path in sorted((SCRIPTS / "page").iterdir()):
            _copy(path, folder / path.name)
        for name in files:
            _copy(bundle.folder / name, folder / "bundle" / name)
        heading = title or bundle.folder.resolve().name
        settings = site_settings(bundle, variant, heading, standing, webgpu)
        settings["files"] = [name for name, _ in _contents(folder)]
        text = json.dumps(settings, ensure_ascii=False, indent=1)
        (folder / SETTINGS).write_text(f"{text}\n", encoding="utf-8")
        _list_files(folder)
        sizes = {name: path.stat().st_size for name, path in _contents(folder)}
        require_new(out, foreign_site, force=force)  # again, after the copies
        replace_folder(folder, out)
    return Site(sizes, standing)


def package_scripts() -> list[Path]:
    """Returns the modules of the package in js/ that browsers load."""
    rooms = (path for room in ROOMS for path in (SCRIPTS / room).rglob("*.js"))
    return sorted({*SCRIPTS.glob("*.js"), *rooms} - {SCRIPTS / "node.js"})


def foreign_site(folder: Path) -> str:
    """Returns the defect of a folder that should be a site; "" without one."""
    try:
        files = read_document(folder / SETTINGS, dict[str, Any], "").get("files")
    except InputError:
        files = None
    if not isinstance(files, list):
        return "exists and is no site"
    return foreign_member(folder, lambda name: name == SETTINGS or name in files)


def find_runtime(folder: Path | None, names: tuple[str, ...]) -> Path:
    """Folder of onnxruntime-web's files; raises UsageError if it is missing or lacks a file."""
    if folder is None:
        places = [Path("node_modules") / RUNTIME, SCRIPTS / "node_modules" / RUNTIME]
    else:
        places = [folder, folder / "dist", folder / RUNTIME, folder / "node_modules" / RUNTIME]
    for place in places:
        if all((place / name).is_file() for name in names):
            return place
    where = "here" if folder is None else f"in {folder}"
    raise UsageError(
        f"found no onnxruntime-web {where} with {names[-1]}: npm install onnxruntime-web, or name "
        "its folder with --onnxruntime-web"
    )


def certified(bundle: Bundle, variant: Variant) -> tuple[str, ...]:
    """Sentences about the certificates of the graphs that the site runs."""
    held = [one for one in certificates(bundle) if not one.changed(bundle)]
    same = [one for one in held if one.cell.variant == variant.name]
    told = [
        f"Certificate of {one.date} against {one.compared}: {one.cell}; {one.signature()}; "
        f"{one.rows()} rows."
        for one in same or held
    ]
    if same:
        told.append(
            "This page runs the graphs that were verified and checks every file's hash; the "
            "certificate speaks of the runtime that it names, not of this browser."
        )
    elif held:
        told.append(
            f"No certificate covers variant {variant.name}, which this page runs. Every file's "
            "hash is checked."
        )
    else:
        told.append(
            "No certificate: the export compared the graphs with recorded answers of torch. Every "
            "file's hash is checked."
        )
    return tuple(told)


def page_of(bundle: Bundle) -> tuple[type[Task], Page]:
    """Returns a bundle's last task with a page; raises UsageError if js/ lacks that task."""
    tasks = [TASKS[name] for name in bundle.tasks]
    *_, (task, page) = ((task, task.page) for task in tasks if task.page is not None)
    head = bundle.manifest.head
    lacking = ""
    if head is not None and head.task == "answer":
        lacking = "task answer"
    elif head is not None and task.name == "embed":
        lacking = {"sparse": "sparse vectors", "tokens": "vectors of tokens"}.get(head.vectors, "")
    if lacking:
        raise UsageError(f"a page has no {lacking}; serve the bundle with transferry run instead")
    return task, page


def site_settings(
    bundle: Bundle, variant: str, title: str, standing: tuple[str, ...], webgpu: bool
) -> dict[str, Any]:
    """Content of site.json, which page.js and worker.js read."""
    task, page = page_of(bundle)
    first, *rest = task.name.split("-")
    return {
        "title": title,
        "about": f"{bundle.manifest.architecture}, {variant} graphs, in this browser alone",
        "input": page.label,
        "placeholder": page.example,
        "button": page.button,
        "method": first + "".join(map(str.capitalize, rest)),
        "options": dict(page.options),
        "variant": variant,
        "generation": {},
        "webgpu": webgpu,
        "standing": [*standing, f"Manifest sha256 {bundle.sha256}."],
    }


def _model_files(bundle: Bundle, variant: Variant) -> list[str]:
    """Files of the bundle that the site needs."""
    listed = bundle.manifest.files
    graphs = [graph.file for name, graph in variant.steps.items() if name != "select"]
    weights = {str(PurePosixPath(file).with_name("weights.bin")) for file in graphs}
    needed = (*graphs, *sorted(weights), "tokenizer.json", *bundle.tokenizer.names)
    return [MANIFEST, *(file for file in needed if file in listed)]


def _list_files(folder: Path) -> None:
    """Fills in the service worker's list of files to keep; a changed file is a new version."""
    path = folder / SERVICE_WORKER
    digest = hashlib.sha256()
    kept: list[str] = ["./"]
    on_gpu: list[str] = []
    for name, file in _contents(folder):
        with file.open("rb") as stream:
            digest.update(f"{name}\0".encode() + hashlib.file_digest(stream, "sha256").digest())
        if name != SERVICE_WORKER:
            (on_gpu if _for_gpu(name) else kept).append(name)
    script = path.read_text(encoding="utf-8")
    for mark, names in ((FILES, kept), (GPU_FILES, on_gpu)):
        script = script.replace(mark, ", ".join(map(json.dumps, names)))
    script = script.replace(VERSION, digest.hexdigest()[:16])
    path.write_text(script, encoding="utf-8")


def _contents(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def _for_gpu(name: str) -> bool:
    return name.removeprefix("onnxruntime/") in WEBGPU


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError as error:
        raise InputError(f"{source} is missing; install transferry again") from error


def _size(sizes: Iterable[int]) -> str:
    return f"{sum(sizes) / 1e6:,.1f} MB"
