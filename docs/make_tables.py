"""Writes the tables of model types and of measured speed into their pages: `make docs`.

A run is recorded by `python benchmarks/throughput.py ... | tail -1 >> benchmarks/throughput.jsonl`.
"""

import json
from pathlib import Path

from transferry.build_model.importing.huggingface import decoder_only, encoder_decoder, encoder_only

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "throughput.jsonl"
PAGES = [ROOT / "README.md", ROOT / "docs" / "import.md", ROOT / "docs" / "performance.md"]
CELLS = {
    "fp32, greedy": ("cpu-fp32", 1),
    "fp32, beam 4": ("cpu-fp32", 4),
    "int8, greedy": ("cpu-int8", 1),
    "int8, beam 4": ("cpu-int8", 4),
}


def model_types() -> list[list[str]]:
    """Returns the rows of the table of all model types."""
    rows = [["architecture", "model_type: models"]]
    for module in (encoder_decoder, decoder_only, encoder_only):
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        types = [f"`{kind}`: {family.models}" for kind, family in module.FAMILIES.items()]
        rows.append([name, "; ".join(types)])
    return rows


def speed() -> list[list[str]]:
    """Returns the engine's speed over CTranslate2's, a row for each recorded run."""
    rows = [["model", "processor, date", *CELLS]]
    for record in map(json.loads, RECORDS.read_text(encoding="utf-8").splitlines()):
        tuned = [cell for cell in record["cells"] if cell["sentences_per_batch"] is None]
        told = {(cell["kinds"]["engine"], cell["beam"]): _ratio(cell) for cell in tuned}
        cells = [told.get(kind, "") for kind in CELLS.values()]
        rows.append([record["name"], f"{record['cpu']}, {record['date']}", *cells])
    return rows


def _ratio(cell: dict[str, dict[str, float]]) -> str:
    ratio = cell["ratio"]["engine"]
    told = f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}**"
    return f"{told} ({'–'.join(f'{each:.2f}' for each in cell['ratio_range']['engine'])})"


TABLES = {"model types": model_types, "speed": speed}


def with_tables(text: str) -> str:
    """Returns a page with the tables between its marks."""
    for name, rows in TABLES.items():
        begin, end = f"<!-- {name}: make docs -->\n", f"<!-- /{name} -->\n"
        if begin in text:
            head, *body = rows()
            lines = [head, ["---"] * len(head), *body]
            table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
            before, _, rest = text.partition(begin)
            text = before + begin + table + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
