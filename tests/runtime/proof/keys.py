"""Keys for tests, always the same, and another program that checks signatures."""

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat, PublicFormat

# RFC 6979, appendix A.2.5.
RFC_6979 = 0xC9AFA9D845BA75166B5C215767B1D6934E50C3DB36E89B127B8A622B120F6721


def pem(key: ec.EllipticCurvePrivateKey, passphrase: bytes = b"") -> bytes:
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase:
        encryption = serialization.BestAvailableEncryption(passphrase)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def public_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def key_files(folder: Path, name: str = "signing", secret: int = RFC_6979) -> tuple[Path, Path]:
    """Writes a private and its public key; returns both files."""
    key = ec.derive_private_key(secret, ec.SECP256R1())
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    private.write_bytes(pem(key))
    public.write_bytes(public_pem(key))
    return private, public


def model_signing(folder: Path, signature: Path, public: Path) -> tuple[int, str]:
    """Exit code and output of the command of model-signing."""
    pytest.importorskip("model_signing", reason="pip install model-signing pyopenssl")
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(folder)]
    command += ["--signature", str(signature), "--public_key", str(public)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr
