"""Parts of the tests of js/: hard strings, bundles of a tokenizer alone, and running `npm test`."""

import hashlib
import json
import random
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.commands import PATIENCE
from tests.optional import program
from transferry import Engine
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer
from transferry.runtime.tokenizer.third_party import SentencePieceTokenizer

IN_JAVASCRIPT = {
    "long_rows": "longRows",
    "source_language": "sourceLanguage",
    "target_language": "targetLanguage",
    "first_row": "firstRow",
    "chat_template_kwargs": "chatTemplateKwargs",
}
JS = Path(__file__).resolve().parents[2] / "js"
NODE = program("node")

# Strings that tokenizers get wrong: one of each kind, then mixtures of them.
PIECES = (
    *("Straße", "Übergrößen", "ẞ", "İI ıi", "ſ's", "'S", "'LL", "'ſ", "don't", "DON'T", "’s"),
    *("\u212a", "e\u0301", "\u0301", "a\u0308\u0323", "क्षि", "ﬁ", "Ǆ", "ʰ", "ª", "Ⅷ", "²³", "½"),
    *("٣٤٥", "१२३४५", "日本語", "漢字かな交じり文", "한국어", "\u1112\u1161\u11ab", "ไทย"),
    *("עברית", "العربية", "𠮷", "𝒳", "😀", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "❤️", "\u200d", "\ufe0f"),
    *("\u200b", "\u2060", "\ufeff", "\u00ad", " ", "  ", "   \n", "\t", "\r\n", "\n\n", "\x85"),
    *("\xa0", "\u2028", "\u3000", "\u180e", "\x1c", "<s>", "</s>", "<|endoftext|>", "[MASK]"),
    *("<pad>", "<unk>", ">>fra<<", "▁", "\x00", "\x7f", "\\", "1234567", "1,000.5", "a1b2"),
    *("...", "?!\n", "--", "/path/x", "$$", "_a_", "\U0010ffff", "\ufffd", "\ud800", "\udc00x"),
    *("\ud83d\ude00", "anna " * 40, "a" * 700, " " * 700, "é" * 300, "^" * 600),
)


def hard_strings(count: int = 1000, *, surrogates: bool = True) -> list[str]:
    """Returns strings; libraries of others take none with lone surrogates."""
    rng = random.Random(0)
    mixed = ["".join(rng.choices(PIECES[:-5], k=rng.randint(2, 6))) for _ in range(count)]
    singles = [chr(code) for code in range(0, 0xD800, 613)]
    found = [*PIECES, *singles, *mixed]
    if not surrogates:
        found = [text for text in found if not any(0xD800 <= ord(one) < 0xE000 for one in text)]
    return found[:count]


def ids_case(
    folder: Path, tokenizer: AnyTokenizer, texts: list[str], *, places: bool = False
) -> dict[str, Any]:
    """Saves a tokenizer as a bundle, and returns its ids and texts."""
    folder.mkdir()
    tokenizer.save(folder)
    seal(folder, tokenizer.vocabulary_size)
    found = tokenizer.encode_batch(texts)
    case = {"bundle": str(folder), "texts": texts, "ids": found}
    case["decoded"] = [tokenizer.decode(each) for each in found]
    case["targets"] = [tokenizer.encode_target(each) for each in texts[:200]]
    # Answers may end anywhere, and hold any ids.
    rng = random.Random(1)
    drawn = [rng.choices(range(tokenizer.vocabulary_size), k=9) for _ in range(200)]
    case["answers"] = [[ids, tokenizer.decode(ids)] for ids in drawn]
    case |= _special_cases(tokenizer, texts[:200])
    if places:
        case["places"] = [[[*place[:3]] for place in tokenizer.places(text)] for text in texts]
    return case


