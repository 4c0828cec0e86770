"""Which secrets does a webhook's file hold? Keys for signatures, one on each line, or PagerDuty's routing key."""

import base64
import binascii
import re
from pathlib import Path

PREFIX = "whsec_"
KEY_MIN, KEY_MAX = 24, 64  # bytes, as Standard Webhooks has them
FILE_MAX = 64 * 1024
KEYS_MAX = 8
MAKES_ONE = f'`echo "{PREFIX}$(head -c 32 /dev/urandom | base64)"` makes one'
ROUTING_KEY = re.compile(r"[A-Za-z0-9]{32}")


def read_secret(file: Path) -> str:
    """Return what a file with secrets holds. Raise ValueError that says why it cannot be had."""
    try:
        with file.open("rb") as opened:
            text = opened.read(FILE_MAX).decode("ascii").strip()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} holds no secret: those are plain letters, digits and signs") from None
    if not text:
        raise ValueError(f"{file} is empty")
    return text


def keys_of(text: str) -> list[bytes]:
    """Return the keys of a file's text. Raise ValueError that says what is wrong with it."""
    found = [_key(line.strip(), number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not 0 < len(found) <= KEYS_MAX:
        raise ValueError(f"it has {len(found)} keys: 1 to {KEYS_MAX}, each on a line of its own")
    return found


def _key(line: str, number: int) -> bytes:
    try:
        key = base64.b64decode(line.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not line.startswith(PREFIX) or not KEY_MIN <= len(key) <= KEY_MAX:
        raise ValueError(
            f"line {number} is no key: {PREFIX} and the base64 of {KEY_MIN} to {KEY_MAX} bytes; {MAKES_ONE}"
        )
    return key


def routing_key(text: str) -> str:
    """Return the routing key that a file's text is. Raise ValueError if it is none."""
    if not ROUTING_KEY.fullmatch(text):
        raise ValueError(
            "it is no routing key of PagerDuty: those are 32 letters and digits, alone in the file"
        )
    return text
