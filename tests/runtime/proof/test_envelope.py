"""The file of a certificate, and another program's reading of it."""

import base64
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.proof.certified import change_byte
from tests.runtime.proof.keys import key_files, model_signing
from transferry.runtime.proof.certificates.envelope import (
    FOLDER,
    PAYLOAD_TYPE,
    Envelope,
    pae,
    read_statement,
    statement,
)
from transferry.runtime.proof.certificates.signature import Trust, load_private_key, load_public_key


def hashes(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if FOLDER not in path.parts
    }


FILES = {"weights.bin": "ab" * 32, "manifest.json": "01" * 32}
REPORT = {"date": "2026-11-21"}


def test_the_signed_bytes_are_those_of_dsse() -> None:
    assert pae(b"{}") == b"DSSEv1 28 application/vnd.in-toto+json 2 {}"


def test_a_statement_is_read_back() -> None:
    payload = statement(FILES, REPORT)
    assert read_statement(payload) == (FILES, REPORT)
    record = json.loads(payload)
    assert record["_type"] == "https://in-toto.io/Statement/v1"
    digests = bytes.fromhex("01" * 32 + "ab" * 32)  # in the order of the names
    (subject,) = record["subject"]
    assert subject["digest"] == {"sha256": hashlib.sha256(digests).hexdigest()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_type": "https://in-toto.io/Statement/v0.1"}, r"v0.1' - at `\$\._type`"),
        ({"predicateType": "https://slsa.dev/provenance/v1"}, r"at `\$\.predicateType`"),
        ({"subject": [{"digest": {"sha256": "00" * 32}}]}, "subject is not that of its files"),
    ],
)
def test_another_statement_is_refused(changes: dict[str, Any], message: str) -> None:
    record = json.loads(statement(FILES, REPORT))
    with pytest.raises(ValueError, match=message):
        read_statement(json.dumps({**record, **changes}).encode())


def test_an_envelope_is_read_back_and_its_bytes_are_always_the_same(tmp_path: Path) -> None:
    private, public = key_files(tmp_path)
    key, trusted = load_private_key(private), Trust((load_public_key(public),))
    payload = statement(FILES, REPORT)
    unsigned, signed = Envelope.seal(payload), Envelope.seal(payload, key)
    assert signed == Envelope.parse(signed.content) == Envelope.seal(payload, key)
    assert unsigned.payload == signed.payload == payload
    assert (unsigned.signatures, unsigned.refusal(trusted)) == ((), "is unsigned")
    assert [key_id for key_id, _ in signed.signatures] == [trusted.keys[0].key_id]
    assert signed.refusal(trusted) == ""


def tampered(envelope: Envelope, **changes: Any) -> Envelope:
    record = json.loads(envelope.content)
    record["dsseEnvelope"] |= changes
    return Envelope.parse(json.dumps(record).encode())


def test_a_changed_envelope_is_refused(tmp_path: Path) -> None:
    private, public = key_files(tmp_path)
    other_private, other_public = key_files(tmp_path, "other", secret=7)
    own = load_public_key(public)
    trusted = Trust((own,))
    envelope = Envelope.seal(statement(FILES, REPORT), load_private_key(private))
    (signature,) = json.loads(envelope.content)["dsseEnvelope"]["signatures"]
    other = load_public_key(other_public)
    message = f"is signed by {own.key_id}, not by the trusted key {other.key_id}"
    assert envelope.refusal(Trust((other,))) == message
    # A key id proves nothing, right or wrong.
    forged = Envelope.seal(envelope.payload, load_private_key(other_private))
    claimed = {**json.loads(forged.content)["dsseEnvelope"]["signatures"][0]}
    claimed["keyid"] = own.key_id
    changed = "has changed since it was signed"
    assert tampered(forged, signatures=[claimed]).refusal(trusted) == changed
    unnamed = {**signature, "keyid": "x\nsigned by somebody"}
    assert tampered(envelope, signatures=[unnamed]).signatures[0][0] == "an unnamed key"
    assert tampered(envelope, signatures=[unnamed]).refusal(trusted) == ""
    assert tampered(envelope, signatures=[claimed, signature]).refusal(trusted) == ""


