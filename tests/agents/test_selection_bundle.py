"""Bundles of site-selection policies: any number of sites, without torch, proven to act as the original."""

import json
import subprocess
import sys

import numpy as np
import pytest

from wattgym.agents.bundle import GOLDEN, MANIFEST, POLICY, load_bundle
from wattgym.agents.export import export_bundle
from wattgym.agents.policy import load_policy
from wattgym.agents.selection_bundle import (
    GOLDEN_SIZES,
    SelectionBundleController,
    load_selection_bundle,
    read_pairs,
)
from wattgym.agents.training import train
from wattgym.agents.validation import held_out_federation
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.envs.selection import SiteSelection
from wattgym.errors import UserError


@pytest.fixture(scope="module")
def runs(tiny_selection, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    small = {"train__total_steps": 96, "imitation__passes": 0}
    for name in ("deep_sets", "set_attention"):
        train(tiny_selection(network__architecture=name, **small), folder / name, progress=False)
    return folder


@pytest.fixture(scope="module")
def bundle(runs, tmp_path_factory):
    target = tmp_path_factory.mktemp("bundles") / "bundle"
    export_bundle(runs / "deep_sets", target)
    return target


@pytest.fixture(scope="module")
def federation(tiny_selection):
    """Held-out federations of a number of sites."""

    def build(count, **changes):
        env = tiny_selection().envs["a"].model_dump()
        env["sites"] |= {"count": (count, count), "slots": count}
        for key, value in changes.items():
            env[key] |= value
        return SiteSelection(held_out_federation(SiteSelectionConfig.model_validate(env), "test"))

    return build


@pytest.mark.parametrize("name", ["deep_sets", "set_attention"])
def test_a_bundle_chooses_what_the_policy_chooses_at_any_number_of_sites(name, runs, federation, tmp_path):
    made = export_bundle(runs / name, tmp_path / "bundle")
    assert made.manifest.parity.largest_difference <= 1e-6
    assert made.manifest.parity.rounding < 1e-3
    trained, bundled = load_policy(runs / name), load_policy(tmp_path / "bundle")
    assert bundled.controller.name == f"{name} (bundle)"
    assert bundled.config == trained.config
    for count in (1, 2, 6, 13, 57):
        selection = federation(count)
        observation = selection.reset([5, 6, 7])
        for policy in (trained.controller, bundled.controller):
            policy.reset(selection.task)
        for _ in range(5):
            score = bundled.controller.act(observation)
            assert score.shape == (3, count)
            assert (np.abs(score) <= 1.0).all()
            sure = np.abs(score) > 1e-4
            np.testing.assert_array_equal((score > 0)[sure], (trained.controller.act(observation) > 0)[sure])
            outcome = selection.step(score)
            assert not outcome.ineligible.any()
            if (outcome.terminated | outcome.truncated).any():
                break
            observation = outcome.observation


def test_golden_pairs_are_there_at_every_size(bundle):
    manifest = load_selection_bundle(bundle).manifest
    pairs = read_pairs((bundle / GOLDEN).read_bytes(), manifest.contract)
    assert tuple(pairs) == GOLDEN_SIZES
    scores = np.concatenate([score.ravel() for _, score in pairs.values()])
    # Both decisions are among them.
    assert (scores > 0).any()
    assert (scores < 0).any()
    assert manifest.contract.site[0].name == "exists"
    assert manifest.training.config["problem"] == "site_selection"


def test_a_bundle_runs_without_torch(bundle):
    program = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "stable_baselines3", "sb3_contrib"):
            raise ImportError(name)

sys.meta_path.insert(0, Absent())
import numpy as np
from wattgym.agents.selection_bundle import load_selection_bundle
bundle = load_selection_bundle(sys.argv[1])
print(bundle.policy.step(np.zeros((2, bundle.manifest.contract.size(9)), np.float32))[0].shape)
"""
    done = subprocess.run([sys.executable, "-c", program, str(bundle)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(2, 9)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observation": {"market": False}}, r"observation.market is False, the policy needs True"),
        ({"learning": {"domains": 4}}, r"domains is 4, the policy needs 8"),
    ],
)
def test_another_federation_is_refused_by_name(changes, message, bundle, federation):
    controller = SelectionBundleController(load_selection_bundle(bundle))
    selection = federation(4, **changes)
    selection.reset([1])
    with pytest.raises(UserError, match=message):
        controller.reset(selection.task)


def copied(bundle, folder):
    folder.mkdir()
    for path in bundle.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("name", [POLICY, GOLDEN])
def test_damage_is_refused(name, bundle, tmp_path):
    folder = copied(bundle, tmp_path / "copy")
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(bytes(content))
    with pytest.raises(UserError, match="differs from its checksum"):
        load_selection_bundle(folder)


def test_an_edited_manifest_is_refused(bundle, tmp_path):
    folder = copied(bundle, tmp_path / "copy")
    data = json.loads((folder / MANIFEST).read_text())
    data["contract"]["domains"] = 4
    (folder / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(UserError, match="differs from its own checksum"):
        load_selection_bundle(folder)


def test_a_power_shaping_plant_does_not_take_it(bundle):
    with pytest.raises(UserError, match="kind: Input should be 'power_shaping'"):
        load_bundle(bundle)


def test_a_policy_for_one_number_of_slots_is_not_exported(tiny_selection, tmp_path):
    config = tiny_selection(network={"hidden": [8]}, imitation={}, train__total_steps=96)
    train(config, tmp_path / "run", progress=False)
    with pytest.raises(UserError, match="only policies over sites"):
        export_bundle(tmp_path / "run", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
