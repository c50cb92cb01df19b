"""A key signs the same bytes the same way, and a file that holds no such key is named."""

import hashlib
from pathlib import Path

import pytest
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from tests.commands import python
from tests.runtime.proof.keys import RFC_6979, key_files, pem, public_pem
from transferry.runtime.errors import InputError, UsageError, install_command
from transferry.runtime.proof.certificates.signature import (
    PASSPHRASE,
    load_private_key,
    load_public_key,
)


def test_the_vector_of_rfc_6979(tmp_path: Path) -> None:
    """Appendix A.2.5: P-256, SHA-256, message "sample"."""
    private, public = map(Path, key_files(tmp_path))
    signature = load_private_key(private).sign(b"sample")
    assert decode_dss_signature(signature) == (
        0xEFD48B2AACB6A8FD1140DD9CD45E81D69D2C877B56AAF991C34D0EA84EAF3716,
        0xF7CB1C942D657C41D436C7A1B6E29F65F3E900DBB9AFF4064DC4AB2F843ACDA8,
    )
    key = load_public_key(public)
    assert key.accepts(b"sample", signature)
    assert not key.accepts(b"Sample", signature)
    for other in (b"", b"no DER", signature[:-1], signature[:-1] + bytes([signature[-1] ^ 1])):
        assert not key.accepts(b"sample", other)


def test_the_vector_of_rfc_8032(tmp_path: Path) -> None:
    """Section 7.1, test 2: Ed25519 of the message 0x72."""
    secret = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    key = ed25519.Ed25519PrivateKey.from_private_bytes(secret)
    private = write(tmp_path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    signature = load_private_key(private).sign(b"\x72")
    assert signature.hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    info = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    public = load_public_key(write(tmp_path, key.public_key().public_bytes(*info)))
    assert public.accepts(b"\x72", signature)
    for message, other in ((b"\x73", signature), (b"\x72", signature[:-1]), (b"\x72", b"")):
        assert not public.accepts(message, other)


def test_no_random_signature_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object, **__: object) -> None:
        raise UnsupportedAlgorithm("ECDSA with deterministic signature (RFC 6979)")

    key = load_private_key(key_files(tmp_path)[0])
    monkeypatch.setattr(ec, "ECDSA", unsupported)
    with pytest.raises(UsageError, match=r"need OpenSSL 3\.2 or later.*; install its wheel: pip"):
        key.sign(b"sample")


def test_the_id_of_a_key_is_the_hash_of_its_der(tmp_path: Path) -> None:
    private, public = key_files(tmp_path)
    key = ec.derive_private_key(RFC_6979, ec.SECP256R1()).public_key()
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    expected = f"sha256:{hashlib.sha256(der).hexdigest()}"
    assert load_public_key(public).key_id == load_private_key(private).public.key_id == expected
    assert load_public_key(key_files(tmp_path, "other", secret=7)[1]).key_id != expected


def write(folder: Path, content: bytes) -> Path:
    path = folder / "some.pem"
    path.write_bytes(content)
    return path


def unfit_keys() -> dict[str, tuple[bytes, str, str]]:
    """Content, and the message's word for it: as private key, as public key."""
    p384, k256 = ec.derive_private_key(7, ec.SECP384R1()), ec.derive_private_key(7, ec.SECP256K1())
    of_rsa = rsa.generate_private_key(65537, 1024)
    edwards = ed448.Ed448PrivateKey.from_private_bytes(bytes(57))
    plain = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    info = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    fit = ec.derive_private_key(7, ec.SECP256R1())
    return {
        "P-384": (pem(p384), "one on the curve secp384r1", "a private key"),
        "secp256k1": (pem(k256), "one on the curve secp256k1", "a private key"),
        "P-384, public": (public_pem(p384), "a public key", "one on the curve secp384r1"),
        "RSA": (of_rsa.private_bytes(*plain), "a key for RSA", "a private key"),
        "RSA, public": (of_rsa.public_key().public_bytes(*info), "a public key", "a key for RSA"),
        "Ed448": (edwards.private_bytes(*plain), "a key for Ed448", "a private key"),
        "DER": (fit.private_bytes(Encoding.DER, *plain[1:]), "no PEM", "no PEM"),
        "empty": (b"", "an empty file", "an empty file"),
        "text": (b"key\n", "no PEM", "no PEM"),
        "torn": (pem(fit)[:-40], "a damaged private key", "a private key"),
        "torn, public": (public_pem(fit)[:60], "a public key", "a damaged public key"),
        "certificate": (b"-----BEGIN CERTIFICATE-----\n", "a certificate", "a certificate"),
    }


@pytest.mark.parametrize("name", unfit_keys())
def test_a_file_without_such_a_key_is_named(tmp_path: Path, name: str) -> None:
    content, as_private, as_public = unfit_keys()[name]
    path = write(tmp_path, content)
    with pytest.raises(InputError) as private:
        load_private_key(path)
    assert str(private.value) == (
        f"{path}: expected a private key as PEM, Ed25519 or ECDSA on the curve P-256, "
        f"found {as_private}. "
        "Make one: openssl genpkey -algorithm ed25519 -out KEY"
    )
    with pytest.raises(InputError) as public:
        load_public_key(path)
    assert str(public.value) == (
        f"{path}: expected a public key as PEM, Ed25519 or ECDSA on the curve P-256, "
        f"found {as_public}. "
        "Make one: openssl pkey -in KEY -pubout -out PUB"
    )


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent: cannot be read: No such file"):
        load_private_key(tmp_path / "absent")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        load_public_key(tmp_path)


def test_a_passphrase_is_read_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PASSPHRASE, raising=False)
    key = ec.derive_private_key(RFC_6979, ec.SECP256R1())
    path = write(tmp_path, pem(key, b"open"))
    with pytest.raises(InputError, match=f"some.pem is encrypted: put .* variable {PASSPHRASE}$"):
        load_private_key(path)
    monkeypatch.setenv(PASSPHRASE, "shut")
    with pytest.raises(InputError, match=f"passphrase in {PASSPHRASE} does not open it"):
        load_private_key(path)
    monkeypatch.setenv(PASSPHRASE, "open")
    plain = key_files(tmp_path)[0]
    assert load_private_key(path).public.key_id == load_private_key(plain).public.key_id


def test_a_missing_library_is_named_once_a_key_is_opened(tmp_path: Path) -> None:
    private, _ = key_files(tmp_path)
    script = f"""
import sys
from pathlib import Path
sys.modules["cryptography"] = None
import transferry.runtime.engine.engine
from transferry.runtime.errors import UsageError
from transferry.runtime.proof.certificates.signature import load_private_key
try:
    load_private_key(Path({str(private)!r}))
except UsageError as error:
    print(error)
"""
    done = python("-c", script)
    assert done.stdout == (
        f"signatures need cryptography, which is not installed; {install_command('sign')}\n"
    ), done.stderr
