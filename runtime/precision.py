"""Precisions of variants: one row each, with every limit and property that the project reads.

To add a precision, add its row here and its recipe in `export/recipes.py`. A type of torch needs
no more. Rounded weights also need a maker, a file of its own in `export/rewrite/` that the recipe
names, and torch's side of the rounding in `export/oracle/rounding.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from transferry.runtime.errors import InputError

EPSILON = 2.0**-23  # of float32


@dataclass(frozen=True)
class TaskBudget:
    """The largest changes of answers that pass.

    Attributes:
        choices: Share of positions at which the preferred token may be worse than torch's.
        bleu: Points of sacreBLEU.
        perplexity: Relative change of the perplexity.
        choice: How far below torch's token a preferred one may be, in nats.
        cosine: Distance of the mean cosine of vectors to torch's from 1; of the least one,
            `LEAST` times that.
        neighbours: Share of texts whose nearest neighbour may change.
        ranks: Distance of the rank correlation of scores or similarities from 1.
        labels: Share of labels that may change.
        found: Loss in nDCG@10 of a search with vectors.
    """

    choices: float
    bleu: float
    perplexity: float
    choice: float
    cosine: float = math.inf
    neighbours: float = math.inf
    ranks: float = math.inf
    labels: float = math.inf
    found: float = math.inf


@dataclass(frozen=True)
class Precision:
    """Type of a variant's weights and arithmetic.

    Attributes:
        name: As in the manifest; of a float type, torch's name.
        task: Limits on the changes of answers.
        epsilon: Distance from 1 to the next number. A variant with rounded weights is compared with
            torch that rounds to the same integers; between these roundings both compute in float32.
        most: Largest error budget that proves anything, in units of an entry; larger
            where one rounding is a large part of the budget.
        slowness: Order of speed on one provider: lower is faster.
        integers: Whether products are of integers.
        weights_only: Whether weights are stored in integers and products computed in float32.
        calibrated: Whether scales of activations are measured on text.
        block_bits: Bits of weights in blocks, each with a scale, whose products round their inputs
            in blocks too; 0 without.
        foreign: Largest error of another tool's graph, in units of an entry. Only its
            writer knows the integers it rounds to, so torch cannot round likewise. None: as for a
            bundle. docs/audit.md has the measurement.
        kernels: Whether graphs use operators of the package transferry-kernels.
    """

    name: str
    task: TaskBudget
    epsilon: float = EPSILON
    most: float = 2.0**-6
    slowness: int = 0
    integers: bool = False
    weights_only: bool = False
    calibrated: bool = False
    block_bits: int = 0
    foreign: float | None = None
    kernels: bool = False

    @classmethod
    def of(cls, name: str) -> Precision:
        """Returns the precision of a name; raises InputError for an unknown one."""
        if name not in PRECISIONS:
            raise InputError(
                f"expected a variant of precision {', '.join(PRECISIONS)}, found {name!r}; "
                "install the version of transferry that wrote the bundle"
            )
        return PRECISIONS[name]

    @property
    def rounded(self) -> bool:
        """Whether torch rounds to the same integers where answers are compared."""
        return self.integers or self.weights_only


# In float32 every different token must be a tie, so any share of them passes.
FLOAT32 = Precision("float32", TaskBudget(math.inf, math.inf, math.inf, math.inf), slowness=3)
EIGHT_BITS = TaskBudget(0.02, 0.3, 0.02, 2.0, 0.005, 0.07, 0.005, 0.05, 0.005)
WEIGHT_ONLY = Precision("int8-weights", EIGHT_BITS, slowness=4, weights_only=True)
FLOAT16 = Precision(
    "float16",
    TaskBudget(0.001, 0.1, 0.001, 0.1, 1e-4, 0.02, 1e-4, 0.01, 0.001),
    epsilon=2.0**-10,
    most=0.5,
)
BFLOAT16 = Precision(
    "bfloat16",
    TaskBudget(0.01, 0.3, 0.01, 1.0, 0.002, 0.05, 0.002, 0.02, 0.003),
    epsilon=2.0**-7,
    most=2.0,
)
INT8 = Precision(
    "int8",
    EIGHT_BITS,
    most=2.0,
    integers=True,
    calibrated=True,
    foreign=2.0**-3,
)
INT8_KERNELS = replace(INT8, name="int8-kernels", slowness=-1, foreign=None, kernels=True)
INT8_BLOCKS = Precision(
    "int8-blocks", EIGHT_BITS, most=2.0, slowness=2, integers=True, block_bits=8
)
# In blocks, 4 bits are as fast as 8 but for few rows, where they are faster.
INT4 = Precision(
    "int4",
    TaskBudget(0.05, 1.0, 0.05, 3.0, 0.02, 0.15, 0.02, 0.1, 0.01),
    most=2.0,
    slowness=1,
    integers=True,
    block_bits=4,
    foreign=3 * 2.0**-3,
)
# By name, from the finest to the coarsest.
_ALL = (FLOAT32, WEIGHT_ONLY, FLOAT16, BFLOAT16, INT8_BLOCKS, INT8, INT8_KERNELS, INT4)
PRECISIONS = {each.name: each for each in _ALL}
