"""A process that parses large request bodies, so that they do not block a frontend's event loop.

    stdin:   size (4 bytes, little-endian), parser (1 byte), body
    stdout:  size, MessagePack of the parsed request or of its rejection (400)

The process exits at the end of its input. The frontend kills the process if one body takes too long.
"""

import os
import struct
import sys
from typing import Any

import msgspec

from controller.frontend.errors import ApiError
from controller.frontend.openai.request_kinds import KINDS, parse_body

HEAD = struct.Struct("<IB")
SIZE = struct.Struct("<I")
NAMES = tuple(KINDS)
NICENESS = 5  # lower priority than the frontend, so that running streams have precedence


def parse(name: str, body: bytes) -> bytes:
    """Parse a body with the parser `name`. Return the encoded outcome: the parsed request, or its rejection."""
    try:
        return msgspec.msgpack.encode((parse_body(name, body), None))
    except ApiError as error:
        rejection = (str(error), error.code, error.param)
    except OverflowError:  # MessagePack has no integers above 64 bits
        rejection = ("a number in the body has more than 64 bits", "invalid_value", None)
    return msgspec.msgpack.encode((None, rejection))


def outcome(name: str, encoded: bytes) -> Any:
    """Return the parsed request that `parse` has encoded. Raise ApiError (400) if a rejection is encoded instead.

    `name` is the parser that was used.
    """
    rejected = tuple[str, str, str | None]  # the 400 of an invalid body: message, code, param
    result, rejection = msgspec.msgpack.decode(encoded, type=tuple[msgspec.Raw, rejected | None])
    if rejection is not None:
        message, code, param = rejection
        raise ApiError(400, message, code=code, param=param)
    return msgspec.msgpack.decode(result, type=KINDS[name][1])


def main() -> None:
    """Parse bodies until the input ends."""
    os.nice(NICENESS)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while len(head := source.read(HEAD.size)) == HEAD.size:
        size, parser = HEAD.unpack(head)
        answer = parse(NAMES[parser], source.read(size))
        sink.write(SIZE.pack(len(answer)))
        sink.write(answer)
        sink.flush()


if __name__ == "__main__":
    main()
