"""The glossary names only what exists, and includes every class named with an established term."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "glossary.md").read_text()
ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
PEERS = (
    "llm-d",
    "Dynamo",
    "vLLM",
    "Envoy",
    "Kubernetes",
    "OpenAI",
    "etcd",
    "virtual machines",
    "mutation testing",
)
# Classes with established names from the field, which readers of peer projects look for.
FIELDS_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
AcknowledgedPosition ActiveSequences AdmittedRequest Attempt BrokerRefused BufferedWriter CanaryRunner CanarySet Candidates
CoalescingTransport Completion Dialer Director Endpoint EndpointGroup EndpointTable FastPathConnection
GenerationRequest HangDetector IncrementalDetokenizer KvRefused Listeners LiveRequest LocalBreakers
MigrationRequest OutboxMessage ParsedRequest Peers PlannedMoves Probe
RankLoad ReadPosition RequestMetrics RequestPlane RequestPlaneClient Reservation ResponseFormat Scheduler
ResponseWriter RouterFeeds RoutingOverrides ScoringRequest SegmentCache ServedSpan SimulatedRequest SpanHistory
Stream StreamingWriter TransferSink WorkerCommands WorkerConfig WorkerConnection WorkerOutcomes WorkerRank WorkerWatch
""",
    )
)


def rows() -> list[tuple[str, str, str, str]]:
    return [row for row in ROW.findall(PAGE) if row[0] != "term" and not row[0].startswith("-")]


def named() -> set[tuple[str, str]]:
    """Return what the page names: a module, and a name in it or "" for the whole module."""
    where = {code for _, _, cell, _ in rows() for code in re.findall(r"`([\w.:]+)`", cell)}
    return {(module, name) for module, _, name in (each.partition(":") for each in where)}


@cache
def classes(path: Path) -> frozenset[str]:
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))


def test_every_module_and_class_that_the_page_names_exists() -> None:
    assert len(named()) > 100
    for module, name in sorted(named()):
        file = ROOT / (module.replace(".", "/") + ".py")
        folder = file.with_suffix("")
        files = sorted(folder.glob("*.py")) if folder.is_dir() else [file]
        assert all(file.exists() for file in files), module
        assert not name or any(name in classes(file) for file in files), f"{module}:{name}"


@pytest.mark.slow
def test_every_class_with_an_established_name_is_on_the_page() -> None:
    files = [path for root in ("controller", "workers", "events") for path in (ROOT / root).rglob("*.py")]
    here = {name for path in files for name in classes(path)}
    found = {name for _, name in named()}
    assert (here & FIELDS_WORDS) - found == set()
    assert len(here & FIELDS_WORDS) > 50, "after a rename, change the page and this list"


def test_every_word_has_a_meaning_and_the_peers_terms() -> None:
    assert len(rows()) > 80
    assert len(rows()) == len(re.findall(r"^\| (?!term|-)", PAGE, re.MULTILINE)), "four cells a row"
    for word, means, _, peers in rows():
        assert len(means) > 10 and not means.endswith("."), word
        assert peers == "–" or any(peer in peers for peer in PEERS), f"{word}: {peers}"


def test_code_words_exist_in_the_code() -> None:
    code = "\n".join(
        path.read_text()
        for root in ("controller", "workers", "events")
        for path in (ROOT / root).rglob("*.py")
    )
    words = {word for row in rows() for word in re.findall(r"`(\w+)`", row[0])}
    assert words and {word for word in words if not re.search(rf"\b{word}\b", code)} == set()
