"""A bundle's claims are compared with the checkpoint, whatever is changed in it."""

import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.export.conftest import verified
from tests.sealed import records
from transferry.build_model.checkpoint import Checkpoint
from transferry.export.checks.claims import manifest_claims, recorded_claim
from transferry.export.oracle.oracle import Oracle
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import Manifest
from transferry.runtime.bundle.specs import REFERENCE, CacheSpec, Variant
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.io.sealed_folder import FileRecord
from transferry.runtime.proof.compare import Case, Tolerance, Truth
from transferry.runtime.proof.recorded import RecordedSearch, Reference
from transferry.runtime.proof.views import report_text

# Another value of each field, valid beside the defaults.
OTHER_OPTIONS: dict[str, Any] = {
    "beam": 4,
    "n_best": 2,
    "length_penalty": 0.0,
    "early_stopping": "never",
    "max_total_length": 40,
    "min_total_length": 3,
    "min_p": 0.1,
    "typical_p": 0.9,
    "repetition_penalty": 1.2,
    "prompt_ngrams": True,
    "suppress_sequences": ((5, 6),),
    "suppress_begin": (7,),
    "forced_begin": 9,
    "forced_end": (2,),
    "renormalise": True,
    "stop": (".",),
    "split_lines": False,
    "min_length": 2,
    "max_length": 20,
    "no_repeat_ngram": 3,
    "sample": True,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "seed": 7,
    "prefix": (5,),
    "suppress": (9,),
    "scores": False,
}
# The needs of each.
NEEDED: dict[str, dict[str, Any]] = {
    "n_best": {"beam": 2},
    "early_stopping": {"beam": 2},
    **{name: {"sample": True} for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")},
}
OTHER_VARIANTS: dict[str, Any] = {
    "precision": "int8",
    "providers": ("cpu",),
    "cache": CacheSpec(in_place=True, type="float32"),
    "top_k": True,
    "name": "mine",
}


def altered(bundle: Bundle, **changes: Any) -> Bundle:
    manifest: Manifest = replace(bundle.manifest, **changes)
    return Bundle(bundle.folder, manifest, bundle.tokenizer)


def problems(checkpoint: Checkpoint, bundle: Bundle) -> dict[str, str]:
    return {c.name: c.problem for c in manifest_claims(checkpoint, bundle) if c.problem}


def test_an_honest_bundle_says_what_the_run_says(pair: tuple[Checkpoint, Bundle]) -> None:
    checkpoint, bundle = pair
    assert problems(checkpoint, bundle) == {}
    oracle = Oracle.of(checkpoint.model, checkpoint.tokenizer.special, Tolerance())
    assert recorded_claim(bundle, bundle.variant(), oracle).problem == ""


def test_every_variant_is_what_its_recipe_says(calm: Checkpoint, all_variants: Bundle) -> None:
    assert problems(calm, all_variants) == {}
    assert len(all_variants.manifest.variants) == 4


def test_every_option_of_generation_is_tried() -> None:
    assert OTHER_OPTIONS.keys() == {field.name for field in fields(GenerationOptions)}


@pytest.mark.parametrize("name", OTHER_OPTIONS)
def test_another_default_is_told(name: str, checkpoint: Checkpoint, bundle: Bundle) -> None:
    generation = {**bundle.manifest.generation, **NEEDED.get(name, {}), name: OTHER_OPTIONS[name]}
    found = problems(checkpoint, altered(bundle, generation=generation))
    assert f"{name} is {OTHER_OPTIONS[name]!r}" in found["generation defaults"]


@pytest.mark.parametrize("name", OTHER_VARIANTS)
def test_another_variant_is_told(name: str, checkpoint: Checkpoint, bundle: Bundle) -> None:
    variant: Variant = replace(bundle.variant(), **{name: OTHER_VARIANTS[name]})
    found = problems(checkpoint, altered(bundle, variants={variant.name: variant}))
    assert found.keys() == {f"variant {variant.name}"}


Change = Callable[[Reference], Reference]


def on_first_case(change: Callable[[Truth], Truth]) -> Change:
    def changed(reference: Reference) -> Reference:
        (case, truth), *rest = reference.cases
        return replace(reference, cases=[(case, change(truth)), *rest])

    return changed


def on_searches(change: Callable[[RecordedSearch], RecordedSearch]) -> Change:
    return lambda reference: replace(
        reference, searches=[change(item) for item in reference.searches]
    )


def on_last_case(change: Callable[[Case], Case]) -> Change:
    def changed(reference: Reference) -> Reference:
        *rest, (case, truth) = reference.cases
        return replace(reference, cases=[*rest, (change(case), truth)])

    return changed


def hollow(sources: int | None, length: int | None) -> Change:
    """A record cut to so many sources, and to answers of so many tokens."""

    def cut(item: RecordedSearch) -> RecordedSearch:
        options = dict(item.options) | ({} if length is None else {"max_length": length})
        answers = [[tokens[:length] for tokens in row] for row in item.answers[:sources]]
        lists = ("scores", "score_error", "ends")
        kept: dict[str, Any] = {name: getattr(item, name)[:sources] for name in lists}
        return replace(item, options=options, answers=answers, **kept)

    def changed(reference: Reference) -> Reference:
        return replace(on_searches(cut)(reference), sources=reference.sources[:sources])

    return changed


CHANGES: dict[str, Change] = {
    "tensors": on_first_case(
        lambda truth: replace(truth, oracle={k: v * 1.01 for k, v in truth.oracle.items()})
    ),
    "a tensor less": on_first_case(
        lambda truth: Truth(
            {name: tensor for name, tensor in truth.oracle.items() if name != "logits"},
            {name: error for name, error in truth.errors.items() if name != "logits"},
        )
    ),
    "errors": on_first_case(
        lambda truth: replace(truth, errors={k: 1e4 * v for k, v in truth.errors.items()})
    ),
    "answers of the next row": on_searches(
        lambda item: replace(item, answers=[*item.answers[1:], item.answers[0]])
    ),
    "scores": on_searches(
        lambda item: replace(item, scores=[[s + 0.01 for s in row] for row in item.scores])
    ),
    "score error": on_searches(
        lambda item: replace(item, score_error=[[1e4 * one.own for one in r] for r in item.exact])
    ),
    "one score error for all": on_searches(lambda item: replace(item, score_error=1.0)),
    "options": on_searches(lambda item: replace(item, options={**item.options, "min_length": 9})),
    "options that are none": on_searches(lambda item: replace(item, options={"beam": 0})),
    "tokens": lambda reference: replace(reference, sources=[[10**6]]),
    "no searches": lambda reference: replace(reference, searches=[]),
    "no cases": lambda reference: replace(reference, cases=[]),
    "one case": lambda reference: replace(reference, cases=reference.cases[:1]),
    "one case thrice": lambda reference: replace(reference, cases=[*reference.cases[:1]] * 3),
    "a smaller case": on_last_case(lambda case: replace(case, rows=case.kept[:1])),
    "no sources": hollow(0, None),
    "one source": hollow(1, None),
    "answers of one token": hollow(None, 1),
    "one answer of one token": hollow(1, 1),
    "no beams": lambda reference: replace(reference, searches=reference.searches[:1]),
    "fewer hypotheses": on_searches(
        lambda item: (
            replace(
                item,
                answers=[row[:1] for row in item.answers],
                scores=[row[:1] for row in item.scores],
                ends=[row[:1] for row in item.ends],
                score_error=[[each.own for each in row[:1]] for row in item.exact],
            )
            if item.name == "beam 4"
            else item
        )
    ),
}


def problem_of(reference: Reference, bundle: Bundle, oracle: Oracle, folder: Path) -> str:
    reference.save(folder / REFERENCE)
    copy = Bundle(folder, replace(bundle.manifest, files=records(folder)), bundle.tokenizer)
    return recorded_claim(copy, copy.variant(), oracle).problem


@pytest.mark.parametrize("name", CHANGES)
def test_another_record_is_told(name: str, bundle: Bundle, oracle: Oracle, tmp_path: Path) -> None:
    reference = Reference.load(bundle.folder / REFERENCE)
    assert problem_of(reference, bundle, oracle, tmp_path) == ""
    assert problem_of(CHANGES[name](reference), bundle, oracle, tmp_path)


def test_another_end_with_its_own_score_is_told(
    bundle: Bundle, oracle: Oracle, tmp_path: Path
) -> None:
    reference = Reference.load(bundle.folder / REFERENCE)

    def ended(item: RecordedSearch) -> RecordedSearch:
        pairs = zip(item.answers, item.ends, strict=True)
        # An answer without any token has no score.
        ends = [[None if tokens else end for tokens, end in zip(*p, strict=True)] for p in pairs]
        given = reference.sources, replace(item, ends=ends).hypotheses
        found = oracle.scores(*given, GenerationOptions(**item.options))
        scores = [[one.score for one in row] for row in found]
        return replace(item, ends=ends, scores=scores)

    told = problem_of(on_searches(ended)(reference), bundle, oracle, tmp_path)
    assert "torch prefers" in told


def test_files_that_nothing_reads_or_lists_are_told(
    checkpoint: Checkpoint, bundle: Bundle, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(bundle.folder, tmp_path / "copy"))
    (folder / "certificates").mkdir(exist_ok=True)
    for name in ("certificates/x.json", ".gitattributes", "portable/spare.onnx", "listed.bin"):
        (folder / name).write_bytes(b"x")
    files = {**bundle.manifest.files, "listed.bin": FileRecord(64 * "0", 1)}
    copy = Bundle(folder, replace(bundle.manifest, files=files), bundle.tokenizer)
    told = {each.name: each for each in manifest_claims(checkpoint, copy)}["files"]
    assert not told.problem
    assert (
        "nothing reads listed.bin; portable/spare.onnx not listed in manifest.json" in told.skipped
    )


def test_a_wrong_claim_fails_the_verification(checkpoint: Checkpoint, bundle: Bundle) -> None:
    """And does not decide what passes: int8 would allow 2 ** 15 times the error."""
    variant = replace(bundle.variant(), precision="int8")
    generation = {"max_length": 20, "beam": 2}
    wrong = altered(bundle, variants={"portable": variant}, generation=generation)
    report = verified(checkpoint, wrong, [])
    assert not report.passed
    assert report.tolerance == Tolerance()
    named = [line.partition(":")[0] for line in report.faults]
    assert named == ["generation defaults", "variant portable"]
    assert "6 of 9 claims match the checkpoint, 1 not compared" in report_text(report)
    assert len(report.to_dict()["claims"]) == 9
