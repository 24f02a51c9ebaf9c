import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from wattgym.agents.bundle import BundleController, load_bundle, manifest_digest
from wattgym.agents.export import export_bundle
from wattgym.agents.onnx_graph import check_graph
from wattgym.agents.rollout import Arena
from wattgym.agents.training import train
from wattgym.agents.validation import held_out
from wattgym.errors import UserError

FILES = ("bundle.json", "golden.npz", "policy.onnx")


@pytest.fixture(scope="module")
def originals(ppo_run, tiny, tmp_path_factory):
    """Two bundles that differ in their network alone, and one with memory."""
    folder = tmp_path_factory.mktemp("originals")
    export_bundle(ppo_run.run.path, folder / "ppo")
    for name, config in {
        "other": tiny(seed=1, train__total_steps=128),
        "lstm": tiny("recurrent_ppo", train__total_steps=128),
    }.items():
        export_bundle(train(config, folder / f"{name}-run", progress=False).run.path, folder / name)
    return folder


@pytest.fixture
def bundle(originals, tmp_path):
    return Path(shutil.copytree(originals / "ppo", tmp_path / "bundle"))


@pytest.fixture
def recurrent(originals, tmp_path):
    return Path(shutil.copytree(originals / "lstm", tmp_path / "recurrent"))


def refused(folder):
    with pytest.raises(UserError) as caught:
        load_bundle(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit(folder, change, sign=True):
    """Changes the manifest; signed, its checksums are right again, as those of a careful forger would be."""
    path = folder / "bundle.json"
    data = json.loads(path.read_text())
    change(data)
    if sign:
        data["digest"] = manifest_digest(data)
    path.write_text(json.dumps(data))


def put(folder, name, content):
    """Replaces a file and its checksum."""
    (folder / name).write_bytes(content)
    edit(folder, lambda data: data["sha256"].update({name: hashlib.sha256(content).hexdigest()}))


def put_golden(folder, change):
    with np.load(folder / "golden.npz", allow_pickle=False) as file:
        arrays = dict(file)
    change(arrays)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    put(folder, "golden.npz", buffer.getvalue())


def put_model(folder, change):
    model = onnx.load(folder / "policy.onnx")
    change(model)
    put(folder, "policy.onnx", model.SerializeToString())


def test_whole_bundles_load(bundle, recurrent):
    for folder in (bundle, recurrent):
        loaded = load_bundle(str(folder))
        assert loaded.folder == folder
        assert loaded.manifest.digest == json.loads((folder / "bundle.json").read_text())["digest"]


def test_signing_again_without_a_change_changes_nothing(bundle):
    before = (bundle / "bundle.json").read_text()
    edit(bundle, lambda data: None)
    assert json.loads((bundle / "bundle.json").read_text()) == json.loads(before)
    put_golden(bundle, lambda arrays: None)
    put_model(bundle, lambda model: None)
    load_bundle(bundle)


@pytest.mark.parametrize("name", ["golden.npz", "policy.onnx"])
@pytest.mark.parametrize("where", [0.0, 0.3, 0.7, 1.0])
def test_one_flipped_bit_is_refused_by_file(name, where, bundle):
    data = bytearray((bundle / name).read_bytes())
    data[int(where * (len(data) - 1))] ^= 4
    (bundle / name).write_bytes(data)
    assert f"{name}: differs from its checksum in bundle.json" in refused(bundle)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0, 1, 0.5, -2])
def test_a_file_cut_short_is_refused_by_name(name, kept, bundle):
    data = (bundle / name).read_bytes()
    (bundle / name).write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    assert name in refused(bundle)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(name, bundle):
    (bundle / name).unlink()
    assert name in refused(bundle)
    (bundle / name).mkdir()
    assert name in refused(bundle)


def test_what_is_no_bundle_is_refused(tmp_path, ppo_run):
    for folder in (tmp_path, tmp_path / "nowhere", ppo_run.run.path):
        assert "not a policy bundle (it has no bundle.json)" in refused(folder)


def paths(value, prefix=()):
    if isinstance(value, dict):
        return [path for key, item in value.items() for path in paths(item, (*prefix, key))]
    return [prefix]


