"""What the tests of the export share: the random run and its bundle, and both as decoders."""

from pathlib import Path

import pytest

from transferry.build_model.checkpoint import Checkpoint, load_checkpoint, load_samples
from transferry.export.judge import Judge
from transferry.runtime.bundle import Bundle
from transferry.runtime.compare import Tolerance
from transferry.runtime.onnx_decoder import OnnxDecoder
from transferry.runtime.session import SessionOptions


@pytest.fixture(scope="session")
def checkpoint(run_folder: Path) -> Checkpoint:
    """Shared: perturb a copy of the model."""
    return load_checkpoint(run_folder)


@pytest.fixture(scope="session")
def texts(run_folder: Path) -> list[str]:
    return load_samples(run_folder)


@pytest.fixture(scope="session")
def sources(checkpoint: Checkpoint, texts: list[str]) -> list[list[int]]:
    tokenizer = checkpoint.tokenizer
    return [[*tokenizer.encode(text), tokenizer.special.eos_id] for text in texts]


@pytest.fixture(scope="session")
def bundle(bundle_folder: Path) -> Bundle:
    return Bundle.load(bundle_folder)


@pytest.fixture(scope="session")
def decoder(bundle: Bundle) -> OnnxDecoder:
    return OnnxDecoder(bundle, bundle.variant(), SessionOptions())


@pytest.fixture(scope="session")
def judge(checkpoint: Checkpoint) -> Judge:
    return Judge(checkpoint.model, checkpoint.tokenizer.special, Tolerance())
