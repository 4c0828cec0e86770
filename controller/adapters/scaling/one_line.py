"""Condenses other programs' output to one line for the journal."""

SAYS_MAX = 300  # characters


def one_line(text: str) -> str:
    """Return a text as one line of printable characters, truncated to SAYS_MAX characters."""
    line = " ".join(text.split())
    line = "".join(one for one in line if one.isprintable())
    return line if len(line) <= SAYS_MAX else f"{line[: SAYS_MAX - 1]}…"


def last_line(output: bytes) -> str:
    """Return the last non-empty line of a process's output; empty if there is none."""
    lines = output.decode(errors="replace").splitlines()
    return next(filter(None, (one_line(line) for line in reversed(lines))), "")
