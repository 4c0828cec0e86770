"""Finds responses of the Responses API by their ids, in this frontend or in another one.

    resp_ + frontend (12 hex digits) + random (32 hex digits)
        └── this frontend: its store, or a response in progress
        └── another one: a request over the broker, answered in pieces, because a broker limits the size of a message

A host's frontends share one port, so a later request may reach another frontend than the first one.
"""

import asyncio
import base64
from collections.abc import Mapping
from hashlib import blake2b

import msgspec
import structlog

from controller.frontend.director import Director
from controller.frontend.errors import ApiError, invalid, unavailable
from controller.frontend.openai.completion import Completion
from controller.frontend.openai.request_head import fresh_id
from controller.frontend.openai.request_parser import ParsedRequest, ResponseOptions
from controller.frontend.openai.responses.conversion import REFERENCE, Turn, joined, turns_of_output
from controller.frontend.openai.responses.events import PREFIX, ResponsesFormat
from controller.frontend.openai.responses.store import ResponseStore, StoredResponse
from events import subjects
from events.json_types import Json
from events.nats.bus import Bus, BusUnavailable, NoAnswer, NoSubscriber
from events.nats.connection import DISCONNECTED

TAG_BYTES = 6
TAG = slice(len(PREFIX), len(PREFIX) + 2 * TAG_BYTES)
PIECE_BYTES = 2**18  # a third more as base64, below any usual limit of a broker
DEADLINE_S = 2.0
RETRY_S = 1
SUBSCRIBE_S = 1.0  # delay before subscribing is retried

log = structlog.get_logger(__name__)
_turns = msgspec.json.Decoder(list[dict[str, object]])
_record = msgspec.msgpack.Decoder(StoredResponse)


