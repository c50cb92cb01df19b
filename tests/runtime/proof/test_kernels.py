"""Variants whose operators are of transferry-kernels: served with it, refused without.

A stand-in of the package has a library that registers nothing.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.commands import call
from tests.runtime.proof.certified import certified, with_variants
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.doctor import PRODUCT_GRAPH, check_kernels
from transferry.runtime.errors import ProviderError, UsageError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import KERNELS, SessionOptions, kernels, open_session
from transferry.runtime.proof.certificates.standing import fastest, standing

NAME = "cpu-int8-kernels"
PACKAGE = """
from pathlib import Path
LIBRARY, __version__, OPERATORS = Path(__file__).with_name("kernels.so"), "{version}", 1
def obstacle(): return "{obstacle}"
def instruction_set(): return "AVX2"
"""
LIBRARY = (
    "void *RegisterCustomOps(void *options, const void *base) {{ return 0; }} int n = {number};"
)
MISSING = "variant cpu-int8-kernels needs transferry-kernels, which is not installed. Install it"

Install = Callable[..., None]


@pytest.fixture
def bundle(plain: Path) -> Bundle:
    return with_variants(plain, "cpu-int8", NAME)


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the package, unless a test installs it, and without its traces afterwards."""
    monkeypatch.setitem(sys.modules, "transferry_kernels", None)
    kernels.cache_clear()
    yield
    kernels.cache_clear()


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    paths = [tmp_path_factory.mktemp("libraries") / f"{number}.so" for number in range(2)]
    for number, path in enumerate(paths):
        source = LIBRARY.format(number=number).encode()
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=source, check=True)
    return paths


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libraries: list[Path]
) -> Iterator[Install]:
    def install(
        obstacle: str = "", number: int = 0, content: bytes | None = None, text: str = PACKAGE
    ) -> None:
        folder = tmp_path / f"packages {number}" / "transferry_kernels"
        folder.mkdir(parents=True, exist_ok=True)
        made = text.format(version=f"0.1.{number}", obstacle=obstacle)
        (folder / "__init__.py").write_text(made, encoding="utf-8")
        (folder / "kernels.so").write_bytes(content or libraries[number].read_bytes())
        monkeypatch.syspath_prepend(folder.parent)
        sys.modules.pop("transferry_kernels", None)
        kernels.cache_clear()

    yield install
    sys.modules.pop("transferry_kernels", None)


def refused(bundle: Bundle, **options: Any) -> str:
    with pytest.raises((ProviderError, UsageError)) as error:
        open_model(bundle, bundle.variant(NAME), SessionOptions(**options))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_without_the_package_the_variant_is_refused_and_the_next_one_served(
    bundle: Bundle, install: Install
) -> None:
    for name in ("cpu-int8", NAME):
        certified(bundle, name, settings={"transferry-kernels": "0.1.0, sha256 0"})
    assert refused(bundle) == (
        f"{MISSING} (`pip install ./kernels` in a checkout of transferry, or its wheel), or choose "
        "variant cpu-int8"
    )
    assert fastest(bundle, SessionOptions()).name == "cpu-int8"
    install()
    certified(bundle, NAME, settings={"transferry-kernels": kernels().version})
    assert fastest(bundle, SessionOptions()).name == NAME
    assert open_model(bundle, bundle.variant(), SessionOptions()).variant.name == "portable"


def test_commands_exit_with_the_code_of_the_refusal(bundle: Bundle, tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("A dog runs.\n", encoding="utf-8")
    named = ["--variant", NAME]
    run: list[str | Path] = ["run", bundle.folder, lines, "-o", tmp_path / "out.jsonl"]
    for command in (run, ["verify", bundle.folder]):
        result = call(*command, *named)
        assert result.exit_code == 5
        assert result.stderr.splitlines()[-1].startswith(f"Error: {MISSING}")
    assert call(*run, *named, "--optimisation", "disable").exit_code == 2
    assert call(*run, *named, "--require-certificate").exit_code == 4
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"optimisation": "disable"}, "found provider cpu, optimisation disable"),
        ({"provider": "cuda"}, "found provider cuda, optimisation all"),
        ({"provider": "tensorrt"}, "provider tensorrt runs variants of standard operators"),
        ({"runtime": "openvino"}, "runtime openvino runs variants of standard operator"),
    ],
)
def test_other_sessions_are_refused(
    bundle: Bundle, install: Install, options: dict[str, Any], found: str
) -> None:
    install()
    assert found in refused(bundle, **options)