def test_a_second_signature_stands_beside_the_first(tmp_path: Path) -> None:
    first, second = (key_files(tmp_path, name, secret) for name, secret in (("a", 5), ("b", 7)))
    keys = [load_public_key(public) for _, public in (first, second)]
    one = Envelope.seal(b"{}", load_private_key(first[0]))
    both = one.signed(load_private_key(second[0]))
    assert [key_id for key_id, _ in both.signatures] == [key.key_id for key in keys]
    assert both.payload == one.payload
    assert both.signers(keys) == [key.key_id for key in keys]
    assert both.signed(load_private_key(first[0])).content == both.content
    hints = [json.loads(each.content)["verificationMaterial"] for each in (one, both)]
    assert hints[0] == hints[1] == {"publicKey": {"hint": keys[0].hint}}
    two = Trust(tuple(keys), 2)
    assert both.refusal(two) == ""
    lacks = f"has 1 of 2 signatures by trusted keys, none of {keys[1].key_id}"
    assert one.refusal(two) == lacks
    # The same signature twice, and one by a stranger, count once and not at all.
    record = json.loads(one.content)["dsseEnvelope"]["signatures"]
    assert tampered(one, signatures=record * 2).refusal(two) == lacks
    stranger = load_private_key(key_files(tmp_path, "c", 11)[0])
    assert one.signed(stranger).refusal(two) == lacks


def test_the_hint_of_a_first_signature_may_be_absent(tmp_path: Path) -> None:
    first, second = (load_private_key(key_files(tmp_path, *each)[0]) for each in (("a",), ("b", 7)))
    record = json.loads(Envelope.seal(statement(FILES, REPORT), first).content)
    del record["verificationMaterial"]
    both = Envelope.parse(json.dumps(record).encode()).signed(second)
    assert len(both.signatures) == 2
    with pytest.raises(ValueError, match=r"got `null` - at `\$\.verificationMaterial"):
        Envelope.parse(json.dumps({**record, "verificationMaterial": {"publicKey": None}}).encode())


@pytest.fixture
def signed_bundle(bundle_folder: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A bundle with two certificates, the signed one, and the public key."""
    private, public = key_files(tmp_path)
    folder = tmp_path / "bundle"
    shutil.copytree(bundle_folder, folder, ignore=shutil.ignore_patterns(FOLDER))
    (folder / FOLDER).mkdir()
    payload = statement(hashes(folder), REPORT)
    signed = folder / FOLDER / "signed.json"
    signed.write_bytes(Envelope.seal(payload, load_private_key(private)).content)
    (folder / FOLDER / "other.json").write_bytes(Envelope.seal(payload).content)
    return folder, signed, public


def test_model_signing_accepts_and_refuses_as_we_do(
    signed_bundle: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    folder, signed, public = signed_bundle
    assert model_signing(folder, signed, public) == (0, "Verification succeeded\n")
    other = key_files(tmp_path, "other", secret=7)[1]
    assert model_signing(folder, signed, other)[0] == 1
    assert model_signing(folder, folder / FOLDER / "other.json", public)[0] == 1
    envelope = Envelope.parse(signed.read_bytes())
    payload = base64.b64encode(envelope.payload.replace(b"2026", b"2025")).decode()
    signed.write_bytes(tampered(envelope, payload=payload).content)
    assert model_signing(folder, signed, public)[0] == 1
    (folder / "added.txt").write_text("not signed")
    signed.write_bytes(envelope.content)
    assert "Extra files found" in model_signing(folder, signed, public)[1]
    (folder / "added.txt").unlink()
    change_byte(folder / "portable" / "weights.bin", 100)
    code, said = model_signing(folder, signed, public)
    assert (code, "Hash mismatch for 'portable/weights.bin'" in said) == (1, True)


def test_openssl_accepts_what_is_signed(signed_bundle: tuple[Path, Path, Path]) -> None:
    """As docs/certificate.md shows it, with the bytes of DSSE put together by hand."""
    folder, signed, public = signed_bundle
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    envelope = json.loads(signed.read_bytes())["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"])
    message = folder.parent / "message"
    message.write_bytes(f"DSSEv1 28 {PAYLOAD_TYPE} {len(payload)} ".encode() + payload)
    signature = folder.parent / "signature"
    signature.write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    command = ["openssl", "dgst", "-sha256", "-verify", str(public)]
    command += ["-signature", str(signature), str(message)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "Verified OK\n"
