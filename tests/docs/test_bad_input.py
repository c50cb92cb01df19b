"""Runs every entry of docs/errors.md: its command, on the bad input that it names.

Each command runs in a folder with a bundle, its checkpoint, input lines and training pairs; the
function registered for the row, if any, spoils the file in question.
"""

import base64
import gzip
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric import ec

from tests.fuzz.models import gpt2
from tests.runtime.proof.certified import change_byte, remake_manifest, with_variants
from tests.runtime.proof.keys import key_files, pem
from transferry.cli import main
from transferry.runtime.doctor import check_cuda
from transferry.runtime.ort.session import kernels

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"

# - bad input (`options`, exit code): message
ENTRY = re.compile(r"- ([^(]+) \((?:`([^`]+)`, )?(\d+)\): (.+)")

Spoiler = Callable[[Path], object]


ANSWERS = frozenset(f"answers.jsonl{suffix}" for suffix in ("", ".settings.toml", ".summary.json"))


@dataclass(frozen=True)
class Row:
    """An entry of a list."""

    bad_input: str
    command: str
    exit_code: int
    message: str

    @property
    def leaves(self) -> frozenset[str]:
        """The files that the command adds."""
        return ANSWERS if self.exit_code in (0, 6) else frozenset()


def rows() -> list[Row]:
    """Entries of all lists; a heading is the command to which the entries below add options."""
    sections = PAGE.read_text(encoding="utf-8").partition("\n## ")[0].split("\n### ")[1:]
    found = []
    for section in sections:
        shared, *lines = section.splitlines()
        for line in filter(None, lines):
            entry = ENTRY.fullmatch(line)
            assert entry, line
            bad_input, shown, exit_code, message = entry.groups(default="")
            command = shown if shared == "Other commands" else f"{shared.strip('`')} {shown}"
            found.append(Row(bad_input, command.strip(), int(exit_code), message))
    return found


def spoils(*bad_inputs: str) -> Callable[[Spoiler], Spoiler]:
    def register(spoiler: Spoiler) -> Spoiler:
        SPOILERS.update(dict.fromkeys(bad_inputs, spoiler))
        return spoiler

    return register


@pytest.fixture
def place(
    run_folder: Path, bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    from transferry.build_model.train.corpus import builtin_pairs

    shutil.copytree(run_folder, tmp_path / "run")
    shutil.copytree(bundle_folder, tmp_path / "bundle")
    pairs = builtin_pairs(20, seed=1)
    for name, lines in (
        ("lines.txt", ["five", "six hundred", "ninety"]),
        ("train.en", [pair.source for pair in pairs]),
        ("train.de", [pair.target for pair in pairs]),
        ("train.tsv", ["\t".join(pair) for pair in pairs]),
        ("valid.tsv", ["\t".join(pair) for pair in pairs[:5]]),
    ):
        write_lines(tmp_path / name, lines)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_spoiler_has_a_row() -> None:
    named = [row.bad_input for row in rows()]
    assert len(named) == len(set(named))
    assert set(named) >= SPOILERS.keys()


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.bad_input)
def test_bad_input(row: Row, place: Path) -> None:
    if row.bad_input in SPOILERS:
        SPOILERS[row.bad_input](place)
    assert "read-only" not in row.command or (place / "read-only").is_dir()
    before = snapshot(place)
    exit_code, stderr = execute(row.command)
    assert exit_code == row.exit_code, stderr
    pieces = map(re.escape, row.message.split("…"))
    assert re.search(".*".join(pieces), stderr), stderr
    assert "Traceback" not in stderr
    after = snapshot(place)
    assert {name for name in after if after[name] != before.get(name)} == row.leaves
    assert before.keys() <= after.keys()


