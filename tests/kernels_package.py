"""Builds the package transferry_kernels for the tests, where it is not installed."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from tests.optional import CHECKOUT
from transferry.runtime.hardware import instruction_sets

SOURCE = CHECKOUT / "kernels"
NEEDED = {"avx2", "fma"}
SETTINGS = (SOURCE / "CMakeLists.txt").read_text(encoding="utf-8")


def installed() -> Path | None:
    """Folder that holds the installed package; None without one."""
    found = importlib.util.find_spec("transferry_kernels")
    return Path(found.origin).parent.parent if found and found.origin else None


def obstacle() -> str:
    """Reason why the package cannot be built or run here; "" if it can."""
    if platform.system() != "Linux" or not set(instruction_sets()) >= NEEDED:
        return "the kernels need Linux and a CPU with AVX2 and FMA"
    if not installed() and shutil.which("g++") is None:
        return "transferry-kernels is not installed, and g++ absent"
    return ""


def flags(command: str) -> list[str]:
    """Flags of a command of CMakeLists.txt, named with its first arguments."""
    found = re.search(rf"{command}([^)]*)\)", SETTINGS)
    assert found, command
    earlier = re.findall(r"\$\{(\w+)\}", found[1])  # variables
    return [
        *(flag for name in earlier for flag in flags(rf"set\({name}")),
        *re.findall(r"-\S+", found[1]),
    ]


def build(folder: Path, *more: str, compiler: str = "g++") -> None:
    """Makes the package in a folder, with its parts compiled side by side.

    Args:
        folder: New folder that holds `transferry_kernels`.
        more: Flags for the compiler and the linker.
        compiler: Name of the compiler.
    """
    package = folder / "transferry_kernels"
    shutil.copytree(SOURCE / "transferry_kernels", package, ignore=lambda *_: ["__pycache__"])
    common = [compiler, "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden"]
    common += flags("add_compile_options")
    if compiler == "g++":
        common += flags(r'"GNU"\)\s*add_compile_options')
    common += more
    parts = {name: [f"{SOURCE}/src/{name}.cpp"] for name in ("library", "operators")}
    probe = [compiler, *flags(r"set\(amx"), "-E", "-x", "c++", os.devnull]
    has_amx = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    if has_amx:
        parts["library"].append("-DHAS_AMX")
    for isa in ("avx2", "avx512", "amx")[: 2 + has_amx]:
        parts[isa] = [f"{SOURCE}/src/kernels.cpp", f"-DISA={isa}", *flags(rf"set\({isa}")]
    objects = [str(folder / f"{name}.o") for name in parts]
    running = [
        subprocess.Popen([*common, "-c", *own, "-o", made], stderr=subprocess.PIPE, text=True)
        for own, made in zip(parts.values(), objects, strict=True)
    ]
    said = [process.communicate()[1] for process in running]
    assert not any(said) and not any(process.returncode for process in running), "\n".join(said)
    library = package / "libtransferry_kernels.so"
    subprocess.run([compiler, "-shared", "-s", *more, *objects, "-o", library], check=True)
