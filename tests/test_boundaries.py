"""Who may import whom, held over the sources as text and over what an import really loads."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = ("build_model", "export", "runtime")
MAX_LINES = 520
CLI_MAX_LINES = 820  # the top level is fixed, so cli.py cannot become two

# Leaf modules of the runtime that training shares with it: the files that both read, the errors
# that both raise, the settings that both write, the tokenizers that one writes and the other reads.
SHARED = (
    *("runtime.errors", "runtime.files", "runtime.settings"),
    *("runtime.tokenizer", "runtime.special_tokens", "runtime.original_tokenizers"),
)
# What each part of the project may import of the project besides itself.
PROJECT_IMPORTS: dict[str, tuple[str, ...]] = {
    "cli": PACKAGES,
    "export": ("build_model", "runtime"),
    "build_model": SHARED,
    "runtime": (),
}
STANDARD_LIBRARY = frozenset(sys.stdlib_module_names)
RUNTIME_LIBRARIES = STANDARD_LIBRARY | {"numpy", "onnxruntime", "tiktoken"}
# What a part of the runtime may use where it is installed.
OPTIONAL_LIBRARIES = {
    "runtime.files": frozenset({"zstandard"}),
    "runtime.sinks": frozenset({"pyarrow"}),
    "runtime.sources": frozenset({"pyarrow"}),
    "runtime.ray_job": frozenset({"pyarrow", "ray"}),
    "runtime.reading": frozenset({"sentencex"}),
    "runtime.original_tokenizers": frozenset({"tokenizers", "sentencepiece"}),
}
GRAPH_LIBRARIES = frozenset({"onnx", "onnx_ir", "onnxscript", "onnxruntime"})


def violations(root: Path) -> list[str]:
    """Every breach of the project's import rules in the source tree at `root`."""
    return [
        f"{path.relative_to(root)} {breach}"
        for path in sources(root)
        for breach in breaches(module_name(path.relative_to(root)), path, root)
    ]


def breaches(module: str, path: Path, root: Path) -> Iterator[str]:
    for imported in imports(path):
        library = imported.split(".")[0]
        if imported.startswith("."):
            yield "has a relative import: write transferry.<package>.<module>"
        elif library in (*PACKAGES, "cli"):
            yield f"imports {imported} by its bare name: write transferry.{imported}"
        elif library == "transferry":
            target = existing_module(imported.removeprefix("transferry").lstrip("."), root)
            if not may_import_module(module, target):
                yield f"imports transferry.{target}: against the direction of dependencies"
        elif not may_import_library(module, library):
            yield f"imports {library}: not among its libraries"


def sources(root: Path) -> list[Path]:
    modules = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    return sorted([*root.glob("*.py"), *modules])


