"""Keys that sign certificates: Ed25519 (RFC 8032), and ECDSA on P-256 with SHA-256 (FIPS 186-5).

`cryptography`, an extra, is imported when a key is opened.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transferry.runtime.errors import InputError, UsageError, from_extra, require
from transferry.runtime.io.whole import read_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

PASSPHRASE = "TRANSFERRY_KEY_PASSPHRASE"
CURVE = "secp256r1"  # P-256; openssl calls it prime256v1
MOST_KEY = 1 << 16  # bytes
MAKE_PRIVATE = "openssl genpkey -algorithm ed25519 -out KEY"
MAKE_PUBLIC = "openssl pkey -in KEY -pubout -out PUB"


@dataclass(frozen=True)
class PublicKey:
    """A key that checks signatures."""

    key: EllipticCurvePublicKey | Ed25519PublicKey

    @property
    def key_id(self) -> str:
        """Hash of the DER SubjectPublicKeyInfo (RFC 5280), as "sha256:" and hex."""
        return f"sha256:{self._sha256('DER')}"

    @property
    def hint(self) -> str:
        """sha256 of the PEM, in hex: the `hint` that model_signing compares before it verifies."""
        return self._sha256("PEM")

    def _sha256(self, encoding: Literal["DER", "PEM"]) -> str:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        kind = getattr(Encoding, encoding)
        encoded = self.key.public_bytes(kind, PublicFormat.SubjectPublicKeyInfo)
        return hashlib.sha256(encoded).hexdigest()

    def accepts(self, message: bytes, signature: bytes) -> bool:
        """Whether the holder of the private key signed this message."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        try:
            if isinstance(self.key, ec.EllipticCurvePublicKey):
                self.key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
            else:
                self.key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class PrivateKey:
    """A key that signs."""

    key: EllipticCurvePrivateKey | Ed25519PrivateKey

    @property
    def public(self) -> PublicKey:
        """The key that checks what this one signs."""
        return PublicKey(self.key.public_key())

    def sign(self, message: bytes) -> bytes:
        """Returns the signature of a message: of ECDSA DER-encoded, of Ed25519 64 bytes.

        It is deterministic (RFC 6979, RFC 8032), so that the same certificate has the same bytes.
        Raises UsageError if the installed OpenSSL signs with random numbers only.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        if not isinstance(self.key, ec.EllipticCurvePrivateKey):
            return self.key.sign(message)
        try:
            algorithm = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
            return self.key.sign(message, algorithm)
        except UnsupportedAlgorithm as error:
            raise UsageError(
                "deterministic signatures (RFC 6979) need OpenSSL 3.2 or later, which the "
                "installed cryptography lacks; install its wheel: "
                'pip install --force-reinstall --only-binary :all: "cryptography>=43"'
            ) from error


@dataclass(frozen=True)
class Trust:
    """Keys whose signatures count, each once; at least `least` of them must have signed."""

    keys: tuple[PublicKey, ...]
    least: int = 1

    @classmethod
    def load(cls, paths: Sequence[Path], least: int = 1) -> Trust | None:
        """Reads keys from PEM files; None without any.

        Raises errors as `load_private_key`, and UsageError if more signatures are required than
        there are keys.
        """
        keys = {key.key_id: key for key in map(load_public_key, paths)}
        require(
            1 <= least <= max(1, len(keys)),
            "require_signatures",
            f"from 1 to {max(1, len(keys))}, the number of trusted keys",
            least,
        )
        return cls(tuple(keys.values()), least) if keys else None


def load_private_key(path: Path) -> PrivateKey:
    """Reads the private key of `sign --key` and `verify --sign`, a PEM file.

    Raises:
        InputError: The file is unreadable, encrypted with another passphrase than that in
            TRANSFERRY_KEY_PASSPHRASE, or no private key of Ed25519 or on the curve P-256.
        UsageError: cryptography is not installed.
    """
    return PrivateKey(_load(path, "private"))


def load_public_key(path: Path) -> PublicKey:
    """Reads the public key of `--trusted-key`, a PEM file; raises as `load_private_key`."""
    return PublicKey(_load(path, "public"))


def _load(path: Path, kind: Literal["private", "public"]) -> Any:
    with from_extra("sign", "signatures need cryptography"):
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    content, passphrase = read_bytes(path, MOST_KEY), ""
    key: Any
    try:
        if kind == "public":
            key = serialization.load_pem_public_key(content)
        else:
            # Tried without a passphrase first: it may belong to another key.
            try:
                key = serialization.load_pem_private_key(content, None)
            except TypeError:
                if not (passphrase := os.environ.get(PASSPHRASE, "")):
                    raise InputError(
                        f"{path} is encrypted: put its passphrase into the environment variable "
                        f"{PASSPHRASE}"
                    ) from None
                key = serialization.load_pem_private_key(content, passphrase.encode())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if passphrase:
            raise InputError(
                f"{path} is encrypted, and the passphrase in {PASSPHRASE} does not open it: "
                "correct the passphrase"
            ) from error
        found = _label(content).replace(f"a {kind} key", f"a damaged {kind} key")
        raise _no_key(path, kind, found) from error
    edwards = (ed25519.Ed25519PublicKey, ed25519.Ed25519PrivateKey)
    elliptic = (ec.EllipticCurvePublicKey, ec.EllipticCurvePrivateKey)
    if isinstance(key, edwards) or (isinstance(key, elliptic) and key.curve.name == CURVE):
        return key
    raise _no_key(path, kind, _kind(key))


def _no_key(path: Path, kind: str, found: str) -> InputError:
    remedy = MAKE_PRIVATE if kind == "private" else MAKE_PUBLIC
    return InputError(
        f"{path}: expected a {kind} key as PEM, Ed25519 or ECDSA on the curve P-256, found "
        f"{found}. Make one: {remedy}"
    )


def _label(content: bytes) -> str:
    labels = re.findall(r"-----BEGIN ([A-Z0-9 ]+)-----", content.decode(errors="replace"))
    if not labels:
        return "no PEM" if content else "an empty file"
    kinds = (kind for kind in ("private key", "public key") if labels[-1].endswith(kind.upper()))
    return f"a {next(kinds, labels[-1].lower())}"


def _kind(key: Any) -> str:
    """Describes a key of the wrong algorithm or curve."""
    if curve := getattr(key, "curve", None):
        return f"one on the curve {curve.name}"
    return f"a key for {type(key).__name__.removesuffix('PrivateKey').removesuffix('PublicKey')}"