def test_every_edited_value_of_the_manifest_is_noticed(bundle):
    original = json.loads((bundle / "bundle.json").read_text())
    for path in paths(original):
        data = json.loads(json.dumps(original))
        branch = data
        for key in path[:-1]:
            branch = branch[key]
        value = branch[path[-1]]
        branch[path[-1]] = value + 1 if isinstance(value, int | float) and not isinstance(value, bool) else "edited"
        (bundle / "bundle.json").write_text(json.dumps(data))
        assert "bundle.json" in refused(bundle), path


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_schema_version_is_refused_before_anything_else_is_read(version, bundle):
    def change(data):
        data.clear()
        data.update(schema_version=version, something="new")

    edit(bundle, change)
    assert f"schema version {version!r}, this WattGym reads version 1" in refused(bundle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(kind="site_selection"), "kind: Input should be 'power_shaping'"),
        (lambda d: d.update(extra=1), "unknown key 'extra'"),
        (lambda d: d["contract"].pop("rules"), "contract.rules: Field required"),
        (lambda d: d["contract"].update(period_s=0.0), "contract.period_s: Input should be greater than 0"),
        (lambda d: d["sha256"].pop("policy.onnx"), "sha256 has no entry for 'policy.onnx'"),
        (lambda d: d["contract"].update(jobs=3), "'action' is float32 of shape (1, 256, 2), expected float32 of shape"),
        (lambda d: d["contract"]["features"].pop(), "golden.npz: refused: 'observation' is float32 of shape (1, 256,"),
        (lambda d: d.update(recurrence={"layers": 1, "size": 4}), "golden.npz: refused: 'hidden' is missing"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_by_field(change, message, bundle):
    edit(bundle, change)
    assert message in refused(bundle)


def test_the_network_of_another_policy_differs_from_the_golden_pairs(bundle, recurrent, originals):
    put(bundle, "policy.onnx", (originals / "other" / "policy.onnx").read_bytes())
    assert "policy.onnx differs from the golden pairs in golden.npz by" in refused(bundle)
    put(bundle, "golden.npz", (originals / "other" / "golden.npz").read_bytes())
    load_bundle(bundle)
    put(bundle, "policy.onnx", (recurrent / "policy.onnx").read_bytes())
    assert "policy.onnx: refused: its inputs are" in refused(bundle)


@pytest.mark.parametrize("name", ["observation", "action", "episode_start", "hidden", "cell"])
def test_golden_arrays_are_exactly_those_that_belong_there(name, recurrent):
    for change, message in (
        (lambda a: a.update({name: a[name].astype(np.float64)}), "float64"),
        (lambda a: a.update({name: np.array([None])}), "golden.npz: refused: "),
        (lambda a: a.update({name: a[name][1:]}), "golden.npz: refused: "),
        (lambda a: a.pop(name), "golden.npz: refused: "),
    ):
        folder = recurrent.with_name("changed")
        shutil.copytree(recurrent, folder)
        put_golden(folder, change)
        assert message in refused(folder)
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["observation", "action", "episode_start", "hidden", "cell"])
def test_every_golden_array_counts(name, recurrent):
    def change(arrays):
        arrays[name] = 1.0 - arrays[name]

    put_golden(recurrent, change)
    assert "differs from the golden pairs" in refused(recurrent)


def test_one_golden_number_that_is_off_or_none_is_noticed(bundle):
    for wrong in (2e-6, np.nan):

        def change(arrays, wrong=wrong):
            arrays["action"][0, 200, 1] += wrong

        put_golden(bundle, change)
        assert "differs from the golden pairs" in refused(bundle)


def test_pickles_in_the_golden_file_are_not_run(bundle, tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    buffer = io.BytesIO()
    np.savez(buffer, observation=np.array([Trap()], dtype=object), action=np.zeros(1))
    put(bundle, "golden.npz", buffer.getvalue())
    assert "not readable as plain arrays: Object arrays cannot be loaded" in refused(bundle)
    np.savez_compressed(buffer := io.BytesIO(), observation=np.zeros((1, 256, 3), np.float32))
    put(bundle, "golden.npz", buffer.getvalue())
    assert "'observation.npy' is compressed" in refused(bundle)
    assert not (tmp_path / "sprung").exists()


def replace_operator(model, operator="Erf", domain=""):
    node = next(node for node in model.graph.node if node.op_type == "Tanh")
    node.op_type, node.domain = operator, domain


def branch(model):
    inner = helper.make_graph([], "inner", [], [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])])
    model.graph.node.append(helper.make_node("Constant", [], ["never"], value=helper.make_tensor("t", 1, [1], [0.0])))
    model.graph.node[-1].attribute.append(helper.make_attribute("then_branch", inner))


def external(model, location="/etc/hostname"):
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)


def external_constant(model):
    constant = next(node for node in model.graph.node if node.op_type == "Constant")
    constant.attribute[0].t.external_data.add(key="location", value="elsewhere")


def function(model):
    model.functions.append(
        helper.make_function("own", "F", ["x"], ["y"], [helper.make_node("Tanh", ["x"], ["y"])], model.opset_import)
    )


def sparse(model):
    model.graph.sparse_initializer.add()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_operator, "it uses the operator 'Erf'; allowed: Add,"),
        (lambda m: replace_operator(m, "Tanh", "com.evil"), "it uses operators of the domain 'com.evil'"),
        (lambda m: m.opset_import.add(domain="com.evil", version=1), "it uses operators of the domain 'com.evil'"),
        (branch, "it holds a graph within the graph"),
        (external, "it keeps weights in another file"),
        (external_constant, "it keeps weights in another file"),
        (function, "it defines functions of its own"),
        (sparse, "it holds sparse tensors"),
        (lambda m: m.graph.node.pop(), "onnxruntime cannot run it: "),
        (lambda m: setattr(m.graph.output[0], "name", "else"), "policy.onnx: refused: "),
        (lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 11), "policy.onnx: refused: "),
    ],
)
def test_networks_hold_plain_arithmetic_alone(change, message, bundle):
    put_model(bundle, change)
    assert message in refused(bundle)


