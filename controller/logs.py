"""Logs of a controller-side process: its own, and those of the libraries that it uses, in one form."""

import logging

import structlog

from events.process import logs

CLIENTS_MISTAKES = (
    "aiohttp.http_exceptions",
    "aiohttp.web_protocol",
)  # the modules of aiohttp's errors for them


def configure() -> None:
    """Set structlog up for this process, and let what libraries log through it."""
    logs.configure()
    logging.basicConfig(handlers=[_Libraries()], level=logging.WARNING, force=True)


class _Libraries(logging.Handler):
    """What libraries log, in our form.

    A request that is no HTTP is its client's mistake: one line, and never the error's own words, which quote it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        log, error = structlog.get_logger(record.name), record.exc_info[1] if record.exc_info else None
        if error is not None and type(error).__module__ in CLIENTS_MISTAKES:
            log.warning(record.getMessage(), library=record.name, error=type(error).__name__)
        else:
            log.log(record.levelno, record.getMessage(), library=record.name, exc_info=error)
