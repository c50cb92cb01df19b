"""The file of a certificate: an in-toto statement in a DSSE envelope in a Sigstore bundle.

One signature serves two readers. The statement is a model signature of OpenSSF Model Signing (OMS),
so `model_signing verify key` accepts it; and its predicate also holds the parity report, as an
extra field, which OMS tells verifiers to ignore. Sources:

- DSSE v1: https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md
- in-toto Statement v1: https://in-toto.io/Statement/v1
- OMS: https://github.com/ossf/model-signing-spec, and `dsse_payload_to_manifest` of model-signing
- Sigstore bundle v0.3: https://docs.sigstore.dev/about/bundle/
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.documents import MOST_JSON, decode
from transferry.runtime.io.sealed_folder import open_inside
from transferry.runtime.io.whole import read_at_most
from transferry.runtime.proof.signature import PrivateKey, PublicKey

FOLDER = "certificates"
FORMAT = 4
MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
# What parsing something else raises.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError)
REPORT = "transferry_certificate"  # the predicate's extra field


@dataclass(frozen=True)
class Envelope:
    """A payload and its signatures, as stored.

    Attributes:
        content: Bytes of the file.
        payload: The statement, as JSON.
        signatures: Key id and signature, for each signature; none if it is unsigned. The key id
            proves nothing: anybody could have written it.
    """

    content: bytes
    payload: bytes
    signatures: tuple[tuple[str, bytes], ...]

    @classmethod
    def seal(cls, payload: bytes, key: PrivateKey | None = None) -> Envelope:
        """Puts a statement into an envelope; signs it if there is a key."""
        record: dict[str, Any] = {"mediaType": MEDIA_TYPE}
        signatures = []
        if key is not None:
            record["verificationMaterial"] = {"publicKey": {"hint": key.public.hint}}
            signature = base64.b64encode(key.sign(pae(payload))).decode()
            signatures.append({"keyid": key.public.key_id, "sig": signature})
        record["dsseEnvelope"] = {
            "payloadType": PAYLOAD_TYPE,
            "payload": base64.b64encode(payload).decode(),
            "signatures": signatures,
        }
        return cls.parse(f"{json.dumps(record, indent=1)}\n".encode())

    @classmethod
    def parse(cls, content: bytes) -> Envelope:
        """Parses a file without reading its payload.

        Raises:
            ValueError: It, or another of MALFORMED: this is no such file.
        """
        record = decode(content)
        if isinstance(record, dict) and "format" in record:  # up to format 3 it had no envelope
            raise ValueError(f"format {record['format']!r}, expected {FORMAT}")
        envelope = msgspec.convert(record, _File).dsse_envelope
        if envelope.payload_type != PAYLOAD_TYPE:
            raise ValueError(f"payloadType {envelope.payload_type!r}, expected {PAYLOAD_TYPE}")
        signatures = ((_key_id(one.keyid), _decode(one.sig)) for one in envelope.signatures)
        return cls(content, _decode(envelope.payload), tuple(signatures))

    def refusal(self, key: PublicKey) -> str:
        """Returns why the envelope is not signed by this key; empty if it is.

        The signature is checked over the payload's bytes as stored, before anything parses them.
        """
        if not self.signatures:
            return "is unsigned"
        message = pae(self.payload)
        if any(key.accepts(message, signature) for _, signature in self.signatures):
            return ""
        others = [key_id for key_id, _ in self.signatures if key_id != key.key_id]
        if len(others) == len(self.signatures):
            return f"is signed by {others[0]}, not by the trusted key {key.key_id}"
        return "has changed since it was signed"


class _Signature(Struct):
    sig: str
    keyid: str = ""


class _Envelope(Struct, rename="camel"):
    payload_type: str
    payload: str
    signatures: list[_Signature]


class _File(Struct, rename="camel"):
    dsse_envelope: _Envelope


def envelopes(bundle: Path) -> Iterator[tuple[Path, Envelope]]:
    """Reads the certificates of a bundle, in the order of their names, without their payloads.

    Args:
        bundle: Folder of the bundle.

    Raises:
        InputError: One of them cannot be read.
    """
    for path in sorted((bundle / FOLDER).glob("*.json")):
        with open_inside(bundle, f"{FOLDER}/{path.name}") as file:
            content = read_at_most(file, MOST_JSON, path)
        try:
            envelope = Envelope.parse(content)
        except MALFORMED as error:
            raise no_certificate(str(path), error) from error
        yield path, envelope


def no_certificate(origin: str, error: Exception) -> InputError:
    """Returns the error for a file that holds something else."""
    return InputError(
        f"{origin} is not a certificate ({type(error).__name__}: {error}); remove it, and verify "
        "the bundle again"
    )


def pae(payload: bytes) -> bytes:
    """Returns the bytes that a signature covers: DSSE's pre-authentication encoding."""
    return f"DSSEv1 {len(PAYLOAD_TYPE)} {PAYLOAD_TYPE} {len(payload)} ".encode() + payload


