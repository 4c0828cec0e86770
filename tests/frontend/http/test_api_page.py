"""docs/reference/api.md lists exactly the error codes that a client can get."""

import re
from pathlib import Path

from controller.frontend.errors import CODES
from controller.frontend.request.failures import KINDS
from controller.router.selection import filter as pick

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
NEVER_SENT = {"cancelled", "no_worker"}  # the client has left; the base class of the others


def test_the_page_lists_exactly_the_codes() -> None:
    rows = [line.split("|")[2] for line in PAGE.split("## Errors")[1].splitlines() if line.startswith("| ")]
    shown = {code for cell in rows for code in re.findall(r"`([a-z_]+)(?:: tier=…)?`", cell)}
    assert shown == CODES - NEVER_SENT


def test_every_failure_and_router_refusal_has_a_declared_code() -> None:
    refusals = {
        error.code for error in vars(pick).values() if isinstance(error, type) and hasattr(error, "code")
    }
    assert set(KINDS) | refusals <= CODES
