"""The form in which a chat template takes messages, read off its syntax tree, and messages in that form.

The API's messages are not quite what templates are written for. As vLLM's chat endpoint does, before rendering:

- Text parts are joined with newlines, unless the template loops over a message's parts: it gets the parts then.
- A tool call's arguments are JSON text in the API, and an object in a template.
- A template that does not know the role `developer` gets `system` in its place.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes

PLAIN_ROLES = frozenset({"user", "assistant", "system"})  # a text of theirs is the same in each form


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """What one template expects of a message."""

    parts: bool = False  # its content as a list of parts, where a client sends one
    strings: bool = True  # its content as a string, where a client sends one
    developer: bool = False  # the role `developer`

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the API's messages in this form. The given ones stay as they are."""
        for message in messages:
            plain = len(message) == 2 and message.get("role") in PLAIN_ROLES
            if self.parts or not plain or type(message.get("content")) is not str:
                return [self._message(message) for message in messages]
        return list(messages)  # nearly always

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        content = message.get("content")
        if isinstance(content, list):
            if not self.parts:
                changed["content"] = "\n".join(part["text"] for part in content)
        elif self.parts and not self.strings and isinstance(content, str):
            changed["content"] = [{"type": "text", "text": content}]
        if message.get("role") == "developer" and not self.developer:
            changed["role"] = "system"
        if isinstance(calls := message.get("tool_calls"), list):
            changed["tool_calls"] = [_with_object(call) for call in calls]
        return message | changed if changed else message


def format_of(tree: nodes.Template) -> MessageFormat:
    """Return the form that a template takes."""
    parts = _loops_over_parts(tree)
    strings = not parts or any(test.name == "string" for test in tree.find_all(nodes.Test))
    developer = any(constant.value == "developer" for constant in tree.find_all(nodes.Const))
    return MessageFormat(parts, strings, developer)


def _with_object(call: Any) -> Any:
    """Return a tool call whose arguments are an object. What is not the JSON text of one stays as it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _loops_over_parts(tree: nodes.Template) -> bool:
    """Return whether a loop of the template runs over the content of a message."""
    lists = {"messages"}  # names that hold messages
    one: set[str] = set()  # names that hold one message
    contents: set[str] = set()  # names that hold its content
    for _ in range(3):  # an alias of an alias of an alias
        for target, value in _assignments(tree):
            if _is_content(value, lists, one, contents):
                contents.add(target)
            elif _is_message(value, lists, one):
                one.add(target)
            elif _base_name(value) in lists:
                lists.add(target)
        for loop in tree.find_all(nodes.For):
            if isinstance(loop.target, nodes.Name) and _base_name(loop.iter) in lists:
                one.add(loop.target.name)
    return any(_is_content(loop.iter, lists, one, contents) for loop in tree.find_all(nodes.For))


def _assignments(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    for assigned in tree.find_all(nodes.Assign):
        if isinstance(assigned.target, nodes.Name):
            yield assigned.target.name, assigned.node


def _is_content(value: nodes.Node, lists: set[str], one: set[str], contents: set[str]) -> bool:
    value = _unfiltered(value)
    if isinstance(value, nodes.Name):
        return value.name in contents
    match value:
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return _is_message(value.node, lists, one)
    return False


def _is_message(value: nodes.Node, lists: set[str], one: set[str]) -> bool:
    value = _unfiltered(value)
    if isinstance(value, nodes.Name):
        return value.name in one
    return isinstance(value, nodes.Getitem) and _base_name(value.node) in lists


def _base_name(value: nodes.Node) -> str:
    value = _unfiltered(value)
    return value.name if isinstance(value, nodes.Name) else ""


def _unfiltered(value: nodes.Node) -> nodes.Node:
    """Return what a chain of filters and slices starts from."""
    while isinstance(value, nodes.Filter) and value.node is not None:
        value = value.node
    return value
