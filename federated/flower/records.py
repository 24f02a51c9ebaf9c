"""Flower's records for the federation's messages: a header as JSON text and the adapter as one array of bytes.

Flower sends every array of a record as an object of its own, with a request each; an adapter has hundreds of arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from wattgym.federated.adapters import from_bytes, to_bytes
from wattgym.federated.messages import Adapter
from wattgym.federated.site.wire import WireError

_HEADER, _ADAPTER = "header", "adapter"


def pack(header: Mapping[str, Any], adapter: Adapter | None = None) -> RecordDict:
    """Puts a header of the site protocol and an adapter into records."""
    records = RecordDict({_HEADER: ConfigRecord({"json": json.dumps(header)})})
    if adapter is not None:
        records[_ADAPTER] = ArrayRecord({_ADAPTER: Array(np.frombuffer(to_bytes(adapter), dtype=np.uint8))})
    return records


def unpack(records: RecordDict) -> tuple[dict[str, Any], Adapter]:
    """Takes them out again; the adapter is empty where there is none.

    Raises:
        UserError: The records hold something else.
    """
    try:
        header = json.loads(str(records.config_records[_HEADER]["json"]))
        arrays = records.array_records.get(_ADAPTER)
        adapter = from_bytes(arrays[_ADAPTER].numpy().tobytes()) if arrays is not None else {}
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"a message that is not of this federation: {' '.join(str(error).split())}") from None
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise WireError("a message without a kind")
    return header, adapter
