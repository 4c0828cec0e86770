"""HTTP requests to the ports of this fleet's processes on this host."""

import ssl
import urllib.request
from typing import Any


def opened(request: "str | urllib.request.Request", within_s: float) -> Any:
    """Open a URL of a process on this host. The certificate is not verified, because it names the host as clients reach it, not
    this address. No proxy is used."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers).open(request, timeout=within_s)
