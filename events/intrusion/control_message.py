"""Builds control messages to workers, and detects other messages on the workers' control subjects.

A publisher to the journal chooses the subject of the broker's acknowledgement, and the broker checks no permission for that
subject. So a worker can receive an acknowledgement on its control subject, although no controller sent a message.

A control message contains the worker instance that it addresses. Since 0.3 it also contains the version of its format, its
sender and its verb, which is the name of the command. A controller of 0.2.0 sends only the instance, or only the argument of the
command.
"""

from collections.abc import Mapping

import msgspec

from events.json_types import Json, JsonView

FORM = 1
OLD = {"chaos": ("fault",), "drain": ("deadline_s",), "batch": ("share",), "distrust": ("reason",)}


def control(verb: str, worker: str, instance: str, sender: str, body: JsonView) -> Json:
    """Return the body of a control message to a worker instance."""
    form = {"form": FORM, "verb": verb, "worker": worker, "sender": sender}
    return {**body, "instance": instance, "control": form}


def foreign(verb: str, worker: str, body: JsonView) -> str:
    """Return why a body is not a control message to this worker with this command (`verb`). Return an empty string if the body
    is a valid control message."""
    form = body.get("control")
    if form is None:
        return (
            "" if any(name in body for name in ("instance", *OLD.get(verb, ()))) else "it names no instance"
        )
    if not isinstance(form, Mapping) or not isinstance(form.get("form"), int):
        return "its form is unreadable"
    if (form.get("verb"), form.get("worker")) != (verb, worker):
        return f"it is for {form.get('worker')!r} to {form.get('verb')!r}"
    return (
        ""
        if isinstance(form.get("sender"), str) and isinstance(body.get("instance"), str)
        else "it names no sender"
    )


def acknowledged(body: bytes) -> int | None:
    """Return the stream sequence in a broker's acknowledgement. Return None if the body is not an acknowledgement, or
    acknowledges a duplicate."""
    try:
        found = msgspec.json.decode(body, type=Json)
    except (msgspec.MsgspecError, UnicodeError):
        return None
    seq = found.get("seq")
    whole = "stream" in found and isinstance(seq, int) and seq > 0 and not found.get("duplicate")
    return seq if whole and "error" not in found else None
