"""The folders from which a frontend reads tokenizers and chat templates.

A worker registers the folder of its model. A chat template is a program, so a frontend reads none that only a worker names:
an operator configures the folders (`--model-folders`).
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from controller.frontend.openai.text.tokenizer import BUILTIN
from events.broker_users import account_of
from events.observations import IntrusionRefused, WorkerJoined

REMEMBERED_MAX = 4096  # workers whose folder was refused

log = structlog.get_logger(__name__)


class ModelFolders:
    """The configured folders, and which workers were refused for naming another one."""

    def __init__(self, folders: Iterable[str], observe: Callable[[IntrusionRefused], object]) -> None:
        self._folders = [Path(folder).resolve() for folder in folders]
        self._observe = observe
        self._allowed: dict[str, bool] = {BUILTIN: True}
        self._refused: set[tuple[str, str]] = set()

    def allows(self, joined: WorkerJoined) -> bool:
        """Return whether this worker's tokenizer may be read. A refusal is logged and reported once for each life of it."""
        name = joined.tokenizer
        if len(self._allowed) >= REMEMBERED_MAX:
            self._allowed = {BUILTIN: True}
        if name not in self._allowed:
            self._allowed[name] = any(Path(name).resolve().is_relative_to(folder) for folder in self._folders)
        if self._allowed[name]:
            return True
        life = (joined.worker, joined.instance)
        if life not in self._refused and len(self._refused) < REMEMBERED_MAX:
            self._refused.add(life)
            log.warning(
                "model_folder_refused",
                worker=joined.worker,
                folder=name,
                hint="if it is meant, start frontends with --model-folders and this folder",
            )
            tried = f"have a frontend read the model folder {name[:200]!r}, which is not configured (--model-folders)"
            who = account_of(joined.worker, joined.account)
            self._observe(IntrusionRefused(who=who, tried=tried, times=1, worker=joined.worker))
        return False
