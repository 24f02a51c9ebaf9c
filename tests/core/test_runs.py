import errno
import json
import os
import subprocess
import sys

import pytest

from wattgym import files, runs
from wattgym.errors import UserError
from wattgym.files import atomic_path, atomic_write_bytes, atomic_write_json, atomic_write_text, read_json_object
from wattgym.runs import RunFolder

CONFIG = {"seed": 3, "env": {"jobs": 4, "gains": [0.5, 1.0]}, "total_steps": 1000}


def names(folder):
    return sorted(p.name for p in folder.iterdir())


# --- atomic files -----------------------------------------------------------------------------------------------


def test_written_whole_with_parents_and_replaced(tmp_path):
    target = tmp_path / "a" / "b.txt"
    atomic_write_text(target, "old\r\n")
    atomic_write_text(target, "neu: äöü\n")
    assert target.read_bytes() == "neu: äöü\n".encode()
    assert names(target.parent) == ["b.txt"]


def test_mode_follows_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        atomic_write_bytes(tmp_path / "f", b"x")
    finally:
        os.umask(old)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640


def test_symbolic_link_is_written_through(tmp_path):
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("real.json")
    atomic_write_json(tmp_path / "link.json", {"a": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == {"a": 1}


def test_other_writers_get_the_suffix_and_leave_nothing_on_failure(tmp_path):
    target = tmp_path / "model.zip"
    atomic_write_text(target, "good")

    def break_halfway():
        with atomic_path(target) as temporary:
            assert temporary.suffix == ".zip"
            temporary.write_text("half")
            raise RuntimeError("writer broke")

    with pytest.raises(RuntimeError, match="writer broke"):
        break_halfway()
    assert (target.read_text(), names(tmp_path)) == ("good", ["model.zip"])
    with pytest.raises(UserError, match="cannot write"), atomic_path(target):
        pass  # a writer that wrote nothing
    assert (target.read_text(), names(tmp_path)) == ("good", ["model.zip"])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "open"])
def test_a_refusing_disk_keeps_the_old_file(tmp_path, monkeypatch, number, call):
    target = tmp_path / "run.json"
    atomic_write_json(target, {"old": True})

    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, call, refuse)
    with pytest.raises(UserError) as caught:
        atomic_write_json(target, {"new": True})
    monkeypatch.undo()
    assert str(target) in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert json.loads(target.read_text()) == {"old": True}
    assert names(tmp_path) == ["run.json"]


