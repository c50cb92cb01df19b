"""Who may import whom, held over the sources as text and over what an import loads."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import transferry
import transferry.runtime

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = ("build_model", "export", "runtime")
MAX_MODULES, MAX_LINES, MAX_FUNCTION, MAX_PARAMETERS = 12, 500, 60, 8
# Decorators of click's commands and of their shared options, which may have as many parameters as a
# command has options.
CLICK = re.compile(r"\b(command|option|argument)s?\b|_options?\b")
CPP_FUNCTION = re.compile(
    r"^( *)(?=\w)(?!namespace)[^\n(]*?(?P<name>\w+)\([^;{]*\{\n.*?^\1\}", re.M | re.S
)
# The list may only become shorter.
STILL_OVERSIZED = {
    "runtime/engine/open_bundle.py: __init__",
    "tests/build_model/importing/huggingface/test_classifiers.py: test_jobs_with_heads",
    "tests/build_model/importing/huggingface/test_classifiers.py: "
    "test_labels_through_bundle_and_engine_are_theirs",
}

# Training shares these with the runtime: it reads the same files, raises the same errors, keeps
# its settings in the same way and writes the tokenizer that the runtime reads.
SHARED = (
    *("runtime.errors", "runtime.io", "runtime.settings", "runtime.stopping"),
    *("runtime.tokenizer", "runtime.bundle.card", "runtime.bundle.head"),
)
# The modules of commands and their shared parts: click is theirs alone.
COMMAND_LINE = (
    *("cli", "build_model.commands", "export.export_command", "export.proof_commands"),
    "export.distillation.distil_command",
    "runtime.console",
)
# Imports of each part of the project from the others.
PROJECT_IMPORTS: dict[str, tuple[str, ...]] = {
    "__main__": ("cli", "runtime"),
    "cli": PACKAGES,
    "export": ("build_model", "runtime"),
    "export.export_command": ("build_model", "runtime"),
    "export.proof_commands": ("build_model", "runtime"),
    "export.distillation.distil_command": ("build_model", "runtime"),
    "build_model": SHARED,
    "build_model.commands": (*SHARED, "runtime.console"),
    "runtime": (),
    "__init__": ("runtime",),
    "batches": ("runtime",),
}
# The rooms of a package, leaf first: each may import those before it, and no later one.
ROOMS = {
    "runtime": (
        *(
            *("errors", "installation", "stopping", "hardware", "precision", "io", "settings"),
            "tables",
        ),
        *("tokenizer", "decoding", "bundle", "ort", "doctor", "proof", "engine", "page", "jobs"),
        "console",
    ),
    "export": (
        *("recipes", "trace", "arithmetic", "torch_model", "rewrite", "make", "oracle"),
        *("subject", "checks", "blame", "faults", "report", "verify", "audit", "audit_function"),
        *("bundle_folder", "bundle", "distillation", "export_command", "proof_commands"),
    ),
}
STANDARD_LIBRARY = frozenset(sys.stdlib_module_names)
RUNTIME_LIBRARIES = STANDARD_LIBRARY | {
    *("filelock", "msgspec", "numpy", "onnxruntime", "tiktoken", "tqdm")
}
# Optional libraries of parts of the runtime.
OPTIONAL_LIBRARIES = {
    "runtime.io.lines": frozenset({"zstandard"}),
    "runtime.jobs.formats.writers": frozenset({"pyarrow"}),
    "runtime.jobs.formats.cells": frozenset({"pyarrow"}),
    "runtime.jobs.formats.columnar": frozenset({"pyarrow"}),
    "runtime.jobs.formats.spreadsheet": frozenset({"openpyxl"}),
    "runtime.jobs.formats.remote_file": frozenset({"fsspec"}),
    "runtime.jobs.ray_job": frozenset({"pyarrow", "ray"}),
    "runtime.engine.preprocess": frozenset({"sentencex"}),
    "runtime.ort.openvino_runner": frozenset({"openvino"}),
    "runtime.proof.certificates.signature": frozenset({"cryptography"}),
    "runtime.tokenizer.chat_worker": frozenset({"jinja2"}),
    "runtime.tokenizer.third_party": frozenset({"tokenizers", "sentencepiece"}),
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
    """Full names of all imports of a file, within functions and type checking included."""
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


def within(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def may_import_module(module: str, target: str) -> bool:
    package = module.split(".")[0]
    allowed = PROJECT_IMPORTS[module if module in COMMAND_LINE else package]
    if not within(target, (package, *allowed)):
        return False
    if package not in ROOMS or target.split(".")[0] != package or module == package:
        return True
    rooms, one, other = ROOMS[package], module.split(".")[1], target.split(".")[1:2]
    return bool(other) and rooms.index(other[0]) <= rooms.index(one)


def may_import_library(module: str, library: str) -> bool:
    optional = OPTIONAL_LIBRARIES.get(module, frozenset())
    if library == "onnxruntime":  # imported where its telemetry is off
        return within(module, ("runtime.ort",))
    if within(module, SHARED):
        return library in RUNTIME_LIBRARIES | optional
    if within(module, COMMAND_LINE):
        return library in STANDARD_LIBRARY | {"click", "tqdm"}
    package = module.split(".")[0]
    if package == "__init__":
        return library in STANDARD_LIBRARY
    if package == "runtime":
        return library in RUNTIME_LIBRARIES | optional
    forbidden = {"click"} | (GRAPH_LIBRARIES if package == "build_model" else set())
    return library not in forbidden


def test_the_sources_keep_the_rules() -> None:
    assert {path.relative_to(CHECKOUT).parts[0] for path in sources(CHECKOUT)} >= set(PACKAGES)
    assert violations(CHECKOUT) == []


def test_every_module_has_a_room() -> None:
    for package, rooms in ROOMS.items():
        found = {path.stem for path in (CHECKOUT / package).iterdir() if path.suffix == ".py"}
        found |= {path.parent.name for path in (CHECKOUT / package).glob("*/__init__.py")}
        assert found - {"__init__"} <= set(rooms), f"{package}: tell in ROOMS where these stand"


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {module_name(path.relative_to(CHECKOUT)): path for path in sources(CHECKOUT)}
    left = {
        module: {
            existing_module(name.removeprefix("transferry."), CHECKOUT)
            for name in imports(path)
            if name.startswith("transferry.")
        }
        - {module}
        for module, path in modules.items()
    }
    while leaves := {module for module, targets in left.items() if not targets & left.keys()}:
        left = {module: targets for module, targets in left.items() if module not in leaves}
    assert not left, "these import each other"


ENGINE = "runtime/engine/engine.py"
LOOP = "build_model/train/loop.py"
IMPORTER = "build_model/importing/huggingface/a.py"
TRACE = "export/trace/portable.py"
PAIRS = "runtime/tokenizer/byte_pair.py"
THIRD = "runtime/tokenizer/third_party.py"


@pytest.mark.parametrize(
    ("place", "line", "breach"),
    [
        (ENGINE, "import torch", "imports torch"),
        (ENGINE, "def f():\n    import onnxruntime", "imports onnxruntime"),
        ("export/bundle.py", "from onnxruntime import capi", "imports onnxruntime"),
        (ENGINE, "def f():\n    import onnx.helper", "imports onnx"),
        (ENGINE, "import click", "imports click"),
        (ENGINE, "from transferry.export import graphs", "transferry.export"),
        (ENGINE, "import transferry.build_model.model.config", "build_model"),
        (ENGINE, "from transferry import cli", "imports transferry.cli"),
        (ENGINE, "from .errors import InputError", "relative import"),
        (ENGINE, "from runtime.errors import InputError", "bare name"),
        (ENGINE, "from transferry.runtime.jobs import job", "runtime.jobs"),
        (ENGINE, "from transferry.runtime import Engine", "runtime"),
        ("runtime/decoding/search.py", "import transferry.runtime.bundle.bundle", "runtime.bundle"),
        ("runtime/jobs/job.py", "from transferry.runtime.console import progress", "console"),
        ("runtime/console/progress.py", "import numpy", "imports numpy"),
        (PAIRS, "import onnxruntime", "imports onnxruntime"),
        (PAIRS, "import tokenizers", "imports tokenizers"),
        (THIRD, "import onnxruntime", "imports onnxruntime"),
        (PAIRS, "from transferry.runtime import engine", "engine"),
        (IMPORTER, "from transferry.runtime.bundle.bundle import B", "bundle"),
        (LOOP, "from transferry.runtime.engine.engine import E", "engine"),
        (LOOP, "from transferry.runtime import engine", "runtime.engine"),
        (LOOP, "from transferry import runtime", "imports transferry.runtime"),
        (LOOP, "from transferry.export import graphs", "transferry.export"),
        (LOOP, "import onnxruntime as ort", "imports onnxruntime"),
        (TRACE, "from transferry.cli import main", "transferry.cli"),
        (TRACE, "from transferry.export import bundle", "export.bundle"),
        (TRACE, "import click", "imports click"),
        ("__init__.py", "import numpy", "imports numpy"),
        ("__init__.py", "from transferry.export import verify", "transferry.export"),
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
        ("cli.py", "import click\nfrom transferry.runtime.console import progress"),
        ("cli.py", "def run():\n    from transferry.export.trace.portable import export"),
        (TRACE, "import onnx, torch\nimport transferry.runtime.engine"),
        (TRACE, "from transferry.build_model.train.loop import train"),
        ("export/bundle.py", "from transferry.export.trace import portable"),
        (LOOP, "import torch\nfrom transferry.runtime import errors, io"),
        (LOOP, "from transferry.runtime.tokenizer.byte_pair import Tokenizer"),
        (IMPORTER, "from transferry.runtime.tokenizer import third_party"),
        ("runtime/console/progress.py", "import click\nfrom transferry.runtime.jobs import job"),
        (THIRD, "import tokenizers, sentencepiece"),
        ("runtime/ort/session.py", "import onnxruntime\nfrom transferry.runtime import errors"),
        ("runtime/jobs/job.py", "from transferry.runtime.engine.engine import Engine"),
        (PAIRS, "import json\nfrom transferry.runtime import io"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, place: str, line: str) -> None:
    plant(tmp_path, place, line)
    assert violations(tmp_path) == []


def plant(root: Path, place: str, line: str) -> None:
    modules = (
        *(*("__init__.py", "cli.py", LOOP), IMPORTER),
        *(TRACE, "export/bundle.py", "runtime/bundle/bundle.py"),
        *("runtime/errors.py", "runtime/io/lines.py", PAIRS),
        *(THIRD, "runtime/decoding/search.py"),
        *("runtime/ort/session.py", ENGINE, "runtime/jobs/job.py"),
        "runtime/console/progress.py",
    )
    for module in modules:
        path = root / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line if module == place else "", encoding="utf-8")


def measured(root: Path) -> list[Path]:
    """Modules of the product, of the kernels and of the tests."""
    kernels = [path for end in ("cpp", "h", "py") for path in (root / "kernels").rglob(f"*.{end}")]
    return [*sources(root), *sorted(kernels), *sorted((root / "tests").rglob("*.py"))]


def oversized(root: Path) -> set[str]:
    """Folders, modules and functions of a source tree that exceed the limits of design.md."""
    folders = Counter(
        path.parent.relative_to(root).as_posix()
        for path in measured(root)
        if path.name != "__init__.py"
    )
    found = {folder for folder, count in folders.items() if count > MAX_MODULES}
    for path in measured(root):
        name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        if len(text.splitlines()) > MAX_LINES:
            found.add(name)
        large = large_functions if path.suffix == ".py" else large_cpp_functions
        found |= {f"{name}: {function}" for function in large(text)}
    return found


def large_cpp_functions(text: str) -> Iterator[str]:
    """Functions of C++ that are too long: their last line is indented as their first."""
    for function in CPP_FUNCTION.finditer(text):
        if len(function[0].splitlines()) > MAX_FUNCTION:
            yield function["name"]


def large_functions(text: str) -> Iterator[str]:
    """Functions of a module that are too long or have too many parameters, click's excepted."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef):
            continue
        decorators = (getattr(each, "func", each) for each in node.decorator_list)
        if any(CLICK.search(ast.unparse(each)) for each in decorators):
            continue
        arguments = node.args
        names = [each.arg for each in (*arguments.args, *arguments.kwonlyargs)]
        parameters = len(names) - (names[:1] in (["self"], ["cls"]))
        lines = (node.end_lineno or 0) - node.lineno + 1
        if lines > MAX_FUNCTION or parameters > MAX_PARAMETERS:
            yield node.name


