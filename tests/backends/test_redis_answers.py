# SPDX-License-Identifier: Apache-2.0
"""What answers of a server say of it, by connections of ours and by redis-py."""

import pytest
from redis import exceptions
from redis.exceptions import ResponseError

from ucm.backends._redis_answers import refuses


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([b"OK", None, 1, 0], False),
        ([ResponseError("MISCONF of a snapshot"), b"OK"], True),
        ([ResponseError("READONLY of a replica")], True),
        ([exceptions.ReadOnlyError("of a replica")], True),
        ([ResponseError("NOREPLICAS for it")], True),
        ([exceptions.NoPermissionError("to run it")], True),
        ([ResponseError("OOM of maxmemory"), b"OK"], False),
        ([ResponseError("OOM of maxmemory")], None),
        ([exceptions.OutOfMemoryError("of maxmemory")], None),
        ([ResponseError("LOADING the dataset")], None),
        ([exceptions.BusyLoadingError("the dataset")], None),
        ([ResponseError("MOVED 1 10.0.0.1:6379")], None),
        ([exceptions.MovedError("1 10.0.0.1:6379")], None),
        ([exceptions.TryAgainError("later")], None),
        ([ResponseError("CLUSTERDOWN for now")], None),
        ([exceptions.ClusterDownError("for now")], None),
        ([ConnectionError(), TimeoutError()], None),
        ([ConnectionError(), b"OK"], False),
    ],
)
def test_server_takes_nothing_that_says_so_to_a_write(answers, expected):
    """X-14: not one that is full, that names another, or that says nothing; one that took anything takes."""
    assert expected is refuses(answers)
