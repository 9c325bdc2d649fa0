# SPDX-License-Identifier: Apache-2.0
"""A service of objects that has no such bucket, as its address is wrong, or takes us for nobody."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.backends.test_object import open_objects
from ucm.backends.abc import Presence, Verdict
from ucm.errors import ConfigError
from ucm.testing.backend_contract import BLOCK, fetch, seal
from ucm.testing.store_blocks import make_keys

pytestmark = pytest.mark.asyncio


@contextlib.contextmanager
def service_that_says(says):
    """Run one that has nothing, for the last reason of *says*; yields its address."""

    class Nothing(BaseHTTPRequestHandler):
        def do_GET(self):
            status, code = says[-1]
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = f"<Error><Code>{code}</Code><Message>x</Message></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_PUT = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("code", ["NoSuchBucket", "ContainerNotFound"])
async def test_bucket_that_is_not_there_is_refused(code, tmp_path):
    """R-51: all that was asked for was a miss, and what was put went nowhere, without a word why."""
    with service_that_says([(404, code)]) as url, pytest.raises(ConfigError) as caught:
        await open_objects(url, tmp_path)
    assert ("tiers.0.url", True) == (caught.value.key, code in str(caught.value))


async def test_bucket_that_is_empty_is_opened(tmp_path):
    """An object that is not there is no reason."""
    with service_that_says([(404, "NoSuchKey")]) as url:
        await (await open_objects(url, tmp_path)).aclose()


async def test_credentials_that_are_over_are_told(tmp_path):
    """R-51: the log had a tier that is silent, and no word why; and none that is secret."""
    says, key = [(404, "NoSuchKey")], make_keys(1)[0]
    with service_that_says(says) as url:
        backend = await open_objects(url, tmp_path)
        says.append((403, "ExpiredToken"))
        ((got, _),) = await fetch(backend, [key], BLOCK)
        assert Verdict.UNAVAILABLE is got.verdict
        assert "PermissionDeniedError, ExpiredToken" == backend.trouble
        says.append((404, "NoSuchKey"))
        assert [Presence.ABSENT] == await backend.exists([key])
        assert "" == backend.trouble
        says.append((400, "ExpiredToken"))
        assert [Verdict.UNAVAILABLE] == await backend.put([seal(key)])
        assert "GenericError, ExpiredToken" == backend.trouble
        await backend.aclose()