def test_a_larger_file_than_any_policy_is_not_read(bundle):
    with (bundle / "policy.onnx").open("ab") as file:
        file.truncate(2**36)
    assert "policy.onnx: larger than 64 MiB" in refused(bundle)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(content):
    try:
        check_graph(content)
    except ValueError as error:
        assert str(error)  # noqa: PT017


def test_any_damage_to_a_network_is_survived(originals):
    model = (originals / "ppo" / "policy.onnx").read_bytes()
    rng = np.random.default_rng(0)
    refusals = 0
    for _ in range(300):
        damaged = bytearray(model)
        for place in rng.integers(len(model), size=8):
            damaged[place] = rng.integers(256)
        try:
            check_graph(bytes(damaged[: rng.integers(len(model))]))
        except ValueError:
            refusals += 1
    assert refusals > 200


def test_other_files_in_the_folder_are_never_opened(bundle):
    (bundle / "README.md").write_text("mine")
    os.mkfifo(bundle / "pipe.pkl")
    load_bundle(bundle)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"env__site__jobs": 3}, "jobs is 3, the policy needs 2"),
        ({"env__period_s": 5.0}, "period_s is 5.0, the policy needs 10.0"),
        ({"env__action": {"kind": "delta"}}, "action.kind is 'delta', the policy needs 'absolute'"),
        ({"env__observation": {"preview_periods": 1}}, "observation.preview_periods is 1, the policy needs 0"),
        ({"env__observation": {"integral_leak": 0.5}}, "observation.integral_leak is 0.5, the policy needs 0.95"),
        ({"env__rules": {"raise_fraction_per_s": 0.5}}, "rules.raise_fraction_per_s is 0.5, the policy needs 0.2"),
    ],
)
def test_a_plant_that_differs_is_refused_by_field(changes, field, bundle, tiny):
    controller = BundleController(load_bundle(bundle))
    with pytest.raises(UserError) as caught:
        Arena(tiny(**changes).env).run(controller, [1])
    assert f"the plant's {field}" in str(caught.value)
    assert str(bundle) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda c: c["features"][1].update(name="speed"), "features.1.name is 'target_change', the policy needs 'spe"),
        (lambda c: c["features"][1].update(unit="V"), "features.1.unit is 'capacity', the policy needs 'V'"),
        (lambda c: c["features"][2].update(high=9.0), "features.2.high is 5.0, the policy needs 9.0"),
        (lambda c: c["action"].update(kind="residual", scale=0.1), "action.kind is 'absolute', the policy needs 'resi"),
        (lambda c: c.update(action_bounds=[0.0, 1.0]), "action_bounds.0 is -1.0, the policy needs 0.0"),
    ],
)
def test_features_mean_the_same_on_both_sides(change, field, bundle, tiny):
    edit(bundle, lambda data: change(data["contract"]))
    with pytest.raises(UserError) as caught:
        Arena(tiny().env).run(BundleController(load_bundle(bundle)), [1])
    assert f"the plant's {field}" in str(caught.value)


def test_signals_plants_and_reward_may_differ(bundle, tiny):
    config = tiny(env__reward={"tracking": 2.0}, env__site__randomise=0.5)
    elsewhere = held_out(config.env, "droop", "test", 600.0)
    rollout = Arena(elsewhere).run(BundleController(load_bundle(bundle)), [7])
    assert rollout.power_w.shape == (1, 60)
    assert np.isfinite(rollout.reward).all()


BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(f"blocked: {{name}}")

sys.meta_path.insert(0, Block())
"""
RUN = """
import json
import numpy as np
from wattgym.agents.bundle import BundleController, load_bundle
from wattgym.agents.config import TrainingConfig
from wattgym.agents.rollout import Arena

bundle = load_bundle(sys.argv[1])
env = TrainingConfig.model_validate(bundle.manifest.training.config).env
rollout = Arena(env).run(BundleController(bundle), [1, 2])
print(json.dumps(rollout.power_w.tolist()))
"""


def run_without(blocked, folder):
    script = BLOCK.format(blocked=set(blocked)) + RUN
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(folder)],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["ppo", "lstm"])
def test_a_bundle_runs_the_emulator_where_neither_torch_nor_stable_baselines_can_be_imported(name, originals):
    done = run_without(("torch", "stable_baselines3", "sb3_contrib", "onnx", "tensorboard"), originals / name)
    assert (done.returncode, done.stderr) == (0, "")
    loaded = load_bundle(originals / name)
    from wattgym.agents.config import TrainingConfig

    env = TrainingConfig.model_validate(loaded.manifest.training.config).env
    here = Arena(env).run(BundleController(loaded), [1, 2])
    np.testing.assert_allclose(json.loads(done.stdout), here.power_w, rtol=1e-9)


def test_a_missing_runtime_is_named_with_the_command_that_installs_it(originals):
    done = run_without(("onnxruntime",), originals / "ppo")
    assert done.returncode == 1
    expected = "UserError: running a policy bundle needs onnxruntime: pip install 'wattgym[deploy]'"
    assert done.stderr.strip().splitlines()[-1].endswith(expected)
