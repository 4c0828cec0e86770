"""The dashboards as TypeScript, to check against Grafana's published types (`@grafana/schema`).

Each dashboard, panel, panel options and field options is a constant of its published type. Parts that the types leave open, such
as a panel's `options` within a dashboard, are thus checked against the type of their kind. JSON has strings in place of enums.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / ".grafana"
COMPILER = FOLDER / "node_modules" / "typescript" / "bin" / "tsc"
SCHEMA = FOLDER / "node_modules" / "@grafana" / "schema" / "package.json"
RAW = "@grafana/schema/dist/esm/raw"
KINDS = {  # panel -> folder, type name, whether its field options are published
    "stat": ("stat", "Stat", False), "timeseries": ("timeseries", "TimeSeries", True),
    "table": ("table", "Table", True), "state-timeline": ("statetimeline", "StateTimeline", True),
    "heatmap": ("heatmap", "Heatmap", True),
}  # fmt: skip
PRELUDE = f"""import type {{ Dashboard, Panel, RowPanel, VariableModel, AnnotationQuery }} from '{RAW}/../veneer/dashboard.types';
import type {{ DataQuery }} from '@grafana/schema';
type Plain<T> = T extends string ? `${{T}}` : T extends number | boolean | null | undefined ? T
  : T extends Array<infer U> ? Plain<U>[] : T extends object ? {{ [K in keyof T]: Plain<T[K]> }} : T;
"""


def compiler() -> tuple[str, str]:
    """Return node and the compiler. Skip the test if they are missing."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: the dashboards are not checked against Grafana's published types")
    if not (COMPILER.exists() and SCHEMA.exists()):
        pytest.skip("`make grafana-types` installs Grafana's published types into .grafana")
    return node, str(COMPILER)


def typescript(board: Mapping[str, Any]) -> str:
    """Return a dashboard's JSON as TypeScript."""
    return PRELUDE + "".join(_imports()) + "".join(_constants(board))


def _imports() -> Iterator[str]:
    for folder, name, custom in KINDS.values():
        also = f", FieldConfig as {name}Custom" if custom else ""
        path = f"{RAW}/composable/{folder}/panelcfg/x/{name}PanelCfg_types.gen"
        yield f"import type {{ Options as {name}Options{also} }} from '{path}';\n"


def _constants(board: Mapping[str, Any]) -> Iterator[str]:
    without = {name: value for name, value in board.items() if name not in ("panels", "annotations")}
    yield _constant("board", "Plain<Dashboard>", without)
    for variable in board["templating"]["list"]:
        yield _constant(f"variable_{variable['name']}", "Plain<VariableModel>", variable)
    for number, marked in enumerate(board["annotations"]["list"]):
        yield _constant(
            f"marked_{number}", "Plain<AnnotationQuery<DataQuery & Record<string, unknown>>>", marked
        )
    for panel in board["panels"]:
        name = f"panel_{panel['id']}"
        if panel["type"] == "row":
            yield _constant(name, "Plain<RowPanel>", panel)
            continue
        yield _constant(name, "Plain<Panel>", panel)
        _, kind, custom = KINDS[panel["type"]]
        yield _constant(f"{name}_options", f"Plain<{kind}Options>", panel["options"])
        if custom:
            yield _constant(
                f"{name}_custom", f"Partial<Plain<{kind}Custom>>", panel["fieldConfig"]["defaults"]["custom"]
            )


def _constant(name: str, of: str, value: Any) -> str:
    return f"export const {name}: {of} = {json.dumps(value, indent=1, ensure_ascii=False)};\n"


def complaints(folder: Path, files: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the compiler's errors in each of these TypeScript files, by name."""
    node, tsc = compiler()
    (folder / "node_modules").symlink_to(FOLDER / "node_modules")
    for name, text in files.items():
        (folder / f"{name}.ts").write_text(text)
    options = {
        "strict": True, "noEmit": True, "target": "es2022", "module": "esnext", "moduleResolution": "node10",
        "skipLibCheck": True, "types": [], "preserveSymlinks": True,
    }  # fmt: skip
    config = {"compilerOptions": options, "files": [f"{name}.ts" for name in files]}
    (folder / "tsconfig.json").write_text(json.dumps(config))
    done = subprocess.run(
        [node, tsc, "-p", str(folder), "--pretty", "false"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found: dict[str, list[str]] = {name: [] for name in files}
    for line in done.stdout.splitlines():
        if match := re.match(r"([\w-]+)\.ts\(", line):
            found[match[1]].append(line)
        elif not line.startswith(" "):
            raise AssertionError(done.stdout)
    assert not done.stderr and (done.returncode == 0) == (not any(found.values())), done.stdout + done.stderr
    return found
