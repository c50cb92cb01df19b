"""Claims of a bundle, made again from the checkpoint and compared.

The bundle's defaults, precisions and recorded answers decide the served variant and the verdict,
and both sides of a comparison read them: without the checkpoint, a wrong one would go unnoticed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, fields, replace
from itertools import chain
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.checkpoint_folder import CONFIG
from transferry.build_model.model.config import ModelConfig
from transferry.export.oracle.cases import RECORDED as RECORDED_SEARCHES
from transferry.export.oracle.cases import recorded_cases, search_settings
from transferry.export.oracle.effort import recorded_count, recorded_length
from transferry.export.oracle.oracle import Oracle
from transferry.export.recipes import RECIPES
from transferry.export.rewrite.calibration import CALIBRATION
from transferry.export.rewrite.kv_scales import has_int8_cache
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding.generation_options import (
    GenerationOptions,
    generation_options,
)
from transferry.runtime.decoding.search import search
from transferry.runtime.errors import InputError, TransferryError, UsageError
from transferry.runtime.ort.external_files import external_files
from transferry.runtime.precision import FLOAT32
from transferry.runtime.proof.certificates.envelope import FOLDER
from transferry.runtime.proof.compare import Case, Tolerance, Truth, compare
from transferry.runtime.proof.recorded import RECORDED, RecordedSearch, Reference
from transferry.runtime.proof.report import Claim
from transferry.runtime.tokenizer.special_tokens import SETTINGS_FILE

MAX_LENGTH = 256  # where a checkpoint says nothing else
CROSSING = 8  # of so many scores one may have crossed a border of int8 elsewhere alone
CASE = ("source", "mask", "target", "past", "kept")  # what decides the tensors of a case
# Both sides are float64: no rounding in float32 excuses it.
EXACT = Tolerance(1.0)


def require_exported_from(checkpoint: Checkpoint, bundle: Bundle) -> None:
    """Requires that a bundle has the shape and the tokenizer of a checkpoint.

    Raises:
        InputError: It has others, or links in place of files.
    """
    bundle.files.require_plain()  # onnx follows no links
    found = ModelConfig.from_dict(dict(bundle.manifest.model))
    if differing := _differences(checkpoint.model.config, found):
        raise InputError(
            f"{bundle.folder} holds another model, whose {differing[0]}; give the checkpoint that "
            "was exported"
        )
    if bundle.tokenizer != checkpoint.tokenizer:
        raise InputError(
            f"{bundle.folder} and the checkpoint do not have the same tokenizer; give the "
            "checkpoint that was exported"
        )


def default_generation(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the defaults of generation of a bundle of this checkpoint.

    Raises:
        InputError: The checkpoint has settings outside of generation, or out of range.
    """
    longest = min(MAX_LENGTH, checkpoint.model.config.max_positions)
    values = {"max_length": longest, **checkpoint.generation}
    try:
        generation_options(values)
    except UsageError as error:
        raise InputError(
            f"{CONFIG} of the checkpoint cannot be used: {error}; correct it"
        ) from error
    return values


def manifest_claims(checkpoint: Checkpoint, bundle: Bundle) -> list[Claim]:
    """Compares a manifest with the checkpoint: defaults, architecture and every variant."""
    manifest, config = bundle.manifest, checkpoint.model.config
    wanted = GenerationOptions(**default_generation(checkpoint))
    found = GenerationOptions(**manifest.generation)
    claims = [
        Claim("generation defaults", "; ".join(_differences(wanted, found))),
        Claim("architecture", _unequal("architecture", config.architecture, manifest.architecture)),
    ]
    if checkpoint.head is not None or manifest.head is not None:
        claims.append(Claim("head", _unequal("head", checkpoint.head, manifest.head)))
    for variant in manifest.variants.values():
        problems = filter(None, _variant_problems(variant, config))
        claims.append(Claim(f"variant {variant.name}", "; ".join(problems)))
    if checkpoint.tokenizer is bundle.tokenizer:
        told = "the checkpoint is a module without one, so the bundle's own was used"
        claims.append(Claim("tokenizer", skipped=told))
    if told := "; ".join(_strays(bundle)):
        claims.append(Claim("files", skipped=told))
    return claims


