"""The library itself: its bits, its threads, its memory, its ABI, and the package around it."""

import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels.graphs import Operator, Values, layer, norm, prefixed
from tests.kernels.test_attention import int8, self_attention
from tests.kernels_package import SOURCE, build
from tests.optional import CHECKOUT, HEADERS
from transferry.runtime.ort.session import ONNXRUNTIME_ERRORS, is_shortage

SLOTS = 70
# Fields of OrtCustomOp up to version 17, four of variadic inputs and outputs as one.
FIELDS = [
    f"OrtCustomOp, {name}"
    for name in (
        *("version", "CreateKernel", "GetName", "GetExecutionProviderType", "GetInputType"),
        *("GetInputTypeCount", "GetOutputType", "GetOutputTypeCount", "KernelCompute"),
        *("KernelDestroy", "GetInputCharacteristic", "GetOutputCharacteristic"),
        *("GetInputMemoryType", "GetVariadicInputMinArity", "CreateKernelV2", "KernelComputeV2"),
        *("InferOutputShapeFn", "GetStartVersion", "GetEndVersion"),
    )
]
RNG = np.random.default_rng(0)


def floats(*sizes: int) -> Any:
    return RNG.standard_normal(sizes).astype(np.float32)


def feed_forward(width: int, inner: int) -> Values:
    """Constants of a feed-forward layer."""
    return {
        **prefixed("inner.", layer(RNG, width, inner)),
        **prefixed("outer.", layer(RNG, inner, width, zero=0)),
        **norm(RNG, width),
    }


ATTENTION = self_attention(RNG, (SLOTS, 2, 40, 32, 3), single=False)
# An operator's constants, its inputs with a row or slot each, and its attributes.
CASES: dict[str, tuple[Values, Values, dict[str, Any]]] = {
    "Linear": (layer(RNG, 48, 330), {"x": floats(SLOTS, 48)}, {}),
    "LinearNorm": (
        {**layer(RNG, 64, 96), **norm(RNG, 96)},
        {"x": floats(SLOTS, 64), "residual": floats(SLOTS, 96)},
        {"epsilon": 1e-5},
    ),
    "FeedForward": (feed_forward(64, 640), {"x": floats(SLOTS, 64)}, {"epsilon": 1e-5}),
    "LinearRank": (
        {**layer(RNG, 64, 5000), "count": np.array([7])},
        {"x": floats(SLOTS, 64)},
        {},
    ),
    "ExpSums": ({}, {"logits": floats(SLOTS, 700)}, {}),
    "SelfAttention": (
        {"single": np.array(False)},
        {name: value for name, value in ATTENTION.items() if name != "single"},
        {"width": 32},
    ),
    "CrossAttention": (
        {},
        {
            "x": 0.02 * floats(4 * SLOTS, 64),
            "past_keys": int8(RNG, SLOTS, 2, 19, 32),
            "past_values": int8(RNG, SLOTS, 2, 19, 32),
            "bias": floats(SLOTS, 1, 1, 19),
        },
        {"width": 32},
    ),
    "EncoderAttention": (
        {},
        {
            **{name: floats(21 * SLOTS, 64) for name in "qkv"},
            "mask": RNG.random((SLOTS, 21)) < 0.8,
        },
        {"width": 32},
    ),
}
ORDER = {
    "LinearNorm": [*("x", *layer(RNG, 16, 16)), "residual", "gamma", "beta"],
    "SelfAttention": list(ATTENTION),
}


def operator(library: Path, kind: str, threads: int = 1) -> Operator:
    constants, inputs, attributes = CASES[kind]
    values = {**inputs, **constants}
    values = {name: values[name] for name in ORDER.get(kind, values)}
    return Operator(library, kind, values, " ".join(inputs), threads=threads, **attributes)


def part(values: Values, first: int, slots: int) -> Values:
    """Some slots of the inputs."""
    found = {}
    for name, value in values.items():
        rows = len(value) // SLOTS
        found[name] = value[first * rows : (first + slots) * rows]
        if name == "cells":
            found[name] = found[name] - [first, 0, 0]
    return found


@pytest.mark.parametrize("kind", CASES)
def test_all_batches_and_instruction_sets_have_the_same_bits(
    libraries: dict[str, Path], kind: str
) -> None:
    inputs = CASES[kind][1]
    expected = operator(libraries["AVX2"], kind)(inputs)
    for library in libraries.values():
        run = operator(library, kind)
        for slots in (1, 2, 5, 7, 35, SLOTS):
            batches = [run(part(inputs, at, slots)) for at in range(0, SLOTS - slots + 1, slots)]
            for whole, *parts in zip(expected, *batches, strict=True):
                found = np.concatenate(parts)
                assert found.tobytes() == whole[: len(found)].tobytes()


