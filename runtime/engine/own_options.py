"""Generation options of a row, such as those of a request, on top of a job's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from transferry.runtime.decoding.generation_options import OF_SAMPLING, GenerationOptions
from transferry.runtime.engine.result import RowError
from transferry.runtime.errors import ParityError, UsageError

if TYPE_CHECKING:
    from transferry.runtime.engine.open_bundle import OpenBundle

# Options that are remembered: few rows have settings that no other row has.
MOST_OPTIONS = 1024
# Fields of GenerationOptions as the body of a request names them.
BODY_NAMES = {"n_best": "n", "max_length": "max_tokens", "min_length": "min_tokens"}


@lru_cache(MOST_OPTIONS)
def batch_options(options: GenerationOptions, max_length: int) -> GenerationOptions:
    """Returns the options of a batch: each request has its own limit and seed.

    Checking new options takes 90 microseconds, as long as a small model takes for a token.
    """
    return replace(options, max_length=max_length, seed=0)


class OwnOptions:
    """Returns the options of a row from the fields that it sets."""

    def __init__(
        self, engine: OpenBundle, default: GenerationOptions, given: Mapping[str, Any]
    ) -> None:
        """Takes the options of rows that set nothing, and the fields that no row changes."""
        self.engine, self.default, self.given = engine, default, given
        self._known = lru_cache(MOST_OPTIONS)(self._options)

    def __call__(self, settings: Mapping[str, Any]) -> GenerationOptions | RowError:
        """Returns the options, or why the row cannot have them."""
        return self._known(tuple(sorted(settings.items())))

    def _options(self, settings: tuple[tuple[str, Any], ...]) -> GenerationOptions | RowError:
        given, default = self.given, self.default
        own = {name: value for name, value in settings if name not in given}
        if given.get("sample") is False or given.get("beam", 1) > 1:
            own = {name: own[name] for name in own if name not in (*OF_SAMPLING, "sample")}
        n_best, beam = own.get("n_best", 1), given.get("beam", default.beam)
        if n_best > beam and not own.get("sample", given.get("sample", default.sample)):
            needed = "a temperature above 0, since greedy search has one answer"
            return RowError("settings", f"n = {n_best} needs {needed}; give one, or leave n out")
        if "max_length" in own:  # which may be generous
            own["max_length"] = min(own["max_length"], self.engine.max_positions)
        try:
            options = self.engine.options(default, **own)
            self.engine.require_covered(options)
        except UsageError as error:
            return RowError("settings", error.worded(BODY_NAMES))
        except ParityError as error:
            return RowError("settings", str(error))
        return options if options.sample else replace(options, seed=default.seed)
