"""The file of a certificate: an in-toto statement in a DSSE envelope in a Sigstore bundle.

One signature serves two readers. The statement is a model signature of OpenSSF Model Signing (OMS),
so `model_signing verify key` accepts it; its predicate also holds the parity report, as an extra
field, which OMS tells verifiers to ignore. Sources:

- DSSE v1: https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md
- in-toto Statement v1: https://in-toto.io/Statement/v1
- OMS: https://github.com/ossf/model-signing-spec, and `dsse_payload_to_manifest` of model-signing
- Sigstore bundle v0.3: https://docs.sigstore.dev/about/bundle/

securesystemslib has an envelope too, but its signer draws random numbers: the same certificate
would have other bytes each time.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta, Struct, field

from transferry.runtime.errors import InputError
from transferry.runtime.io.documents import MOST_JSON, decode
from transferry.runtime.io.whole import read_bytes
from transferry.runtime.proof.certificates.signature import PrivateKey, PublicKey, Trust

FOLDER = "certificates"
FORMAT = 5
MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PayloadType = Literal["application/vnd.in-toto+json"]
PAYLOAD_TYPE: PayloadType = "application/vnd.in-toto+json"
# Raised by the parsing of another kind of file.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError)
REPORT = "transferry_certificate"  # the predicate's extra field


class _Signature(Struct, kw_only=True):
    keyid: str = ""
    sig: bytes


class _Envelope(Struct, rename="camel"):
    payload_type: PayloadType
    payload: bytes
    signatures: list[_Signature]


class _File(Struct, rename="camel", kw_only=True, omit_defaults=True):
    media_type: str = ""
    verification_material: dict[str, dict[str, Any]] = {}
    dsse_envelope: _Envelope


@dataclass(frozen=True)
class Envelope:
    """The bytes of a file, its payload (a statement, as JSON), and its signatures.

    Each signature has a key id, which proves nothing: anybody could have written it.
    """

    content: bytes
    payload: bytes
    signatures: tuple[tuple[str, bytes], ...]

    @classmethod
    def seal(cls, payload: bytes, key: PrivateKey | None = None) -> Self:
        """Puts a statement into an envelope; signs it if there is a key."""
        unsigned = cls._of(payload, (), "")
        return unsigned if key is None else unsigned.signed(key)

    @classmethod
    def _of(cls, payload: bytes, signatures: Sequence[tuple[str, bytes]], hint: str) -> Self:
        record = _File(
            media_type=MEDIA_TYPE,
            verification_material={"publicKey": {"hint": hint}} if hint else {},
            dsse_envelope=_Envelope(
                PAYLOAD_TYPE, payload, [_Signature(keyid=name, sig=sig) for name, sig in signatures]
            ),
        )
        return cls.parse(f"{json.dumps(msgspec.to_builtins(record), indent=1)}\n".encode())

    def signed(self, key: PrivateKey) -> Self:
        """Returns the envelope with one more signature; itself if the key has signed it already.

        The hint stays that of the first key, whose signature other tools look for.
        """
        if self.signers([key.public]):
            return self
        found = json.loads(self.content).get("verificationMaterial", {})
        material = found if self.signatures else {}
        hint = material.get("publicKey", {}).get("hint") or key.public.hint
        added = (key.public.key_id, key.sign(pae(self.payload)))
        return self._of(self.payload, (*self.signatures, added), hint)

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Parses a file without reading its payload; raises one of MALFORMED for another file."""
        record = decode(content)
        if isinstance(record, dict) and "format" in record:  # up to format 3 without an envelope
            raise ValueError(f"format {record['format']!r}, expected {FORMAT}")
        found = msgspec.convert(record, _File).dsse_envelope
        signatures = tuple((_key_id(one.keyid), one.sig) for one in found.signatures)
        return cls(content, found.payload, signatures)

    def signers(self, keys: Iterable[PublicKey]) -> list[str]:
        """Returns the ids of the keys that signed.

        Signatures are checked over the payload's bytes as stored, before anything parses them.
        """
        message, signatures = pae(self.payload), [signature for _, signature in self.signatures]
        return [key.key_id for key in keys if any(key.accepts(message, one) for one in signatures)]

    def refusal(self, trust: Trust) -> str:
        """Returns why too few of these keys signed the envelope; empty if enough did."""
        if not self.signatures:
            return "is unsigned"
        signed = self.signers(trust.keys)
        if len(signed) >= trust.least:
            return ""
        known = [key.key_id for key in trust.keys]
        if signed:
            lacks = ", ".join(key_id for key_id in known if key_id not in signed)
            return f"has {len(signed)} of {trust.least} signatures by trusted keys, none of {lacks}"
        others = [key_id for key_id, _ in self.signatures if key_id not in known]
        if len(others) == len(self.signatures):
            return f"is signed by {', '.join(others)}, not by the trusted key {', '.join(known)}"
        return "has changed since it was signed"


