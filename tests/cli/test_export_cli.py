import pytest
import yaml

from wattgym.cli import main
from wattgym.files import read_json_object

TINY = {
    "env": {"site": {"jobs": 1}, "period_s": 10.0, "episode_s": 600.0},
    "train": {"total_steps": 128, "num_envs": 4, "hyperparameters": {"n_steps": 16}},
    "network": {"hidden": [8]},
    "validation": {"every_steps": 64, "scenarios": 1, "episode_s": 600.0, "families": ["rega"]},
}
EVALUATE = ["--families", "rega", "--seeds", "2", "--episode-s", "1200", "--baselines", "none"]


def wattgym(*arguments):
    """Exit code of the command in this process."""
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, arguments)))
    return caught.value.code or 0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    assert wattgym("train", "--config", folder / "tiny.yaml", "--out", folder / "tiny-seed0") == 0
    return folder / "tiny-seed0"


@pytest.mark.parametrize("which", ["best", "last"])
def test_export_writes_a_bundle_and_says_what_it_is(which, run, tmp_path, capsys):
    out = tmp_path / "new" / "bundle"
    assert wattgym("export", run, "--out", out, "--checkpoint", which) == 0
    assert sorted(path.name for path in out.iterdir()) == ["bundle.json", "golden.npz", "policy.onnx"]
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]
    told, err = capsys.readouterr()
    steps = read_json_object(out / "bundle.json")["training"]["steps"]
    assert told.startswith(f"{out}: ppo, {which} checkpoint, {steps} steps; largest difference from the original ")
    assert (told.count("\n"), err) == (1, "")


def test_evaluate_judges_a_bundle_like_the_run_it_is_made_of(run, tmp_path, capsys):
    assert wattgym("export", run, "--out", tmp_path / "bundle") == 0
    assert wattgym("evaluate", run, tmp_path / "bundle", *EVALUATE, "--out", tmp_path / "evaluation") == 0
    summary = read_json_object(tmp_path / "evaluation" / "summary.json")
    mine, theirs = (summary["controllers"][name] for name in ("tiny-seed0 (bundle)", "tiny-seed0"))
    assert mine.keys() == theirs.keys()
    assert mine["pjm_composite"]["value"] == pytest.approx(theirs["pjm_composite"]["value"], abs=1e-3)
    policies = read_json_object(tmp_path / "evaluation" / "evaluation.json")["provenance"]["policies"]
    assert policies["tiny-seed0 (bundle)"][0]["folder"] == str(tmp_path / "bundle")
    assert policies["tiny-seed0 (bundle)"][0]["config"] == policies["tiny-seed0"][0]["config"]
    capsys.readouterr()


def test_evaluate_refuses_a_damaged_bundle_by_file(run, tmp_path, capsys):
    assert wattgym("export", run, "--out", tmp_path / "bundle") == 0
    (tmp_path / "bundle" / "policy.onnx").write_bytes(b"")
    capsys.readouterr()
    assert wattgym("evaluate", tmp_path / "bundle", *EVALUATE, "--out", tmp_path / "evaluation") == 2
    assert "policy.onnx: differs from its checksum" in capsys.readouterr().err


def refusal(capsys, *arguments):
    capsys.readouterr()
    assert wattgym("export", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("wattgym: error: ")
    assert err.count("\n") == 1
    return err


def test_bad_input_is_one_line_and_leaves_nothing(run, tmp_path, capsys):
    out = tmp_path / "bundle"
    assert "no such run folder" in refusal(capsys, tmp_path / "nowhere", "--out", out)
    assert "not a run folder" in refusal(capsys, tmp_path, "--out", out)
    assert "--checkpoint newest: valid are best and last" in refusal(
        capsys, run, "--out", out, "--checkpoint", "newest"
    )
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    (out / "mine").write_text("x")
    assert "is not empty; a bundle needs a new or empty folder" in refusal(capsys, run, "--out", out)
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_a_folder_that_cannot_be_made_is_one_line(run, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert "cannot write the bundle" in refusal(capsys, run, "--out", tmp_path / "file" / "bundle")
    assert "is a file" in refusal(capsys, run, "--out", tmp_path / "file")
