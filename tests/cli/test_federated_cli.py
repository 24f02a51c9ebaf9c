from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from wattgym.cli import main
from wattgym.envs.federation.learning import cohort_factor


def recorded(path: Path) -> None:
    """Rounds of four cohort sizes that follow the model exactly: L0 4, floor 0.2, S0 8, beta 1, phi 5."""
    rows = []
    for run, sites in enumerate((1, 2, 4, 8)):
        work = np.arange(31) * float(cohort_factor(np.array(float(sites)), 5.0))
        loss = 0.2 + 3.8 / (1.0 + work / 8.0)
        rows += [{"run": run, "round": k, "loss": loss[k], "sites": sites} for k in range(31)]
    table = pd.DataFrame(rows)
    if path.suffix == ".jsonl":
        table.to_json(path, orient="records", lines=True)
    else:
        table.to_csv(path, index=False)


@pytest.mark.parametrize("name", ["rounds.csv", "rounds.jsonl"])
def test_fit_prints_parameters_and_writes_a_profile(tmp_path, capsys, name):
    recorded(tmp_path / name)
    with pytest.raises(SystemExit) as ended:
        main(["federated", "fit", str(tmp_path / name), "--out", str(tmp_path / "profile.yaml")])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "rms of the log residual over 120 rounds: 0.00" in shown
    profile = yaml.safe_load((tmp_path / "profile.yaml").read_text())
    assert profile["phi"] == pytest.approx(5.0, rel=0.1)
    assert profile["beta"] / profile["s0"] == pytest.approx(1 / 8, rel=0.1)


def test_runs_of_different_sizes_tell_together_what_neither_tells_alone(tmp_path, capsys):
    def fit(*names):
        main(["federated", "fit", *(str(tmp_path / name) for name in names), "--out", str(tmp_path / "profile.yaml")])

    recorded(tmp_path / "all.csv")
    table = pd.read_csv(tmp_path / "all.csv")
    for name, (_, run) in zip(("few.csv", "many.csv"), list(table.groupby("run"))[::2], strict=False):
        run.drop(columns="run").to_csv(tmp_path / name, index=False)
    for names, identified in ((("few.csv",), False), (("few.csv", "many.csv"), True)):
        with pytest.raises(SystemExit) as ended:
            fit(*names)
        assert not ended.value.code
        assert ("never varied" not in capsys.readouterr().out) is identified
    assert yaml.safe_load((tmp_path / "profile.yaml").read_text())["phi"] == pytest.approx(5.0, rel=0.15)
    (tmp_path / "few.csv").write_text("round,sites\n0,1\n")
    with pytest.raises(SystemExit) as ended:
        fit("many.csv", "few.csv")
    assert ended.value.code == 2
    assert "few.csv: no column 'loss'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("round,sites\n0,1\n", "no column 'loss'"),
        ("", "no CSV or JSON lines"),
        ("round,loss,sites\n0,4,1\n1,-1,1\n", "loss is -1"),
    ],
)
def test_bad_tables_are_one_line_and_write_nothing(tmp_path, capsys, content, message):
    (tmp_path / "rounds.csv").write_text(content)
    with pytest.raises(SystemExit) as ended:
        main(["federated", "fit", str(tmp_path / "rounds.csv"), "--out", str(tmp_path / "profile.yaml")])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "profile.yaml").exists()
