"""Keys that sign certificates: ECDSA on the curve P-256 with SHA-256 (FIPS 186-5).

`cryptography`, an extra, is imported when a key is opened.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transferry.runtime.errors import InputError, UsageError, install_command
from transferry.runtime.io.whole import read_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )
    from cryptography.hazmat.primitives.serialization import Encoding

PASSPHRASE = "TRANSFERRY_KEY_PASSPHRASE"
CURVE = "secp256r1"  # P-256; openssl calls it prime256v1
MOST_KEY = 1 << 16  # bytes
MAKE_PRIVATE = "openssl ecparam -name prime256v1 -genkey -noout -out KEY"
MAKE_PUBLIC = "openssl ec -in KEY -pubout -out PUB"


@dataclass(frozen=True)
class PublicKey:
    """A key that checks signatures."""

    key: EllipticCurvePublicKey

    @property
    def key_id(self) -> str:
        """Hash of the DER SubjectPublicKeyInfo (RFC 5280), as "sha256:" and hex."""
        from cryptography.hazmat.primitives.serialization import Encoding

        return f"sha256:{self._sha256(Encoding.DER)}"

    @property
    def hint(self) -> str:
        """sha256 of the PEM, in hex: the `hint` that model_signing compares before it verifies."""
        from cryptography.hazmat.primitives.serialization import Encoding

        return self._sha256(Encoding.PEM)

    def _sha256(self, encoding: Encoding) -> str:
        from cryptography.hazmat.primitives.serialization import PublicFormat

        encoded = self.key.public_bytes(encoding, PublicFormat.SubjectPublicKeyInfo)
        return hashlib.sha256(encoded).hexdigest()

    def accepts(self, message: bytes, signature: bytes) -> bool:
        """Whether the holder of the private key signed this message."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        try:
            self.key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class PrivateKey:
    """A key that signs."""

    key: EllipticCurvePrivateKey

    @property
    def public(self) -> PublicKey:
        """The key that checks what this one signs."""
        return PublicKey(self.key.public_key())

    def sign(self, message: bytes) -> bytes:
        """Returns the signature of a message, DER-encoded.

        It is deterministic (RFC 6979), so that the same certificate has the same bytes.

        Raises:
            UsageError: The installed OpenSSL signs with random numbers only.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        try:
            algorithm = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)
            return self.key.sign(message, algorithm)
        except UnsupportedAlgorithm as error:
            raise UsageError(
                "deterministic signatures (RFC 6979) need OpenSSL 3.2 or later, which the "
                "installed cryptography lacks; install its wheel: "
                'pip install --force-reinstall --only-binary :all: "cryptography>=43"'
            ) from error


def load_private_key(path: Path) -> PrivateKey:
    """Reads the private key of `verify --sign`.

    Args:
        path: PEM file. The passphrase of an encrypted one is in TRANSFERRY_KEY_PASSPHRASE.

    Raises:
        InputError: The file is unreadable, encrypted with another passphrase, or no private key on
            the curve P-256.
        UsageError: cryptography is not installed.
    """
    from_pem, ec = _library("load_pem_private_key")
    content = read_bytes(path, MOST_KEY)
    try:
        # Tried without a passphrase first, which is of another key where this one needs none.
        key = from_pem(content, None)
    except TypeError:
        key = _decrypted(path, content, from_pem)
    except _errors() as error:
        raise _no_key(path, "private", _label(content)) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != CURVE:
        raise _no_key(path, "private", _kind(key))
    return PrivateKey(key)


def _decrypted(path: Path, content: bytes, from_pem: Any) -> Any:
    passphrase = os.environ.get(PASSPHRASE, "")
    if not passphrase:
        raise InputError(
            f"{path} is encrypted: put its passphrase into the environment variable {PASSPHRASE}"
        )
    try:
        return from_pem(content, passphrase.encode())
    except _errors() as error:
        raise InputError(
            f"{path} is encrypted, and the passphrase in {PASSPHRASE} does not open it: correct "
            "the passphrase"
        ) from error


def load_public_key(path: Path) -> PublicKey:
    """Reads the public key of `--trusted-key`.

    Args:
        path: PEM file.

    Raises:
        InputError: The file is unreadable, or no public key on the curve P-256.
        UsageError: cryptography is not installed.
    """
    from_pem, ec = _library("load_pem_public_key")
    content = read_bytes(path, MOST_KEY)
    try:
        key = from_pem(content)
    except _errors() as error:
        raise _no_key(path, "public", _label(content)) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != CURVE:
        raise _no_key(path, "public", _kind(key))
    return PublicKey(key)


def _library(reader: str) -> tuple[Any, Any]:
    """Returns the library's function that reads a PEM file, and its elliptic curves."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ModuleNotFoundError as error:
        raise UsageError(
            f"signatures need cryptography, which is not installed; {install_command('sign')}"
        ) from error
    return getattr(serialization, reader), ec


def _errors() -> tuple[type[Exception], ...]:
    from cryptography.exceptions import UnsupportedAlgorithm

    return ValueError, TypeError, UnsupportedAlgorithm


def _no_key(path: Path, kind: str, found: str) -> InputError:
    remedy = MAKE_PRIVATE if kind == "private" else MAKE_PUBLIC
    return InputError(
        f"{path}: expected a {kind} key as PEM, ECDSA on the curve P-256, found {found}. Make one: "
        f"{remedy}"
    )


def _label(content: bytes) -> str:
    """Describes what a PEM file says that it holds."""
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
