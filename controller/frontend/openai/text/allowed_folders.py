"""The folders from which a frontend loads tokenizers and chat templates.

A worker registers the folder of its model. A chat template is a program, so a frontend loads only templates from folders that
the operator has configured (`--model-folders`).
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from controller.frontend.openai.text.tokenizer import BUILTIN
from events.broker_users import account_of
from events.observations import IntrusionRefused, WorkerJoined

REMEMBERED_MAX = 4096  # workers with a refused folder

log = structlog.get_logger(__name__)


class ModelFolders:
    """The configured folders, and the workers that were refused for registering another one."""

    def __init__(self, folders: Iterable[str], observe: Callable[[IntrusionRefused], object]) -> None:
        self._folders = [Path(folder).resolve() for folder in folders]
        self._observe = observe
        self._allowed: dict[str, bool] = {BUILTIN: True}
        self._refused: set[tuple[str, str]] = set()

    def allows(self, joined: WorkerJoined) -> bool:
        """Return whether this worker's tokenizer may be loaded. A refusal is logged and reported once per worker instance."""
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
                hint="to allow it, start frontends with --model-folders and this folder",
            )
            tried = f"make a frontend load the model folder {name[:200]!r}, which is not configured (--model-folders)"
            account = account_of(joined.worker, joined.account)
            self._observe(IntrusionRefused(who=account, tried=tried, times=1, worker=joined.worker))
        return False
