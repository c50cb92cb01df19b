"""The library of the kernels with each instruction set of this CPU."""

import ctypes
import os
import shutil
from pathlib import Path

import pytest

SETS = ("AVX2", "AVX-512 VNNI", "AMX")


def instruction_set(library: Path) -> str:
    find = ctypes.CDLL(str(library)).TransferryKernelsInstructionSet
    find.restype = ctypes.c_char_p
    found: bytes = find()
    return found.decode()


@pytest.fixture(scope="session")
def libraries(kernels_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies of the library by instruction set: each chooses once in a process."""
    content = kernels_folder / "transferry_kernels" / "libtransferry_kernels.so"
    found: dict[str, Path] = {}
    for most in ("avx2", "avx512", "amx"):
        library = tmp_path_factory.mktemp("kernels") / content.name
        shutil.copyfile(content, library)
        os.environ["TRANSFERRY_KERNELS_ISA"] = most
        found.setdefault(instruction_set(library), library)
        del os.environ["TRANSFERRY_KERNELS_ISA"]
    assert "AVX2" in found
    return found


@pytest.fixture(params=SETS)
def library(request: pytest.FixtureRequest, libraries: dict[str, Path]) -> Path:
    if request.param not in libraries:
        pytest.skip(f"this CPU has no {request.param}")
    return libraries[request.param]
