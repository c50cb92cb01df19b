"""Certificates of reports made by hand, and bundles that somebody changes on purpose."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.bundle.specs import IN_PLACE, CacheSpec
from transferry.runtime.decoding.decoder import StepOutput
from transferry.runtime.io.whole import sha256
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.certificates.certificate import Certificate
from transferry.runtime.proof.certificates.envelope import FOLDER, REPORT, Envelope
from transferry.runtime.proof.certificates.signature import load_private_key
from transferry.runtime.proof.certificates.stored import certify
from transferry.runtime.proof.certificates.strength import GRAPHS
from transferry.runtime.proof.compare import Comparison, Tolerance
from transferry.runtime.proof.recorded import verify_recorded
from transferry.runtime.proof.report import Claim, ParityReport

DATE = "2026-11-21"
PRECISIONS = {"fp32": "float32", "fp16": "float16"}


def a_report(
    against: str = "the run",
    fault: str = "",
    *,
    claims: Mapping[str, str] = {GRAPHS: ""},
    searches: Sequence[Any] = ({"beam": 1}, {"beam": 4, "n_best": 4}),
    settings: Mapping[str, Any] = {},
) -> ParityReport:
    tensor = Comparison("case", "logits", "text", 1e-8, 1e-7, 1e-6, fault)
    own = {"against": against, "batch_rows": 64, "tasks": ["generate", "score"]}
    made = [Claim(name, skipped=reason) for name, reason in claims.items()]
    given = "bundle", own | dict(settings), Tolerance(), [tensor]
    return ParityReport(*given, claims=made, searches=searches)


def certified(
    bundle: Bundle | Path,
    variant: str | None = None,
    sign: Path | None = None,
    against: str = "the run",
    force: bool = False,
    **report: Any,
) -> Certificate:
    """Writes the certificate of a report that passed."""
    bundle = Bundle.load(bundle) if isinstance(bundle, Path) else bundle
    key = load_private_key(sign) if sign else None
    given = bundle, bundle.variant(variant), SessionOptions(), a_report(against, **report), DATE
    found = certify(*given, key=key, force=force)
    assert found is not None
    return found


def verified(folder: Path, *, force: bool = False, **options: Any) -> Certificate:
    """Verifies against the record, and writes the certificate."""
    bundle, session = Bundle.load(folder), SessionOptions(**options)
    report = verify_recorded(bundle, open_model(bundle, bundle.variant(), session))
    found = certify(bundle, bundle.variant(), session, report, DATE, force=force)
    assert found is not None
    return found


def rewrite(path: Path, **changes: Any) -> None:
    """Changes fields of an unsigned certificate."""
    record = json.loads(Envelope.parse(path.read_bytes()).payload)
    record["predicate"][REPORT] |= changes
    path.write_bytes(Envelope.seal(json.dumps(record).encode()).content)


def file_of(folder: Path) -> Path:
    """The bundle's only certificate."""
    (path,) = (folder / FOLDER).iterdir()
    return path


def change_byte(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def remake_manifest(folder: Path, **changes: Any) -> None:
    """A deliberate change of a file: the hashes agree again."""
    record = json.loads((folder / MANIFEST).read_bytes()) | changes
    for name, entry in record["files"].items():
        entry.update(sha256=sha256(folder / name), size=(folder / name).stat().st_size)
    (folder / MANIFEST).write_text(json.dumps(record), encoding="utf-8")


def with_variants(folder: Path, *names: str) -> Bundle:
    """The bundle as if it had these variants too: their entries in the manifest alone matter."""
    bundle = Bundle.load(folder)
    portable = bundle.variant("portable")
    in_place = dict.fromkeys(IN_PLACE["encoder-decoder"], portable.graphs["select"])
    variants = {"portable": portable}
    for name in names:
        provider, precision = name.split("-", 1)
        variants[name] = dataclasses.replace(
            portable,
            name=name,
            precision=PRECISIONS.get(precision, precision),
            providers=(provider,),
            graphs={**portable.graphs, **in_place},
            cache=CacheSpec(in_place=True, type="float32"),
        )
    manifest = dataclasses.replace(bundle.manifest, variants=variants)
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return Bundle.load(folder)


def spoil(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """From now on, multiplies the logits of a bundle that is opened as it is served."""
    step = PortableDecoder.step

    def wrong(self: PortableDecoder, tokens: Any, state: Any, **wanted: Any) -> Any:
        output, later = step(self, tokens, state)
        spoiled = 1.0 if self.options.optimisation == "disable" else factor
        return StepOutput(output.all_logits * spoiled), later

    monkeypatch.setattr(PortableDecoder, "step", wrong)
