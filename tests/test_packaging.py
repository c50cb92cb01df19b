"""Wheel and sdist of the checkout: the sources as one package `transferry`, and nothing else."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import transferry

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = ("build_model", "export", "runtime")
USER_PROGRAM = """
from transferry import Engine, GenerationResult, InputError, Results


async def answers(engine: Engine) -> list[str]:
    return [result.text async for result in engine.generate(["a"], beam=4)]


with Engine("bundle", provider="cpu") as engine:
    results: Results[GenerationResult] = engine.generate(["a"])
    vectors = [row.vector for row in engine.embed(["a"], normalise=True)]
    passed: bool = engine.verify().passed
    for row in engine.classify([("a", "b")]):
        reveal_type(row)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git would commit, so that the build leaves no traces."""
    if not (CHECKOUT / ".git").exists():
        pytest.skip("not a git checkout: what belongs to the project is unknown")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    copy = tmp_path_factory.mktemp("build") / "a checkout of any name"
    for name in filter(None, listing.stdout.split("\0")):
        if (CHECKOUT / name).is_file():  # deleted files are listed until they are committed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(CHECKOUT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def built(checkout: Path) -> Path:
    """The folder with the sdist and the wheel that was built from that sdist."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"]
    result = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return checkout / "dist"


def test_the_wheel_holds_the_sources_and_nothing_else(checkout: Path, built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        recorded = {name for name in archive.namelist() if ".dist-info/" in name}
    patterns = ("*.py", "py.typed", *(f"{package}/**/*" for package in PACKAGES))
    patterns += ("js/**/*.js", "js/*.d.ts", "js/package.json", "js/page/*")
    paths = {path for pattern in patterns for path in checkout.glob(pattern) if path.is_file()}
    paths -= set(checkout.glob("js/test/*"))
    assert set(names) == {f"transferry/{path.relative_to(checkout).as_posix()}" for path in paths}
    assert {"transferry/cli.py", "transferry/py.typed"} <= set(names)
    assert "transferry/export/report/report.html.jinja" in names
    assert {PurePosixPath(name).parts[0] for name in recorded} == {dist_info(wheel)}
    assert f"{dist_info(wheel)}/licenses/LICENSE" in recorded


def test_the_wheel_brings_the_command(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read(f"{dist_info(wheel)}/entry_points.txt").decode()
    assert "transferry = transferry.__main__:main" in entry_points


def test_a_users_program_type_checks_strictly(built: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "host", symlinks=True)
    (site,) = (tmp_path / "host").glob("lib/*/site-packages")
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(USER_PROGRAM, encoding="utf-8")
    python = f"--python-executable={tmp_path / 'host' / 'bin' / 'python'}"
    settings = ("--strict", f"--cache-dir={tmp_path / 'cache'}", python)
    command = [sys.executable, "-m", "mypy", *settings, str(program)]
    checked = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "runtime.engine.tasks.classify.ClassifiedResult" in checked.stdout, checked.stderr
    assert checked.returncode == 0, checked.stdout


def test_the_sdist_holds_what_building_needs(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {PurePosixPath(*PurePosixPath(name).parts[1:]) for name in archive.getnames()}
    needed = {"LICENSE", "README.md", "pyproject.toml", "__init__.py", "cli.py", "py.typed"}
    assert needed <= {str(name) for name in names}
    assert not {name.parts[0] for name in names if name.parts} & {".typing", "benchmarks", "docs"}


def test_the_version_is_the_projects() -> None:
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    assert transferry.__version__ == settings["project"]["version"]
    assert not hasattr(transferry, "version")


def dist_info(wheel: Path) -> str:
    name, version = wheel.name.split("-")[:2]
    return f"{name}-{version}.dist-info"