@pytest.mark.parametrize(
    ("broken", "status", "found"),
    [
        ({"obstacle": "no AVX2"}, "warning", "cannot run here: no AVX2"),
        ({"content": b"\x7fELF of another machine"}, "fault", "cannot be loaded: [ONNXRuntimeErr"),
        ({"text": "raise ImportError('an old one')"}, "fault", "cannot be loaded: an old one"),
        ({"text": "__version__ = '0.0.1'"}, "fault", "cannot be loaded: module 'transferry_kernel"),
    ],
)
def test_a_package_that_cannot_run_disturbs_no_other_variant(
    bundle: Bundle, install: Install, broken: dict[str, str], status: str, found: str
) -> None:
    install(**broken)
    assert f"which {found}" in refused(bundle)
    check = check_kernels()
    assert (check.status, check.remedy in refused(bundle)) == (status, True)
    assert check.found.startswith(f"transferry-kernels {found}")
    assert fastest(bundle, SessionOptions()).name == "portable"
    open_model(bundle, bundle.variant(), SessionOptions())


def test_doctor_names_what_computes(install: Install) -> None:
    check = check_kernels()
    assert (check.status, check.remedy) == ("ok", "")
    assert check.found == "not installed; only variant cpu-int8-kernels needs them"
    install()
    assert check_kernels().found == "transferry-kernels 0.1.0, AVX2"


def with_operators(version: int, op: str = "Linear") -> bytes:
    model = onnx.load_from_string(PRODUCT_GRAPH)
    model.graph.node[0].op_type, model.graph.node[0].domain = op, KERNELS
    model.opset_import.append(onnx.helper.make_opsetid(KERNELS, version))
    return bytes(model.SerializeToString())


def test_later_operators_than_the_packages_are_refused(tmp_path: Path, install: Install) -> None:
    path = tmp_path / "product.onnx"
    path.write_bytes(PRODUCT_GRAPH)
    with pytest.raises(ProviderError, match=r"needs version 1 .* version 0 .* is not installed"):
        open_session(path, SessionOptions(), with_operators(1))
    install()
    with pytest.raises(ProviderError, match=r"version 2 .*found version 1 .*kernels 0\.1\.0, AVX2"):
        open_session(path, SessionOptions(), with_operators(2))
    a = np.eye(3, dtype=np.float32)
    (found,) = open_session(path, SessionOptions()).run(None, {"a": a, "b": a})
    np.testing.assert_array_equal(found, a)


def test_another_library_makes_a_certificate_one_of_elsewhere(
    bundle: Bundle, install: Install
) -> None:
    install()
    assert fastest(bundle, SessionOptions()).name == "portable", "nothing is certified"
    first = kernels().version
    assert first.startswith("0.1.0, sha256 ")
    given = certified(bundle, NAME, settings={"transferry-kernels": first})
    assert given.versions["transferry-kernels"] == first
    found = standing(bundle, bundle.variant(NAME), SessionOptions())
    assert (found.status, found.reason) == ("verified", "")
    certified(bundle, "cpu-int8")
    assert fastest(bundle, SessionOptions()).name == NAME

    install(number=1)
    second = kernels().version
    found = standing(bundle, bundle.variant(NAME), SessionOptions())
    assert found.status == "elsewhere"
    assert found.reason == f"transferry-kernels {second}, not {first}"
    assert standing(bundle, bundle.variant("cpu-int8"), SessionOptions()).status == "verified"
    assert fastest(bundle, SessionOptions()).name == "cpu-int8"
