# SPDX-License-Identifier: Apache-2.0
"""The engine's modules, imported once and in peace; no engine is started here."""

import importlib
import warnings

with warnings.catch_warnings():
    # The engine and its libraries warn while they are imported, which is no test's
    # business; later imports find the modules there.
    warnings.simplefilter("ignore")
    importlib.import_module("hypothesis")  # else its plug-in does so amid a summary
    importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
