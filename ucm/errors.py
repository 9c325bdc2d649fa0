# SPDX-License-Identifier: Apache-2.0
"""
Every exception that ``ucm`` raises.

- UCMError
    - ConfigError (ValueError): a setting is wrong; names key, value and remedy
        - ConfigFileError: a file of settings cannot be read
    - LayoutError (ValueError): a KV cache that cannot be mapped safely
    - KeyFormatError (ValueError): bytes that are no block key of ours
    - MessageError (ValueError): a step message of another version or shape
    - StoreError
        - BlockNotFoundError (LookupError): never committed, or evicted since
        - BlockCorruptError: stored bytes are not the bytes that were saved
        - StoreFullError: no slot could be freed
        - StoreUnavailableError: the store did not answer; may be retried
            - StoreBypassedError: nobody asked it, because it did not answer before
        - LeaseExpiredError: a lease was used after it ended
    - DeviceError
        - EventNotRecordedError: an event that proves nothing yet
            - EventUnreadableError: what was offered has no native handle
            - EventStaleError: an event whose record is of an earlier step
        - ForeignEventError: an event of another device or runtime
        - GraphCaptureError: a call that no graph may contain
        - DeviceFailedError: the device has failed, now or before
        - DeviceTimeoutError (TimeoutError): a fence did not pass in time
    - PipelineError
        - PipelineClosedError: work was offered after close
        - BlockInUseError: a block that somebody reads or writes was to be written
        - StageFailedError: a stage raised; carries stage and transfer id
        - WorkerDiedError: the thread that did the work is gone
    - LedgerError: a hold was taken or released twice; a bug of ours
    - NoLogError: a path that has no log of ours
    - NoStatusError: no running process tells how it is

Expected ends (a miss, a refused save) are values and not in this list.
"""

import re
from collections.abc import Mapping
from typing import Self

_CREDENTIALS = re.compile(r"://\S*@")
"""Up to the last sign: a password may have any of the others in it."""
_PARAMETER = re.compile(r"([?&;])([^=&;\s]+)=[^&;\s]*")
_SECRET = re.compile(
    "secret|passw|credential|(access|api|account|private|encryption|customer)[_-]?key"
    "|(^|[._-])(token|pwd|sig|signature|auth|authorization)$",
    re.IGNORECASE,
)
"""Names of settings that no message tells."""
_MOST_SHOWN = 400
"""Characters of a value in a message; it may come from a file."""


def text_of(error: BaseException) -> str:
    """Return what an error says; its type's name where somebody else's cannot say it."""
    try:
        return repr(error)
    except Exception:  # noqa: BLE001 - a host's own may raise anything
        return type(error).__name__


def masked(value: object, depth: int = 16) -> object:
    """
    Return a value that may be shown and logged: without credentials.

    Args:
        value: As it was given.
        depth: What is nested deeper is left out.
    """
    if isinstance(value, str):
        return _PARAMETER.sub(_parameter, _CREDENTIALS.sub("://***@", value))
    if not depth:
        return "..."
    if isinstance(value, list | tuple):
        return [masked(each, depth - 1) for each in value]
    if isinstance(value, Mapping):
        return {
            key: "***" if _SECRET.search(str(key)) else masked(each, depth - 1)
            for key, each in value.items()
        }
    return value


def _parameter(found: "re.Match[str]") -> str:
    """Return what is shown of one parameter of an address."""
    is_secret = _SECRET.search(found[2])
    return f"{found[1]}{found[2]}=***" if is_secret else found[0]


class UCMError(Exception):
    """Base of all errors raised by ``ucm``; each may be copied, and sent to another process."""

    def __reduce__(self) -> tuple[object, ...]:
        """Be made again of what it says: what ``__init__`` takes is another thing."""
        return _again, (type(self), self.args), self.__dict__


def _again(kind: type[UCMError], args: tuple[object, ...]) -> UCMError:
    return kind.__new__(kind, *args)