def _strays(bundle: Bundle) -> Iterator[str]:
    """Describes files that nothing reads, and files that the manifest does not list."""
    listed, used = {*bundle.manifest.files}, {SETTINGS_FILE, *bundle.tokenizer.names}
    for variant in bundle.manifest.variants.values():
        beside = PurePosixPath(variant.reference)
        used |= {variant.reference, beside.with_name(CALIBRATION).as_posix()}
        used |= {tensor.file for tensor in variant.screen.values()}
        for graph in variant.graphs.values():
            names = external_files(bundle.files.read(graph.file))
            file = PurePosixPath(graph.file)
            used |= {graph.file, *(file.with_name(name).as_posix() for name in names)}
    found = (path for path in bundle.folder.rglob("*") if path.is_file())
    present = {path.relative_to(bundle.folder).as_posix() for path in found}
    # Certificates are no part of the verified files; hidden files belong to other programs.
    foreign = {name for name in present if name.startswith((f"{FOLDER}/", ".")) or "/." in name}
    if unread := sorted(listed - used):
        yield f"nothing reads {', '.join(unread)}"
    if unlisted := sorted(present - listed - foreign - {MANIFEST}):
        yield f"{', '.join(unlisted)} not listed in {MANIFEST}"


def recorded_claim(bundle: Bundle, variant: Variant, oracle: Oracle) -> Claim:
    """Makes the recorded answers of a variant again, with its oracle, and compares."""
    reference = Reference.of(bundle, variant)
    hollow = _hollow(reference, oracle, bundle.manifest.generation)
    problems = filter(None, (*hollow, *_reference_problems(reference, oracle)))
    return Claim(RECORDED, next(problems, ""))


def _hollow(reference: Reference, oracle: Oracle, generation: Mapping[str, Any]) -> Iterator[str]:
    """Describes cases and searches that `Oracle.record` would have made, and others."""
    config = oracle.config
    expected = recorded_cases(config)
    if len(reference.cases) != len(expected):
        yield f"hold {len(reference.cases)} cases, expected {len(expected)}"
    for one, (case, _) in zip(expected, reference.cases, strict=False):
        if not _same(one, case):
            yield f"{case.name}: expected the inputs that export records ({one.name})"
    names = RECORDED_SEARCHES if config.decoder_layers else ()
    found = [item.name for item in reference.searches]
    if found != [*names]:
        yield f"hold the searches {', '.join(found) or 'none'}, expected {', '.join(names)}"
    sources, count = reference.sources, recorded_count(oracle.trained.model)
    # Random ones, of a small vocabulary, may be alike.
    if len(sources) < count or 2 * len({*map(tuple, sources)}) < count:
        yield f"hold {len(sources)} sources, expected {count} different ones; export again"
    longest = recorded_length(oracle.trained.model)
    for item in reference.searches if found == [*names] else ():
        given = config, reference.sources, longest
        wanted = GenerationOptions(**search_settings(item.name, generation, *given))
        try:
            options = generation_options(item.options)
        except UsageError as error:
            yield f"{item.name}: {error}"
            continue
        # Another version may have recorded longer answers.
        length = max(wanted.max_length, options.max_length)
        differences = _differences(replace(wanted, max_length=length), options)
        yield f"{item.name}: {'; '.join(differences)}" if differences else ""


def _unequal(name: str, wanted: object, found: object) -> str:
    return "" if wanted == found else f"{name} is {found!r}, the checkpoint has {wanted!r}"


def _differences(wanted: Any, found: Any) -> list[str]:
    """Describes the fields of two dataclasses of a type that differ."""
    names = [field.name for field in fields(wanted)]
    compared = (_unequal(name, getattr(wanted, name), getattr(found, name)) for name in names)
    return [problem for problem in compared if problem]


def _variant_problems(variant: Variant, config: ModelConfig) -> Iterator[str]:
    recipe = RECIPES.get(variant.name)
    if recipe is None:
        yield f"is unknown to export, which makes {', '.join(RECIPES)}"
        return
    yield _unequal("precision", recipe.precision.name, variant.precision)
    yield _unequal("providers", recipe.providers, tuple(variant.providers))
    cache = None
    if config.decoder_layers:
        kept = (FLOAT32 if recipe.precision.rounded else recipe.precision).name
        if recipe.precision.calibrated and has_int8_cache(config):
            kept = "int8"
        cache = recipe.fused, kept, "state" if config.recurrent else "columns"
    yield _unequal("cache", cache, variant.cache and astuple(variant.cache))
    ranks = "top_k" in variant.graphs if recipe.precision.kernels else not recipe.on_cpu
    yield _unequal("top_k", bool(recipe.fused and cache and ranks), variant.top_k)
    yield _unequal("reference", recipe.reference, variant.reference)
    screened = {"approximate_logits", "lm_head"} <= variant.graphs.keys()
    if screened != bool(variant.screen):
        yield "has graphs of a screen without the screen, or the screen alone"


