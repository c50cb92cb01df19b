"""Operators of onnxruntime for transferry's variant cpu-int8-kernels, as a shared library."""

import ctypes
from pathlib import Path

__version__ = "0.1.0"

# Version of the operators: of the domain transferry.kernels in a graph.
OPERATORS = 2
# For onnxruntime.SessionOptions.register_custom_ops_library.
LIBRARY = Path(__file__).with_name("libtransferry_kernels.so")


def obstacle() -> str:
    """Reason why the CPU cannot run the kernels; empty if it can.

    Raises OSError if the library cannot be loaded.
    """
    return _text("TransferryKernelsObstacle")


def instruction_set() -> str:
    """Instruction set in use: "AVX2", "AVX-512 VNNI" or "AMX"."""
    return _text("TransferryKernelsInstructionSet")


def _text(function: str) -> str:
    find = ctypes.CDLL(str(LIBRARY))[function]
    find.restype = ctypes.c_char_p
    found: bytes = find()
    return found.decode()
