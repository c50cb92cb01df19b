"""A CUDA driver without a GPU: libraries under which onnxruntime's CUDA provider opens and runs.

Everything is real but the arithmetic: onnxruntime places nodes by its own kernels, binds buffers
and copies between host and device. Kernels do nothing, so results are zeros. There is no cuDNN,
which onnxruntime needs for other graphs only. A process sees the libraries if LD_LIBRARY_PATH names
their folder when it starts; within it, `Simulated` counts and sets limits.
"""

import ctypes
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("cuda_stand_in.c")
LIBRARIES = (
    *("libcuda.so.1", "libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13"),
    *("libcurand.so.10", "libnvrtc.so.13", "libcufft.so.12"),
)
# As the enumeration in the source.
COUNTS = (
    *("launches", "products", "to_device", "to_host", "within", "syncs"),
    *("mallocs", "held", "most", "pinned", "torn", "strays"),
)


def provider_library() -> Path | None:
    """onnxruntime's CUDA provider; None where the package or a compiler is missing."""
    found = importlib.util.find_spec("onnxruntime")
    if found is None or found.origin is None or not (shutil.which("gcc") and shutil.which("nm")):
        return None
    library = Path(found.origin).parent / "capi" / "libonnxruntime_providers_cuda.so"
    return library if library.is_file() else None


def build(folder: Path, provider: Path) -> None:
    """Compiles the libraries into a folder: one file, linked under each name."""
    folder.mkdir()
    needed = ["nm", "--dynamic", "--undefined-only", str(provider)]
    table = subprocess.run(needed, check=True, capture_output=True, text=True).stdout
    own = SOURCE.read_text()
    versions: dict[str, list[str]] = {name: [] for name in LIBRARIES}
    rest = ['#include "' + str(SOURCE) + '"']
    for name, version in re.findall(r" U (\w+)(?:@(lib\S+))?", table):
        if version not in versions and not re.match(r"cu[A-Z]", name):
            continue
        versions[version or "libcuda.so.1"].append(name)
        if not re.search(rf"\b{name}\(", own):
            body = "return 0;"
            if "Create" in name:  # of a handle, which is never read
                body = "if (out) *out = &one; return 0;"
            elif re.search(r"[Gg]emm|[Gg]eam|Matmul$", name):
                body = "simulated_count(PRODUCTS); return 0;"
            rest.append(f"int {name}(void **out) {{ {body} }}")
    driver = re.findall(r"\b(?:cu[A-Z]\w+|simulated_\w+)(?=\()", own)
    versions["libcuda.so.1"] += driver
    nodes = [
        " ".join([library, "{", *(["global:"] if names else []), *(f"{x};" for x in names), "};"])
        for library, names in versions.items()
    ]
    script = folder / "versions"
    script.write_text("\n".join(nodes))
    target = folder / LIBRARIES[0]
    command = [
        *("gcc", "-shared", "-fPIC", "-O1", "-w", "-x", "c", "-", "-o", str(target)),
        f"-Wl,--version-script={script}",
    ]
    subprocess.run(command, input="\n".join(rest), text=True, check=True)
    for name in LIBRARIES[1:]:
        (folder / name).symlink_to(target.name)


class Simulated:
    """The stand-in of this process, which was started with its folder in LD_LIBRARY_PATH."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARIES[0])

    def counts(self) -> Mapping[str, int]:
        """Calls so far, by `COUNTS`; held, most and pinned are bytes."""
        found = (ctypes.c_long * len(COUNTS))()
        self._library.simulated_counts(found)
        return dict(zip(COUNTS, found, strict=True))

    def set(
        self, *, limit: int = 0, failing: int = 0, driver: int = 13000, devices: int = 1
    ) -> None:
        """Limits memory, in bytes; lets the n-th allocation from
        now fail, and all after it; sets driver and devices."""
        self._library.simulated_setting(
            ctypes.c_long(limit), ctypes.c_long(failing), driver, devices
        )
