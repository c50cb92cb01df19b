"""Fixtures of all tests: the corpus, the needs of a test of CUDA, and models and their bundles."""

import fcntl
import gc
import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import transferry.runtime.ort  # noqa: F401 - before a test imports onnxruntime
from tests.optional import is_installed
from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.doctor import check_cuda
from transferry.runtime.tokenizer.byte_pair import (
    PASSAGES,
    PROMPTS,
    SOURCES,
    AnyTokenizer,
    SpecialTokens,
)

CHECKOUT = Path(__file__).resolve().parent.parent


REQUIRED = os.environ.get("OPTIONAL") == "required"  # by `make test-all`
THOROUGH = REQUIRED or os.environ.get("FUZZ") == "long"

# The short profile tries the same examples each time, so that a red suite is the change's fault; a
# slow machine is no fault in either. `make fuzz` tries EXAMPLES of each test.
UNTIMED: dict[str, Any] = dict(
    deadline=None,
    suppress_health_check=(
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.data_too_large,
    ),
)
settings.register_profile("short", max_examples=3, derandomize=True, **UNTIMED)
EXAMPLES = int(os.environ.get("EXAMPLES", "2500"))
settings.register_profile("long", max_examples=EXAMPLES, print_blob=True, **UNTIMED)
settings.load_profile(os.environ.get("FUZZ", "short"))


def pytest_configure() -> None:
    # On a slow machine a command would show its progress, where a test wants an empty stderr.
    os.environ["TRANSFERRY_LOG_EVERY"] = "inf"
    # Tracing makes millions of small objects that live on: with Python's own thresholds, looking
    # through them all again and again is a quarter of the time of an export.
    gc.set_threshold(100_000, 50, 1000)
    # A shell starts background jobs, this test run perhaps, with SIGINT ignored, and programs that
    # tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names content by its argument: two workers must agree, and gzip writes the time."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_finish() -> None:
    keep_what_is_there()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        keep_what_is_there()


def keep_what_is_there() -> None:
    """Training and export collect unused objects when they end: not among those that stay."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "corpus_dir" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.corpus)
    if marked := [item for item in items if item.get_closest_marker("cuda")]:
        check = check_cuda()
        if check.status != "ok":
            skip = pytest.mark.skip(reason=f"CUDA cannot run here: {check.found}")
            for item in marked:
                item.add_marker(skip)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test whose optional packages are absent; with OPTIONAL=required it fails."""
    if item.get_closest_marker("thorough") and not THOROUGH:
        pytest.skip("a cheaper test looks at the same code; `make test-all` runs this one")
    for marker in item.iter_markers("optional"):
        if absent := [name for name in marker.args if not is_installed(name)]:
            end = pytest.fail if REQUIRED else pytest.skip
            end(f"{' and '.join(absent)} absent; `make test-all` installs it")


@pytest.fixture(scope="session")
def corpus_dir() -> Path:
    """The folder that holds `multi30k/`, outside of the project because of its licence."""
    named = os.environ.get("TRANSFERRY_DATA")
    folder = Path(named) if named else CHECKOUT.parent / "shared" / "data"
    if (folder / "multi30k").is_dir():
        return folder
    if named:
        pytest.fail(f"TRANSFERRY_DATA names {named}, which has no folder multi30k")
    pytest.skip(f"the corpus is absent: no {folder / 'multi30k'}; TRANSFERRY_DATA may name another")


