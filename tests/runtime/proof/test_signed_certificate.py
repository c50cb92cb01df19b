"""With a trusted key, a certificate counts if that key signed it, and for nothing else."""

import base64
import json
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.proof.certified import (
    DATE,
    certified,
    change_byte,
    file_of,
    remake_manifest,
    with_variants,
)
from tests.runtime.proof.keys import key_files
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, ParityError, UsageError
from transferry.runtime.io.whole import sha256
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.certificates import certificate as certificate_module
from transferry.runtime.proof.certificates.envelope import FOLDER, Envelope
from transferry.runtime.proof.certificates.signature import Trust, load_private_key, load_public_key
from transferry.runtime.proof.certificates.standing import fastest
from transferry.runtime.proof.certificates.stored import certificates, describe, sign
from transferry.runtime.proof.report import ParityReport

Keys = tuple[Path, Path]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return key_files(tmp_path)


@pytest.fixture
def other(tmp_path: Path) -> Keys:
    return key_files(tmp_path, "other", secret=7)


def load(plain: Path, key: Path) -> Engine:
    return Engine(plain, require_certificate="recorded", trusted_key=key)


def test_a_signed_certificate_is_cited_with_its_key(plain: Path, keys: Keys) -> None:
    made, (_, public) = certified(plain, sign=keys[0]), keys
    key_id = load_public_key(public).key_id
    assert str(made).endswith(f", signed by {key_id}")
    assert load(plain, public).certificate.endswith(
        f", sha256 {sha256(file_of(plain))}), signed by {key_id}"
    )
    # Without a key to check it with, the signature is a claim.
    assert Engine(plain).certificate.endswith(f", signature of {key_id} not checked")
    bundle = Bundle.load(plain)
    assert describe(bundle)[0][-2:] == (f"signature of {key_id} not checked", "holds")
    assert describe(bundle, Trust.load([public]))[0][-2:] == (f"signed by {key_id}", "holds")
    assert load(plain, public).batches == BatchOptions(rows=64)


def test_two_people_sign(plain: Path, keys: Keys, other: Keys, tmp_path: Path) -> None:
    def loaded(least: int) -> Engine:
        publics = deque([keys[1], other[1]])  # any sequence
        required = partial(Engine, plain, require_certificate="recorded")
        return required(trusted_key=publics, require_signatures=least)

    bundle, second = Bundle.load(plain), load_private_key(other[0])
    with pytest.raises(InputError, match="no certificate to sign; see verify --certify"):
        sign(bundle, second)
    certified(plain)
    before = file_of(plain).read_bytes()
    with pytest.raises(InputError, match=r"no certificate to sign.* is unsigned"):
        sign(bundle, second, trusted=Trust.load([keys[1]]))
    with pytest.raises(InputError, match="no certificate for variant other to sign"):
        sign(bundle, second, variant="other")
    assert file_of(plain).read_bytes() == before
    certified(plain, sign=keys[0])
    loaded(1)
    with pytest.raises(ParityError, match="has 1 of 2 signatures by trusted keys, none of sha256:"):
        loaded(2)
    (signed,) = sign(bundle, second, trusted=Trust.load([keys[1]]))
    ids = ", ".join(load_public_key(public).key_id for _, public in (keys, other))
    assert signed.signature() == f"signed by {ids}"
    assert loaded(2).certificate.endswith(f"signed by {ids}")
    with pytest.raises(UsageError, match="require_signatures must be from 1 to 2, the number of"):
        loaded(3)
    # A changed file is nothing to sign.
    change_byte(plain / "portable" / "decoder.onnx", 40)
    remake_manifest(plain)
    with pytest.raises(InputError, match=r"decoder\.onnx is not the file that was verified"):
        sign(Bundle.load(plain), load_private_key(key_files(tmp_path, "third", 11)[0]))


def test_a_signature_that_is_not_checked_is_not_said_to_be_anybodys(
    plain: Path, keys: Keys, other: Keys
) -> None:
    certified(plain)
    record = json.loads(file_of(plain).read_bytes())
    claimed = {"keyid": load_public_key(keys[1]).key_id, "sig": "AAAA"}
    record["dsseEnvelope"]["signatures"] = [claimed]
    file_of(plain).write_text(json.dumps(record), encoding="utf-8")
    (signed,) = sign(Bundle.load(plain), load_private_key(other[0]))
    assert signed.signature() == f"signed by {load_public_key(other[1]).key_id}"


