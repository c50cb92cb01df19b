"""The variants that `export` makes: precision, files and kernels of each. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from transferry.runtime.bundle.specs import PORTABLE, REFERENCE
from transferry.runtime.errors import UsageError
from transferry.runtime.precision import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT4,
    INT8,
    WEIGHT_ONLY,
    Precision,
)


@dataclass(frozen=True)
class Recipe:
    """How a variant is made.

    Attributes:
        precision: Of weights and arithmetic.
        providers: Providers that the variant is made for.
        prefix: Beginning of its files' names. Graphs that share weights lie in one folder, since
            onnxruntime refuses weights outside the graph's folder.
        fused: Linear layers fused and the cache in place; else standard operators only.
    """

    precision: Precision
    providers: tuple[str, ...]
    prefix: str
    fused: bool = True


RECIPES = {
    PORTABLE: Recipe(FLOAT32, ("cpu", "cuda"), "portable/", fused=False),
    "portable-int8": Recipe(WEIGHT_ONLY, ("cpu",), "portable-int8/", fused=False),
    "cpu-fp32": Recipe(FLOAT32, ("cpu",), "portable/fused-"),
    "cpu-int8": Recipe(INT8, ("cpu",), "cpu-int8/"),
    "cpu-int4": Recipe(INT4, ("cpu",), "cpu-int4/"),
    "cuda-fp16": Recipe(FLOAT16, ("cuda",), "cuda-fp16/"),
    "cuda-bf16": Recipe(BFLOAT16, ("cuda",), "cuda-bf16/"),
}


def recipe_of(name: str, *, calibrated: bool) -> Recipe:
    """Returns the recipe of a variant.

    Raises:
        UsageError: There is no such variant, or an int8 variant is not calibrated.
    """
    if name not in RECIPES:
        raise UsageError(f"there is no variant {name!r}; expected one of {', '.join(RECIPES)}")
    if RECIPES[name].precision.calibrated and not calibrated:
        raise UsageError(
            f"variant {name} is calibrated on text like that it will run on; add it with "
            "--calibrate FILE"
        )
    return RECIPES[name]


def reference_file(recipe: Recipe) -> str:
    """Returns the file of the answers that a variant is compared with, inside the bundle."""
    return f"{recipe.prefix}{REFERENCE}" if recipe.precision.rounded else REFERENCE