def _reference_problems(reference: Reference, oracle: Oracle) -> Iterator[str]:
    config = oracle.config
    sources = [source for case, _ in reference.cases for source in case.source.tolist()]
    targets = [target for case, _ in reference.cases for target in case.target.tolist()]
    read, written = config.source_vocabulary, config.vocabulary_size
    for rows, size in (([*sources, *reference.sources], read), (targets, written)):
        for tokens in rows:
            known = all(0 <= token < size for token in tokens)
            if len(tokens) > config.max_positions or not known:
                yield "hold a token or a length that the model does not have"
                return
    for case, truth in reference.cases:
        yield _case_problem(case, truth, oracle)
    for item in reference.searches:
        yield _search_problem(item, reference.sources, oracle)


def _same(one: Case, other: Case) -> bool:
    pairs = ((getattr(case, name) for case in (one, other)) for name in CASE)
    return all(np.array_equal(*each) for each in pairs)


def _wider(name: str, found: float, own: float, oracle: Oracle) -> str:
    """Describes a recorded error of torch that is larger than rounding on any machine explains.

    In integers another processor's float32 may move a value across a border: 0.032 of `crossed`'s
    0.063 where torch exported without vector instructions.
    """
    limit = Tolerance.factor * max(own, oracle.tolerance.floor)
    if found <= max(limit, oracle.tolerance.crossed if oracle.others else 0.0):
        return ""
    return f"{name}: torch's own error is recorded as {found:.1e}, it is {own:.1e}"


def _case_problem(case: Case, recorded: Truth, oracle: Oracle) -> str:
    made = oracle.truth(case)
    exact = Truth(made.oracle, {name: 0 * own for name, own in made.errors.items()}, made.least)
    if recorded.least > 4 * made.least:  # in which errors would look small
        unit = f"the head's unit is recorded as {recorded.least:.1e}"
        return f"{case.name}: {unit}, not as the checkpoint's"
    faults = [item for item in compare(case, exact, recorded.oracle, EXACT) if item.fault]
    if faults:
        return f"{case.name}: {faults[0].tensor}: {faults[0].fault}"
    wider = (
        _wider(f"{case.name}: {name}", recorded.worst(name), made.worst(name), oracle)
        for name in made.errors
    )
    return next(filter(None, wider), "")


def _search_problem(item: RecordedSearch, sources: Sequence[Sequence[int]], oracle: Oracle) -> str:
    """Describes the first answer that is neither torch's nor tied with it, or a wrong score."""
    try:
        options = generation_options(item.options)
        answers = search(oracle.reference, sources, options, oracle.special)
    except TransferryError as error:
        return f"{item.name}: {error}"
    if not len(sources) == len(item.answers) == len(item.scores):
        return f"{item.name}: expected answers to {len(sources)} sources"
    recorded = item.hypotheses
    explainer = replace(oracle.explainer(oracle.exact, options), tolerance=Tolerance())
    for row, (source, wanted, found) in enumerate(zip(sources, answers, recorded, strict=True)):
        if len(found) != len(wanted):
            return f"{item.name}: row {row}: {len(found)} answers, expected {len(wanted)}"
        if [one.scored_tokens for one in wanted] != [one.scored_tokens for one in found]:
            divergence = explainer.explain(source, wanted, found, row)
            if not divergence.passes:
                return f"{item.name}: row {row}: {divergence}"
    exact, fresh = (oracle.scores(sources, each, options) for each in (recorded, answers))
    moved = 0
    for told, true, own in zip(*map(chain.from_iterable, (item.exact, exact, fresh)), strict=True):
        if told.own > Tolerance.factor * own.own and own.wider is not None:
            own = own.wider()
        moved += told.own > Tolerance.factor * max(own.own, oracle.tolerance.floor)
        if not abs(told.score - true.score) <= own.own:
            return f"{item.name}: a score is {abs(told.score - true.score):.1e} nats off"
        if wider := _wider(item.name, told.own, own.own, oracle):
            return wider
    # 1 of 40 without vector instructions.
    most = 1 + (scores := sum(map(len, exact))) // CROSSING
    if moved <= most:
        return ""
    return (
        f"{item.name}: torch's own errors of {moved} of {scores} scores are recorded as wider than "
        f"here (at most {most}); export again on this kind of processor"
    )