def make_run(
    folder: Path,
    special: SpecialTokens,
    *,
    vocabulary: int = 400,
    head: HeadSettings | None = None,
    tokenizer: AnyTokenizer | None = None,
    **changes: Any,
) -> Path:
    """A run as training leaves it: a model of a few thousand weights, random but always the same.

    The weights are drawn wider than training begins with, so that attention and the choice of
    tokens depend on every input, and the end token is likely enough that outputs end.
    """
    import torch

    from transferry.build_model import checkpoint
    from transferry.build_model.model.config import ModelConfig
    from transferry.build_model.model.transformer import Transformer
    from transferry.build_model.train.corpus import builtin_pairs
    from transferry.build_model.train.train_config import TrainConfig
    from transferry.build_model.train.vocabulary import train_bpe

    (folder / "checkpoints").mkdir(parents=True)
    pairs = builtin_pairs(300, seed=0)
    texts = [text for pair in pairs for text in pair]
    if vocabulary > 800:  # more than there are words
        letters = random.Random(0)
        texts += [
            " ".join("".join(letters.choices("abcdefghij", k=6)) for _ in range(10))
            for _ in range(vocabulary // 4)
        ]
    tokenizer = tokenizer or train_bpe(texts, vocabulary, special)
    shape: dict[str, Any] = dict(
        vocabulary_size=tokenizer.vocabulary_size,
        d_model=32,
        heads=2,
        encoder_layers=1,
        decoder_layers=2,
        d_ff=48,
        max_positions=64,
    )
    config = ModelConfig(**(shape | changes))
    torch.manual_seed(0)
    model = Transformer(config)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Where the layers do not outweigh the tied embedding, one token repeats for ever.
            inner = parameter.dim() == 2 and not name.startswith("embedding")
            parameter.add_(noise * (0.2 if inner else 0.1))
        model.embedding.weight[tokenizer.special.eos_id] *= 3.0
    checkpoint.save_config(folder, config, TrainConfig(max_steps=1), head=head)
    tokenizer.save(folder)
    checkpoint.save_samples(folder, [pair.source for pair in pairs[:8]])
    checkpoint.save_tensors(folder / checkpoint.WEIGHTS, model.state_dict())
    return folder


def make_bundle(run: Path, folder: Path, *variants: str, one_graph: int = 0) -> Path:
    """Exports a run, unverified."""
    from tests.traced import unverified
    from transferry.build_model.checkpoint import load_checkpoint, load_samples
    from transferry.build_model.train.corpus import builtin_pairs
    from transferry.export.bundle import Contents

    unverified(
        load_checkpoint(run),
        folder,
        Contents(
            texts=load_samples(run),
            variants=variants,
            calibrate=[pair.source for pair in builtin_pairs(300, seed=1)] if variants else (),
            one_graph=one_graph,
        ),
    )
    return folder


Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Makes a folder once in a run of the suite, not once per worker of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def once(name: str, make: Callable[[Path], object]) -> Path:
        folder = base / "shared" / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                draft = folder.with_suffix(".draft")
                shutil.rmtree(draft, ignore_errors=True)
                make(draft)
                draft.rename(folder)
        return folder

    return once


@pytest.fixture(scope="session")
def traces(once: Once) -> None:
    """Keeps `TRACES` of tests/traced.py on disk, and passes them to `export` and `verify`."""
    from tests import commands
    from tests.traced import TRACES

    TRACES.once, commands.shared = once, TRACES


@pytest.fixture(scope="session")
def kernels_folder(once: Once) -> Path:
    """Folder that holds the package transferry_kernels, as installed or built from kernels/."""
    from tests import kernels_package

    if reason := kernels_package.obstacle():
        end = pytest.fail if REQUIRED else pytest.skip
        end(reason)
    return kernels_package.installed() or once("kernels", kernels_package.build)


@pytest.fixture(scope="session")
def run_folder(once: Once) -> Path:
    """A run of an encoder-decoder."""
    return once("run", lambda folder: make_run(folder, SOURCES))


@pytest.fixture(scope="session")
def writer_run_folder(once: Once) -> Path:
    """A run of a decoder alone, made as Llama is."""
    options: dict[str, Any] = dict(
        architecture="decoder-only",
        encoder_layers=0,
        heads=4,
        key_value_heads=2,
        norm="rms",
        norm_order="pre",
        positions="rotary",
        activation="swiglu",
        bias=False,
        tied=False,
    )
    return once("writer-run", lambda folder: make_run(folder, PROMPTS, **options))


@pytest.fixture(scope="session")
def chat_bundle_folder(writer_bundle_folder: Path, once: Once) -> Path:
    """A bundle with a chat template, as export writes one."""
    from transferry.runtime.tokenizer.byte_pair import load_tokenizer
    from transferry.runtime.tokenizer.chat import ChatTemplate

    turn = "{{ m.role }}: {{ m.content }}{{ eos_token }}"
    source = f"{{% for m in messages %}}{turn}{{% endfor %}}{{{{ tone }}}}A:"

    def make(folder: Path) -> None:
        shutil.copytree(writer_bundle_folder, folder)
        tokenizer = load_tokenizer(folder)
        end = {"<e>": tokenizer.special.eos_id}
        tokenizer.chat = ChatTemplate(source, {"eos_token": "<e>"}, end)
        tokenizer.save(folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        for name in ("tokenizer.json", "chat_template.jinja"):
            content = (folder / name).read_bytes()
            record = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            manifest["files"][name] = record
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return once("chat-bundle", make)


@pytest.fixture(scope="session")
def reader_run_folder(once: Once) -> Path:
    """A run of an encoder alone, made as BERT is."""
    options: dict[str, Any] = dict(
        architecture="encoder-only",
        encoder_layers=2,
        decoder_layers=0,
        positions="learned",
        activation="gelu",
        scale_embedding=False,
        embedding_norm=True,
        output_transform=True,
        output_bias=True,
    )
    return once("reader-run", lambda folder: make_run(folder, PASSAGES, **options))


def bundle_of(run: str, name: str, *variants: str, one_graph: int = 0) -> Any:
    """A fixture of the bundle of a run. Copy it before changing anything in it."""

    @pytest.fixture(scope="session")
    def made(request: pytest.FixtureRequest, once: Once, traces: None) -> Path:
        given = request.getfixturevalue(run)
        return once(name, lambda to: make_bundle(given, to, *variants, one_graph=one_graph))

    return made


bundle_folder = bundle_of("run_folder", "bundle")
weight_only_bundle_folder = bundle_of("run_folder", "weight-only", "portable-int8")
# Search as one graph: greedy, and with 4 beams.
whole_bundle_folder = bundle_of("run_folder", "whole-bundle", one_graph=1)
beam_bundle_folder = bundle_of("run_folder", "beam-bundle", one_graph=4)
# The fused variant in float32, and one for a GPU, which a CPU runs too.
fast_bundle_folder = bundle_of("run_folder", "fast-bundle", "cpu-fp32")
device_bundle_folder = bundle_of("run_folder", "device-bundle", "cuda-fp16")
writer_bundle_folder = bundle_of("writer_run_folder", "writer-bundle")
whole_writer_bundle_folder = bundle_of("writer_run_folder", "whole-writer-bundle", one_graph=1)
fast_writer_bundle_folder = bundle_of("writer_run_folder", "fast-writer-bundle", "cpu-fp32")
reader_bundle_folder = bundle_of("reader_run_folder", "reader-bundle")
