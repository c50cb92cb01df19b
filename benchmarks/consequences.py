"""Whether two bundles answer alike: every task, answers, scores and vectors, on many texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import TransferryError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions

SCORE = 1e-3  # nats that a score, and share of its largest entry that a vector may move
ROWS = 250  # answered before they are compared


class Answers:
    """Answers of a bundle to texts, and whether other bundles give the same.

    Where a variant rounds values to integers, any change of a float moves some across the border
    of two integers. There, an honest bundle at other optimisation levels of onnxruntime, which add
    in another order, tells how many rows that changes; a bundle is different if it changes twice as
    many, and three more.
    """

    def __init__(self, bundle: Bundle, variant: Variant, texts: Sequence[str]) -> None:
        """Answers all texts with the honest bundle."""
        self.variant, self.texts = variant, texts
        self.wanted = [*self._records(bundle, SessionOptions())]
        self.most = 0
        if variant.precision in ("int8", "int4"):
            others = [SessionOptions(optimisation=level) for level in ("basic", "disable")]
            changed = [self._changed(self._records(bundle, other), 1 << 60) for other in others]
            self.rounding = [len(each) for each in changed]
            self.most = 2 * max(self.rounding) + 3

    def difference(self, faulty: Bundle) -> str:
        """Returns the first row that a bundle answers otherwise, and how many do; or nothing."""
        try:
            found = self._changed(self._records(faulty, SessionOptions()), self.most)
        except TransferryError as error:
            return f"no answer: {error}"
        return f"{len(found)} rows, first {found[0]}" if len(found) > self.most else ""

    def _changed(self, found: Iterator[tuple[str, Any]], most: int) -> list[str]:
        """Returns the rows that differ, until there are more than `most`."""
        changed = []
        for (name, wanted), (_, other) in zip(self.wanted, found, strict=True):
            if difference := _difference(wanted, other):
                changed.append(f"{name}: {difference}")
                if len(changed) > most:
                    break
        return changed

    def _records(self, bundle: Bundle, options: SessionOptions) -> Iterator[tuple[str, Any]]:
        """Yields the result of each row of each task."""
        engine = Engine(bundle, open_model(bundle, self.variant, options))
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
        return texts
    return zip(texts, reversed(texts), strict=True)


def _difference(wanted: Any, found: Any) -> str:
    """Returns how two values of results differ; floats may differ by `SCORE`."""
    if isinstance(wanted, np.ndarray):
        if wanted.shape != found.shape:
            return "another shape"
        largest = float(np.abs(wanted).max(initial=0.0)) or 1.0
        error = float(np.abs(wanted - found).max(initial=0.0)) / largest
        return "" if error <= SCORE else f"a vector {error:.1e} of its largest entry off"
    if isinstance(wanted, float) and isinstance(found, float):
        error = abs(wanted - found)
        same = error <= SCORE or wanted == found
        return "" if same else f"a number {error:.1e} off"
    if isinstance(wanted, dict):
        wanted, found = list(wanted.items()), list(found.items())
    if isinstance(wanted, (list, tuple)) and not all(isinstance(each, int) for each in wanted):
        if len(wanted) != len(found):
            return "another length"
        return next(filter(None, map(_difference, wanted, found)), "")
    if hasattr(wanted, "__dict__") and not isinstance(wanted, type):
        return _difference(vars(wanted), vars(found))
    return "" if wanted == found else f"{str(wanted)[:60]} became {str(found)[:60]}"
