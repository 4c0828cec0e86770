"""`make dashboards`: writes dashboards and alerts as Grafana reads them, and rules as Prometheus does."""

import json
import sys
from pathlib import Path

from grafana import managed_rules, rules
from grafana.boards import control_plane, corruption, fleet, incident, requests, router, slo, worker
from grafana.model import Dashboard

FOLDER = Path(__file__).parent / "dashboards"
RULES = Path(__file__).parent / "alerts" / "holdfast.rules.yaml"
MANAGED = Path(__file__).parent / "provisioning" / "alerting" / "holdfast.json"
BOARDS: tuple[Dashboard, ...] = (
    fleet.BOARD,
    incident.BOARD,
    worker.BOARD,
    corruption.BOARD,
    requests.BOARD,
    router.BOARD,
    control_plane.BOARD,
    slo.BOARD,
)


def text(board: Dashboard) -> str:
    """Return a dashboard as file content."""
    return json.dumps(board.json(), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for board in BOARDS:
        (FOLDER / f"{board.uid}.json").write_text(text(board), encoding="utf-8")
    for path, content in ((RULES, rules.text()), (MANAGED, managed_rules.text())):
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
