# SPDX-License-Identifier: Apache-2.0
"""The example server: killed amid its clients, and looked at in a browser."""

import asyncio
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import transformers

from examples.chat_server.tiny import make_tiny
from tests.examples.chat_kit import Said, Server, ask, browser, counted, page_at, run

CHROMIUM = shutil.which("chromium")
CLIENTS = 50
TOKENS = 10
SHARED = "Here is a long story that everybody tells first, word by word. " * 3
PROMPTS = [f"{SHARED}And this is what number {at} asks." for at in range(CLIENTS)]
LOST = 'chat_answers_total{end="lost"}'
COMMITTED = 'ucm_settled_parts_total{direction="save",outcome="committed",reason=""}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that any test may kill."""
    served = Server(tmp_path_factory.mktemp("chat") / "slab")
    yield served
    served.kill()


def expected(directory: Path) -> list[str]:
    """Return what the model says to each prompt without a server and a store."""
    transformers.logging.disable_progress_bar()
    path = make_tiny(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    answers = []
    for content in PROMPTS:
        text = f"user: {content}\nassistant: "
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        done = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
        answers.append(tokenizer.decode(done[0, ids.shape[1] :]))
    return answers


async def ask_all(server: Server, *, kills: bool) -> list[Said]:
    """Ask from all clients at once; kill the server when some have their answers."""
    said = [Said() for _ in PROMPTS]
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as group,
    ):
        for prompt, each in zip(PROMPTS, said, strict=True):
            group.create_task(ask(session, server.url, prompt, TOKENS, each))
        if kills:
            for each in said[:10]:
                await each.ended.wait()
            while not await counted(session, server.url, COMMITTED):
                pass
            server.kill()
    return said


@pytest.mark.slow
class TestServer:
    def test_every_answer_is_exact_also_after_a_kill_amid_fifty_clients(
        self, server: Server, tmp_path: Path
    ) -> None:
        """R-81: what came before the kill is right as far as it came; after a restart
        all are answered, and the store has what they begin with."""
        server.start()
        cut = run(ask_all(server, kills=True))
        server.start()
        whole = run(ask_all(server, kills=False))
        right = expected(tmp_path)
        assert any(each.finish is None for each in cut)
        assert all(r.startswith(each.text) for r, each in zip(right, cut, strict=True))
        assert right == [each.text for each in whole]
        assert right[0] != right[1]
        shared = len(SHARED) // 16 * 16
        assert [shared <= each.loaded for each in whole] == [True] * CLIENTS

    def test_client_that_goes_away_is_cancelled(self, server: Server) -> None:
        """Nobody computes for it any more; what was computed is stored."""
        server.start()

        async def main() -> None:
            async with aiohttp.ClientSession() as session:
                said, again = Said(), Said()
                prompt = SHARED[::-1]
                task = asyncio.ensure_future(
                    ask(session, server.url, prompt, 1000, said)
                )
                await said.begun.wait()
                task.cancel()
                await asyncio.wait([task])
                while not await counted(session, server.url, LOST):
                    pass
                while not again.loaded:
                    await ask(session, server.url, prompt, 1, again)

        run(main())

    @pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
    def test_page_shows_what_is_loaded_in_a_browser(
        self, server: Server, tmp_path: Path
    ) -> None:
        """Two turns are typed; the second loads the first one's tokens, and the page
        says how many, with a bar and without a word on the console."""
        server.start()

        async def main(address: str) -> bytes:
            async with (
                aiohttp.ClientSession() as session,
                page_at(address, server.url) as page,
            ):
                before = await counted(session, server.url, COMMITTED)
                for turn in (1, 2):
                    await page.evaluate("document.getElementById('text').focus()")
                    await page.call(
                        "Input.insertText", text=f"Turn {turn}: <b>{SHARED}"
                    )
                    await page.evaluate("document.getElementById('send').click()")
                    await page.until(
                        f"document.querySelectorAll('#requests rect').length === {2 * turn}"
                    )
                    while await counted(session, server.url, COMMITTED) < before + 16:
                        pass  # the first turn's prompt and answer are stored
                rows = await page.evaluate(
                    "[...document.querySelectorAll('#requests tbody tr')].map("
                    "(row) => [...row.cells].map((cell) => cell.textContent))"
                )
                second, first = [[int(cell) for cell in row[:5]] for row in rows]
                assert (2, 1, 0) == (second[0], first[0], first[2])
                assert first[1] <= second[2] <= second[1]
                for _, prompt, loaded, computed, answer in (first, second):
                    assert prompt == loaded + computed
                    assert 48 == answer
                said = await page.evaluate(
                    "document.getElementById('talk').textContent"
                )
                assert f"{second[2]} of {second[1]} tokens loaded, first token" in said
                assert f"<b>{SHARED}"[:-1] in said
                assert 0 == await page.evaluate(
                    "document.querySelectorAll('b b').length"
                )
                picture = await page.picture()
                assert [] == page.problems
                return picture

        with browser(str(CHROMIUM), tmp_path / "profile") as address:
            picture = run(main(address))
        (tmp_path / "page.png").write_bytes(picture)  # for who wants to look
        assert 900 == struct.unpack(">I", picture[16:20])[0]
        assert 10_000 < len(picture)
