"""An export gives a whole, verified bundle or nothing, and always the same bytes."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.commands import python
from tests.export.conftest import exported
from transferry.build_model.checkpoint import Checkpoint
from transferry.export import bundle as export
from transferry.export.bundle import Contents, check_bundle, check_graphs
from transferry.export.make import make
from transferry.export.trace.graph import Graph
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.bundle.specs import REFERENCE
from transferry.runtime.errors import InputError, ParityError, UsageError
from transferry.runtime.proof.recorded import Reference


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the export record short searches."""
    monkeypatch.setattr("transferry.export.oracle.effort.RECORDED_LENGTH", 4)


@pytest.fixture
def one_weight_off(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the export lose 1 % of a single weight."""

    def wrong(*given: Any) -> dict[str, Graph]:
        graphs = make(*given)
        name = "model.encoder.0.feed_forward.inner.weight"
        value = graphs["encoder"].model.graph.initializers[name]
        assert value.const_value is not None
        weights = value.const_value.numpy().copy()
        weights.flat[np.abs(weights).argmax()] *= 0.99
        value.const_value = ir.tensor(weights, name=name)
        return graphs

    monkeypatch.setattr(export, "make", wrong)


def raising(error: BaseException) -> Callable[..., Any]:
    def raises(*arguments: object, **options: object) -> None:
        raise error

    return raises


def test_same_checkpoint_gives_the_same_bytes(
    bundle_folder: Path, run_folder: Path, tmp_path: Path
) -> None:
    """In another process and folder, with another order of hashing, and as a large model's."""
    script = """
import sys
from pathlib import Path
from transferry.build_model.checkpoint import load_checkpoint, load_samples
from transferry.export import bundle

bundle.MAPPED = 0
run, out = map(Path, sys.argv[1:])
contents = bundle.Contents(load_samples(run))
bundle.export_bundle(load_checkpoint(run), out, contents, prove=lambda *given: None)
"""
    out = tmp_path / "elsewhere"
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    python("-c", script, run_folder, out, env=environment, cwd=tmp_path)
    assert files_of(out) == files_of(bundle_folder)


def test_checks_pass(bundle: Bundle) -> None:
    check_graphs(bundle, bundle.variant())
    report = check_bundle(bundle)
    assert report.passed
    # Three cases of nine tensors (two select rows), by onnxruntime and onnx's evaluator.
    assert len(report.comparisons) == 2 * (3 * 9 + 2)
    assert [item.rows for item in report.decisions] == [8, 8]


def unknown_operator(graph: onnx.GraphProto) -> None:
    graph.node[0].op_type = "NoSuchOperator"


def dangling_input(graph: onnx.GraphProto) -> None:
    graph.node[0].input[0] = "nowhere"


def wrong_type(graph: onnx.GraphProto) -> None:
    """Only type inference (full_check) finds this."""
    graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64


@pytest.mark.parametrize("damage", [unknown_operator, dangling_input, wrong_type])
@pytest.mark.parametrize("name", ["encoder", "decoder", "select"])
def test_invalid_graph_is_found(
    bundle_folder: Path, tmp_path: Path, name: str, damage: Callable[[onnx.GraphProto], None]
) -> None:
    bundle = Bundle.load(Path(shutil.copytree(bundle_folder, tmp_path / "bundle")))
    path = bundle.graph(bundle.variant().graphs[name])
    model = onnx.load(path, load_external_data=False)
    damage(model.graph)
    onnx.save(model, path)
    with pytest.raises(ParityError, match=rf"{name}\.onnx is not a valid ONNX graph"):
        check_graphs(bundle, bundle.variant())


@pytest.fixture
def old(bundle_folder: Path, tmp_path: Path) -> Path:
    """An existing bundle at the target."""
    return Path(shutil.copytree(bundle_folder, tmp_path / "old" / "bundle"))


@pytest.mark.usefixtures("short")
class TestPlace:
    """Target folders of an export, new and existing."""

    def test_folders_on_the_way_are_made(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        out = tmp_path / "some" / "where"
        assert exported(checkpoint, out).folder == out
        assert [path.name for path in out.parent.iterdir()] == ["where"]

    def test_existing_bundle_is_replaced_with_force_alone(
        self, checkpoint: Checkpoint, bundle_folder: Path, texts: list[str], old: Path
    ) -> None:
        contents = Contents(texts[:2])
        with pytest.raises(UsageError, match="add force to replace"):
            exported(checkpoint, old, contents)
        assert files_of(old) == files_of(bundle_folder)
        note = old / "of somebody else"
        note.touch()
        with pytest.raises(UsageError, match="holds of somebody else, which transferry did not"):
            exported(checkpoint, old, contents, force=True)
        note.unlink()
        (old / "certificates").mkdir()
        (old / "certificates" / "of the old bundle.json").touch()
        bundle = exported(checkpoint, old, contents, force=True)
        old_one, new_one = (Reference.load(at / REFERENCE).sources for at in (bundle_folder, old))
        assert new_one[:2] == old_one[:2]
        assert new_one[2:] != old_one[2:]
        assert files_of(old).keys() == {*bundle.manifest.files, MANIFEST}
        assert list(old.parent.iterdir()) == [old]

    @pytest.mark.parametrize("force", [False, True])
    def test_what_is_no_bundle_is_never_replaced(
        self, checkpoint: Checkpoint, tmp_path: Path, force: bool
    ) -> None:
        folder, file = tmp_path / "folder", tmp_path / "file"
        folder.mkdir()
        (folder / "thesis.txt").write_text("years of work")
        file.write_text("months of work")
        before = files_of(tmp_path)
        for out, error, message in (
            (folder, UsageError, f"{folder} exists"),
            (file, UsageError, f"{file} exists"),
            (file / "bundle", InputError, "cannot be written"),
        ):
            with pytest.raises(error, match=message):
                exported(checkpoint, out, force=force)
        assert files_of(tmp_path) == before


@pytest.mark.usefixtures("short")
def test_texts_that_do_not_fit_are_not_recorded(
    checkpoint: Checkpoint, texts: list[str], sources: list[list[int]], tmp_path: Path
) -> None:
    """Without a fitting sentence, random sources are recorded."""
    unfit = ["", " ".join(texts)]
    bundle = exported(checkpoint, tmp_path / "one", Contents([*unfit, texts[0]]))
    recorded = Reference.load(bundle.folder / REFERENCE).sources
    assert recorded[0] == sources[0]
    assert not any(source in sources for source in recorded[1:])
    bundle = exported(checkpoint, tmp_path / "none", Contents(unfit))
    assert len(Reference.load(bundle.folder / REFERENCE).sources) == 8


STAGES = ("write_graphs", "prove", "replace_folder", "rename")
FULL = OSError(errno.ENOSPC, "No space left on device")


def require_untouched(old: Path, bundle_folder: Path) -> None:
    """The old bundle is whole, and nothing stands beside it or at the new place."""
    assert list(old.parent.iterdir()) == [old]
    assert files_of(old) == files_of(bundle_folder)
    Bundle.load(old)
    new = old.parents[1] / "new"
    assert not new.exists() or not list(new.iterdir())


@pytest.mark.usefixtures("one_weight_off")
def test_failed_check_leaves_nothing(
    checkpoint: Checkpoint, bundle_folder: Path, tmp_path: Path, old: Path, texts: list[str]
) -> None:
    for out in (tmp_path / "new" / "bundle", old):
        with pytest.raises(ParityError, match="does not answer as torch does"):
            exported(checkpoint, out, Contents(texts), force=True)
    require_untouched(old, bundle_folder)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("error", "becomes"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (FULL, InputError)],
    ids=["interrupted", "disk full"],
)
def test_interruption_leaves_nothing(
    checkpoint: Checkpoint,
    bundle_folder: Path,
    old: Path,
    stage: str,
    error: BaseException,
    becomes: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the old bundle is replaced, too: it is put back."""
    rename = Path.rename
    options: dict[str, Any] = {}

    def fails_for_the_new(path: Path, target: Path) -> Path:
        if path.suffix == ".part":
            raise error
        return rename(path, target)

    if stage == "prove":
        options["prove"] = raising(error)
    elif stage == "rename":
        monkeypatch.setattr(Path, "rename", fails_for_the_new)
    else:
        monkeypatch.setattr(export, stage, raising(error))
    for out in (old.parents[1] / "new" / "bundle", old):
        with pytest.raises(becomes):
            exported(checkpoint, out, force=out == old, **options)
    require_untouched(old, bundle_folder)


@pytest.mark.usefixtures("short")
def test_former_bundle_that_cannot_be_removed_is_named(
    checkpoint: Checkpoint, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one is in place by then, so "nothing was written" would be a lie."""
    remove = shutil.rmtree

    def refuses_the_old(path: Path, **options: Any) -> None:
        if path.suffix == ".old" and not options.get("ignore_errors"):
            raise PermissionError(errno.EACCES, "Permission denied")
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", refuses_the_old)
    with pytest.raises(InputError, match=r"is replaced, but .* delete .*\.old$"):
        exported(checkpoint, old, force=True)
    Bundle.load(old)


@pytest.mark.usefixtures("short")
def test_stages_are_told_and_the_manifest_is_written_last(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """A process that is killed while verifying leaves a folder that cannot be loaded.

    A variant that is named twice is made once.
    """
    seen: list[Path] = []
    said: list[str] = []

    def look(checkpoint: Checkpoint, bundle: Bundle, *others: object) -> None:
        seen.append(bundle.folder)
        with pytest.raises(InputError, match=MANIFEST):
            Bundle.load(bundle.folder)

    contents = Contents(variants=["portable"])
    exported(checkpoint, tmp_path / "bundle", contents, prove=look, say=said.append)
    assert [path.parent for path in seen] == [tmp_path]
    assert seen[0].name.startswith(".")
    told = ["exporting variant portable", "recording reference answers of torch", "verifying"]
    assert said == told
