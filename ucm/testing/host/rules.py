# SPDX-License-Identifier: Apache-2.0
"""
What an engine expects of a connector, each as a named rule.

The first letters of a rule's text name the requirement it stands for. Where the engine
has an assertion, the rule is that assertion or a stricter one: an engine may go on for
hours after a report that it merely does not understand.
"""

import enum

__all__ = ["HostAssertionError", "Rule", "require"]


class Rule(enum.Enum):
    """A thing that no connector may do."""

    REPORT_UNKNOWN = "H-01, H-02: report requests that the engine has, and none later"
    REPORT_UNREGISTERED = "H-01: report only what was registered for that direction"
    REPORT_TWICE = "H-01: report each request once per direction and rank"
    SENT_UNFINISHED = "H-01: report a save only after its request has finished"
    FAILED_NOT_RECEIVED = "H-05: report a failed load as received in the same output"
    FAILED_BLOCKS = "S4-15: name failed blocks only of open loads of a single group"
    ERRORS_TWICE = "S3-09: tell of each failed block once"
    NEVER_ENDS = "design 9: bring every load and every delayed free to an end"
    ASYNC_NOTHING = "H-11: never answer (0, True)"
    MATCH_TOO_LONG = "H-08, S3-08: leave a token to compute, count no local ones"
    MATCH_UNALIGNED = "H-08: end a match with a block"
    ANSWER = "S3-02: answer a hook in the form the engine takes"
    MUTATED = "S3-06: leave the engine's own objects as they are"
    METADATA_CHANGED = "H-12: survive pickling unchanged"
    METADATA_TOO_LARGE = "H-12: bound what is sent in a step"
    FINISHED_CHANGED = "S1-02: answer request_finished twice the same way"
    DEFERRED_FOR_NOTHING = "S1-28: keep no blocks of a request that never ran"
    DELIVERY_REQUIRED = "H-04: never ask for a request to be repeated"
    CONTENT = "H-10, S1-09: every block of a prefix holds what its tokens say"
    NULL_BLOCK = "H-11: leave the null block alone"
    HOOK_ORDER = "the order of hooks in a step"


class HostAssertionError(AssertionError):
    """
    A connector broke a rule.

    Args:
        rule: Which.
        message: What was seen.
        ids: Request, rank, block and so on, where they are known.
    """

    def __init__(self, rule: Rule, message: str, **ids: object) -> None:
        self.rule = rule
        self.ids = ids
        where = ", ".join(f"{name} {value}" for name, value in ids.items())
        super().__init__(f"{rule.name} ({rule.value}): {where}: {message}")


def require(holds: object, rule: Rule, message: str, **ids: object) -> None:
    """
    Insist on a rule.

    Raises:
        HostAssertionError: It was broken, by the connector.
    """
    if not holds:
        raise HostAssertionError(rule, message, **ids)
