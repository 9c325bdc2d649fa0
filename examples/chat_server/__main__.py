# SPDX-License-Identifier: Apache-2.0
"""
A chat server over transformers whose prompts survive a restart.

    python -m examples.chat_server                  # a tiny model, made on the spot
    python -m examples.chat_server ./Llama-3.2-1B-Instruct

Ask it, stop it, start it again and ask on: what was computed before is loaded. So is what
other machines have computed, if all are started with ``--share`` and a directory that all
of them see. Needs ``pip install '.[transformers,metrics]' starlette uvicorn``.
"""

import socket
import tempfile
from pathlib import Path

import click
import transformers
import uvicorn

from examples.chat_server.app import make_app
from examples.chat_server.chat import Limits
from examples.chat_server.tiny import make_tiny

_MODEL = Path(tempfile.gettempdir()) / "ucm-chat"
_STORE = "/dev/shm/ucm-chat-server"


@click.command()
@click.argument("model", required=False)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, help="0: any that is free.")
@click.option("--store", default=_STORE, show_default=True)
@click.option("--capacity", default="1GiB", show_default=True)
@click.option("--share", help="Directory that several machines see.")
@click.option("--line", default=64, show_default=True, help="Requests at a time.")
@click.option("--deadline", default=60.0, show_default=True, help="Seconds for each.")
def main(
    *,
    model: str | None,
    host: str,
    port: int,
    store: str,
    capacity: str,
    share: str | None,
    line: int,
    deadline: float,
) -> None:
    """Serve MODEL, a path or name; without one a tiny model that talks nonsense."""
    transformers.logging.disable_progress_bar()
    path = model or str(make_tiny(_MODEL))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    if not tokenizer.chat_template:
        raise click.BadParameter("its tokenizer has no template for chats")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
    Path(store).parent.mkdir(parents=True, exist_ok=True)
    config: dict[str, object] = {"store": {"path": store, "capacity": capacity}}
    if share:
        config["tiers"] = [{"type": "files", "path": share, "capacity": "16GiB"}]
    limits = Limits(line=line, deadline=deadline)
    app = make_app(loaded, tokenizer, config, limits)
    with socket.create_server((host, port)) as listening:
        place = "http://{}:{}".format(*listening.getsockname()[:2])
        click.echo(f"listening on {place}")
        settings = uvicorn.Config(
            app,
            log_level="warning",
            limit_concurrency=4 * line,
            timeout_graceful_shutdown=10,
        )
        uvicorn.Server(settings).run(sockets=[listening])


if __name__ == "__main__":
    main()