def test_a_truly_full_file_system_keeps_the_old_file(tmp_path):
    """The kernel itself refuses the write: the process may not write files above 4 KiB."""
    target = tmp_path / "big.txt"
    target.write_text("old")
    code = (
        "import resource, sys\n"
        "from wattgym.errors import UserError\n"
        "from wattgym.files import atomic_write_text\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n    atomic_write_text(sys.argv[1], 'x' * 100_000)\n"
        "except UserError as error:\n    print(error); sys.exit(2)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "")
    assert "cannot write: File too large" in done.stdout
    assert (target.read_text(), names(tmp_path)) == ("old", ["big.txt"])


def test_a_folder_without_permission(tmp_path):
    """As an unprivileged user, because root may write anywhere."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    code = (
        "import os, sys\n"
        "from wattgym.errors import UserError\n"
        "from wattgym.files import atomic_write_text\n"
        "os.chdir(sys.argv[1])\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "try:\n    atomic_write_text('f.txt', 'x')\n"
        "except UserError as error:\n    print(error); sys.exit(2)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(locked)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "f.txt: cannot write: Permission denied\n", "")
    assert names(locked) == []


def test_killed_between_write_and_rename_keeps_the_old_file(tmp_path):
    target = tmp_path / "state.txt"
    target.write_text("old")
    code = (
        "import os, signal, sys\n"
        "from wattgym.files import atomic_path\n"
        "with atomic_path(sys.argv[1]) as temporary:\n"
        "    temporary.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)], check=False)
    assert done.returncode == -9
    assert target.read_text() == "old"


def test_targets_that_are_no_files(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a folder"):
        atomic_write_text(tmp_path, "x")
    with pytest.raises(UserError, match="cannot write"):
        atomic_write_text(tmp_path / "file" / "below", "x")
    assert names(tmp_path) == ["file"]


def test_json_refuses_nan_before_touching_the_disk(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        atomic_write_json(tmp_path / "f.json", {"x": float("nan")})
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1, "b', "cut short"),
        (b"", "cut short"),
        (b"\x89PNG\xff\xfe", "not UTF-8"),
        (b"[" * 200_000, "not valid JSON"),
        (b"[1]", "expected a JSON object, got list"),
    ],
)
def test_damaged_json_is_one_line(tmp_path, content, message):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_json_object(path)
    assert "\n" not in str(caught.value)


# --- run folders ------------------------------------------------------------------------------------------------


def test_create_records_what_is_needed_to_repeat_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["wattgym", "train", "--out", "my runs/1"])
    run = RunFolder.create(tmp_path / "deep" / "run", CONFIG, "training", 3)
    assert names(run.path) == ["config.yaml", "run.json"]
    record = json.loads((run.path / "run.json").read_text())
    assert record["schema_version"] == runs.SCHEMA_VERSION
    assert (record["kind"], record["seed"], record["status"]) == ("training", 3, "running")
    assert record["command"] == "wattgym train --out 'my runs/1'"
    assert record["packages"]["numpy"].count(".") == 2
    assert record["created"].endswith("+00:00")
    again = RunFolder.open(run.path, "training")
    assert (again.info, again.config) == (run.info, CONFIG)


def test_git_state_is_that_of_the_package(tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    package = checkout / "wattgym"
    package.mkdir(parents=True)
    source = package / "runs.py"
    source.write_text("x = 1\n")

    def git(*arguments):
        command = ["git", "-C", str(checkout), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(runs, "__file__", str(source))
    assert runs.git_state() is None  # no checkout at all
    git("init", "-q")
    assert runs.git_state() is None  # somebody else's checkout: the file is not tracked
    git("add", ".")
    git("commit", "-q", "-m", "one")
    state = runs.git_state()
    assert state is not None
    assert (state.commit, state.dirty) == (git("rev-parse", "HEAD"), False)
    source.write_text("x = 2\n")
    state = runs.git_state()
    assert state is not None
    assert state.dirty
    monkeypatch.setenv("PATH", str(tmp_path))  # git is not installed
    assert runs.git_state() is None


def test_status_follows_the_block(tmp_path):
    run = RunFolder.create(tmp_path / "a", CONFIG, "training", 3)
    with run.recording_status():
        assert RunFolder.open(run.path).info.status == "running"
    assert RunFolder.open(run.path).info.status == "finished"
    with pytest.raises(KeyboardInterrupt), run.recording_status():
        raise KeyboardInterrupt
    assert RunFolder.open(run.path).info.status == "interrupted"
    with pytest.raises(ZeroDivisionError), run.recording_status():
        raise ZeroDivisionError
    assert RunFolder.open(run.path).info.status == "failed"


def test_a_full_folder_is_not_overwritten(tmp_path):
    RunFolder.create(tmp_path / "run", CONFIG, "training", 3)
    before = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(UserError, match="not empty"):
        RunFolder.create(tmp_path / "run", CONFIG, "training", 3)
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    for resume in (False, True):
        with pytest.raises(UserError):
            RunFolder.create(tmp_path / "other", CONFIG, "training", 3, resume=resume)
    assert names(tmp_path / "other") == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path / "empty", CONFIG, "training", 3).info.status == "running"


def test_resume_takes_up_or_starts(tmp_path):
    first = RunFolder.create(tmp_path / "run", CONFIG, "training", 3, resume=True)
    first.set_status("interrupted")
    second = RunFolder.create(tmp_path / "run", CONFIG, "training", 3, resume=True)
    assert second.info.created == first.info.created
    assert second.info.status == "running"
    assert len(second.info.resumed) == 1
    tuples = {**CONFIG, "env": {"jobs": 4, "gains": (0.5, 1.0)}}  # what YAML turned into a list
    RunFolder.create(tmp_path / "run", tuples, "training", 3, resume=True)
    longer = {**CONFIG, "total_steps": 2000}
    third = RunFolder.create(tmp_path / "run", longer, "training", 3, resume=True, may_change=("total_steps",))
    assert RunFolder.open(third.path).config["total_steps"] == 2000


@pytest.mark.parametrize(
    ("config", "kind", "seed", "message"),
    [
        ({**CONFIG, "env": {"jobs": 5, "gains": [0.5, 1.0]}}, "training", 3, r"'env\.jobs' was 4, is now 5"),
        ({**CONFIG, "extra": 1}, "training", 3, r"'extra' was 'not set', is now 1"),
        (CONFIG, "evaluation", 3, "kind 'training', expected 'evaluation'"),
        (CONFIG, "training", 4, "seed 3, cannot resume it with seed 4"),
    ],
)
def test_resume_refuses_another_run(tmp_path, config, kind, seed, message):
    RunFolder.create(tmp_path / "run", CONFIG, "training", 3)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(UserError, match=message):
        RunFolder.create(tmp_path / "run", config, kind, seed, resume=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


def damage_version(folder):
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "schema_version": 99}))


def damage_key(folder):
    record = json.loads((folder / "run.json").read_text())
    record["sead"] = record.pop("seed")
    (folder / "run.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_version, r"schema version 99, this WattGym reads version 1"),
        (damage_key, "seed"),
        (lambda f: (f / "run.json").write_text((f / "run.json").read_text()[:50]), "cut short"),
        (lambda f: (f / "run.json").unlink(), "not a run folder"),
        (lambda f: (f / "config.yaml").unlink(), "config.yaml: cannot read"),
        (lambda f: (f / "config.yaml").write_text("a: [1"), "not valid YAML"),
        (lambda f: (f / "config.yaml").write_text(""), "expected a mapping, got NoneType"),
    ],
)
def test_damaged_folders_are_one_line(tmp_path, damage, message):
    run = RunFolder.create(tmp_path / "run", CONFIG, "training", 3)
    damage(run.path)
    with pytest.raises(UserError, match=message) as caught:
        RunFolder.open(run.path)
    assert "\n" not in str(caught.value)


def test_missing_folder_and_file_in_the_way(tmp_path):
    with pytest.raises(UserError, match="no such run folder"):
        RunFolder.open(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="file"):
            RunFolder.create(path, CONFIG, "training", 3)
    assert names(tmp_path) == ["file"]