def check_date(date: str) -> None:
    """Raises UsageError unless this is a date as YYYY-MM-DD, tomorrow's at the latest."""
    try:
        day = datetime.date.fromisoformat(date)
    except ValueError as error:
        raise UsageError(f"expected a date as YYYY-MM-DD, found {date!r} ({error})") from error
    # Tomorrow: somewhere on earth it has begun.
    latest = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=1)
    if day > latest:
        raise UsageError(
            f"expected the date of the verification, found {date}, which is in the future"
        )


def statement(files: Mapping[str, str], report: Mapping[str, Any]) -> bytes:
    """Returns the statement that a report holds for these files.

    OMS allows one subject. Its digest is that of the files' digests, in the order of their names.

    Args:
        files: sha256 of every file of the bundle, the manifest included, by path in the bundle.
        report: The fields of the certificate.
    """
    resources = [
        {"name": name, "algorithm": "sha256", "digest": digest}
        for name, digest in sorted(files.items())
    ]
    record = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": "bundle", "digest": {"sha256": _root(resources)}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [FOLDER],
            },
            "resources": resources,
            REPORT: {"format": FORMAT, **report},
        },
    }
    return json.dumps(record, indent=1, ensure_ascii=False).encode()


def read_statement(payload: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the files and the report of a statement.

    Raises:
        ValueError: It, or another of MALFORMED: this is no such statement.
    """
    record = msgspec.convert(decode(payload), _Statement)
    for name, found, expected in (
        ("_type", record.type, STATEMENT_TYPE),
        ("predicateType", record.predicate_type, PREDICATE_TYPE),
    ):
        if found != expected:
            raise ValueError(f"{name} {found!r}, expected {expected}")
    resources = [{"name": one.name, "digest": one.digest} for one in record.predicate.resources]
    if record.subject[0].digest.sha256 != _root(resources):
        raise ValueError("the digest of its subject is not that of its files")
    files = {one["name"]: one["digest"] for one in resources}
    if len(files) < len(resources):
        raise ValueError("a file is listed twice")
    report = record.predicate.report
    if (version := report.pop("format", None)) != FORMAT:
        raise ValueError(f"format {version!r}, expected {FORMAT}")
    return files, report


class _Resource(Struct):
    name: str
    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class _Predicate(Struct):
    resources: list[_Resource]
    report: dict[str, Any] = field(name=REPORT)


class _Digest(Struct):
    sha256: str


class _Subject(Struct):
    digest: _Digest


class _Statement(Struct):
    type: str = field(name="_type")
    predicate_type: str = field(name="predicateType")
    subject: Annotated[list[_Subject], Meta(min_length=1)]
    predicate: _Predicate


def _root(resources: list[dict[str, str]]) -> str:
    digests = b"".join(bytes.fromhex(resource["digest"]) for resource in resources)
    return hashlib.sha256(digests).hexdigest()


def _key_id(named: str) -> str:
    """Returns the id that a signature names, and no other text, since messages repeat it."""
    return named if re.fullmatch(r"sha256:[0-9a-f]{64}", named) else "an unnamed key"


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