@pytest.mark.parametrize(
    "settings",
    [
        {"require_certificate": True, "trusted_key": []},
        {"require_certificate": True, "trusted_key": ""},
        {"require_certificate": False, "trusted_key": []},
        {"require_certificate": ""},
    ],
)
def test_an_empty_setting_requires_no_less(plain: Path, settings: dict[str, Any]) -> None:
    certified(plain)
    with pytest.raises(UsageError, match=r"trusted_key|require_certificate"):
        Engine(plain, **settings)


@pytest.mark.parametrize("what", ["payload", "signature"])
def test_a_changed_certificate_is_refused_before_it_is_parsed(
    plain: Path, keys: Keys, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    certified(plain, sign=keys[0])
    path = file_of(plain)
    record = json.loads(path.read_bytes())
    envelope = record["dsseEnvelope"]
    if what == "payload":
        payload = base64.b64decode(envelope["payload"])
        changed = payload.replace(b'"batch_rows": 64', b'"batch_rows": 99')
        envelope["payload"] = base64.b64encode(changed).decode()
    else:
        signature = bytearray(base64.b64decode(envelope["signatures"][0]["sig"]))
        signature[20] ^= 1
        envelope["signatures"][0]["sig"] = base64.b64encode(signature).decode()
    path.write_text(json.dumps(record), encoding="utf-8")
    assert len(certificates(Bundle.load(plain))) == 1

    def parsed(payload: bytes) -> None:
        raise AssertionError("parsed before it was checked")

    monkeypatch.setattr(certificate_module, "read_statement", parsed)
    with pytest.raises(ParityError, match="has changed since it was signed"):
        load(plain, keys[1])


def test_a_signature_does_not_move_to_other_files(plain: Path, keys: Keys) -> None:
    """The manifest is made again, as by somebody who changes a file on purpose."""
    certified(plain, sign=keys[0])
    change_byte(plain / "portable" / "weights.bin", -1)
    remake_manifest(plain)
    with pytest.raises(ParityError, match=r"weights\.bin is not the file that was verified"):
        load(plain, keys[1])


def test_the_signed_one_counts_beside_others(plain: Path, keys: Keys) -> None:
    """Whatever its name, and although an unsigned one of the same cell comes first."""
    certified(plain, sign=keys[0])
    path = file_of(plain)
    payload = Envelope.parse(path.read_bytes()).payload
    forged = payload.replace(b'"batch_rows": 64', b'"batch_rows": 4096')
    assert forged != payload
    (plain / FOLDER / "a.json").write_bytes(Envelope.seal(forged).content)
    engine = load(plain, keys[1])
    assert [one.batch_rows for one in engine.required] == [64]
    path.unlink()
    with pytest.raises(ParityError, match=r"certificates/a\.json is unsigned"):
        load(plain, keys[1])


def test_elsewhere_only_what_is_signed_is_computed_again(
    plain: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    certified(plain, sign=keys[0])
    monkeypatch.setattr(certificate_module, "instruction_sets", lambda: ("avx2",))
    said = load(plain, keys[1]).certificate
    assert "signed by sha256:" in said
    assert said.endswith("; the recorded answers came out here too")
    envelope = Envelope.parse(file_of(plain).read_bytes())
    file_of(plain).write_bytes(Envelope.seal(envelope.payload).content)

    def prove(*_: object) -> ParityReport:
        raise AssertionError("proved an unsigned certificate")

    with pytest.raises(ParityError, match="is unsigned"):
        Engine(plain, require_certificate="checkpoint", trusted_key=keys[1], prove=prove)


def test_an_unsigned_certificate_chooses_no_variant(plain: Path, keys: Keys) -> None:
    bundle = with_variants(plain, "cpu-int8")
    options, trusted = SessionOptions(), Trust.load([keys[1]])
    certified(bundle, "cpu-int8")
    assert fastest(bundle, options).name == "cpu-int8"
    assert fastest(bundle, options, trusted).name == "portable"
    certified(bundle, "cpu-int8", keys[0])
    assert fastest(bundle, options, trusted).name == "cpu-int8"


def test_an_unsigned_certificate_replaces_no_signed_one(
    plain: Path, keys: Keys, other: Keys
) -> None:
    certified(plain, sign=keys[0])
    before = file_of(plain).read_bytes()
    with pytest.raises(UsageError, match=f"certificate of {DATE} is signed.* give --sign, or --fo"):
        certified(plain)
    assert file_of(plain).read_bytes() == before
    certified(plain, sign=other[0])
    assert certified(plain, force=True).signature() == "unsigned"
    certified(plain, sign=keys[0])
    with pytest.raises(UsageError, match="is weaker"):
        certified(plain, sign=keys[0], against="the recorded answers")
    # Of other files than these it is worth nothing, and goes.
    (plain / MANIFEST).write_bytes((plain / MANIFEST).read_bytes() + b"\n")
    assert certified(plain).signature() == "unsigned"