def test_nothing_outgrows_its_noun() -> None:
    assert oversized(CHECKOUT) <= STILL_OVERSIZED


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = 1\n" * 501, {"runtime/errors.py"}),
        ("def f() -> None:\n" + "    g()\n" * 60, {"runtime/errors.py: f"}),
        ("def f(a, b, c, d, e, *, f, g, h, i): ...", {"runtime/errors.py: f"}),
        ("class A:\n    def f(self, b, c, d, e, f, g, h, i): ...", set()),
        ("@click.option('-a')\ndef f(a, b, c, d, e, f, g, h, i): ...", set()),
    ],
)
def test_a_planted_excess_is_caught(tmp_path: Path, text: str, found: set[str]) -> None:
    plant(tmp_path, "runtime/errors.py", text)
    assert oversized(tmp_path) == found
    for number in range(12):
        (tmp_path / "runtime" / f"m{number}.py").touch()
    assert oversized(tmp_path) == found | {"runtime"}


def test_a_planted_excess_of_cpp_is_caught(tmp_path: Path) -> None:
    module = tmp_path / "kernels" / "src" / "a.cpp"
    module.parent.mkdir(parents=True)
    text = "struct A {\n  void f(\n      int x) const {\n%s  }\n};\n"
    for lines, found in ((57, set()), (58, {"kernels/src/a.cpp: f"})):
        module.write_text(text % ("    g();\n" * lines))
        assert oversized(tmp_path) == found
    module.write_text("int x;\n" * 501)
    assert oversized(tmp_path) == {"kernels/src/a.cpp"}


