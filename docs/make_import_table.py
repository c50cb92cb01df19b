"""Writes the table of model types into docs/import.md: `make docs`."""

from pathlib import Path

from transferry.build_model.importing.huggingface import decoder_only, encoder_decoder, encoder_only

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "docs" / "import.md"]
BEGIN, END = "<!-- model types: make docs -->\n", "<!-- /model types -->\n"


def table() -> str:
    """Returns the table of all model types, as Markdown."""
    rows = ["| architecture | model_type: models |", "|---|---|"]
    for module in (encoder_decoder, decoder_only, encoder_only):
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        types = [f"`{kind}`: {family.models}" for kind, family in module.FAMILIES.items()]
        rows.append(f"| {name} | {'; '.join(types)} |")
    return "".join(f"{row}\n" for row in rows)


def with_table(text: str) -> str:
    """Returns a page with the table between its marks.

    Raises:
        ValueError: The page has no marks.
    """
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
