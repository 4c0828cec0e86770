"""Text in Markdown in which nothing is markup: names may have been chosen by a client or by a compromised worker."""

import re

from controller.terminal_text import safe

_markup = re.compile(r"([\\`*\[\]#|~!$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
_link = re.compile(r"(?i)\b(https?|ftp|mailto|xmpp)(?=:)|\bwww(?=\.)")  # becomes a link without any markup
_line_start = re.compile(r"^(\s*(?:\d{1,9}(?=[.)])|(?=[-+=>])))")


def escaped(text: str) -> str:
    """Return one line of Markdown that shows this text, also in a cell of a table."""
    line = _markup.sub(r"\\\1", safe(" ".join(text.split())))
    line = _link.sub(lambda found: f"{found[0]}\\", line.replace("&", "&amp;").replace("<", "&lt;"))
    return _line_start.sub(r"\1\\", line)
