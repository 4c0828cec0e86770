"""A certificate that is not trusted is named as the cause, not `Operation not permitted`."""

import ssl
from pathlib import Path

import pytest
from aiohttp import web
from certificates import certificate

from workers.engines.openai.away import UpstreamAway
from workers.engines.openai.upstream import Upstream


async def test_an_untrusted_certificate_and_a_port_without_tls_say_so(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    runner = web.AppRunner(web.Application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (_, with_tls), (_, without) = runner.addresses
    try:
        for port, why in ((with_tls, "certificate is not trusted: self-signed"), (without, "TLS failed: ")):
            upstream = Upstream(f"https://127.0.0.1:{port}", "", 1)
            with pytest.raises(UpstreamAway, match=why) as raised:
                await upstream.abilities()
            assert "Operation not permitted" not in str(raised.value)
            assert why in await upstream.healthy(10.0)
            await upstream.close()
    finally:
        await runner.cleanup()
