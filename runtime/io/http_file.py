"""Files of web servers, read as they stream in; what ends early or changes is an error."""

import base64
import contextlib
import errno
import http.client
import io
import os
import urllib.error
import urllib.request
from typing import Any, cast
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from transferry.runtime.errors import InputError

# Seconds to wait for a server, and bytes that are skipped where it sends whole files only.
_PATIENCE, _MOST_SKIPPED = 60.0, 256 << 20
_STATUS = {
    401: "the server asks for a user and a password, or a token; give them in the address",
    403: "the server refuses these credentials, or the signature of the address has expired",
    407: "the proxy asks for credentials",
    429: "the server wants fewer requests; try again later",
}


class HttpFile(io.RawIOBase):
    """A file by its address: one request as long as nobody seeks.

    `version` is its size in bytes, and the time of the last change or the ETag; None if unknown.
    """

    def __init__(self, url: str, shown: str) -> None:
        """Asks for the file, which messages call `shown`; raises InputError if it is refused."""
        self._url, self._shown = url, shown
        self._at, self._size = 0, cast("int | None", None)
        self._response: Any = None
        headers = self._ask()
        self.version = (self._size, headers.get("Last-Modified") or headers.get("ETag"))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._size is not None

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Goes to another place, for which the next read asks anew."""
        if self._size is None:
            raise io.UnsupportedOperation("the server does not say how long the file is")
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if at != self._at:
            self._drop()
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        """Reads some bytes; raises InputError where their number is not the announced one."""
        if self._response is None:
            if self._at == self._size:
                return 0
            self._ask()
        try:
            size = int(self._response.readinto(buffer) or 0)
        except TimeoutError:
            if self._at != self._size:  # else a server that does not hang up
                raise
            size = 0
        except http.client.HTTPException as error:  # one without a size, in chunks
            raise self._cut("all") from error
        self._at += size
        if self._size is not None and self._at > self._size:
            raise self._cut(f"{self._size:,}", "more")
        if self._size is not None and not size and self._at < self._size:
            raise self._cut(f"{self._size:,}")
        return size

    def _cut(self, expected: str, found: str = "") -> InputError:
        return InputError(
            f"{self._shown}: expected {expected} bytes, as the server announced, found "
            f"{found or f'{self._at:,}'}; run the command again, or download the file first"
        )

    def close(self) -> None:
        self._drop()
        super().close()

    def _drop(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def _ask(self) -> Any:
        """Begins a response at the current place, and returns its headers."""
        request = _request(self._url)
        asked = f"bytes {self._at}-"
        if self._at:
            request.add_header("Range", asked.replace(" ", "="))
        try:
            self._response = response = _OPENER.open(request, timeout=_PATIENCE)
        except urllib.error.HTTPError as error:
            raise _refused(self._shown, error) from error
        except (http.client.HTTPException, ValueError) as error:
            raise InputError(
                f"{self._shown}: cannot be read: expected an answer of HTTP, found another "
                f"({type(error).__name__})"
            ) from error
        announced = response.headers.get("Content-Length")
        if announced is not None and not announced.isdecimal():
            raise InputError(f"{self._shown}: cannot be read: its Content-Length is no number")
        if not self._at:
            self._size = None if announced is None else int(announced)
        elif response.status != 206:
            self._skip(response)
        elif not (part := response.headers.get("Content-Range", asked)).startswith(asked):
            raise InputError(
                f"{self._shown}: expected {asked}, found {part}, another part of the file; "
                "download it first"
            )
        # Read until the server hangs up, and so find out whether its announcement is true.
        response.length = None
        return response.headers

    def _skip(self, response: Any) -> None:
        """Skips to the current place of a server that sends whole files only."""
        if self._at > _MOST_SKIPPED:
            raise InputError(f"{self._shown}: the server sends whole files only; download it first")
        for start in range(0, self._at, 1 << 20):
            response.read(min(1 << 20, self._at - start))


def _request(url: str) -> urllib.request.Request:
    """Returns the request of an address, whose user and password go into a header."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    path, query = (quote(part, safe="%/:=&?~#+!$,;'@()*[]") for part in (parts.path, parts.query))
    plain = urlunsplit((parts.scheme, host, path, query, ""))
    headers = {"Accept-Encoding": "identity", "User-Agent": "transferry"}
    request = urllib.request.Request(plain, headers=headers)
    if at:
        secret = base64.b64encode(unquote(user).encode()).decode()
        # Not sent to another server that this one redirects to.
        request.add_unredirected_header("Authorization", f"Basic {secret}")
    return request


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Keeps credentials on the same server alone."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        known = req.unredirected_hdrs.get("Authorization")
        if request is not None and known and urlsplit(newurl)[:2] == urlsplit(req.full_url)[:2]:
            request.add_unredirected_header("Authorization", known)
        return request


_OPENER = urllib.request.build_opener(_Redirects)


def _refused(shown: str, error: urllib.error.HTTPError) -> InputError:
    with contextlib.closing(error):
        told = f"{error.code} {http.client.responses.get(error.code, '')}".strip()
    if error.code in (404, 410):
        return InputError(f"{shown}: there is no such file ({told})")
    if 300 <= error.code < 400:
        return InputError(f"{shown}: cannot be read: the server redirects without end ({told})")
    usual = "the server failed; try again later" if error.code >= 500 else "the server refuses"
    return InputError(f"{shown}: cannot be read: {_STATUS.get(error.code, usual)} ({told})")
