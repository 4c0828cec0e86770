"""docs/guides/device-watch.md lists for each Xid and each fault class the action that the code takes."""

import re
from pathlib import Path

from workers.devices.taxonomy import LEVELS, XIDS

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "device-watch.md"
ROW = re.compile(r"^\| `?(\w+)`? \| (.+) \| (\w+) \|$", re.MULTILINE)


def test_the_tables_match_the_code() -> None:
    documented = {
        key: (text, action) for key, text, action in ROW.findall(PAGE.read_text()) if action != "class"
    }
    known = {str(code): meaning for code, meaning in XIDS.items()} | dict(LEVELS)
    assert documented == {key: (meaning.text, meaning.action) for key, meaning in known.items()}
