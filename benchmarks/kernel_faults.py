"""Does `verify` catch faults in the operators of transferry-kernels?

    python benchmarks/kernel_faults.py CHECKPOINT BUNDLE TEXT [--rows 40] [--only NAME,NAME]

With the package installed (`make kernels`), builds it from copies of its source, the first as it
is, each other one with one fault, and verifies the variant cpu-int8-kernels of BUNDLE with each up
to the first check that fails. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from faults import ANSWERS_ALONE, verified
from sentences import read_sentences
from transferry.build_model.checkpoint import load_checkpoint
from transferry.export.trace.graph import Traces
from transferry.export.verify import Request, Verification
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.errors import InputError, TransferryError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions, kernels
from transferry.runtime.tables import table

PACKAGE = Path(__file__).parents[1] / "kernels"
VARIANT = "cpu-int8-kernels"


@dataclass(frozen=True)
class Fault:
    """A change of the source: text that occurs once in a file, and other text for it."""

    name: str
    file: str = ""
    right: str = ""
    wrong: str = ""


KERNELS, LAYER, OPERATORS = "kernels.cpp", "layer.h", "operators.cpp"
FAULTS = (
    Fault("none"),
    Fault("inputs clamped one too early", KERNELS, "float(255 - zero)", "float(254 - zero)"),
    Fault(
        "inputs rounded down", KERNELS, "round_to_even(x) + zero", "round_to_even(x - 0.5f) + zero"
    ),
    Fault(
        "a quotient that two steps do not reach",
        KERNELS,
        "Floats near = x * inverse;",
        "Floats near = x * inverse * 1.5f;",
    ),
    Fault(
        "products of a last row twice", KERNELS, "row += height;", "row += height - (rest == 2);"
    ),
    Fault("no bias", LAYER, "std::copy(given, given + outputs, all_bias.begin());", ""),
    Fault(
        "bias of the last output missing",
        LAYER,
        "std::copy(given, given + outputs, all_bias.begin());",
        "std::copy(given, given + outputs - 1, all_bias.begin());",
    ),
    Fault(
        "scale of one output off by 2^-12",
        LAYER,
        "all_scales[n] = factor * each[n];",
        "all_scales[n] = factor * each[n] * (n == 5 ? 1.000244f : 1.f);",
    ),
    Fault("zero point of inputs forgotten", LAYER, "starts[n] -= input_zero * w[i];", ""),
    Fault(
        "one input dropped",
        LAYER,
        "% 64 * 4 + i % 4] = w[i];",
        "% 64 * 4 + i % 4] = i == 9 ? 0 : w[i];",
    ),
    Fault("no epsilon", KERNELS, " + norm.epsilon)", ")"),
    Fault("epsilon halved", KERNELS, " + norm.epsilon)", " + norm.epsilon / 2)"),
    Fault(
        "residual of the first row",
        KERNELS,
        "residual += R * width",
        "residual += 0",
    ),
    Fault(
        "mean of one value less", KERNELS, "(t[1] + t[3])) / width", "(t[1] + t[3])) / (width - 1)"
    ),
    Fault(
        "a coarse exponential",
        KERNELS,
        "e = exponential(load(scores + c) - peak);",
        "e = exponential(load(scores + c) - peak); if (c) e = e * 1.0001f;",
    ),
    Fault(
        "the last column unread",
        KERNELS,
        "for (int c = 0; c < a.columns; ++c) {\n      const Element* value",
        "for (int c = 0; c < a.columns - (a.columns > 9); ++c) {\n      const Element* value",
    ),
    Fault(
        "rows of AMX's second tile from the first",
        KERNELS,
        "_tile_loadd(5, x[1] + i",
        "_tile_loadd(5, x[0] + i",
    ),
    Fault(
        "64 inputs less in AMX's tiles",
        KERNELS,
        "i < w.inputs; i += 64, weights",
        "i < w.inputs - 64; i += 64, weights",
    ),
    Fault(
        "exponentials of the last part left out",
        OPERATORS,
        "part < parts; ++part",
        "part < parts - 1; ++part",
    ),
    Fault("the last part unranked", OPERATORS, "n < tokens && n <", "n < tokens - PART && n <"),
    Fault(
        "of equal logits the last first",
        KERNELS,
        "logits[token] > best.logits[place - 1]",
        "logits[token] >= best.logits[place - 1]",
    ),
    Fault(
        "ranked without order", KERNELS, "for (; place > 0 && logits", "for (; place > 9 && logits"
    ),
    Fault(
        "maxima of half a segment",
        OPERATORS,
        "largest(x + n, SEGMENT)",
        "largest(x + n, SEGMENT / 2)",
    ),
    Fault("no mask in the encoder", KERNELS, "if (!a.mask[c])", "if (false)"),
    Fault(
        "no mask of the cache",
        OPERATORS,
        "single ? nullptr : bias + first * cache.columns",
        "nullptr",
    ),
    Fault(
        "the new token unseen",
        OPERATORS,
        "positions[slot] + 1",
        "positions[slot] + (positions[slot] == 0)",
    ),
    Fault(
        "the first beam's column for all",
        OPERATORS,
        "single ? positions[row] : cell[2]",
        "single ? positions[row] : cells[first * cache.heads * 3 + 2]",
    ),
    Fault(
        "one source column less",
        OPERATORS,
        "while (columns > 1 &&",
        "if (columns > 6) --columns;\n      while (columns > 1 &&",
    ),
    Fault(
        "keys rounded down",
        KERNELS,
        "min(max(x, broadcast(-128.f)), broadcast(127.f))",
        "min(max(x - 0.25f, broadcast(-128.f)), broadcast(127.f))",
    ),
    Fault(
        "values of the first head",
        OPERATORS,
        "kernels().round_to_int8(key + d, width, values + at",
        "kernels().round_to_int8(key + d - head * width, width, values + at",
    ),
    Fault(
        "positions one too early",
        KERNELS,
        "e.positions + positions[row] * e.width",
        "e.positions + (positions[row] - (positions[row] > 40)) * e.width",
    ),
)


def build(fault: Fault, folder: Path) -> None:
    """Builds the package with a fault, and puts it in the place of the installed one."""
    source, site = folder / "kernels", folder / "site"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("build*"))
    if fault.file:
        path = source / "src" / fault.file
        content = path.read_text(encoding="utf-8")
        if content.count(fault.right) != 1:
            raise InputError(
                f"expected {fault.right!r} once in {path.name}; correct fault {fault.name}"
            )
        path.write_text(content.replace(fault.right, fault.wrong), encoding="utf-8")
    options = "-q", "--no-deps", "--target"
    subprocess.run([sys.executable, "-m", "pip", "install", *options, site, source], check=True)
    sys.modules.pop("transferry_kernels", None)
    sys.path.insert(0, str(site))
    kernels.cache_clear()
    found = kernels()  # which imports it
    sys.path.remove(str(site))
    if not Path(found.library).is_relative_to(site):
        raise InputError(f"expected the package in {site}, found {found.library or found.found}")


def main() -> None:
    """Verifies and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="example: kernel_faults.py runs/small bundles/small test_2016_flickr.en",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="with cpu-int8-kernels")
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("--rows", type=int, default=40, help="default: 40")
    parser.add_argument("--only", default="", help="faults whose names begin so; a,b")
    arguments = parser.parse_args()
    begun, found = tuple(arguments.only.split(",")), {}
    try:
        checkpoint, bundle = load_checkpoint(arguments.checkpoint), Bundle.load(arguments.bundle)
        texts = read_sentences(arguments.text, arguments.rows)
        model = open_model(bundle, bundle.variant(VARIANT), SessionOptions())
        request = Request(texts, effort=ANSWERS_ALONE)
        work = Verification.of(checkpoint, bundle, model, request, Traces())
        work = replace(work, oracle=work.oracle.remembering())
        for fault in FAULTS:
            if not fault.name.startswith(begun):
                continue
            with tempfile.TemporaryDirectory(prefix="transferry-") as folder:
                build(fault, Path(folder))
                found[fault.name] = verified(work, work.subject.reopened(bundle.folder))
            print(f"{fault.name}: {found[fault.name] or 'passed'}", file=sys.stderr)
    except TransferryError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    print(table(("fault", "caught by"), [(name, each or "passed") for name, each in found.items()]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
