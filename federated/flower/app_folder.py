"""The folder that `flwr run` takes: a `pyproject.toml` that names WattGym's server app and client app, no code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from wattgym import __version__
from wattgym.files import atomic_write_text

Scalar = str | int | float | bool

RUN_CONFIG: dict[str, Scalar] = {
    "federation": "federation.yaml",
    "policy": "all sites",
    "rounds": 10,
    "seed": 0,
    "out": "federated_run",
    "resume": False,
    "site-folders": "",
    "join-s": 600.0,
}
"""What `flwr run --run-config` can set, with its defaults; see `server_app.py`."""

_TEMPLATE = """\
# Made by `python -m wattgym.federated.flower.app_folder FOLDER`. Server and sites need `wattgym[federated]` installed:
# a Flower app carries no dependencies here, and its apps are WattGym's own.
[project]
name = "wattgym-federated"
version = "{version}"
description = "Federated LoRA fine-tuning; a policy picks the sites of each round by their power"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "wattgym"

[tool.flwr.app.components]
serverapp = "wattgym.federated.flower.server_app:app"
clientapp = "wattgym.federated.flower.client_app:app"

[tool.flwr.app.config]
{config}"""


def write_app(folder: Path) -> Path:
    """Writes the app folder; returns it.

    Raises:
        UserError: It cannot be written.
    """
    atomic_write_text(folder / "pyproject.toml", _TEMPLATE.format(version=__version__, config=toml(RUN_CONFIG)))
    return folder


def toml(values: Mapping[str, Scalar]) -> str:
    """Scalars as TOML, one a line; JSON's strings, numbers and booleans are TOML's."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


if __name__ == "__main__":
    import sys

    write_app(Path(sys.argv[1]))
