"""Emulated links held against real ones: sites in network namespaces, joined to the aggregator's by shaped veth pairs.

    sudo python benchmarks/wan.py [--rate-only] [--rounds 5] [--share 0.002] [--rank 64]

The same federation of a tiny model is played three times with the same site processes: over their sockets without a
link, with the links that the engine emulates, and over TCP through links that the kernel delays and paces (tc netem,
both ends) by the same table. Printed are each site's time of both transfers (round trip less training), the ratio of
emulated to shaped, and the length of rounds. `--rate-only` leaves delays out of both (tc tbf), for kernels without
netem. Without root, ip, tc, network namespaces, veth or the qdisc it says so in one line and exits with 2.

What the emulation leaves out and a shaped link has: TCP's handshake and slow start, and headers of packets (about
4.5 %).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import wan_links

if TYPE_CHECKING:
    from wattgym.federated.config import FederationConfig
    from wattgym.federated.links import Link
    from wattgym.federated.messages import RoundRecord

AGGREGATOR = "aws:us-east-1"
SITES = {"ireland": "aws:eu-west-1", "tokyo": "aws:ap-northeast-1"}
NO_RTT_MS = 1e-3
"""Round trip of the table for `--rate-only`, which wants more than 0."""

MODES = ("no link", "emulated", "shaped")


def main() -> None:
    """Preflight, the three runs, the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-only", action="store_true", help="bandwidth without delay (tbf in place of netem)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each run")
    parser.add_argument("--share", type=float, default=0.002, help="share of the table's throughput that a site gets")
    parser.add_argument("--rank", type=int, default=64, help="adapter rank; the adapter is what is transferred")
    options = parser.parse_args()
    lacks = wan_links.missing(options.rate_only)
    if lacks:
        hint = "" if options.rate_only else "; --rate-only needs no netem"
        print(f"wan.py: links cannot be shaped here, missing: {', '.join(lacks)}{hint}", file=sys.stderr)
        sys.exit(2)
    from wattgym.cli.stopping import terminable

    try:
        with terminable(), tempfile.TemporaryDirectory(prefix="wan-") as folder:
            compare(Path(folder), options)
    except wan_links.LinkError as error:
        sys.exit(f"wan.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def compare(folder: Path, options: argparse.Namespace) -> None:
    """Plays the federation over each kind of link and prints the comparison."""
    from wattgym.federated.links import Links

    plain = federation(None, options.rank)
    network: dict[str, Any] = {"split": "all", "aggregator": AGGREGATOR, "bandwidth_share": options.share}
    links = Links(federation(network, options.rank)).by_site
    if options.rate_only:
        network = {"split": "all", "aggregator": AGGREGATOR, "bandwidth_share": 1.0}
        network["table"] = str(table_without_delay(folder / "table.csv", links))
    emulated = federation(network, options.rank)
    links = Links(emulated).by_site
    shapes = {
        name: wan_links.Shape(None if options.rate_only else link.rtt_s, link.down_bytes_per_s, link.up_bytes_per_s)
        for name, link in links.items()
    }
    for name in wan_links.remove_leftovers():
        print(f"removed {name}, which an earlier run had left")
    records: dict[str, Sequence[RoundRecord]] = {}
    with wan_links.ShapedLinks(shapes) as lab, trainers(plain, folder / "sites", lab) as sockets:
        for mode, config in zip(MODES, (plain, emulated, plain), strict=True):
            for name, socket in sockets.items():
                near = folder / mode / name / socket.name
                near.parent.mkdir(parents=True)
                if mode == "shaped":
                    lab.carry(name, near, socket)
                else:
                    near.symlink_to(socket)
            records[mode] = play(config, folder / mode, options.rounds, mode)
    show(records, links, options.rate_only)


def federation(network: Mapping[str, Any] | None, rank: int) -> FederationConfig:
    """A tiny model at every site, with an adapter whose transfer can be measured."""
    from wattgym.config import parse_config
    from wattgym.federated.config import FederationConfig

    values = {
        "sites": [{"name": name, "region": region} for name, region in SITES.items()],
        "model": {"source": "tiny", "tiny": {"hidden_size": 128}},
        "data": {"source": "tasks", "records": 400, "max_tokens": 96, "evaluation": 16},
        "lora": {"targets": "all-linear", "rank": rank},
        "optimiser": {"learning_rate": 1e-3},
        "samples_per_update": 4,
        "micro_batch": 4,
        "local_steps": 2,
        "network": network,
        "device": "cpu",
    }
    return parse_config(FederationConfig, values, "wan.py")


def table_without_delay(path: Path, links: Mapping[str, Link]) -> Path:
    """The links' rates as a network table without round-trip times."""
    lines = ["src_region,dst_region,rtt_ms,gbps,egress_usd_per_gb"]
    for name, link in links.items():
        lines.append(f"{AGGREGATOR},{SITES[name]},{NO_RTT_MS},{8e-9 * link.down_bytes_per_s},0")
        lines.append(f"{SITES[name]},{AGGREGATOR},{NO_RTT_MS},{8e-9 * link.up_bytes_per_s},0")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@contextmanager
def trainers(config: FederationConfig, folder: Path, lab: wan_links.ShapedLinks) -> Iterator[dict[str, Path]]:
    """The sites' processes in their namespaces, and their sockets; they end with the block, or with this process."""
    import subprocess

    from wattgym.federated.site.client import SOCKET_FILE, SiteClient
    from wattgym.files import atomic_write_json

    file = folder / "federation.json"
    atomic_write_json(file, config.model_dump(mode="json"))
    running: list[subprocess.Popen[bytes]] = []
    try:
        for name, namespace in lab.sites.items():
            words = ["ip", "netns", "exec", namespace, sys.executable, "-P", "-m", "wattgym.federated.site"]
            words += ["--federation", str(file), "--site", name, "--folder", str(folder / name)]
            words += ["--owner", str(os.getpid())]
            running.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True))
        sockets = {name: folder / name / SOCKET_FILE for name in lab.sites}
        for path in sockets.values():
            SiteClient(path).wait_ready(600.0)
        yield sockets
    finally:
        with wan_links.undisturbed():
            for process in running:
                process.terminate()
            for process in running:
                with process:
                    try:
                        process.wait(30.0)
                    except subprocess.TimeoutExpired:
                        process.kill()