class StoredResponses:
    """The responses of one frontend, and access to those of the other frontends."""

    def __init__(self, director: Director) -> None:
        """Start empty."""
        self._driver, self._now = director.driver, director.now
        self._store = ResponseStore(director.settings.responses, director.metrics.stored_responses)
        self._running: dict[str, Completion] = {}
        self._tag = tag_of(director.name)
        self._bus: Bus | None = None

    async def serve(self, bus: Bus) -> None:
        """Answer the other frontends. If the broker is unreachable, retry until the subscription succeeds."""
        self._bus = bus
        while True:
            try:
                await bus.subscribe(subjects.responses(self._tag), self._requested)
                return
            except DISCONNECTED:
                await asyncio.sleep(SUBSCRIBE_S)

    def expire(self, now: float) -> None:
        """Drop the responses that are too old."""
        self._store.expire(now)

    # --- creating a response ------------------------------------------------------------------------------

    async def opened(self, parsed: ParsedRequest, options: ResponseOptions, owner: str) -> ParsedRequest:
        """Return a request with the id of its response, and with the messages of the response that it continues.

        `owner` is the name of the client's API key. Raise ApiError if a stored response is not available.
        """
        turns: list[Turn] = parsed.messages or []
        first = int(options.instructed)
        history: list[Turn] = []
        if options.previous:
            previous = await self._previous(options.previous, owner, "previous_response_id")
            history = _turns.decode(previous.turns)
        own = turns[first:]
        if any(turn["role"] == REFERENCE for turn in own):
            own = await self._dereferenced(own, owner)
        options = msgspec.structs.replace(options, id=f"{PREFIX}{self._tag}{fresh_id()}", owner=owner)
        return msgspec.structs.replace(
            parsed, messages=joined([*turns[:first], *history, *own]), response=options
        )

    async def _dereferenced(self, turns: list[Turn], owner: str) -> list[Turn]:
        """Return turns with the items of stored responses in place of references to them."""
        known: dict[str, dict[str, object]] = {}
        found: list[Turn] = []
        for turn in turns:
            if turn["role"] != REFERENCE:
                found.append(turn)
                continue
            name = turn["id"]
            response = PREFIX + name.partition("_")[2].rpartition("_")[0]
            if response not in known:
                stored = await self._previous(response, owner, "input")
                output: list[dict[str, object]] = msgspec.json.decode(stored.body)["output"]
                known[response] = {str(item["id"]): item for item in output}
            item = known[response].get(name)
            if item is None:
                raise _missing(f"the item {name[:80]!r}", "input")
            found += turns_of_output([item])
        return found

    async def _previous(self, id: str, owner: str, param: str) -> StoredResponse:
        try:
            stored = await self.find("get", id, owner)
        except ApiError as error:
            error.param = param
            raise
        if not stored.ended:
            raise invalid(f"{param}: the response is still in progress", param)
        return stored

    def begin(self, options: ResponseOptions, completion: Completion) -> None:
        """Make a response available while it is in progress."""
        self._running[options.id] = completion

    def end(self, options: ResponseOptions, completion: Completion, error: ApiError | None) -> None:
        """Keep a response that has ended, if its request permits."""
        if self._running.pop(options.id, None) is None or not options.store:
            return
        self._store.add(ended_response(options, completion, error), self._now())

    def drop(self, options: ResponseOptions) -> None:
        """Forget a response in progress, because its client has disconnected."""
        self._running.pop(options.id, None)

    # --- requests about a response ------------------------------------------------------------------------

    async def find(self, verb: str, id: str, owner: str) -> StoredResponse:
        """Return the response with this id, after it was cancelled or deleted if `verb` is `cancel` or `delete`.

        Raise ApiError: 404 if the response, or the frontend that has it, does not exist; 503 if that frontend cannot
        be reached.
        """
        tag = id[TAG]
        if tag == self._tag or not id.startswith(PREFIX) or not _is_tag(tag):
            return self._local(verb, id, owner)
        if self._bus is None:
            raise _gone(id)
        data, size = bytearray(), 1
        while len(data) < size:
            body = {"verb": verb, "id": id, "owner": owner, "at": len(data)}
            reply = await self._ask(self._bus, tag, id, body)
            if "missing" in reply:
                raise _missing(f"the response {id[:80]!r}")
            piece, size = base64.b64decode(str(reply["data"])), int(str(reply["size"]))
            if not piece:
                break
            data += piece
            verb = "get" if verb == "cancel" else verb
        return _record.decode(data)

    async def _ask(self, bus: Bus, tag: str, id: str, body: Json) -> Mapping[str, object]:
        try:
            return await bus.request(subjects.responses(tag), body, DEADLINE_S)
        except NoSubscriber as error:
            raise _gone(id) from error
        except (BusUnavailable, NoAnswer) as error:
            log.warning("stored_response_not_reached", why=str(error))
            why = "the frontend that keeps this response cannot be reached over the broker"
            raise unavailable(why, "response_unreachable", RETRY_S) from error

    def _requested(self, subject: str, body: Mapping[str, object]) -> Json:
        """Answer another frontend's request with a piece of the response."""
        try:
            found = self._local(str(body["verb"]), str(body["id"]), str(body["owner"]))
        except ApiError:
            return {"missing": True}
        if body["verb"] == "delete":
            found = StoredResponse(found.id, found.owner, b"")
        data = msgspec.msgpack.encode(found)
        at = int(str(body["at"]))
        return {"size": len(data), "data": base64.b64encode(data[at : at + PIECE_BYTES]).decode()}

    def _local(self, verb: str, id: str, owner: str) -> StoredResponse:
        completion = self._running.get(id)
        options = completion.format.parsed.response if completion is not None else None
        if completion is not None and options is not None and options.owner == owner:
            if verb == "cancel":
                return self._cancelled(options, completion)
            if verb == "get":
                return snapshot(options, completion)
        stored = self._store.get(id)
        if stored is None or stored.owner != owner:
            raise _missing(f"the response {id[:80]!r}")
        if verb == "delete":
            self._store.remove(id)
        return stored

    def _cancelled(self, options: ResponseOptions, completion: Completion) -> StoredResponse:
        """End a response in progress, and return it. Keep it, if its request permits."""
        error = ApiError(499, "the response was cancelled", code="cancelled")
        completion.finish(error)
        self._driver.cancel(completion.answers)
        self._running.pop(options.id, None)
        found = ended_response(options, completion, error)
        if options.store:
            self._store.add(found, self._now())
        return found


def tag_of(frontend: str) -> str:
    """Return the part of response ids that names a frontend."""
    return blake2b(frontend.encode(), digest_size=TAG_BYTES).hexdigest()


def _is_tag(tag: str) -> bool:
    return len(tag) == 2 * TAG_BYTES and all(c in "0123456789abcdef" for c in tag)


def ended_response(
    options: ResponseOptions, completion: Completion, error: ApiError | None
) -> StoredResponse:
    """Return a response that has ended, as it is kept."""
    format, encode = completion.format, msgspec.json.encode
    assert isinstance(format, ResponsesFormat)
    whole = format.ended(completion.answers, error)
    output = whole["output"]
    assert isinstance(output, list)
    turns = [*(format.parsed.messages or ())[options.instructed :], *turns_of_output(output)]
    return StoredResponse(options.id, options.owner, encode(whole), encode(turns))


def snapshot(options: ResponseOptions, completion: Completion) -> StoredResponse:
    """Return a response in progress, as far as its client has it."""
    format = completion.format
    assert isinstance(format, ResponsesFormat)
    body = msgspec.json.encode(format.events.whole())
    return StoredResponse(options.id, options.owner, body, ended=False)


def _missing(what: str, param: str | None = None) -> ApiError:
    why = (
        f"{what} does not exist: it was never stored, or was dropped (docs/reference/api.md#stored-responses)"
    )
    return ApiError(404, why, code="response_not_found", param=param)


def _gone(id: str) -> ApiError:
    why = f"the frontend that kept the response {id[:80]!r} is not running, and its responses are lost"
    return ApiError(404, why, code="response_frontend_gone")