def execute(command: str) -> tuple[int, str]:
    """Exit code and stderr, run in this process, or in a shell if it is more than a command."""
    words = shlex.split(command)
    if words[0] == "transferry" and not set("<>$") & set(command):
        result = CliRunner().invoke(main, words[1:])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stderr
    done = subprocess.run(
        [
            "bash",
            "-c",
            f'transferry() {{ {shlex.quote(sys.executable)} -m transferry "$@"; }}; {command}',
        ],
        # Else a full disk under standard output fails once only, and Python keeps, for all commands
        # that follow, what it could write of a compiled module.
        env=os.environ | {"PYTHONUNBUFFERED": "", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def snapshot(folder: Path) -> dict[str, bytes]:
    """Bytes of every file below a folder; empty for folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def replace_line(path: Path, number: int, line: str) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[number - 1] = line
    write_lines(path, lines)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change_weight(place: Path, change: Callable[[float], float]) -> None:
    """Changes one weight of the embedding."""
    from transferry.build_model.checkpoint import WEIGHTS, load_tensors, save_tensors

    weights, _ = load_tensors(place / "run" / WEIGHTS)
    values = weights["embedding.weight"].view(-1)
    values[len(values) // 2] = change(values[len(values) // 2].item())
    save_tensors(place / "run" / WEIGHTS, weights)


def with_another_weight(place: Path) -> None:
    """And with a single sample, which is compared."""
    (place / "run" / "samples.json").write_text('["six"]')
    change_weight(place, lambda weight: weight + 1.0)


def written(name: str, content: str | bytes) -> Spoiler:
    data = content.encode() if isinstance(content, str) else content
    return lambda place: (place / name).write_bytes(data)


def with_line(name: str, number: int, line: str) -> Spoiler:
    return lambda place: replace_line(place / name, number, line)


def with_keys(name: str, **changes: Any) -> Spoiler:
    """Changes keys of a JSON file."""

    def change(place: Path) -> None:
        path = place / name
        path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))

    return change


def removed(name: str) -> Spoiler:
    return lambda place: (place / name).unlink()


def truncated(name: str) -> Spoiler:
    return lambda place: truncate(place / name)


# Of the other rows the command is bad itself, or names something that does not exist.
SPOILERS: dict[str, Spoiler] = {
    "truncated bundle file": truncated("bundle/portable/weights.bin"),
    "changed bundle file": lambda place: change_byte(place / "bundle/portable/decoder.onnx", 999),
    "missing tokenizer": removed("bundle/tokenizer.json"),
    "wrong format version": with_keys("bundle/manifest.json", format=99),
    "bundle with a file of somebody else": written("bundle/notes.txt", "dear to somebody\n"),
    "certificate that cannot be written": written("bundle/certificates", "not a folder\n"),
    "key that cannot sign": lambda place: other_key(place, ec.SECP384R1()),
    "encrypted key without its passphrase": lambda place: other_key(
        place, ec.SECP256R1(), b"a passphrase"
    ),
    "empty input file": written("lines.txt", ""),
    "invalid UTF-8": written("lines.txt", b"five\nsix\xff\nninety\n"),
    "truncated gzip file": written("lines.txt.gz", gzip.compress(b"five\n" * 100)[:-9]),
    "binary file": written("binary", bytes(range(256))),
    "unknown input format": written("rows.docx", b"PK"),
    "empty line": with_line("lines.txt", 2, ""),
    "more bad rows than allowed": with_line("lines.txt", 2, ""),
    "1 MB line": with_line("lines.txt", 2, "word " * 200_000),
    "unknown setting": written("settings.toml", "bean = 4\n"),
    "setting of another type": written("settings.toml", 'beam = "four"\n'),
    "report over a file of another program": written("notes.html", "<html>\n"),
    "output that exists": written("answers.jsonl", "dear to somebody\n"),
    "input beside the output": lambda place: (place / "lines.txt").rename(
        place / "answers.jsonl.summary.json"
    ),
    "unknown setting of generation in a checkpoint": with_keys(
        "run/config.json", generation={"zz": 1}
    ),
    "empty line in training": with_line("train.en", 3, ""),
    "1 MB line in training": with_line("train.en", 3, "x" * 1_000_000),
    "malformed pair in training": with_line("train.tsv", 3, "five"),
    "missing checkpoint": removed("run/model.safetensors"),
    "truncated checkpoint": truncated("run/model.safetensors"),
    "NaN in a checkpoint": lambda place: change_weight(place, lambda weight: math.nan),
    "checkpoint with another weight": lambda place: with_another_weight(place),
    "kernels without folded constants": lambda place: add_kernels(place),
    "interrupted job with another option": lambda place: interrupt(place),
    "model type that is not imported": lambda place: import_of(place, model_type="mamba"),
    "setting that is not imported": lambda place: import_of(
        place, activation_function="tanhshrink"
    ),
    "setting that is unknown": lambda place: import_of(place, novelty=1),
    "quantised checkpoint": lambda place: import_of(
        place, quantization_config={"quant_method": "gptq"}
    ),
    "truncated weights of a checkpoint": lambda place: truncate(
        import_of(place) / "model.safetensors"
    ),
    "checkpoint without its tokenizer": lambda place: (import_of(place) / "vocab.json").unlink(),
    **dict.fromkeys(
        (
            "search that no certificate covers",
            "batch that no certificate covers",
            "certificate too weak",
        ),
        lambda place: certify(place),
    ),
    "damaged certificate": lambda place: certify(place).write_text("{}", encoding="utf-8"),
    **dict.fromkeys(
        (
            "trusted key without a required certificate",
            "private key as the trusted one",
            "signature of no certificate",
        ),
        lambda place: key_files(place),
    ),
    **dict.fromkeys(
        (
            "full disk under standard output",
            "full disk under the standard output of any command",
            "full disk under standard error",
        ),
        lambda place: need_full_device(),
    ),
}


def add_kernels(place: Path) -> None:
    """Adds a variant with operators of transferry-kernels, by its entry in the manifest."""
    with_variants(place / "bundle", "cpu-int8-kernels")


@spoils("kernels that are not installed")
def lack_kernels(place: Path) -> None:
    if not kernels().remedy:
        pytest.skip("transferry-kernels is installed")
    add_kernels(place)


def need_full_device() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("only Linux has /dev/full")


def interrupt(place: Path) -> None:
    """Leaves a job with the first of two chunks finished."""
    from transferry.runtime.jobs.job import Job
    from transferry.runtime.jobs.job_options import JobOptions
    from transferry.runtime.jobs.summary import Summary

    def stop(summary: Summary) -> None:
        if summary.rows == 3:
            raise KeyboardInterrupt

    job = Job("bundle", "lines.txt", "answers.jsonl", JobOptions(chunk_rows=2))
    with pytest.raises(KeyboardInterrupt):
        job.run(stop)


@spoils("interrupted job with another input")
def change_answered_line(place: Path) -> None:
    interrupt(place)
    replace_line(place / "lines.txt", 2, "seven hundred")


@spoils("missing partition", "changed partition")
def make_partitions(place: Path) -> None:
    lines = (place / "lines.txt").read_text().splitlines()
    (place / "lines.txt").write_text(f"{lines[0]}\n" * len(lines))  # a row in each
    for number in (1, 2, 3):
        command = f"transferry run bundle lines.txt -o {number}.jsonl --partition {number}/3"
        assert execute(command)[0] == 0
    truncate(place / "2.jsonl")


@spoils("output that was edited")
def edit_output(place: Path) -> None:
    assert execute("transferry run bundle lines.txt -o answers.jsonl")[0] == 0
    with (place / "answers.jsonl").open("a") as file:
        file.write("\n")


@spoils(
    "read-only output folder", "read-only folder for a bundle", "read-only folder for a checkpoint"
)
def read_only(place: Path) -> None:
    folder = place / "read-only"
    if os.geteuid():
        folder.mkdir(mode=0o555)
    else:
        folder.symlink_to("/proc")  # permissions do not bind root, but nobody makes files there


@spoils("unequal line counts in training")
def drop_line(place: Path) -> None:
    path = place / "train.de"
    write_lines(path, path.read_text(encoding="utf-8").splitlines()[:-1])


class Code:
    """An object that runs code where a pickle is opened with pickle."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return print, ("run",)


def import_of(place: Path, **config: Any) -> Path:
    """Makes a checkpoint of others with other settings."""
    gpt2(place / "theirs")
    path = place / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | config))
    return place / "theirs"


