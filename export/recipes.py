"""The variants that `export` makes: precision, files and kernels of each. Needs no torch."""

from dataclasses import dataclass

from transferry.runtime.bundle.specs import PORTABLE, REFERENCE
from transferry.runtime.errors import UsageError
from transferry.runtime.precision import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT4,
    INT8,
    INT8_BLOCKS,
    INT8_KERNELS,
    WEIGHT_ONLY,
    Precision,
)


@dataclass(frozen=True)
class Recipe:
    """How a variant is made.

    Attributes:
        name: The variant's name.
        precision: Of weights and arithmetic.
        providers: Providers that the variant is made for.
        prefix: Beginning of its files' names. Graphs that share weights lie in one folder, since
            onnxruntime refuses weights outside the graph's folder.
        maker: `module:function` in this package, a `make.Maker`: a name, since the modules
            that trace load torch.
        fused: Linear layers fused and the cache in place; else standard operators only.
    """

    name: str
    precision: Precision
    providers: tuple[str, ...]
    prefix: str
    maker: str
    fused: bool = True

    @property
    def on_cpu(self) -> bool:
        """Whether the variant is made for CPUs alone."""
        return self.providers == ("cpu",)

    @property
    def reference(self) -> str:
        """File of the answers that the variant is compared with, inside the bundle.

        Variants of one folder round alike.
        """
        folder = self.prefix.rpartition("/")[0]
        return f"{folder}/{REFERENCE}" if self.precision.rounded else REFERENCE


_CPU, _CUDA = ("cpu",), ("cuda",)
_FLOATS, _IN_INT8 = "rewrite.fused:floats", "make:in_int8"
_BLOCKS = "rewrite.linear_blocks:in_blocks"
_ALL = (
    Recipe(PORTABLE, FLOAT32, ("cpu", "cuda"), "portable/", "make:portable", fused=False),
    Recipe("portable-int8", WEIGHT_ONLY, _CPU, "portable-int8/", _IN_INT8, fused=False),
    Recipe("cpu-fp32", FLOAT32, _CPU, "portable/fused-", _FLOATS),
    Recipe("cpu-int8", INT8, _CPU, "cpu-int8/", "rewrite.kv_cache_int8:int8"),
    Recipe("cpu-int8-kernels", INT8_KERNELS, _CPU, "cpu-int8/kernels-", "rewrite.kernels:int8"),
    Recipe("cpu-int8-blocks", INT8_BLOCKS, _CPU, "cpu-int8-blocks/", _BLOCKS),
    Recipe("cpu-int4", INT4, _CPU, "cpu-int4/", _BLOCKS),
    Recipe("cuda-fp16", FLOAT16, _CUDA, "cuda-fp16/", _FLOATS),
    Recipe("cuda-bf16", BFLOAT16, _CUDA, "cuda-bf16/", _FLOATS),
)
RECIPES = {recipe.name: recipe for recipe in _ALL}


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