@pytest.mark.parametrize("kind", CASES)
def test_replicas_run_one_session_at_once(library: Path, kind: str) -> None:
    inputs = CASES[kind][1]
    run = operator(library, kind)
    expected = run(inputs)
    slots = [*range(1, 9)] * 8
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda count: run(part(inputs, 0, count)), slots)
    for found in answers:
        for one, whole in zip(found, expected, strict=True):
            assert one.tobytes() == whole[: len(one)].tobytes()


@pytest.mark.parametrize("kind", CASES)
def test_threads_change_no_bit(library: Path, kind: str) -> None:
    inputs = CASES[kind][1]
    expected = operator(library, kind)(inputs)
    for found, one in zip(operator(library, kind, threads=3)(inputs), expected, strict=True):
        assert found.tobytes() == one.tobytes()


def short_of_memory(library: Path) -> None:
    """In a process of its own: 1 GiB of hidden integers does not fit."""
    values = {"x": floats(1 << 16, 16), **feed_forward(16, 1 << 14)}
    run = Operator(library, "FeedForward", values, "x", "y", epsilon=1e-5)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), most))
    with pytest.raises(ONNXRUNTIME_ERRORS) as error:
        run(values)
    assert is_shortage(error.value), error.value
    assert "FeedForward node" in str(error.value)
    assert "std::bad_alloc" in str(error.value)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    few = run({"x": values["x"][:10]})
    assert few[0].shape == (10, 16)


def test_short_memory_is_an_error_that_leaves_the_session_usable(
    libraries: dict[str, Path],
) -> None:
    program = "from tests.kernels.test_library import *; short_of_memory(Path(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(libraries["AVX2"])]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_says_what_it_is(kernels_folder: Path) -> None:
    program = "import transferry_kernels as t; print(t.__version__, t.OPERATORS, t.LIBRARY.name)"
    program += "; print(t.obstacle() or t.instruction_set())"
    command = [sys.executable, "-c", program]
    told = {**os.environ, "PYTHONPATH": str(kernels_folder), "TRANSFERRY_KERNELS_ISA": "avx2"}
    found = subprocess.check_output(command, env=told, text=True).splitlines()
    settings = tomllib.loads((SOURCE / "pyproject.toml").read_text(encoding="utf-8"))
    assert found == [f"{settings['project']['version']} 2 libtransferry_kernels.so", "AVX2"]


def test_a_package_whose_library_cannot_be_loaded_is_a_fault(
    kernels_folder: Path, tmp_path: Path
) -> None:
    name = "transferry_kernels"
    shutil.copytree(kernels_folder / name, tmp_path / name)
    (tmp_path / name / f"lib{name}.so").write_bytes(b"\x7fELF of another machine")
    program = "from transferry.runtime.doctor import check_kernels as c; print(c())"
    told = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.check_output([sys.executable, "-c", program], env=told, text=True)
    assert "status='fault'" in found
    assert "cannot be loaded" in found
    assert "Install it again" in found


@pytest.mark.optional("headers of onnxruntime", "g++")
def test_the_abi_is_that_of_the_headers() -> None:
    """The entries of OrtApi and the fields of OrtCustomOp, by the compiler."""
    text = (SOURCE / "src" / "ort.h").read_text(encoding="utf-8")
    checks = [
        f"static_assert(offsetof(OrtApi, {name}) == ort::{name}.number * sizeof(void*));"
        for name in re.findall(r"> (\w+)\{\s*\d+\}", text)
    ]
    fields = re.search(r"struct CustomOp \{(.*?)\n\};", text, re.S)
    assert fields is not None
    mine = re.findall(r"\(\*(\w+)(?:\[4\])?\)\(|^  \w+ (\w+);", fields[1], re.M)
    for ours, theirs in zip(("".join(name) for name in mine), FIELDS, strict=True):
        checks.append(f"static_assert(offsetof(ort::CustomOp, {ours}) == offsetof({theirs}));")
    assert len(checks) > 35
    source = "\n".join(["#include <onnxruntime_c_api.h>", '#include "ort.h"', *checks])
    command = ["g++", "-std=c++17", "-fsyntax-only", "-xc++", f"-I{HEADERS}", f"-I{SOURCE}/src"]
    done = subprocess.run([*command, "-"], input=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@pytest.mark.optional("g++")
def test_sanitizers_find_no_fault(kernels_folder: Path, tmp_path: Path) -> None:
    """The other tests of the folder, with the addresses and arithmetic of the library checked."""
    # GCC 12 warns of its own headers.
    checked = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    build(tmp_path, *checked, "-O1", "-g1", "-Wno-uninitialized")
    names = ("libasan.so", "libubsan.so")
    found = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in names
    ]
    told = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    }
    mine = Path(__file__)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
    command += [str(mine.parent), "-k", "not sanitizers and not is_that_of_the_headers"]
    done = subprocess.run(command, cwd=CHECKOUT, env=told, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
