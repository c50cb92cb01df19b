"""Writes the tables of model types, of speed and of runtimes into their pages: `make docs`.

Runs are recorded by `python benchmarks/throughput.py ... | tail -1 >> benchmarks/throughput.jsonl`
and, at c9889d2, by `python benchmarks/runtimes.py BUNDLE... >> benchmarks/runtimes.jsonl`.
"""

import json
from pathlib import Path

import onnx

from transferry.build_model.importing.huggingface import decoder_only, encoder_decoder, encoder_only

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "throughput.jsonl"
OPENED = ROOT / "benchmarks" / "runtimes.jsonl"
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("import", "performance", "portability")),
]
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


def runtimes() -> list[list[str]]:
    """Returns the runtimes that opened graphs, and the operator at which others stopped."""
    operators = {schema.name for schema in onnx.defs.get_all_schemas()}
    lines = [json.loads(line) for line in OPENED.read_text(encoding="utf-8").splitlines()]
    keys = ("runtime", "version", "graphs", "architecture")
    found: dict[tuple[str, str], dict[str, dict[str, list[str]]]] = {}
    for row in {tuple(line[key] for key in keys): line for line in lines}.values():
        told, _, why = row["result"].partition(": ")
        if why:
            words = "".join(each if each.isalnum() else " " for each in why).split()
            named = next((f"`{word}`" for word in words if word in operators), "")
            told = f"no, {named or ' '.join(words[-3:])}"
        cells = found.setdefault((row["runtime"], row["version"]), {})
        cells.setdefault(row["graphs"], {}).setdefault(told, []).append(row["architecture"])
    told_rows = []
    for (name, version), cells in found.items():
        # Both variants mostly fare alike.
        kinds = ("portable", "portable-int8", "one graph")
        *both, one = (_cell(cells.get(kind, {})) for kind in kinds)
        told_rows.append([f"{name} {version}", " / ".join(dict.fromkeys(both)), one])
    head = ["runtime", "portable, portable-int8", "one graph"]
    return [head, *sorted(told_rows, key=lambda row: (-row.count("equal"), row))]


def _cell(results: dict[str, list[str]]) -> str:
    """Names the architectures of a result only beside another one."""
    if len(results) <= 1:
        return next(iter(results), "")
    told = [f"{', '.join(each)}: {one}" for one, each in results.items() if one != "equal"]
    return "; ".join(["equal", *told] if "equal" in results else told)


TABLES = {"model types": model_types, "speed": speed, "runtimes": runtimes}


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