def test_every_package_is_listed_for_installation() -> None:
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {path.relative_to(CHECKOUT).parent for path in sources(CHECKOUT)}
    packages = {".".join(("transferry", *folder.parts)) for folder in folders}
    assert set(settings["tool"]["setuptools"]["packages"]) == packages | {
        *("transferry", "transferry.js", "transferry.js.page")
    }


def test_only_what_users_import_lies_at_the_root() -> None:
    """Every module at the root would be installed as `transferry.<module>`."""
    modules = {path.name for path in CHECKOUT.glob("*.py")}
    assert modules == {"__init__.py", "__main__.py", "batches.py", "cli.py"}


def test_the_command_line_starts_without_anything_heavy() -> None:
    script = "import sys, transferry.cli; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = set(run_python(script).split())
    assert "click" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "tiktoken", *GRAPH_LIBRARIES})


def test_the_public_names_are_found_on_demand() -> None:
    script = """
import sys, transferry.runtime
assert not {"numpy", "onnxruntime", "tiktoken", "transferry.runtime.errors"} & sys.modules.keys()
for name in transferry.runtime.__all__:
    print(getattr(transferry.runtime, name).__name__)
"""
    assert run_python(script).split() == transferry.runtime.__all__
    assert transferry.Engine is transferry.runtime.Engine
    for module in (transferry, transferry.runtime):
        with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
            module.Nothing  # noqa: B018


