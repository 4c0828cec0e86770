"""Reads the bodies of requests, and decides which requests are passed on to a server of their model.

X-Holdfast-Mode: proxied, or a path without tokens in its answer ──▶ passed on
a field that only a server may support ──▶ passed on, unless X-Holdfast-Mode is exact
otherwise ──▶ exact: this frontend builds the prompt and the answer
"""

import msgspec
from aiohttp import web

from controller.frontend.director import Director
from controller.frontend.errors import ApiError, invalid
from controller.frontend.http.served_models import chosen_model
from controller.frontend.openai import request_head as heads
from controller.frontend.openai.completion import AdmittedRequest
from controller.frontend.openai.intake import UNSCANNED_BYTES, Intake, ReceivedBody
from controller.frontend.openai.output_formats import OutputFormats
from controller.frontend.openai.proxied import pseudo_tokens, read_proxied, with_model
from controller.frontend.openai.request_head import Call, Head
from controller.frontend.openai.request_kinds import KINDS
from controller.frontend.openai.request_parser import ParsedRequest, read_chat, read_json
from controller.frontend.openai.text.tokenizer import Tokens
from controller.router.endpoints import EndpointGroup, Lineage
from events.blocks import BlockNames, seed
from events.proxied_paths import AUDIO, CHATS, COMPLETIONS, EMBEDDINGS, POOLING
from events.wire import ProxiedRequest

INVOCATIONS = {b'"messages"': CHATS, b'"prompt"': COMPLETIONS, b'"input"': EMBEDDINGS}
"""For /invocations: the path for a body with this field."""
ONLY_PROXIED = frozenset((*POOLING, *AUDIO))


class RequestReader:
    """Reads and parses the bodies of one frontend's requests."""

    def __init__(self, director: Director, intake: Intake) -> None:
        self._director = director
        self._table = director.table
        self._intake = intake

    async def read(self, head: Head, given: bytes | web.BaseRequest) -> tuple[Head, ParsedRequest, bytes]:
        """Return the head of a request, the parsed request, which names a served model, and its body.

        Raise ApiError if the body is invalid.
        """
        if head.mode not in heads.MODES:
            raise invalid(f"the header {heads.MODE} must be exact or proxied", heads.MODE)
        # Most bodies are small, and parsing them needs no coroutine.
        if isinstance(given, bytes) and len(given) <= UNSCANNED_BYTES:
            received = ReceivedBody(given, None)
        else:
            received = await self._intake.receive(given, json=head.path not in AUDIO)
        body = received.body
        if head.endpoint == heads.INVOCATIONS:
            path = next((path for field, path in INVOCATIONS.items() if field in body), "")
            if not path:
                raise invalid("the body must have messages, a prompt or an input", "messages")
            head = msgspec.structs.replace(head, path=path, endpoint=heads.ENDPOINTS[path])
        if head.mode == "proxied" or head.path in ONLY_PROXIED:
            return head, self._offered(head, body), body
        parsed: ParsedRequest
        try:
            if received.scan is None:
                parsed = read_chat(body) if head.path == CHATS else KINDS[head.endpoint][0](read_json(body))
            else:
                parsed = await self._intake.parse(head.endpoint, received)
        except ApiError as refused:
            return head, self.pass_on(head, body, refused), body
        if parsed.model not in self._table.known:
            parsed = self._named(parsed, chosen_model(self._director, parsed.model))
        workers = self._table.serving(parsed.served)
        if workers and not workers[0].generates:
            raise _not_offered(parsed.served, head.path)
        return head, parsed, body

    def pass_on(self, head: Head, body: bytes, refused: ApiError) -> ParsedRequest:
        """Return a request in the form in which a server gets it unchanged.

        `refused` is why this frontend cannot build the prompt or the answer. Raise it unless it names a field that a server may
        support, and the client permits that the request is passed on.
        """
        if refused.code != "unsupported_parameter" or head.mode == "exact":
            raise refused
        try:
            return self._offered(head, body)
        except ApiError:
            raise refused from None

    def _offered(self, head: Head, body: bytes) -> ParsedRequest:
        """Return a proxied request. Raise ApiError (404) if no server of its model offers its path."""
        parsed = read_proxied(head.path, head.media, body)
        served = chosen_model(self._director, parsed.model)
        if not any(head.path in one.joined.paths for one in self._table.serving(served)):
            raise _not_offered(served, head.path)
        return self._named(parsed, served)

    def _named(self, parsed: ParsedRequest, served: str) -> ParsedRequest:
        """Return a request for this model or adapter, for a client that may have used an alias or no name.

        In the body of a proxied request, an adapter's name stays as it is.
        """
        model, adapter = self._table.model_of(served), self._table.adapter_of(served)
        if parsed.model == model:
            return parsed
        proxied = parsed.proxied
        if proxied is not None and parsed.model != served:
            proxied = with_model(proxied, served)
        return msgspec.structs.replace(
            parsed, model=model, adapter=adapter, called=parsed.model, proxied=proxied
        )


def _not_offered(served: str, path: str) -> ApiError:
    return ApiError(404, f"no server of {served} offers {path}", code="unknown_url")


def admitted_proxied(
    call: Call, proxied: ProxiedRequest, lineage: Lineage, group: EndpointGroup, tokens: Tokens, serial: int
) -> AdmittedRequest:
    """Return a proxied request as admitted. Its prompt stands for its body. `tokens` is any tokenizer, which is not used."""
    context = group.context_tokens
    wanted = min(call.parsed.max_tokens or context // 2, context - 1)
    call.parsed = msgspec.structs.replace(call.parsed, max_tokens=wanted)
    call.headers[heads.MODE] = "proxied"
    prompt = pseudo_tokens(proxied.body, context - wanted)
    names = BlockNames(prompt, seed(lora=call.parsed.adapter, namespace=proxied.path))
    return AdmittedRequest(
        call, lineage, [(prompt, "", names)], group, tokens, OutputFormats(), None, [], serial
    )
