"""Fingerprints of values that are not written: they show whether two runs had the same value, and not which one.

A plain or salted hash of a short value is guessed by trying all values, and a salt beside it does not help. Therefore
the hash has a key (HMAC, RFC 2104), which stays in the user's state folder, outside of run folders. Without the key a
fingerprint says nothing; fingerprints of two keys cannot be compared, which `<hidden KEY-DIGEST>` shows.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

KEY_BYTES = 32
KEY_NAME = "fingerprint.key"
FORM = re.compile(r"<hidden (?P<key>[0-9a-f]{4})-[0-9a-f]{10}>")


def is_fingerprint(text: str) -> bool:
    """Whether `text` was written instead of a value."""
    return FORM.fullmatch(text) is not None


def are_comparable(a: str, b: str) -> bool:
    """Whether it shows that two values are equal or not; it does not if they were hidden with different keys."""
    found = FORM.fullmatch(a), FORM.fullmatch(b)
    return not all(found) or len({each["key"] for each in found if each}) == 1


class FingerprintKey:
    """The key of this process: the user's, or a random one until `keep` stores it."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._key: bytes | None = None

    def use_folder(self, folder: Path) -> None:
        """Set the folder of the key; it is read when a fingerprint is first needed."""
        self._file, self._key = folder / KEY_NAME, None

    def keep(self) -> None:
        """Store the key for later runs, unless the user has one. Without a writable folder it serves this process."""
        key = self._read()
        if self._file is None:
            return
        if os.path.isfile(self._file):  # False below a folder of another user, where `exists` raises
            self._key = None  # it may be there since this process needed one
            return
        temporary = self._file.with_name(f".{KEY_NAME}.{os.getpid()}")
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(key.hex())
            os.link(temporary, self._file)  # it appears as a whole
        except FileExistsError:
            self._key = None  # another process was faster, and its key counts
        except OSError:
            pass
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def compute(self, name: str, value: str) -> str:
        """The fingerprint of a variable. Its name is hashed too, so that equal values of two variables do not show."""
        return f"<hidden {self._digest('key')[:4]}-{self._digest(f'{name}={value}')[:10]}>"

    def _digest(self, text: str) -> str:
        import hmac  # imported only if a value is hidden: every command imports this module

        return hmac.digest(self._read(), text.encode("utf-8", "surrogateescape"), "sha256").hex()

    def _read(self) -> bytes:
        if self._key is None:
            found = b""
            with contextlib.suppress(OSError, ValueError):
                found = bytes.fromhex(self._file.read_text()) if self._file else b""
            self._key = found if len(found) == KEY_BYTES else os.urandom(KEY_BYTES)
        return self._key


fingerprint_key = FingerprintKey()
"""The key of the command that this process runs."""
