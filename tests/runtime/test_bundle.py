"""A bundle is opened whole and unchanged, or refused by the name of the file at fault."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import FORMAT, MANIFEST, Manifest
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.sealed_folder import FileRecord
from transferry.runtime.io.whole import sha256
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions

Record = dict[str, Any]


@pytest.fixture
def folder(bundle_folder: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(bundle_folder, tmp_path / "bundle"))


def read_record(folder: Path) -> Record:
    record: Record = json.loads((folder / MANIFEST).read_bytes())
    return record


def write_record(folder: Path, record: Record) -> None:
    (folder / MANIFEST).write_text(json.dumps(record))


def test_opens_what_was_exported(bundle_folder: Path) -> None:
    bundle = Bundle.load(bundle_folder)
    assert bundle.tokenizer.vocabulary_size == bundle.manifest.model["vocabulary_size"]
    variant = bundle.variant()
    assert variant == bundle.variant("portable")
    assert variant.graphs.keys() == {"encoder", "decoder", "select"}
    assert all(bundle.graph(graph).is_file() for graph in variant.graphs.values())


def test_every_file_is_vouched_for(bundle_folder: Path) -> None:
    files = {
        path.relative_to(bundle_folder).as_posix()
        for path in bundle_folder.rglob("*")
        if path.is_file()
    }
    assert Bundle.load(bundle_folder).manifest.files.keys() == files - {MANIFEST}


def test_manifest_round_trip(bundle_folder: Path) -> None:
    text = (bundle_folder / MANIFEST).read_text(encoding="utf-8")
    manifest = Manifest.from_json(text, MANIFEST)
    assert manifest.to_json() == text
    assert Manifest.from_json(manifest.to_json(), MANIFEST) == manifest
    assert json.loads(text)["format"] == FORMAT


def test_manifest_as_a_person_reads_it(bundle_folder: Path) -> None:
    manifest = Bundle.load(bundle_folder).manifest
    text = manifest.to_text()
    for name, record in manifest.files.items():
        assert re.search(rf"{re.escape(name)} +{record.size} +{record.sha256[:16]}", text)
    for graph in manifest.variants["portable"].graphs.values():
        for spec in (*graph.inputs, *graph.outputs):
            assert re.search(rf"{re.escape(spec.name)} +{spec.role} +{spec.type} +\[", text)


def test_tensors_are_found_by_role(bundle_folder: Path) -> None:
    decoder = Bundle.load(bundle_folder).variant().graphs["decoder"]
    assert decoder.names("past") == [
        f"past.{layer}.{part}" for layer in range(2) for part in ("keys", "values")
    ]
    assert decoder.tensor("logits").shape[:2] == ("batch", "target")
    assert decoder.names("rows") == []
    with pytest.raises(InputError, match=r"decoder\.onnx has no tensor of role 'rows'"):
        decoder.tensor("rows")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (truncate, r"must have \d+ bytes, but has \d+"),
        (change_a_byte, "has changed: its sha256 must be [0-9a-f]{12}…, but is [0-9a-f]{12}…"),
        (Path.unlink, "is missing"),
    ],
)
def test_every_damaged_file_is_refused(
    folder: Path, damage: Callable[[Path], None], found: str
) -> None:
    names = list(Bundle.load(folder).manifest.files)
    assert {"tokenizer.json", "ranks.tiktoken", "reference.npz"} < set(names)
    for name in names:
        path = folder / name
        content = path.read_bytes()
        damage(path)
        with pytest.raises(InputError, match=f"{re.escape(str(path))} {found}.*; copy the bundle"):
            Bundle.load(folder)
        path.write_bytes(content)
    Bundle.load(folder)


def test_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    kinds = {"absent": "nothing", "file": "a file", "other": "another folder"}
    (tmp_path / "file").touch()
    for name, files in {
        "other": (),
        "run": ("model.safetensors", "settings.toml", "config.json"),
        "theirs": ("model.safetensors", "config.json"),
    }.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text('{"model_type": "bert"}')
    kinds["run"] = r"a checkpoint; export it: transferry export \S+run --out"
    kinds["theirs"] = r"a folder of Hugging Face; .*: transferry export \S+theirs --out"
    for name, found in kinds.items():
        with pytest.raises(InputError, match=rf"{name}: expected a bundle, .*, found {found}"):
            Bundle.load(tmp_path / name)


VARIANT = "variants.portable"
ENCODER = f"{VARIANT}.graphs.encoder"
WEIGHT = {"file": "portable/weights.bin", "offset": 0, "type": "float32", "shape": [2, 2]}
SELECT = {"file": "portable/select.onnx", "inputs": [], "outputs": []}
SCREENED = {f"{VARIANT}.graphs.{name}": SELECT for name in ("approximate_logits", "segment_maxima")}


def change(record: Record, place: str, value: Any) -> None:
    """Sets the value at a dotted place of a manifest; the ellipsis removes it."""
    *parents, last = (int(key) if key.isdigit() else key for key in place.split("."))
    inner: Any = record
    for key in parents:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value


def screened(**changes: Any) -> Record:
    return {**SCREENED, f"{VARIANT}.screen": {"weight": {**WEIGHT, **changes}}}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"format": FORMAT + 1}, f"has bundle format {FORMAT + 1}, .* reads format {FORMAT}"),
        ({"format": ...}, "has bundle format None"),
        *(
            ({key: ...}, f"`{key}`")
            for key in ("architecture", "model", "generation", "variants", "files", "versions")
        ),
        ({"model.max_positions": ...}, "model: Object missing required field `max_positions`"),
        ({"generation": {"bean": 4}}, "generation has no bean; write beam"),
        ({"generation": {"max_length": 0}}, "max_length must be at least 1, found 0"),
        ({"generation": {}}, "generation: max_length is 256, but the model has 64 positions"),
        (
            {f"{ENCODER}.inputs.0.role": "wish"},
            r"Invalid enum value 'wish' - at .*\.graphs\[\.\.\.\]\.inputs\[0\]\.role`",
        ),
        ({"variants": {}}, r"Expected `object` of length >= 1 - at `\$\.variants`"),
        ({f"{VARIANT}.graphs.select": ...}, "variant 'portable' has no graph 'select'"),
        ({f"{VARIANT}.cache": None}, "variant 'portable' must say what its KV cache is"),
        ({f"{VARIANT}.cache.in_place": True}, "variant 'portable' has no graph 'lm_head'"),
        ({f"{VARIANT}.cache.type": "int8"}, "variant 'portable' has no graph 'dequantise'"),
        ({f"{VARIANT}.cache.kind": "rows"}, r"Invalid enum value 'rows' - at .*\.cache\.kind`"),
        (
            {"architecture": "decoder-only", f"{VARIANT}.cache.kind": "state"},
            "'portable' cannot have a recurrent state: it has no",
        ),
        ({f"{VARIANT}.top_k": True}, "variant 'portable' has no graph 'top_k'"),
        ({f"{VARIANT}.screen": {"weight": WEIGHT}}, "has no graph 'approximate_logits'"),
        ({f"{ENCODER}.file": "../encoder.onnx"}, "matching regex"),
        ({f"{ENCODER}.inputs.0.shape": ...}, "missing required field `shape`"),
        *(
            (
                {f"{VARIANT}.graphs.decoder.outputs.0.shape": shape},
                "output 'logits' without a fixed width",
            )
            for shape in ([300, "batch"], [])
        ),
        ({"files": {"reference.npz": {"sha256": "0" * 64}}}, "missing required field `size`"),
        *(
            ({"files": {name: {}}}, r"matching regex .* - at `key` in `\$\.files`")
            for name in ("../x", "/x", "portable/../../x", ".hidden", "a//b", "a\nb", "")
        ),
        *(
            ({"variants": {name: {}}}, r"matching regex .* - at `key` in `\$\.variants`")
            for name in ("../../x", "..", "a/b", ".x", "x\n", "")
        ),
        (screened(type="O"), r"matching regex .* at `.*\.screen\[\.\.\.\]\.type`"),
        (screened(type="float64"), "matching regex"),
        (screened(offset=-4), "Expected `int` >= 0"),
        *((screened(offset=offset), "does not lie inside") for offset in (2, 1 << 40)),
        (screened(shape=[1 << 20, 1 << 20]), "does not lie inside"),
        (screened(shape=[0, 2]), "Expected `int` >= 1"),
        (screened(shape=[2.5]), "Expected `int`"),
        (screened(shape=[1] * 5), "of length <= 4"),
        (screened(file="portable/absent.bin"), "is not among its files"),
    ],
)
def test_an_inconsistent_manifest_is_refused(
    bundle_folder: Path, changes: Record, found: str
) -> None:
    record = read_record(bundle_folder)
    for place, value in changes.items():
        change(record, place, value)
    with pytest.raises(InputError, match=rf"^manifest\.json.*{found}.*; export the bundle again"):
        Manifest.from_json(json.dumps(record), MANIFEST)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'"text"', b'{"files": {}, "files": {}}'],
)
def test_what_is_no_manifest_is_refused(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    expected = r"manifest\.json(: Expected `object`| is not JSON).*; export the bundle again"
    with pytest.raises(InputError, match=expected) as found:
        Bundle.load(folder)
    assert ("Duplicate key 'files'" in str(found.value)) is (b"files" in content)


def cached(folder: Path) -> None:
    """The cache of Hugging Face: a snapshot of links to files under other names."""
    blobs = folder.with_name("blobs")
    blobs.mkdir()
    for number, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), path.parent))


def mounted(folder: Path) -> None:
    """A ConfigMap of Kubernetes: links through a link to the folder of a version."""
    names = [path.name for path in folder.iterdir()]
    version = folder / "..2026_11_26"
    version.mkdir()
    (folder / "..data").symlink_to(version.name)
    for name in names:
        (folder / name).rename(version / name)
        (folder / name).symlink_to(f"..data/{name}")


def with_linked_weights(folder: Path) -> None:
    (folder / "portable" / "weights.bin").rename(folder.with_name("weights"))
    (folder / "portable" / "weights.bin").symlink_to(folder.with_name("weights"))


def with_weights_elsewhere_too(folder: Path) -> None:
    folder.with_name("weights").hardlink_to(folder / "portable" / "weights.bin")


def behind_a_door(folder: Path) -> None:
    folder.rename(folder.with_name("house"))
    folder.symlink_to("house")


@pytest.mark.parametrize(
    "link", [cached, mounted, with_linked_weights, with_weights_elsewhere_too, behind_a_door]
)
def test_links_are_read_through(folder: Path, link: Callable[[Path], None]) -> None:
    before = [result.text for result in Engine(folder).generate(["six hundred"])]
    link(folder)
    engine = Engine(folder)
    assert [result.text for result in engine.generate(["six hundred"])] == before
    if link is not behind_a_door:
        with pytest.raises(InputError, match=r"is a link, which .*: cp -rL .* COPY"):
            engine.bundle.files.require_plain()
    weights = Path(os.path.realpath(folder / "portable" / "weights.bin"))
    weights.write_bytes(bytes(len(weights.read_bytes())))
    with pytest.raises(InputError, match="was changed while it was in use"):
        list(engine.generate(["six hundred"]))
    with pytest.raises(InputError, match=r"weights\.bin has changed: its sha256"):
        Bundle.load(folder)


def test_a_link_without_its_target_is_told(folder: Path, tmp_path: Path) -> None:
    cached(folder)
    (folder / "manifest.json").unlink()
    shutil.copy(folder.with_name("blobs") / "0", folder / "manifest.json")
    (folder.with_name("blobs")).rename(tmp_path / "gone")
    with pytest.raises(InputError, match=r"is a link to .*, which is missing; copy .*cp -rL"):
        Bundle.load(folder)


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        *((name, False) for name in ("portable/weights.bin", "tokenizer.json", "ranks.tiktoken")),
        ("tokenizer.json", True),
    ],
)
def test_a_file_that_is_used_must_be_listed(folder: Path, name: str, gone: bool) -> None:
    record = read_record(folder)
    del record["files"][name]
    write_record(folder, record)
    if gone:
        (folder / name).unlink()
        with pytest.raises(InputError, match=f"{re.escape(name)} is used, but not listed"):
            Bundle.load(folder)
    with pytest.raises(InputError, match=f"{re.escape(name)} is used, but not listed"):
        bundle = Bundle.load(folder)
        open_model(bundle, bundle.variant(), SessionOptions())


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("inputs.0.type", "int32"),
        ("outputs.0.name", "another"),
        ("outputs.0.shape.1", 10**9),
        ("outputs.0", ...),
    ],
)
def test_a_graph_is_the_one_that_the_manifest_describes(
    folder: Path, place: str, value: Any
) -> None:
    record = read_record(folder)
    change(record, f"{ENCODER}.{place}", value)
    write_record(folder, record)
    bundle = Bundle.load(folder)
    with pytest.raises(InputError, match=r"the manifest describes other (in|out)puts"):
        open_model(bundle, bundle.variant(), SessionOptions())


def test_files_may_be_added_with_a_record(folder: Path) -> None:
    (folder / "notes.txt").write_text("fine")
    expected = FileRecord(sha256(folder / "notes.txt"), 4)
    record = read_record(folder)
    record["files"]["notes.txt"] = {"sha256": expected.sha256, "size": 4}
    write_record(folder, record)
    assert Bundle.load(folder).manifest.files["notes.txt"] == expected


def test_unknown_variant_names_those_that_exist(bundle_folder: Path) -> None:
    with pytest.raises(UsageError, match=r"has no variant 'int8'; it has portable"):
        Bundle.load(bundle_folder).variant("int8")


def test_the_hash_is_of_the_manifest_that_was_read(folder: Path) -> None:
    read, bundle = sha256(folder / MANIFEST), Bundle.load(folder)
    write_record(folder, read_record(folder) | {"versions": {}})
    assert bundle.sha256 == read != sha256(folder / MANIFEST)
