"""Languages of rows: options of the tasks that read or write a language by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transferry.runtime.engine.preprocess import InLanguages
from transferry.runtime.engine.tasks.task import RowOptions

if TYPE_CHECKING:
    from transferry.runtime.tokenizer.special_tokens import AnyTokenizer


@dataclass(frozen=True, kw_only=True)
class LanguageOptions(RowOptions):
    """Languages of a job's rows.

    Attributes:
        source_language: Language of the rows, such as eng_Latn. Default: the bundle's own.
        target_language: Language of the outputs. Default: the bundle's own.
        source_language_column: Column with each row's language, else --source-language.
        target_language_column: Column with each output's language, else --target-language.
    """

    source_language: str | None = None
    target_language: str | None = None
    source_language_column: str | None = None
    target_language_column: str | None = None

    @property
    def spoken(self) -> dict[str, str | None]:
        """The options by name, in the order of a fingerprint."""
        names = ("source_language", "target_language")
        return {key: getattr(self, key) for name in names for key in (name, f"{name}_column")}

    def require(self, tokenizer: AnyTokenizer) -> None:
        """Raises UsageError for a language that the tokenizer lacks."""
        for name in ("source_language", "target_language"):
            if (language := getattr(self, name)) is not None:
                tokenizer.special.language(language)
            elif (column := getattr(self, f"{name}_column")) is not None:
                tokenizer.special.require_languages(f"the column {column}")

    def text_of(self, row: Any) -> Any:
        """Returns the text of a row with its languages; an error as it is."""
        source, target = row.languages
        source, target = source or self.source_language, target or self.target_language
        if source is target is None or not isinstance(row.text, str):
            return row.text
        return InLanguages(row.text, source, target)
