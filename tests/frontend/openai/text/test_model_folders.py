"""A frontend loads tokenizers and chat templates only from configured folders.

A chat template is a program. A worker that registers another folder gets no request and is reported.
"""

from pathlib import Path

import pytest
from frontend_kit import frontend, joined, sentencepiece_like
from scripted_worker import ScriptedWorker

from controller.frontend.openai.text.tokenizer import BUILTIN, ModelFolders
from events.observations import IntrusionRefused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with a chat template that never ends."""
    made = tmp_path / "models" / "m"
    made.mkdir(parents=True)
    sentencepiece_like().save(str(made / "tokenizer.json"))
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (made / "chat_template.jinja").write_text(endless)
    return made


async def test_a_worker_that_registers_another_folder_gets_no_request_and_is_reported(folder: Path) -> None:
    async with frontend(model_folders=str(folder.parent.parent / "other")) as kit:
        await kit.add(ScriptedWorker(), tokenizer=str(folder))
        good = ScriptedWorker("w2")
        await kit.add(good)
        status, _, _ = await kit.post("/v1/completions", model="m", prompt="hi", max_tokens=2)
        assert status == 200 and good.requests
        reported = [fact for fact in kit.facts if isinstance(fact, IntrusionRefused)]
        assert len(reported) == 1 and str(folder) in reported[0].tried and "w" in reported[0].who


async def test_a_template_that_never_ends_is_a_clear_error(folder: Path) -> None:
    async with frontend(model_folders=str(folder.parent)) as kit:
        await kit.add(ScriptedWorker(), tokenizer=str(folder))
        said = [{"role": "user", "content": "hi"}]
        status, body, _ = await kit.post("/v1/chat/completions", model="m", messages=said)
        assert status == 400 and "it takes more than " in body["error"]["message"]


@pytest.mark.parametrize(
    ("named", "allowed"),
    [
        (BUILTIN, True),
        ("/models/a", True),
        ("/models/a/b", True),
        ("/models/a/../../etc", False),
        ("/models/ab", False),
        ("a", False),
        ("/", False),
        ("", False),
    ],
)
def test_subfolders_of_a_configured_folder_are_allowed(named: str, allowed: bool) -> None:
    folders = ModelFolders(["/models/a"], lambda fact: None)
    assert folders.allows(joined(ScriptedWorker(), tokenizer=named)) is allowed
