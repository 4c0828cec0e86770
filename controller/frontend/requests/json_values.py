"""Has a body more values than any request needs? Told by its separators, before anything is made of them.

45 MB of `[],[],…` take eight seconds to decode and a gigabyte to keep, 45 MB of text 40 ms. The commas and brackets of a
text are no separators; they are told apart only where there are very many.
"""

LOOKED_AT_BYTES = 2**16  # a shorter body cannot have that much
NESTED_MAX = 2**17  # lists and objects: 10,000 messages of many parts
TEXTS_MAX = 2**18  # names among them
SEPARATED_MAX = 2**21  # values: 16 prompts of 100,000 token ids, and more


def excess(body: bytes) -> str:
    """Return of what a body has too much, with the number that it may have; empty: of nothing."""
    if len(body) < LOOKED_AT_BYTES or not _too_many(body):
        return ""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 2 * TEXTS_MAX:
        return f"{TEXTS_MAX} texts and names"
    return _too_many(b"".join(plain.split(b'"')[::2]))


def _too_many(separators: bytes) -> str:
    if separators.count(b"[") + separators.count(b"{") > NESTED_MAX:
        return f"{NESTED_MAX} lists and objects"
    return f"{SEPARATED_MAX} values" if separators.count(b",") > SEPARATED_MAX else ""