def _key_id(named: str) -> str:
    """Returns a well-formed key id, and no other text, since messages repeat it."""
    return named if re.fullmatch(r"sha256:[0-9a-f]{64}", named) else "an unnamed key"


def pae(payload: bytes) -> bytes:
    """Returns the bytes that a signature covers: DSSE's pre-authentication encoding."""
    return f"DSSEv1 {len(PAYLOAD_TYPE)} {PAYLOAD_TYPE} {len(payload)} ".encode() + payload


def names(bundle: Path) -> list[str]:
    """Returns the names of all files in the folder of a bundle's certificates, sorted."""
    folder = bundle / FOLDER
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def read_envelope(bundle: Path, name: str) -> Envelope:
    """Returns the envelope of a certificate by file name; its payload stays unread.

    Raises InputError if it cannot be read.
    """
    path = bundle / FOLDER / name
    content = read_bytes(path, MOST_JSON)
    try:
        return Envelope.parse(content)
    except MALFORMED as error:
        raise no_certificate(str(path), error) from error


def no_certificate(origin: str, error: Exception) -> InputError:
    """Returns the error for a file that is no certificate."""
    return InputError(
        f"{origin} is not a certificate ({type(error).__name__}: {error}); remove it, and verify "
        "the bundle again"
    )


class _Resource(Struct, kw_only=True):
    name: str
    algorithm: Literal["sha256"] = "sha256"
    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class _Subject(Struct, kw_only=True):
    name: str = "bundle"
    digest: dict[str, str]


class _Serialization(Struct):
    method: Literal["files"] = "files"
    hash_type: Literal["sha256"] = "sha256"
    allow_symlinks: bool = False
    ignore_paths: tuple[str, ...] = (FOLDER,)


class _Predicate(Struct, kw_only=True):
    serialization: _Serialization = field(default_factory=_Serialization)
    resources: list[_Resource]
    report: dict[str, Any] = field(name=REPORT)


class _Statement(Struct, kw_only=True):
    type: Literal["https://in-toto.io/Statement/v1"] = field(name="_type")
    subject: Annotated[list[_Subject], Meta(min_length=1)]
    predicate_type: Literal["https://model_signing/signature/v1.0"] = field(name="predicateType")
    predicate: _Predicate


def statement(files: Mapping[str, str], report: Mapping[str, Any]) -> bytes:
    """Returns the statement that a report, the fields of a certificate, holds for these files.

    OMS allows one subject. Its digest covers the files' digests, in the order of their names.
    `files` has the sha256 of every file of the bundle, the manifest included, by path in the
    bundle.
    """
    resources = [_Resource(name=name, digest=digest) for name, digest in sorted(files.items())]
    record = _Statement(
        type="https://in-toto.io/Statement/v1",
        predicate_type="https://model_signing/signature/v1.0",
        subject=[_Subject(digest={"sha256": _root(resources)})],
        predicate=_Predicate(resources=resources, report={"format": FORMAT, **report}),
    )
    return json.dumps(msgspec.to_builtins(record), indent=1, ensure_ascii=False).encode()


def read_statement(payload: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns files and report of a statement; raises one of MALFORMED for anything else."""
    found = msgspec.convert(decode(payload), _Statement)
    resources, report = found.predicate.resources, found.predicate.report
    if found.subject[0].digest["sha256"] != _root(resources):
        raise ValueError("the digest of its subject is not that of its files")
    files = {one.name: one.digest for one in resources}
    if len(files) < len(resources):
        raise ValueError("a file is listed twice")
    if (version := report.pop("format", None)) != FORMAT:
        raise ValueError(f"format {version!r}, expected {FORMAT}")
    return files, report


def _root(resources: list[_Resource]) -> str:
    digests = b"".join(bytes.fromhex(one.digest) for one in resources)
    return hashlib.sha256(digests).hexdigest()
