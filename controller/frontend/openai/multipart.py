"""Reads and replaces the text fields of a multipart/form-data body (RFC 7578), the form of audio."""

import re
from collections.abc import Iterator

from controller.frontend.errors import invalid

PARTS_MAX = 64
_boundary = re.compile(r'\bboundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE).search
_name = re.compile(rb'\bname="([^"]{0,256})"').search


def form_fields(body: bytes, media: str) -> dict[str, str]:
    """Return the text fields of a body by name, without files. `media` is the body's media type with its boundary.

    Raise ApiError (400) if the body is not multipart/form-data.
    """
    return {
        name: body[start:end].decode("utf-8", "replace")
        for name, is_file, start, end in _parts(body, media)
        if not is_file
    }


def with_form_field(body: bytes, media: str, field: str, value: str) -> bytes:
    """Return a body with the value of one field replaced, or added if the body lacks the field."""
    for name, is_file, start, end in _parts(body, media):
        if name == field and not is_file:
            return body[:start] + value.encode() + body[end:]
    mark = _mark(media)
    head = f'Content-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'
    return mark + b"\r\n" + head.encode() + body


def _mark(media: str) -> bytes:
    found = _boundary(media)
    if not media.lower().startswith("multipart/form-data") or found is None:
        raise invalid("the body must be multipart/form-data with a boundary", code="invalid_value")
    return b"--" + (found[1] or found[2]).encode()


def _parts(body: bytes, media: str) -> Iterator[tuple[str, bool, int, int]]:
    """Yield for each part its name, whether it is a file, and the start and end of its content."""
    mark = _mark(media)
    at = body.find(mark)
    if at < 0:
        raise invalid("the body does not contain the boundary of its Content-Type", code="invalid_value")
    for _ in range(PARTS_MAX):
        head = at + len(mark)
        next_mark = body.find(b"\r\n" + mark, head)
        if next_mark < 0:
            return
        start = body.find(b"\r\n\r\n", head, next_mark)
        if start >= 0:
            described = body[head:start]
            if (found := _name(described)) is not None:
                yield found[1].decode("utf-8", "replace"), b"filename" in described, start + 4, next_mark
        at = next_mark + 2
    raise invalid(f"the body has more than {PARTS_MAX} parts", code="invalid_value")