def test_the_runtime_imports_on_a_host_without_torch_and_onnx() -> None:
    script = """
import importlib, pathlib, sys
for absent in ("torch", "onnx", "onnx_ir", "onnxscript", "safetensors", "tokenizers", "click",
               "jinja2", "openpyxl", "pyarrow", "ray", "sentencepiece", "zstandard", "cryptography",
               "transferry.build_model", "transferry.export"):
    sys.modules[absent] = None  # what the import system takes for "not to be found"
import transferry
import transferry.runtime
folder = pathlib.Path(transferry.runtime.__file__).parent
for path in sorted(folder.rglob("*.py")):
    names = path.relative_to(folder).with_suffix("").parts
    if names[0] != "console":
        importlib.import_module(".".join(("transferry.runtime", *names)).removesuffix(".__init__"))
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


# Who may know that there is more than one runtime: modules that open graphs, that a user names, or
# that compare runtimes.
KNOW_RUNTIMES = {
    *("runtime/ort/session.py", "runtime/ort/graph_runner.py", "runtime/ort/openvino_runner.py"),
    *("runtime/doctor.py", "runtime/console/shared_options.py", "export/blame/cross_check.py"),
    "export/trace/search_graph.py",  # the reason for an operator
    "build_model/importing/formats/foreign.py",  # names a folder that it refuses
}


def test_what_serves_asks_nowhere_which_runtime_it_is() -> None:
    named = {
        path.relative_to(CHECKOUT).as_posix()
        for path in sources(CHECKOUT)
        if "openvino" in path.read_text(encoding="utf-8").lower()
    }
    assert named == KNOW_RUNTIMES
    asking = {
        path.relative_to(CHECKOUT).as_posix()
        for path in sources(CHECKOUT)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare)
        and any(
            isinstance(side, ast.Attribute) and side.attr == "runtime"
            for side in (node.left, *node.comparators)
        )
    }
    assert asking == {"runtime/ort/session.py"}