class ConfigError(UCMError, ValueError):
    """
    A setting that cannot be used.

    Args:
        key: Dotted name of the setting, such as ``store.path``.
        value: What was given.
        problem: Why it cannot be used.
        remedy: What to do about it.
        source: Where it was given, if there are several places.
    """

    def __init__(
        self, key: str, value: object, problem: str, remedy: str, source: str = ""
    ) -> None:
        shown = "'***'" if _SECRET.search(key) else repr(masked(value))
        if len(shown) > _MOST_SHOWN:
            shown = f"{shown[:_MOST_SHOWN]}..."
        where = f" in {source}" if source else ""
        super().__init__(f"{key}={shown}{where}: {problem}. {remedy}")
        self.key = key
        self.value = value
        self.shown = shown
        self.problem = problem
        self.remedy = remedy

    def given_in(self, source: str) -> Self:
        """Return the same error, which says where the setting was given."""
        return type(self)(self.key, self.value, self.problem, self.remedy, source)


class ConfigFileError(ConfigError):
    """A file of settings that is missing, foreign, damaged or too large."""


class LayoutError(UCMError, ValueError):
    """A KV cache layout that cannot be mapped safely."""


class KeyFormatError(UCMError, ValueError):
    """Bytes that are not a block key of this schema."""


class MessageError(UCMError, ValueError):
    """A step message that was written by another version or is damaged."""


class StoreError(UCMError):
    """Base of all errors of a store."""


class BlockNotFoundError(StoreError, LookupError):
    """
    The block was never committed, or was evicted since the lookup.

    Args:
        key: The packed key that is gone.
    """

    def __init__(self, key: bytes) -> None:
        super().__init__(f"no committed block for key {key.hex()}")
        self.key = key


class BlockCorruptError(StoreError):
    """
    The stored bytes are not the bytes that were saved.

    Args:
        key: The packed key whose bytes are wrong.
        problem: Which check failed.
    """

    def __init__(self, key: bytes, problem: str) -> None:
        super().__init__(f"block {key.hex()} is corrupt: {problem}")
        self.key = key


class StoreFullError(StoreError):
    """No slot is free and none could be evicted."""


class StoreUnavailableError(StoreError):
    """The store did not answer; the call may be retried."""


class StoreBypassedError(StoreUnavailableError):
    """The store was not asked: it did not answer, or gave nothing, a short time ago."""


class LeaseExpiredError(StoreError):
    """A lease was used after it was committed, discarded or taken away."""


class DeviceError(UCMError):
    """Base of all errors of a device."""


class EventNotRecordedError(DeviceError):
    """An event was offered as proof but was never recorded in this step."""


class EventUnreadableError(EventNotRecordedError):
    """What was offered as an event has no native handle that could be read."""


class EventStaleError(EventNotRecordedError):
    """The event was seen in an earlier step, and nothing shows a record since."""


class ForeignEventError(DeviceError):
    """An event of another device, or of another runtime."""


class GraphCaptureError(DeviceError):
    """The calling thread's stream is recording a graph, which this call would break."""


class DeviceFailedError(DeviceError):
    """The device has failed. This stays so until the process ends."""


class DeviceTimeoutError(DeviceError, TimeoutError):
    """A fence did not pass before its deadline."""


class PipelineError(UCMError):
    """Base of all errors of the pipeline."""


class PipelineClosedError(PipelineError):
    """Work was offered to a pipeline that no longer takes any."""


class BlockInUseError(PipelineError):
    """
    A load was to write a block that is in use, or a save to read one that is written.

    Args:
        block_id: The block; still in use as before.
    """

    def __init__(self, block_id: int) -> None:
        super().__init__(f"block {block_id} is in use by another save or load")
        self.block_id = block_id


class StageFailedError(PipelineError):
    """
    A stage raised; the cause is chained.

    Args:
        stage: Name of the stage.
        transfer_id: The ticket that was in it.
    """

    def __init__(self, stage: str, transfer_id: int) -> None:
        super().__init__(f"stage {stage} failed for transfer {transfer_id}")
        self.stage = stage
        self.transfer_id = transfer_id


class WorkerDiedError(PipelineError):
    """The loop or copy thread that held the work has ended."""


class LedgerError(UCMError):
    """A hold was taken twice, or released by a rank that does not hold it."""


class NoLogError(UCMError):
    """A path that has no log of ours."""


class NoStatusError(UCMError):
    """No running process tells how it is."""
