# SPDX-License-Identifier: Apache-2.0
"""
Blocks as files on a mount that several machines share, such as NFS, CephFS or Lustre.

``_share`` does what may hang, on threads; ``_backend`` has the verbs, none of which waits for
a thread that hangs behind its caller's deadline.
"""

from ucm.backends.files._backend import FilesBackend, FilesSettings

__all__ = ["FilesBackend", "FilesSettings"]
