"""The programs of docs/one-graph.md, as they are there: each prints the answer of `run`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

from tests.commands import PATIENCE
from tests.optional import HEADERS, PACKAGES
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import ONE_GRAPH
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import search
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs" / "one-graph.md").read_text(encoding="utf-8")
GRAPH = "bundles/ende/portable/generate.onnx"


@pytest.fixture(scope="module")
def graph(whole_bundle_folder: Path) -> Path:
    bundle = Bundle.load(whole_bundle_folder)
    return bundle.graph(bundle.variant().graphs[ONE_GRAPH])


@pytest.fixture(scope="module")
def wanted(whole_bundle_folder: Path) -> list[int]:
    """The answer of the serving search to the source of the page."""
    bundle = Bundle.load(whole_bundle_folder)
    decoder = PortableDecoder(bundle, bundle.variant(), SessionOptions())
    special = bundle.tokenizer.special
    assert (special.bos_id, special.ends) == (1, (2,)), "the page shows other ids"
    # The graph bounds an answer by the model's positions, as `run` does.
    options = GenerationOptions(max_length=min(100, int(bundle.manifest.model["max_positions"])))
    ((found,),) = search(decoder, [[17, 5, 42, 2]], options, special)
    assert len(found.scored_tokens) > 1
    return list(found.scored_tokens)


def program(heading: str, graph: Path) -> str:
    """The block below a heading, with the graph's path in it."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"^```\w+\n(.*?)^```", section, re.S | re.M)
    assert block.count(GRAPH) == 1
    return str(block).replace(GRAPH, str(graph))


def printed(*command: object) -> list[int]:
    """The numbers that a command prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=PATIENCE,
    )
    assert found.returncode == 0, found.stderr
    return [int(number) for number in found.stdout.split()]


def test_python(graph: Path, wanted: list[int]) -> None:
    assert printed(sys.executable, "-c", program("Python", graph)) == wanted


@pytest.mark.optional("openvino")
def test_openvino(graph: Path, wanted: list[int]) -> None:
    both = program("Python", graph) + program("OpenVINO", graph)
    assert printed(sys.executable, "-c", both) == wanted * 2


@pytest.mark.optional("node", "onnxruntime-node")
def test_javascript(graph: Path, wanted: list[int], tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(PACKAGES)
    file = tmp_path / "generate.mjs"
    file.write_text(program("JavaScript", graph), encoding="utf-8")
    assert printed("node", file) == wanted


@pytest.mark.optional("g++", "headers of onnxruntime")
def test_cpp(graph: Path, wanted: list[int], tmp_path: Path) -> None:
    installed = Path(onnxruntime.__file__).parent / "capi"
    library = next(iter(sorted(installed.glob("libonnxruntime.so*"))), None)
    if library is None:
        pytest.skip(f"{installed} has no libonnxruntime.so")
    # The library names itself libonnxruntime.so.1, and pip's package has no such link.
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (tmp_path / name).symlink_to(library)
    source, built = tmp_path / "generate.cpp", tmp_path / "generate"
    source.write_text(program("C++", graph), encoding="utf-8")
    link = [f"-L{tmp_path}", "-lonnxruntime", f"-Wl,-rpath,{tmp_path}"]
    printed("g++", "-std=c++17", f"-I{HEADERS}", source, "-o", built, *link)
    assert printed(built) == wanted
