"""Reads a webhook's secret file: signing keys, one per line, or PagerDuty's routing key."""

import base64
import binascii
import re
from pathlib import Path

PREFIX = "whsec_"
KEY_MIN, KEY_MAX = 24, 64  # bytes, as in Standard Webhooks
FILE_MAX = 64 * 1024
KEYS_MAX = 8
MAKES_ONE = f'`echo "{PREFIX}$(head -c 32 /dev/urandom | base64)"` generates one'
ROUTING_KEY = re.compile(r"[A-Za-z0-9]{32}")


def read_secret(file: Path) -> str:
    """Return the text of a secret file. Raise ValueError with the reason if it cannot be read."""
    try:
        with file.open("rb") as opened:
            text = opened.read(FILE_MAX).decode("ascii").strip()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not a secret file: secrets are ASCII text") from None
    if not text:
        raise ValueError(f"{file} is empty")
    return text


def keys_of(text: str) -> list[bytes]:
    """Return the keys in a file's text. Raise ValueError for an invalid line."""
    found = [_key(line.strip(), number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not 0 < len(found) <= KEYS_MAX:
        raise ValueError(f"it has {len(found)} keys: it must have 1 to {KEYS_MAX}, one per line")
    return found


def _key(line: str, number: int) -> bytes:
    try:
        key = base64.b64decode(line.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not line.startswith(PREFIX) or not KEY_MIN <= len(key) <= KEY_MAX:
        raise ValueError(
            f"line {number} is not a key: it must be {PREFIX} and {KEY_MIN} to {KEY_MAX} bytes in base64; {MAKES_ONE}"
        )
    return key


def routing_key(text: str) -> str:
    """Return the routing key in a file's text. Raise ValueError if it is not one."""
    if not ROUTING_KEY.fullmatch(text):
        raise ValueError(
            "it is not a PagerDuty routing key: the file must hold only its 32 letters and digits"
        )
    return text