def play(config: FederationConfig, folder: Path, rounds: int, mode: str) -> Sequence[RoundRecord]:
    """Rounds with all sites over the sockets in a folder."""
    from wattgym.federated.federation import Federation
    from wattgym.federated.messages import Fate
    from wattgym.federated.processes import ProcessEngine

    with ProcessEngine(config, folder, outlive=True) as engine:  # takes over whoever answers at the sockets
        run = Federation(config, engine)
        for _ in range(rounds):
            record = run.run_round({name: run.assignment() for name in config.names})
            print(f"{mode}: round {record.round}, {record.seconds:.2f} s", flush=True)
            for each in record.outcomes:
                if each.fate is not Fate.COUNTED:
                    sys.exit(f"{mode}, round {record.round}: {each.site} {each.fate}: {each.reason}")
    return run.records[1:]


def show(records: Mapping[str, Sequence[RoundRecord]], links: Mapping[str, Link], rate_only: bool) -> None:
    """Prints medians over the rounds."""
    size = records["shaped"][0].outcomes[0].bytes_each_way
    print(f"\nadapter: {size / 1e6:.2f} MB each way; {'delays left out' if rate_only else 'delay and rate'}")
    print("both transfers of a round, s (median; shaped: range)")
    print(f"{'site':10} {'rtt ms':>7} {'Mbit/s':>7} {'table':>7} {'no link':>8} {'emulated':>9} {'shaped':>8}  "
          f"{'range':>15} {'emulated/shaped':>16}")  # fmt: skip
    for name, link in links.items():
        times = {mode: [transfer_s(record, name) for record in each] for mode, each in records.items()}
        none, emulated, shaped = (median(times[mode]) for mode in MODES)
        span = f"{min(times['shaped']):.2f} to {max(times['shaped']):.2f}"
        print(
            f"{name:10} {1000 * link.rtt_s:7.1f} {8e-6 * link.down_bytes_per_s:7.2f} {sum(link.seconds(size)):7.2f} "
            f"{none:8.2f} {emulated:9.2f} {shaped:8.2f}  {span:>15} {emulated / shaped:16.3f}"
        )
    print("rounds, s (median): the slowest site's answer, and the evaluation after it")
    for mode, each in records.items():
        answers = [max(outcome.round_trip_s for outcome in record.outcomes) for record in each]
        rest = [record.seconds - answer for record, answer in zip(each, answers, strict=True)]
        whole = median([record.seconds for record in each])
        print(f"{mode:10} {whole:7.2f}   {median(answers):7.2f} + {median(rest):.2f}")


def transfer_s(record: RoundRecord, site: str) -> float:
    """A site's time from request to answer less its training, s."""
    outcome = next(each for each in record.outcomes if each.site == site)
    assert outcome.metrics is not None
    return outcome.round_trip_s - outcome.metrics.train_s


if __name__ == "__main__":
    main()
