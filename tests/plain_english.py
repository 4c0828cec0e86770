"""Lists breaches of the language rules that can be checked: `python tests/plain_english.py PATH…`.

- Software is "it": no pronoun for persons. Exempt are the lines of `tests/people_lines.txt`, which speak of people, and the
  public field `who` of a fact.
- No docstring ends in a question mark. The first line of a module's docstring has at most 100 characters.
- No sentence of a document or docstring has more than 40 words.
- No table cell of a document has more than 160 characters.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORDS_MAX = 40
CELL_MAX = 160
FIRST_LINE_MAX = 100
PRONOUN = re.compile(
    r"(?<![a-z.`\"])(who|whom|whose|whoever|he|him|his|himself|she|nobody|somebody|everybody|anybody|anyone|everyone)"
    r"(?![a-z`\"]|=|: str)",
    re.IGNORECASE,
)
READ = {".py", ".md", ".yaml", ".yml", ".toml", ".jinja", ".js", ".css", ".html", ".tsx", ".cjs", ".sh", ".mako", ".ini",
        ".json", ".c", ".importlinter", ".gitignore"}  # fmt: skip
NAMED = {"Makefile", "Dockerfile", "run"}
OTHERS_TEXT = (  # recorded, generated from elsewhere, or written by other projects
    "tests/fixtures/",
    "tests/events/facts/",
    "tests/frontend/openai/text/chat_templates/",
    "docs/reference/asyncapi.yaml",
    "docs/reference/schemas/",
    "events/builtin_sim_tokenizer.json",
)
ALLOWED = ROOT / "tests" / "people_lines.txt"


@cache
def allowed_lines() -> frozenset[tuple[str, str]]:
    """Return the lines that speak of people, each with its file."""
    lines = ALLOWED.read_text().splitlines() if ALLOWED.exists() else []
    split = (line.partition(": ") for line in lines if line and not line.startswith("#"))
    return frozenset((path, text.strip()) for path, _, text in split)


def files(*paths: str) -> Iterator[Path]:
    """Yield the text files of these paths (all without one) that people read and this project writes."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    for name in sorted(set(listed.stdout.splitlines())):
        path = ROOT / name
        own = not any(name.startswith(other) for other in OTHERS_TEXT) or name.endswith(".py")
        if own and path.exists() and (path.suffix in READ or path.name in (*NAMED, *READ)):
            yield path


def pronouns(path: Path) -> Iterator[str]:
    """Yield each line with a pronoun for persons that is not allowed."""
    name = str(path.relative_to(ROOT))
    if name in ("tests/plain_english.py", "tests/people_lines.txt"):
        return
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if (found := PRONOUN.search(line)) and (name, line.strip()) not in allowed_lines():
            yield f"{name}:{number}: “{found[0]}”: {line.strip()[:160]}"


def docstrings(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the line and text of each docstring, and whether it is the module's."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text, isinstance(node, ast.Module)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of prose in Markdown: no code, tables, diagrams, headings or HTML."""
    text = re.sub(r"^(```|~~~).*?^\1", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "\n", text, flags=re.DOTALL)
    kept = ["" if re.match(r"\s*(\||#|<)| {4,}\S", line) else line for line in text.splitlines()]
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. )", "\n".join(kept)):
        plain = re.sub(r"`[^`]*`", "code", paragraph)
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        yield from re.split(r"(?<=[.!?:])[\s)\"”*]+", plain)


def words(sentence: str) -> int:
    """Return how many words a sentence has."""
    return len(re.findall(r"[^\W_][\w'’.,%–-]*", sentence))


def cells(text: str) -> Iterator[tuple[int, str]]:
    """Yield each cell of a Markdown table as a reader sees it, and its line."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
                yield number, re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").strip()


def breaches(path: Path) -> Iterator[str]:
    """Yield what breaks the rules in one file."""
    name = path.relative_to(ROOT)
    yield from pronouns(path)
    if path.suffix == ".py":
        for line, text, of_module in docstrings(path):
            if text.rstrip().endswith("?") or text.partition("\n")[0].rstrip().endswith("?"):
                yield f"{name}:{line}: a docstring that ends in a question mark: {text[:80]}"
            if of_module and len(text.partition("\n")[0]) > FIRST_LINE_MAX:
                yield f"{name}:{line}: the module's first line has {len(text.partition(chr(10))[0])} characters"
            for sentence in sentences(text):
                if words(sentence) > WORDS_MAX:
                    yield f"{name}:{line}: a sentence of {words(sentence)} words: {' '.join(sentence.split())[:120]}"
    elif path.suffix == ".md":
        text = path.read_text()
        for sentence in sentences(text):
            if words(sentence) > WORDS_MAX:
                yield f"{name}: a sentence of {words(sentence)} words: {' '.join(sentence.split())[:120]}"
        for line, cell in cells(text):
            if len(cell) > CELL_MAX:
                yield f"{name}:{line}: a table cell of {len(cell)} characters: {cell[:80]}"


if __name__ == "__main__":
    found = [breach for path in files(*sys.argv[1:]) for breach in breaches(path)]
    print("\n".join(found), f"\n{len(found)} breaches")
    sys.exit(bool(found))