def _special_cases(tokenizer: AnyTokenizer, texts: list[str]) -> dict[str, Any]:
    """Returns ids of masked texts, and of texts with special tokens, read as tokens."""
    special = tokenizer.special_texts()
    if not special or isinstance(tokenizer, SentencePieceTokenizer):
        return {}
    mask, own = special.get("[MASK]", [*special.values()][-1]), tokenizer.special
    masked = replace(own, mask_id=mask)
    made = type(tokenizer)._restore(tokenizer._settings(), masked, tokenizer._contents())
    around = [f"{text} [MASK]  [MASK]\t{text}".split("[MASK]") for text in texts]
    found: dict[str, Any] = {"mask": mask, "masked": [made.encode_masked(each) for each in around]}
    made = type(tokenizer)._restore(tokenizer._settings(), own, tokenizer._contents())
    made.read_special_tokens()
    written = [f"{text}{other} {text}" for text, other in zip(texts, special, strict=False)]
    found["written"] = [*texts, *written]
    return found | {"special": [made.encode(text) for text in found["written"]]}


def npm_test(cases: Path | None = None) -> str:
    """Runs the tests of js/ that compare cases, or the others; returns their output."""
    assert NODE is not None
    name = "units" if cases is None else "parity"
    command = [NODE, "--test", "--test-reporter=tap", str(JS / "test" / f"{name}.test.js")]
    environment = {"PATH": str(Path(NODE).parent), "TRANSFERRY_CASES": str(cases or "")}
    made = subprocess.run(
        command,
        cwd=JS,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    failed = made.stdout.partition("not ok")[2][:4000]
    assert made.returncode == 0, failed or made.stdout[-4000:] + made.stderr[-2000:]
    return made.stdout


def write_cases(
    path: Path,
    answers: list[dict[str, Any]],
    ids: list[dict[str, Any]],
    refused: Sequence[dict[str, str]] = (),
    chats: Sequence[dict[str, Any]] = (),
    **documents: Sequence[Any],
) -> Path:
    """Writes the file that js/test compares.

    It has records, ids, chats, bundles that must be refused, and drawn documents.
    """

    def plain(value: object) -> object:
        assert isinstance(value, np.ndarray)
        return value.tolist()

    cases: dict[str, Any] = {"answers": answers, "ids": ids, "refused": refused, "chats": chats}
    cases |= {"manifests": (), "settings": (), **documents}
    path.write_text(json.dumps(cases, default=plain))
    return path


def answers_of(
    folder: Path,
    task: str,
    options: dict[str, Any],
    texts: Sequence[Any],
    variant: str = "portable",
    *,
    refused: str = "",
    special: Literal["as-text", "as-tokens"] = "as-text",
) -> dict[str, Any]:
    """Returns the records of Python for js/test to compare, or why the options are refused."""
    method = task.replace("-", "_")
    with Engine(folder, variant=variant, special_tokens=special) as engine:
        rows = [(text, None) for text in texts]
        pairs = task == "score" and not engine.decoder.has_encoder
        found = [] if refused else getattr(engine, method)(rows if pairs else texts, **options)
        records = [each.record(options.get("n_best", 1)) for each in found]
    options = {IN_JAVASCRIPT.get(name, name): options[name] for name in options}
    first, *rest = task.split("-")  # "fill-mask" is the method fillMask
    named = {"task": task, "method": first + "".join(map(str.capitalize, rest))}
    case = {"bundle": str(folder), "variant": variant, **named, "options": options}
    case["special"] = special
    for name, other in {**IN_JAVASCRIPT, "=True": "=true", "=False": "=false"}.items():
        refused = refused.replace(name, other)
    return {**case, "texts": texts, "records": None if refused else records, "refused": refused}


def seal(folder: Path, vocabulary: int) -> None:
    """Writes a manifest that lists the files of a tokenizer."""
    files = {
        path.name: {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "size": path.stat().st_size,
        }
        for path in folder.iterdir()
    }
    model = {"vocabulary_size": vocabulary, "max_positions": 512, "d_model": 8}
    graph = {"file": "tokenizer.json", "inputs": [], "outputs": []}  # never opened
    computing = {"precision": "float32", "providers": ["cpu"], "opset": 20}
    computing |= {"graphs": {"encoder": graph}, "reference": "tokenizer.json"}
    manifest = {"format": 9, "architecture": "encoder-only", "model": model, "generation": {}}
    manifest |= {"variants": {"portable": {"name": "portable", **computing}}}
    manifest |= {"files": files, "versions": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
