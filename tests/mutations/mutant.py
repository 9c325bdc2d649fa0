# SPDX-License-Identifier: Apache-2.0
"""One small edit, and who must notice it."""

from pathlib import Path

import attrs

__all__ = ["Mutant", "StaleError"]


class StaleError(Exception):
    """The text to replace is not in the file exactly once."""


@attrs.frozen(kw_only=True)
class Mutant:
    """
    One edit of one file.

    Args:
        name: A short word for tables and ``--only``.
        why: The harm that it would do in the field, as one sentence.
        file: Path below the root of the tree.
        find: Text that occurs exactly once in the file.
        replace: What stands there instead.
        killers: Tests, as pytest names them, each of which must fail. A name without
            parameters means any of them.
    """

    name: str
    why: str
    file: str
    find: str
    replace: str
    killers: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """
        Return the edited text of the file below *root*; writes nothing.

        Raises:
            StaleError: The text to replace is not there exactly once.
        """
        text = (root / self.file).read_text()
        if (count := text.count(self.find)) != 1:
            raise StaleError(f"{self.file} has the text of {self.name} {count} times")
        return text.replace(self.find, self.replace)
