"""A site's process: `python -m wattgym.federated.site --federation federation.yaml --site NAME --folder runs/site`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from wattgym.config import load_config
from wattgym.errors import UserError
from wattgym.federated.config import FederationConfig
from wattgym.federated.partition import Partition
from wattgym.federated.site.client import JOB_FOLDER
from wattgym.live.folder import is_locked, prepare_folder
from wattgym.live.handle import offline_environment
from wattgym.live.models import check_available
from wattgym.runs import RUN_FILE

PREDECESSOR_S = 30.0
"""A site that an engine starts waits so long for one that an earlier engine had started in the folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a site until it is told to stop.

    Returns:
        0 when it was stopped, 2 after one line on stderr when the user can do something about it.
    """
    parser = argparse.ArgumentParser(prog="python -m wattgym.federated.site", description="Run one federated site.")
    parser.add_argument("--federation", type=Path, required=True, help="federation file")
    parser.add_argument("--site", required=True, help="name of the site in it")
    parser.add_argument("--folder", type=Path, required=True, help="the site's own folder: socket, state, log")
    parser.add_argument("--owner", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        config = load_config(FederationConfig, options.federation)
        config.site(options.site)
        # What can be wrong is found before torch is imported, which takes seconds.
        check_available(config.model)
        partition = Partition(config)
        partition.slice(options.site)
        job = options.folder / JOB_FOLDER
        if options.owner:
            _wait_for_predecessor(job)
        # The descriptor stays open, and with it the lock, until the process ends.
        run, _ = prepare_folder(job, config.job(options.site), resume=(job / RUN_FILE).is_file())
        # Before torch is imported, which reads them.
        os.environ |= offline_environment(config.threads) | _visible_devices(config, options.site)
        from wattgym.federated.site.server import serve

        serve(config, options.site, partition, run, options.folder, owner=options.owner)
    except UserError as error:
        print(f"wattgym site: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _wait_for_predecessor(job: Path) -> None:
    """Gives the process of an engine that died the time to find that out and end."""
    until_s = time.monotonic() + PREDECESSOR_S
    while is_locked(job) and time.monotonic() < until_s:
        time.sleep(0.1)


def _visible_devices(config: FederationConfig, name: str) -> dict[str, str]:
    """Ties the process to the GPU that its power controller holds."""
    shaping = config.site(name).shaping
    if shaping is None or shaping.backend != "nvml":
        return {}
    from wattgym.hw.open import open_devices

    devices = open_devices(shaping.devices, "nvml")
    try:
        return {"CUDA_VISIBLE_DEVICES": ",".join(device.info().uuid for device in devices)}
    finally:
        for device in devices:
            device.close()


if __name__ == "__main__":
    sys.exit(main())
