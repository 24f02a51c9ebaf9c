import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from wattgym.cli.traces import app
from wattgym.errors import UserError

GOOD = "t_s,r\n0,0.1\n2,0.2\n4,-0.3\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("WATTGYM_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def refused(*arguments):
    """The message of a user's error, which the top-level command prints as one line with exit code 2."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, UserError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_list_is_plain_in_a_pipe_and_filters():
    lines = run("list", "--kind", "regulation", "--split", "test").splitlines()
    assert lines[0].split("\t")[:2] == ["id", "kind"]
    assert [line.split("\t")[0] for line in lines[1:]] == [
        "regulation/pjm-regd-test-wave", "regulation/pjm-rega-2017-08-02",
    ]  # fmt: skip
    assert "unknown kind 'x'" in refused("list", "--kind", "x")
    assert "unknown split 'x'" in refused("list", "--split", "x")


def test_list_json_and_tables():
    rows = json.loads(run("list", "--json"))
    assert len(rows) > 100
    assert {"id", "kind", "unit", "interval_s", "splits", "licence"} == set(rows[0])
    assert any(
        line.startswith("gpu_power/zeus_power_limit_batch_size\t") for line in run("list", "--tables").splitlines()
    )


def test_list_draws_a_table_on_a_terminal(monkeypatch):
    pty = pytest.importorskip("pty")
    script = "from wattgym.cli.traces import app; app(['list', '--kind', 'frequency'])"
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    chunks = []
    while True:
        try:
            chunk = os.read(master, 65_536)
        except OSError:  # the other side closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(master)
    assert process.wait() == 0
    text = b"".join(chunks).decode()
    assert "frequency/day-1s" in text
    assert "┃" in text


def test_show_series(tmp_path):
    facts = json.loads(run("show", "frequency/day-1s", "--json"))
    assert facts["samples"] == 86_400
    assert facts["splits"]["train"] == [[0, 50_400]]
    assert facts["mean"] == pytest.approx(59.99996, abs=1e-5)
    assert (facts["min"], facts["max"], facts["licence"]) == (59.9508, 60.054, "MIT")
    text = run("show", "regulation/pjm-regd-test-wave")
    assert "test: 0 s to 2402 s" in text
    assert "did you mean frequency/day-1s" in refused("show", "frequency/day1s")


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_show_plots(tmp_path, name, magic):
    run("show", "regulation/pjm-rega-2017-08-01", "--plot", tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_show_plot_errors(tmp_path):
    assert ".png, .svg or .pdf" in refused("show", "frequency/day-1s", "--plot", tmp_path / "a.txt")
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused("show", "frequency/day-1s", "--plot", tmp_path / "file" / "a.png")
    assert "no series to draw" in refused("show", "reserve-events/pjm-synchronized", "--plot", tmp_path / "a.png")


def test_show_events():
    facts = json.loads(run("show", "reserve-events/pjm-synchronized", "--json"))
    assert facts["events"] == 893
    assert facts["events_in"] == {"train": 778, "validation": 58, "test": 57}


def test_check_lists_everything_and_exits_2(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(GOOD)
    assert run("check", path, "--kind", "regulation") == f"{path}: usable as regulation\n"
    path.write_text("t_s,r\n0,7\n2,x\n4,0\n4,0\n")
    text = run("check", path, "--kind", "regulation", code=2)
    assert [line.split(":")[1].strip() for line in text.splitlines()] == [
        "line 2, column 'r'", "line 3, column 'r'", "line 5, column 't_s'",
    ]  # fmt: skip
    report = json.loads(run("check", path, "--json", code=2))
    assert report["usable"] is False
    assert {"level": "error", "code": "duplicate-time", "row": 5, "column": "t_s", "word": "line"}.items() <= {
        **report["findings"][1]
    }.items()
    assert "size limit" in run("check", path, "--max-mib", "0.00001", code=2)
    assert "unknown gap policy 'guess'" in refused("check", path, "--gap-policy", "guess")
    assert "No such file" in run("check", tmp_path / "none.csv", code=2)


def test_import_a_series_and_find_it_again(tmp_path, monkeypatch):
    path = tmp_path / "My Signal.csv"
    path.write_text(GOOD)
    assert run("import", path, "--kind", "regulation") == "imported/my-signal\n"
    assert sorted(p.name for p in (tmp_path / "wattgym-data").iterdir()) == [
        "imported-my-signal.parquet", "imported-my-signal.trace.yaml",
    ]  # fmt: skip
    monkeypatch.setenv("WATTGYM_DATA", str(tmp_path / "wattgym-data"))
    assert "imported/my-signal" in run("list", "--kind", "regulation")
    assert json.loads(run("show", "imported/my-signal", "--json"))["samples"] == 3
    assert "--force" in refused("import", path, "--kind", "regulation")
    run("import", path, "--kind", "regulation", "--force", "--split", "test", "--licence", "CC0-1.0")
    facts = json.loads(run("show", "imported/my-signal", "--json"))
    assert (facts["splits"], facts["licence"]) == ({"test": [[0, 6]]}, "CC0-1.0")


def test_import_creates_the_folder_that_the_variable_names(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text(GOOD)
    monkeypatch.setenv("WATTGYM_DATA", str(tmp_path / "new" / "folder"))
    run("import", path, "--kind", "regulation", "--id", "mine/a")
    assert "mine/a" in run("list", "--kind", "regulation")


def test_import_refuses_and_leaves_nothing(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("t_s,r\n0,7\n2,0\n")
    out = tmp_path / "out"
    message = refused("import", path, "--kind", "regulation", "--out", out)
    assert "line 2, column 'r': 7 is outside [-1, 1]" in message
    assert "kinds: google-power, pjm-regulation, regulation" in refused(
        "import", path, "--kind", "nonsense", "--out", out
    )
    assert "--id does not apply" in refused("import", path, "--kind", "google-power", "--id", "x", "--out", out)
    assert "--signal applies to" in refused("import", path, "--kind", "regulation", "--signal", "regd", "--out", out)
    assert "not a power domain" in refused("import", path, "--kind", "google-power", "--out", out)
    assert "--signal regd" in refused("import", path, "--kind", "pjm-regulation", "--out", out)
    path.write_text(GOOD)
    (tmp_path / "blocked").write_text("")
    assert "cannot write" in refused("import", path, "--kind", "regulation", "--out", tmp_path / "blocked" / "x")
    assert not out.exists()


def test_the_command_ends_with_one_line_and_code_2(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("t_s,r\n0,7\n2,0\n")
    for arguments in (["import", path, "--kind", "regulation"], ["show", "nothing"]):
        done = subprocess.run(
            [sys.executable, "-m", "wattgym", "traces", *arguments], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("wattgym: error: ")
        assert done.stderr.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a.csv"]
