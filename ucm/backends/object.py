# SPDX-License-Identifier: Apache-2.0
"""
Blocks as objects: S3 and what is compatible with it, Google's and Azure's, by obstore.

Each block is an object of its own, its envelope before its bytes, made by a conditional create.
Of writers that race one wins; the others are told so, or get an error that says nothing: then
the object is looked for (R-51). Credentials and TLS are obstore's: its options, or the
environment as it reads it; they are never told by us.

Room is bounded by the bucket's own rules of lifecycle, not by us.

Threading: verbs on the loop; requests on threads of a crew, which end with obstore's timeout also
where whoever asked has gone by then. The caller's memory is used by way of the crew's gate only.
A deletion waits for the puts of its object that are under way, so that none lands behind it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Self, TypeVar

import anyio
import attrs
import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import from_url
from xxhash import xxh3_64_intdigest

from ucm.backends._address import no_address
from ucm.backends._crew import Crew
from ucm.backends._puts import Puts
from ucm.backends.abc import (
    Backend,
    BackendCapabilities,
    Fetched,
    Presence,
    Sealed,
    Verdict,
)
from ucm.backends.envelope import GARBAGE, HEADER_BYTES, Envelope
from ucm.blocks import PackedKey
from ucm.errors import ConfigError
from ucm.settings import field, read_section

__all__ = ["ObjectBackend", "ObjectSettings"]

_Item = TypeVar("_Item")
_T = TypeVar("_T")
_LARGEST_BLOCK = 1 << 30
_UNAVAILABLE = Fetched(Verdict.UNAVAILABLE)
_OPENING_S = 5.0
_ERRORS = (BaseError, OSError)
_CODE = re.compile(r"<Code>(\w{1,64})</Code>", re.ASCII)
"""What a service says of an error; the rest may have secrets."""
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
"""Said of an object that is asked for, as if that alone were not there."""
_PANIC = "PanicException"
"""Of obstore's native code, as at some options: no ``Exception``, and in no module that can be imported."""
_refusal = partial(
    no_address,
    problem="obstore refuses it or an option",
    remedy="Give an address such as s3://bucket/prefix, and options as in obstore's manual; those of HTTP are client's.",
)


def _read_options(key: str, value: object) -> dict[str, str | bool]:
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and isinstance(each, (str, bool))
        for name, each in value.items()
    ):
        raise ConfigError(
            key, "...", "no options", "Give names with text, or true and false."
        )
    return dict(value)


def _read_url(key: str, value: object) -> str:
    """Read an address of a service that obstore knows."""
    text = value if isinstance(value, str) else ""
    try:
        obstore.parse_scheme(text)
    except (BaseError, ValueError) as exc:
        raise _refusal(key, value, exc) from None
    return text


@attrs.frozen(kw_only=True)
class ObjectSettings:
    """Settings of a tier of objects."""

    url: str = field(
        "", "Such as `s3://bucket/prefix`, `gs://` or `az://`.", read=_read_url
    )
    options: dict[str, str | bool] = field(
        attrs.Factory(dict),
        "obstore's for the service, such as `aws_endpoint`; the environment else.",
        read=_read_options,
    )
    client: dict[str, str | bool] = field(
        attrs.Factory(dict),
        "obstore's for HTTP, such as `root_certificate` or `proxy_url`.",
        read=_read_options,
    )
    requests: int = field(32, "At a time, each with a thread.", least=1)
    timeout: float = field(5.0, "Seconds for each request.", least=0.01)


