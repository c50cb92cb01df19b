"""Operators of onnxruntime for transferry's variant cpu-int8-kernels, as a shared library."""

import ctypes
from functools import cache
from pathlib import Path

__version__ = "0.1.0"

# For onnxruntime.SessionOptions.register_custom_ops_library.
LIBRARY = Path(__file__).with_name("libtransferry_kernels.so")


@cache
def obstacle() -> str:
    """Reason why this CPU cannot run the kernels; empty if it can."""
    find = ctypes.CDLL(str(LIBRARY)).TransferryKernelsObstacle
    find.restype = ctypes.c_char_p
    found: bytes = find()
    return found.decode()