def module_name(relative: Path) -> str:
    return ".".join(relative.with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports anywhere, within functions and type checking included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def existing_module(name: str, root: Path) -> str:
    """The part of a dotted name that is a module: the rest names something inside of it."""
    parts = name.split(".")
    while parts:
        place = root.joinpath(*parts)
        if place.with_suffix(".py").is_file() or place.is_dir():
            break
        parts.pop()
    return ".".join(parts)


def may_import_module(module: str, target: str) -> bool:
    if module in SHARED:
        return target in SHARED
    part = module.split(".")[0]
    allowed = (part, *PROJECT_IMPORTS[part])
    return any(target == name or target.startswith(f"{name}.") for name in allowed)


def may_import_library(module: str, library: str) -> bool:
    optional = OPTIONAL_LIBRARIES.get(module, frozenset())
    if module in SHARED:
        return library in (RUNTIME_LIBRARIES - {"onnxruntime"}) | optional
    part = module.split(".")[0]
    if part == "runtime":
        return library in RUNTIME_LIBRARIES | optional
    if part == "cli":
        return library in STANDARD_LIBRARY | {"click"}
    forbidden = {"click"} | (GRAPH_LIBRARIES if part == "build_model" else set())
    return library not in forbidden


def test_the_sources_keep_the_rules() -> None:
    assert {path.relative_to(CHECKOUT).parts[0] for path in sources(CHECKOUT)} >= set(PACKAGES)
    assert violations(CHECKOUT) == []


@pytest.mark.parametrize(
    ("place", "line", "breach"),
    [
        ("runtime/engine.py", "import torch", "imports torch"),
        ("runtime/engine.py", "def f():\n    import onnx.helper", "imports onnx"),
        ("runtime/engine.py", "import click", "imports click"),
        ("runtime/engine.py", "from transferry.export import graphs", "transferry.export"),
        ("runtime/engine.py", "import transferry.build_model.config", "transferry.build_model"),
        ("runtime/engine.py", "from transferry import cli", "imports transferry.cli"),
        ("runtime/engine.py", "from .errors import InputError", "relative import"),
        ("runtime/engine.py", "from runtime.errors import InputError", "bare name"),
        ("runtime/tokenizer.py", "import onnxruntime", "imports onnxruntime"),
        ("runtime/tokenizer.py", "import tokenizers", "imports tokenizers"),
        ("runtime/original_tokenizers.py", "import onnxruntime", "imports onnxruntime"),
        ("build_model/huggingface/a.py", "from transferry.runtime.bundle import B", "bundle"),
        ("runtime/tokenizer.py", "from transferry.runtime.engine import Engine", "runtime.engine"),
        ("build_model/train.py", "from transferry.runtime.engine import E", "runtime.engine"),
        ("build_model/train.py", "from transferry.runtime import engine", "runtime.engine"),
        ("build_model/train.py", "from transferry import runtime", "imports transferry.runtime"),
        ("build_model/train.py", "from transferry.export import graphs", "transferry.export"),
        ("build_model/train.py", "import onnxruntime as ort", "imports onnxruntime"),
        ("export/graphs.py", "from transferry.cli import main", "imports transferry.cli"),
        ("export/graphs.py", "import click", "imports click"),
        ("cli.py", "import numpy", "imports numpy"),
        ("cli.py", "import runtime", "bare name"),
    ],
)
def test_a_planted_breach_is_caught(tmp_path: Path, place: str, line: str, breach: str) -> None:
    plant(tmp_path, place, line)
    (found,) = violations(tmp_path)
    assert found.startswith(place)
    assert breach in found


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("cli.py", "import click\ndef run():\n    from transferry.export.graphs import export"),
        ("export/graphs.py", "import onnx, torch\nfrom transferry.runtime.engine import Engine"),
        ("export/graphs.py", "from transferry.build_model.train import train"),
        ("build_model/train.py", "import torch\nfrom transferry.runtime import errors, files"),
        ("build_model/train.py", "from transferry.runtime.tokenizer import Tokenizer"),
        ("build_model/huggingface/a.py", "from transferry.runtime.original_tokenizers import K"),
        ("runtime/original_tokenizers.py", "import tokenizers, sentencepiece"),
        (
            "runtime/engine.py",
            "import onnxruntime\nfrom transferry.runtime import errors",
        ),
        (
            "runtime/tokenizer.py",
            "import json, tiktoken\nfrom transferry.runtime import files",
        ),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, place: str, line: str) -> None:
    plant(tmp_path, place, line)
    assert violations(tmp_path) == []


def plant(root: Path, place: str, line: str) -> None:
    names = ("bundle", "engine", "errors", "files", "original_tokenizers", "tokenizer")
    modules = [f"runtime/{name}.py" for name in names]
    models = ("build_model/train.py", "build_model/huggingface/a.py")
    for module in ("cli.py", "export/graphs.py", *models, *modules):
        path = root / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line if module == place else "", encoding="utf-8")


def test_no_module_outgrows_its_noun() -> None:
    for path in sources(CHECKOUT):
        most = CLI_MAX_LINES if path == CHECKOUT / "cli.py" else MAX_LINES
        assert len(path.read_text(encoding="utf-8").splitlines()) <= most, path


def test_every_package_is_listed_for_installation() -> None:
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {path.relative_to(CHECKOUT).parent for path in sources(CHECKOUT)}
    packages = {".".join(("transferry", *folder.parts)) for folder in folders}
    assert set(settings["tool"]["setuptools"]["packages"]) == packages | {"transferry"}


def test_only_cli_lies_at_the_root() -> None:
    """Every module at the root would be installed as `transferry.<module>`."""
    assert {path.name for path in CHECKOUT.glob("*.py")} == {"cli.py"}


def test_the_command_line_starts_without_anything_heavy() -> None:
    script = "import sys, transferry.cli; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = set(run_python(script).split())
    assert "click" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "tiktoken", *GRAPH_LIBRARIES})


def test_the_runtime_imports_on_a_host_without_torch_and_onnx() -> None:
    script = """
import importlib, pathlib, sys
for absent in ("torch", "onnx", "onnx_ir", "onnxscript", "safetensors", "tokenizers", "click",
               "pyarrow", "ray", "sentencepiece", "zstandard", "transferry.build_model",
               "transferry.export"):
    sys.modules[absent] = None  # what the import system takes for "not to be found"
import transferry.runtime
folder = pathlib.Path(transferry.runtime.__file__).parent
for path in sorted(folder.glob("*.py")):
    importlib.import_module(f"transferry.runtime.{path.stem}")
    print(path.stem)
"""
    imported = run_python(script).split()
    assert {"errors", "session", "doctor"} <= set(imported)


def run_python(script: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
