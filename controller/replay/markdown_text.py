"""Escapes text for Markdown: clients or compromised workers may have chosen the names in it."""

import re

from controller.terminal_text import escape_controls

_markup = re.compile(r"([\\`*\[\]#|~!$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
_link = re.compile(
    r"(?i)\b(https?|ftp|mailto|xmpp)(?=:)|\bwww(?=\.)"
)  # rendered as a link even without markup
_line_start = re.compile(r"^(\s*(?:\d{1,9}(?=[.)])|(?=[-+=>])))")


def escaped(text: str) -> str:
    """Return one line of Markdown that renders as this text, also within a table cell."""
    line = _markup.sub(r"\\\1", escape_controls(" ".join(text.split())))
    line = _link.sub(lambda found: f"{found[0]}\\", line.replace("&", "&amp;").replace("<", "&lt;"))
    return _line_start.sub(r"\1\\", line)
