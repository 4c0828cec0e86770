"""Edits the text of a file of upstreams: one entry changes, and everything else stays as it is.

An edit changes only the lines of its entry, so that comments and the order stay. The result is parsed again: it must list exactly
the expected entries. If the file is written in a form that cannot be edited this way, nothing changes.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from msgspec.structs import replace

from events.errors import HoldfastError, UsageError
from workers.config.upstreams import UpstreamEntry, parse_upstreams, read_upstreams

Edit = Callable[[str], str]


class NotEditable(HoldfastError):
    """The file of upstreams is written in a form that this command cannot edit. Edit it by hand."""


def add(text: str, fields: dict[str, Any]) -> str:
    """Return the text with one more entry at its end.

    Raise UsageError if the file lists the name already, and NotEditable if the file cannot be edited.
    """
    before = parse_upstreams(text.encode()) if text.strip() else ()
    if any(entry.name == fields["name"] for entry in before):
        raise UsageError(f"the file lists {fields['name']} already")
    line = yaml.safe_dump(
        fields, default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True
    ).strip()
    sequence = _sequence(text)
    if sequence is None:
        lines = [*text.rstrip().splitlines(), "upstreams:", f"  - {line}"]
        after = "\n".join(lines) + "\n"
    elif sequence.value and sequence.flow_style:
        raise NotEditable(f"its list is written in brackets. {NotEditable.__doc__}")
    elif sequence.value:
        column = _dash(text, sequence.value[0])[1]
        lines = text.splitlines()
        lines.insert(_end(sequence.value[-1]) + 1, f"{' ' * column}- {line}")
        after = "\n".join(lines) + "\n"
    else:  # `upstreams: []`
        start, end = sequence.start_mark.index, sequence.end_mark.index
        after = f"{text[:start].rstrip(' ')}\n  - {line}{text[end:]}"
    return _checked(after, [entry.name for entry in before] + [fields["name"]])


def remove(text: str, name: str) -> str:
    """Return the text without the entry of this name.

    Raise UsageError if there is no such entry, and NotEditable if the file cannot be edited.
    """
    before = parse_upstreams(text.encode())
    node = _node(text, name)
    sequence = _sequence(text)
    assert sequence is not None
    if sequence.flow_style:
        raise NotEditable(f"its list is written in brackets. {NotEditable.__doc__}")
    lines = (text if len(before) > 1 else _with_empty_list(text)).splitlines()
    del lines[_dash(text, node)[0] : _end(node) + 1]
    after = "\n".join(lines) + "\n"
    return _checked(after, [entry.name for entry in before if entry.name != name], before)


def set_pause(text: str, name: str, pause: bool) -> str:
    """Return the text with the entry's field `pause` set to this value."""
    before = parse_upstreams(text.encode())
    node, value = _node(text, name), "true" if pause else "false"
    for key, present in node.value:
        if key.value == "pause":
            after = text[: present.start_mark.index] + value + text[present.end_mark.index :]
            break
    else:
        if node.flow_style:
            end = node.end_mark.index - 1
            after = f"{text[:end].rstrip()}, pause: {value}{text[end:]}"
        else:
            lines = text.splitlines()
            lines.insert(_end(node) + 1, f"{' ' * node.start_mark.column}pause: {value}")
            after = "\n".join(lines) + "\n"
    expected = tuple(replace(entry, pause=pause) if entry.name == name else entry for entry in before)
    return _checked(after, [entry.name for entry in before], expected)


def _checked(after: str, names: list[str], expected: tuple[UpstreamEntry, ...] = ()) -> str:
    """Return `after` if it lists entries of these names, and each of `expected` that has one of the names is unchanged."""
    found = {entry.name: entry for entry in parse_upstreams(after.encode())}
    kept = all(found.get(entry.name) == entry for entry in expected if entry.name in names)
    if list(found) != names or not kept:
        raise NotEditable(NotEditable.__doc__)
    return after


def _sequence(text: str) -> yaml.SequenceNode | None:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value == "upstreams":
            return value if isinstance(value, yaml.SequenceNode) else None
    return None


def _with_empty_list(text: str) -> str:
    """Return the text with an empty list after the key `upstreams`. The entries must be removed next."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    (end,) = (key.end_mark.index for key, _ in root.value if key.value == "upstreams")
    colon = text.index(":", end) + 1
    return f"{text[:colon]} []{text[colon:]}"


def _node(text: str, name: str) -> yaml.MappingNode:
    sequence = _sequence(text)
    for node in sequence.value if sequence is not None else ():
        if any(key.value == "name" and value.value == name for key, value in node.value):
            return node
    raise UsageError(f"the file lists no upstream {name}")


def _dash(text: str, node: yaml.Node) -> tuple[int, int]:
    """Return the line and the column of the dash before an entry."""
    lines = text.splitlines()
    for line in range(node.start_mark.line, -1, -1):
        stripped = lines[line].lstrip()
        if stripped.startswith("-"):
            return line, len(lines[line]) - len(stripped)
    raise NotEditable(NotEditable.__doc__)


def _end(node: yaml.Node) -> int:
    """Return the last line of a node, without the comments and blank lines after it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.line)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file while its contents are replaced, so that no edit of another command is lost."""
    while True:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # another command may have replaced the file while this one waited for the lock
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                yield
                return


def edit_file(path: Path, edit: Edit) -> bytes:
    """Replace the file's contents by the result of `edit`, atomically, and return the new contents.

    Raise BadUpstreams if the present contents are invalid, and HoldfastError if the file cannot be written.
    """
    path = path.resolve()  # a link stays a link
    try:
        with locked(path):
            after = edit(read_upstreams(path).decode()).encode()
            fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            try:
                fresh.write_bytes(after)
                fresh.chmod(path.stat().st_mode & 0o777)
                fresh.replace(path)
            finally:
                fresh.unlink(missing_ok=True)
    except OSError as error:
        raise HoldfastError(
            f"{path} cannot be edited: {error.strerror}; change it where it comes from"
        ) from error
    return after