class ObjectBackend(Backend):
    """
    Blocks as objects; made by ``open_configured``.

    Args:
        store: obstore's.
        num_requests: At a time.
    """

    def __init__(self, store: Any, num_requests: int) -> None:  # noqa: ANN401 - a union
        self._store = store
        self._crew = Crew(num_requests, "ucm-object")
        self._puts = Puts()
        self._is_open = True
        self._trouble = ""

    @classmethod
    async def open_configured(cls, settings: object, key: str) -> Self:
        """
        Open a bucket; one that does not answer is unavailable until it does.

        Raises:
            ConfigError: The address or an option is wrong, or the credentials are.
        """
        read = read_section(ObjectSettings, settings, f"{key}.")
        limit = timedelta(seconds=read.timeout)
        make: Any = from_url  # its types are one for each service
        try:
            store = make(
                read.url,
                config=read.options,
                client_options={
                    "connect_timeout": limit,
                    "timeout": limit,
                    **read.client,
                },
                retry_config={"max_retries": 1, "retry_timeout": limit},
            )
        except (BaseError, ValueError, TypeError) as exc:
            raise _refusal(f"{key}.url", read.url, exc) from None
        except BaseException as exc:
            if type(exc).__name__ != _PANIC:
                raise
            raise _refusal(f"{key}.url", read.url, exc) from None
        backend = cls(store, read.requests)
        refused, crew = [""], backend._crew
        with anyio.move_on_after(_OPENING_S):
            await crew.run(["ucm-probe"], backend._why_refused, refused, leave=True)
        if why := refused[0]:
            await backend.aclose()
            if why in _NO_BUCKET:
                problem = f"the service has no such bucket ({why})"
                remedy = "Make it, or give the address of another."
                shown = "..." if "@" in read.url else read.url
                raise ConfigError(f"{key}.url", shown, problem, remedy)
            raise ConfigError(
                f"{key}.options",
                "...",
                f"the service refuses the credentials ({why})",
                "Give those of a user who may read, write and delete objects there, and list them, as services "
                "refuse to tell others what is not there; "
                "RequestTimeTooSkewed is of a clock that is wrong, as this machine's may be.",
            )
        return backend

    @property
    def capabilities(self) -> BackendCapabilities:
        """Of a service."""
        return BackendCapabilities(
            medium="object",
            shared=True,
            durable="node",
            max_block_bytes=_LARGEST_BLOCK,
            batch_blocks=2 * self._crew.num_threads,
            in_flight=2,
            creates=True,
        )

    @property
    def trouble(self) -> str:
        """What obstore calls the last error, and the service's own word for it; the rest may have secrets."""
        return self._trouble

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Ask for the head of each object."""
        return await self._ask(keys, self._look, Presence.UNKNOWN)

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Ask for as much of each object as there is room for; one of another length is garbage."""
        pairs = list(zip(keys, targets, strict=True))
        return await self._ask(pairs, self._get, _UNAVAILABLE)

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """Create each object unless it is there."""
        return await self._ask(blocks, self._put, Verdict.UNAVAILABLE)

    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Delete each object that is there."""
        return await self._ask(keys, self._delete, Verdict.UNAVAILABLE)

    async def aclose(self) -> None:
        """Ask no more; obstore closes idle connections by itself."""
        self._is_open = False
        await self._crew.aclose()

    async def _ask(
        self, items: Sequence[_Item], ask: Callable[[_Item], _T], unknown: _T
    ) -> list[_T]:
        """Return what threads are told of each item, or *unknown* where that is nothing in time."""
        told = [unknown] * len(items)
        if self._is_open:
            await self._crew.run(items, ask, told, leave=True)
            if unknown not in told:
                self._trouble = ""
        return told

    # On threads of the crew, which end with obstore's timeout, whoever waits for them.

    def _why_refused(self, path: str) -> str:
        """Return the error of a service that takes the credentials for nobody's, and its own word; or that of one without the bucket; else nothing."""
        try:
            # Not its head: an answer to that has no words.
            obstore.get_range(self._store, path, start=0, end=1)
        except (PermissionDeniedError, UnauthenticatedError) as exc:
            return _words_of(exc)
        except _ERRORS as exc:
            # Nothing there is as it should be; a service that is down may come back.
            codes = _CODE.findall(str(exc))[:1]
            return "".join(code for code in codes if code in _NO_BUCKET)
        return ""

    def _look(self, key: PackedKey) -> Presence:
        try:
            obstore.head(self._store, _path(key))
        except (NotFoundError, FileNotFoundError):
            return Presence.ABSENT
        except _ERRORS as exc:
            self._trouble = _words_of(exc)
            return Presence.UNKNOWN
        return Presence.PRESENT

    def _get(self, pair: tuple[PackedKey, memoryview]) -> Fetched:
        key, target = pair
        path, nbytes = _path(key), HEADER_BYTES + len(target)
        try:
            # One call, where the object's length and then its bytes are two; a longer one has another byte.
            value = obstore.get_range(self._store, path, start=0, end=nbytes + 1)
        except (NotFoundError, FileNotFoundError):
            return Fetched(Verdict.ABSENT)
        except _ERRORS as exc:
            self._trouble = _words_of(exc)
            is_empty = self._size_of(path) == 0  # no range of it can be asked for
            return GARBAGE if is_empty else _UNAVAILABLE
        if len(value) != nbytes:
            return GARBAGE
        view = memoryview(value)
        opened = self._crew.gate.touch(lambda: Envelope.open(view, key, target))
        return opened or _UNAVAILABLE

    def _size_of(self, path: str) -> int | None:
        """Return how many bytes an object has; None: it is not there, or not known."""
        try:
            size: int = obstore.head(self._store, path)["size"]
        except _ERRORS:
            return None
        return size

    def _put(self, block: Sealed) -> Verdict:
        if len(block.data) > _LARGEST_BLOCK:
            return Verdict.FULL
        with self._puts.putting([block.key]):
            return self._put_to(_path(block.key), block)

    def _put_to(self, path: str, block: Sealed) -> Verdict:
        header = Envelope(block.key, len(block.data), block.checksum).encode()
        # A copy: whoever waits may leave while it is sent.
        value = self._crew.gate.touch(lambda: b"".join((header, block.data)))
        if value is None:
            return Verdict.UNAVAILABLE
        try:
            obstore.put(self._store, path, value, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return Verdict.PRESENT
        except _ERRORS as exc:
            is_there = self._look(block.key) is Presence.PRESENT
            self._trouble = _words_of(exc)
            return Verdict.PRESENT if is_there else Verdict.UNAVAILABLE
        return Verdict.DONE

    def _delete(self, key: PackedKey) -> Verdict:
        gate = self._crew.gate
        if not self._puts.await_end(key, lambda: gate.is_left):
            return Verdict.UNAVAILABLE
        there = self._look(key)
        if gate.is_left:  # it may have been put anew since
            return Verdict.UNAVAILABLE
        if there is not Presence.PRESENT:
            is_absent = there is Presence.ABSENT
            return Verdict.ABSENT if is_absent else Verdict.UNAVAILABLE
        try:
            obstore.delete(self._store, _path(key))
        except _ERRORS as exc:
            self._trouble = _words_of(exc)
            return Verdict.UNAVAILABLE
        return Verdict.DONE


def _path(key: PackedKey) -> str:
    """Return the name of a block; services spread names by how they begin."""
    return f"{xxh3_64_intdigest(key) & 0xFFFF:04x}/{key.hex()}"


def _words_of(exc: BaseException) -> str:
    """Return what obstore calls an error, and the service's own word."""
    return ", ".join([type(exc).__name__, *_CODE.findall(str(exc))[:1]])
