# SPDX-License-Identifier: Apache-2.0
"""
What the logs of a directory tell: of one request, of all of them, of two runs.

``lines`` knows what a line says, ``files`` reads them, ``collected`` keeps the newest and
``lives`` puts together what belongs to one stay of a request. What stands on these are
``told`` (text), ``totals`` (numbers), ``drawing`` (bars and lanes) with its two forms
``page`` (HTML) and ``perfetto``, and ``misses`` (what each reason means and what to do).

Whatever a file says is somebody else's word: lines are bounded, wrong ones are counted,
and nothing is kept without a limit.
"""
