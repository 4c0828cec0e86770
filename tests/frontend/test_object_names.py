"""The repr of an object of a client's request never contains client text.

Logs and errors show it.
"""

import importlib
import pkgutil
from dataclasses import is_dataclass

import controller.frontend
from controller.frontend.openai.choice import Choice, ResponseWriter
from controller.frontend.request.state import GenerationRequest
from events.blocks import BlockNames
from events.wire import Sampling


def test_dataclasses_with_identity_have_no_generated_repr() -> None:
    """They refer to the driver and to requests: a generated repr would print prompts and all live requests."""
    found = {
        kind
        for module in pkgutil.walk_packages(controller.frontend.__path__, "controller.frontend.")
        for kind in vars(importlib.import_module(module.name)).values()
        if is_dataclass(kind)
        and isinstance(kind, type)
        and kind.__module__ == module.name
        and kind.__eq__ is object.__eq__
    }
    assert {kind.__name__ for kind in found} >= {"LiveRequest", "Driver", "KvMove", "PlannedMoves"}
    assert [kind for kind in found if "__repr__" in vars(kind)] == []


def test_a_choice_is_represented_by_its_request_id() -> None:
    request = GenerationRequest(
        id="r1",
        model="m",
        lineage=("m", ""),
        prompt=[1, 2],
        prompt_text="a secret",
        sampling=Sampling(max_tokens=9),
        guided=None,
        deterministic=True,
        names=BlockNames([1, 2]),
    )
    assert repr(Choice(request, ResponseWriter())) == "<Choice of r1>"
    assert repr(request) == "<GenerationRequest r1>"
