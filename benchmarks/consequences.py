"""Whether two bundles answer alike: every task, answers, scores and vectors, on many texts."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.export.subject.bundle_copy import BundleCopy
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import TransferryError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import Optimisation, SessionOptions
from transferry.runtime.precision import Precision

SCORE = 1e-3  # nats that a score, and share of its largest entry that a vector may move
ROWS = 250  # answered before they are compared


class Answers:
    """Answers of a bundle to texts, and whether other bundles give the same.

    Where a variant rounds values to integers, any change of a float moves some across the border
    of two integers. There, honest copies tell how many rows that changes, and by how much: weights
    in float32 off by one unit in the last place, and another optimisation level of onnxruntime. A
    bundle is different if it changes twice as many rows as the worst of these and three more, or a
    number by twice as much.

    Attributes:
        most: Rows that may change.
        largest: The largest change of a number in them, in nats or of a vector's largest entry.
    """

    def __init__(self, bundle: Bundle, variant: Variant, texts: Sequence[str]) -> None:
        """Answers all texts with the honest bundle."""
        self.variant, self.texts = variant, texts
        self.wanted = [*self._records(bundle, SessionOptions())]
        self.most, self.largest = 1 << 60, math.inf
        changed: list[dict[str, float]] = [{}]
        if Precision.of(variant.precision).integers:
            changed.append(self._changed(bundle, "basic"))
            for seed in (0, 1):
                with tempfile.TemporaryDirectory(prefix="transferry-") as place:
                    copied = _one_ulp(bundle, variant, Path(place, "copy"), seed)
                    changed.append(self._changed(copied))
            words = ", ".join(
                f"{len(each)} by {max(each.values(), default=0.0):.2g}" for each in changed
            )
            print(f"{variant.name}: rounding changes rows: {words}", file=sys.stderr)
            self.most = 2 * max(map(len, changed)) + 3
            self.largest = 2 * max(size for each in changed for size in (0.0, *each.values()))
            limits = f"{self.most} of {len(self.wanted)} rows, by {self.largest:.2g}"
            print(f"{variant.name}: rounding may change {limits}", file=sys.stderr)
        else:
            self.most, self.largest = 0, 0.0

    def difference(self, faulty: Bundle) -> str:
        """Returns how many rows differ by more than rounding, and the worst; or nothing."""
        try:
            found = self._changed(faulty)
        except TransferryError as error:
            return f"no answer: {error}"
        worst = max(found, key=lambda row: found[row], default="")
        if len(found) > self.most or (found and found[worst] > self.largest):
            return f"{len(found)} rows, {worst} by {found[worst]:.2g}"
        return ""

    def _changed(self, bundle: Bundle, optimisation: Optimisation = "all") -> dict[str, float]:
        """Returns the change of each row that differs, until there are too many."""
        changed: dict[str, float] = {}
        options = SessionOptions(optimisation=optimisation)
        both = zip(self.wanted, self._records(bundle, options), strict=True)
        for (name, wanted), (_, other) in both:
            if (size := _difference(wanted, other)) is not None:
                changed[name] = size
                if len(changed) > self.most or size > self.largest:
                    break
        return changed

    def _records(self, bundle: Bundle, options: SessionOptions) -> Iterator[tuple[str, Any]]:
        """Yields the result of each row of each task."""
        variant = bundle.variant(self.variant.name)
        engine = Engine(bundle, open_model(bundle, variant, options))
        for first in range(0, len(self.texts), ROWS):
            for task, results in self._tasks(engine, self.texts[first : first + ROWS]):
                yield from ((f"{task}, row {row}", each) for row, each in enumerate(results))

    def _tasks(self, engine: Engine, texts: Sequence[str]) -> Iterator[tuple[str, Iterator[Any]]]:
        methods: dict[str, Callable[[Sequence[str]], Any]] = {
            "embed": engine.embed,
            "classify": engine.classify,
            "tag": engine.tag,
            "rank": lambda texts: engine.rank(pairwise(texts)),
            "fill-mask": lambda texts: engine.fill_mask(_masked(text) for text in texts),
            "score": lambda texts: engine.score(_pairs(engine, texts)),
        }
        for name in engine.tasks:
            if name == "generate":
                for beam in (1, 4):
                    options = replace(engine.default_options(), beam=beam, n_best=1, sample=False)
                    results = engine.generate(texts, options)
                    yield f"beam {beam}", (_hypotheses(each) for each in results)
                if engine.default_options().sample:
                    yield "sample", (_hypotheses(each) for each in engine.generate(texts))
            else:
                yield name, (_record(each) for each in methods[name](texts))


def _one_ulp(bundle: Bundle, variant: Variant, folder: Path, seed: int) -> Bundle:
    """Copies a bundle, each weight in float32 off by one unit in the last place at random."""
    generator = np.random.default_rng(seed)

    def change(array: NDArray[Any]) -> NDArray[Any]:
        towards = np.where(generator.integers(2, size=array.shape), np.inf, -np.inf)
        moved: NDArray[Any] = np.nextafter(array, towards.astype(np.float32))
        return moved

    copy = BundleCopy(bundle, variant, folder)
    for name in copy.names():
        if copy.array(name).dtype == np.float32:
            copy.edit(name, change)
    copy.seal()
    return Bundle.load(folder)


def _hypotheses(result: Any) -> Any:
    return [(one.tokens, one.finish_reason, one.text, one.score) for one in result.hypotheses]


def _record(result: Any) -> dict[str, Any]:
    left = ("repeated", "shared_prompt_tokens")  # by which rows were computed together
    return {name: value for name, value in vars(result).items() if name not in left}


def _masked(text: str) -> str:
    """Hides every seventh word."""
    words = text.split(" ")
    words[1::7] = ["[MASK]"] * len(words[1::7])
    return " ".join(words)


def _pairs(engine: Engine, texts: Sequence[str]) -> Any:
    if engine.bundle.manifest.architecture == "decoder-only":
        return ((text, None) for text in texts)
    return zip(texts, reversed(texts), strict=True)


def _difference(wanted: Any, found: Any) -> float | None:
    """Returns the largest change of a number in two results; None if they are the same.

    Numbers may differ by `SCORE`; a change without any, as of a text, is 0.
    """
    numbers: list[float] = []
    same = _same(wanted, found, numbers)
    worst = max(numbers, default=0.0)
    return None if same and worst <= SCORE else worst


def _same(wanted: Any, found: Any, numbers: list[float]) -> bool:
    """Whether all but numbers are equal; adds the differences of these."""
    if isinstance(wanted, np.ndarray):
        if wanted.shape != found.shape:
            return False
        largest = float(np.abs(wanted).max(initial=0.0)) or 1.0
        numbers.append(float(np.abs(wanted - found).max(initial=0.0)) / largest)
        return bool(np.isfinite(found).all())
    if isinstance(wanted, float) and isinstance(found, float):
        if wanted != found:
            numbers.append(abs(wanted - found))
        return math.isfinite(found) or str(wanted) == str(found)
    if isinstance(wanted, dict):
        wanted, found = list(wanted.items()), list(found.items())
    if isinstance(wanted, (list, tuple)) and not all(isinstance(each, int) for each in wanted):
        # All of them, so that the numbers beside another token count.
        pairs = zip(wanted, found, strict=False)
        same = [_same(*pair, numbers) for pair in pairs]
        return all(same) and len(wanted) == len(found)
    if hasattr(wanted, "__dict__") and type(wanted) is type(found):
        return _same(vars(wanted), vars(found), numbers)
    return bool(wanted == found)
