"""The table of precisions: the limits of docs/parity.md and docs/audit.md, and its readers."""

import math
import re
from dataclasses import astuple
from typing import get_type_hints

import msgspec
import pytest

from transferry.export.audit import tolerance_of
from transferry.export.recipes import RECIPES
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.errors import InputError
from transferry.runtime.precision import PRECISIONS, Precision
from transferry.runtime.proof.compare import Tolerance

# Factor, largest budget, budget of crossed borders; largest error of another tool's graph.
LIMITS = {
    "float32": (8, 2.0**-6, math.inf, 2.0**-20),
    "int8-weights": (8, 2.0**-6, math.inf, 2.0**-20),
    "float16": (8 * 2.0**13, 0.5, math.inf, 2.0**-7),
    "bfloat16": (8 * 2.0**16, 2.0, math.inf, 2.0**-4),
    "int8-blocks": (8, 2.0, 2.0**-4, 2.0**-20),
    "int8": (8, 2.0, 2.0**-4, 2.0**-3),
    "int8-kernels": (8, 2.0, 2.0**-4, 2.0**-20),
    "int4": (8, 2.0, 2.0**-4, 3 * 2.0**-3),
}
BUDGETS = {
    "float32": (math.inf,) * 9,
    "int8-weights": (0.02, 0.3, 0.02, 2.0, 0.005, 0.07, 0.005, 0.05, 0.005),
    "float16": (0.001, 0.1, 0.001, 0.1, 1e-4, 0.02, 1e-4, 0.01, 0.001),
    "bfloat16": (0.01, 0.3, 0.01, 1.0, 0.002, 0.05, 0.002, 0.02, 0.003),
    "int8-blocks": (0.02, 0.3, 0.02, 2.0, 0.005, 0.07, 0.005, 0.05, 0.005),
    "int8": (0.02, 0.3, 0.02, 2.0, 0.005, 0.07, 0.005, 0.05, 0.005),
    "int8-kernels": (0.02, 0.3, 0.02, 2.0, 0.005, 0.07, 0.005, 0.05, 0.005),
    "int4": (0.05, 1.0, 0.05, 3.0, 0.02, 0.15, 0.02, 0.1, 0.01),
}


def test_every_precision_has_its_limits() -> None:
    assert PRECISIONS.keys() == LIMITS.keys() == BUDGETS.keys()
    for name, (factor, most, crossed, foreign) in LIMITS.items():
        assert Tolerance.of(name) == Tolerance(factor, 2.0**-23, most, crossed)
        assert tolerance_of(name).budget(2.0**-23) == foreign
        assert astuple(PRECISIONS[name].task) == BUDGETS[name]


def test_kernels_are_fastest_blocks_and_float32_slower_than_other_rounding() -> None:
    ordered = sorted(PRECISIONS.values(), key=lambda row: row.slowness)
    names = ["int4", "int8-blocks", "float32", "int8-weights"]
    assert [row.name for row in ordered[-4:]] == names
    assert ordered[0].name == "int8-kernels"


def test_the_manifest_knows_the_table_and_no_other_name() -> None:
    kind = get_type_hints(Variant, include_extras=True)["precision"]
    for name in PRECISIONS:
        assert msgspec.convert(name, kind) == name
    for name in ("", "int8 ", "int8\n", "int", "INT8"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(name, kind)
    expected = re.escape(", ".join(PRECISIONS))
    with pytest.raises(InputError, match=f"precision {expected}, found 'int2'"):
        Precision.of("int2")


def test_every_precision_has_a_variant() -> None:
    assert {recipe.precision.name for recipe in RECIPES.values()} == PRECISIONS.keys()