@spoils("GGUF file")
def name_gguf(place: Path) -> None:
    folder = import_of(place)
    (folder / "model.safetensors").rename(folder / "model.gguf")


@spoils("pickle that would run code")
def pickle_code(place: Path) -> None:
    import torch

    folder = import_of(place)
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Code()}, folder / "pytorch_model.bin")


def certify(place: Path, *options: str) -> Path:
    from transferry.runtime.proof.certificates.envelope import FOLDER

    result = CliRunner().invoke(main, ["verify", "bundle", "--certify", "2026-11-21", *options])
    assert result.exit_code == 0
    (path,) = (place / "bundle" / FOLDER).iterdir()
    return path


@spoils("unsigned certificate")
def certify_unsigned(place: Path) -> None:
    key_files(place)
    certify(place)


@spoils("certificate signed by another key")
def certify_with_another_key(place: Path) -> None:
    key_files(place)
    certify(place, "--sign", str(key_files(place, "other", secret=7)[0]))


@spoils("unsigned certificate over a signed one")
def certify_signed(place: Path) -> None:
    certify(place, "--sign", str(key_files(place)[0]))


@spoils("signed certificate that was changed")
def change_signed(place: Path) -> None:
    path = certify(place, "--sign", str(key_files(place)[0]))
    record = json.loads(path.read_bytes())
    payload = base64.b64decode(record["dsseEnvelope"]["payload"])
    changed = payload.replace(b"2026-11-21", b"2026-11-20")
    assert changed != payload
    record["dsseEnvelope"]["payload"] = base64.b64encode(changed).decode()
    path.write_text(json.dumps(record), encoding="utf-8")


def other_key(place: Path, curve: ec.EllipticCurve, passphrase: bytes = b"") -> None:
    (place / "other.key").write_bytes(pem(ec.derive_private_key(7, curve), passphrase))


@spoils("certificate of other files")
def remake(place: Path) -> None:
    certify(place)
    change_byte(place / "bundle" / "portable" / "weights.bin", -1)
    remake_manifest(place / "bundle")


@spoils("CUDA requested but absent", "TensorRT requested but absent")
def need_no_cuda(place: Path) -> None:
    if check_cuda().status == "ok":
        pytest.skip("CUDA can run here")


@spoils("CUDA for training requested but absent")
def need_no_torch_cuda(place: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch can use CUDA here")
