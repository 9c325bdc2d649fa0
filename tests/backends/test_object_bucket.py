# SPDX-License-Identifier: Apache-2.0
"""A service of objects that has no such bucket: its address is wrong."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.backends.test_object import open_objects
from ucm.errors import ConfigError

pytestmark = pytest.mark.asyncio


@contextlib.contextmanager
def service_that_says(code):
    """Run one that has nothing, for that reason; yields its address."""

    class Nothing(BaseHTTPRequestHandler):
        def do_GET(self):
            body = f"<Error><Code>{code}</Code><Message>x</Message></Error>".encode()
            self.send_response(404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

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
    with service_that_says(code) as url, pytest.raises(ConfigError) as caught:
        await open_objects(url, tmp_path)
    assert ("tiers.0.url", True) == (caught.value.key, code in str(caught.value))


async def test_bucket_that_is_empty_is_opened(tmp_path):
    """An object that is not there is no reason."""
    with service_that_says("NoSuchKey") as url:
        await (await open_objects(url, tmp_path)).aclose()
