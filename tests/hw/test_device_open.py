"""Opening devices by address."""

import subprocess
import sys

import pytest

from wattgym.errors import UserError
from wattgym.hw import open as opening
from wattgym.hw.clock import VirtualClock
from wattgym.hw.device import DeviceNotFoundError
from wattgym.hw.open import open_device, open_devices
from wattgym.hw.simulated import SimulatedDevice


def uuids(*arguments, **options):
    return [device.info().uuid for device in open_devices(*arguments, **options)]


@pytest.mark.parametrize("address", ["h100-sxm:3", "SIM-h100-sxm-3"])
def test_a_simulated_device_answers_to_preset_and_uuid(address, tmp_path):
    for folder in (None, tmp_path / "new"):
        assert open_device(address, "simulated", state_dir=folder).info().uuid == "SIM-h100-sxm-3"


def test_all_simulated_devices_of_a_folder(tmp_path):
    assert uuids(None, "simulated") == ["SIM-h100-sxm-0"]
    assert uuids(None, "simulated", state_dir=tmp_path / "a") == ["SIM-h100-sxm-0"]
    for address in ("a40:1", "h100-sxm", "a40"):
        open_device(address, "simulated", state_dir=tmp_path)
    assert uuids(None, "simulated", state_dir=tmp_path) == ["SIM-a40-0", "SIM-a40-1", "SIM-h100-sxm-0"]
    assert uuids(["a40", "SIM-a40-0", "a40:0"], "simulated", state_dir=tmp_path) == ["SIM-a40-0"]


def test_a_seeded_state_is_opened_with_its_seed(tmp_path):
    path = tmp_path / "SIM-a40-0.simulated"
    seeded = SimulatedDevice("a40", seed=7, state_path=path)
    again = open_device("a40", "simulated", state_dir=tmp_path)
    assert again.read().power_w == seeded.read().power_w != SimulatedDevice("a40").read().power_w


@pytest.mark.parametrize("address", ["", ":", "h1000", "h100-sxm:x", "h100-sxm:-1", "SIM-h100-sxm", "SIM-", "GPU-1"])
def test_unknown_simulated_devices_name_what_there_is(address):
    with pytest.raises(DeviceNotFoundError, match=r"PRESET:N.*h100-sxm"):
        open_device(address, "simulated")


def test_an_unknown_backend_names_the_valid_ones():
    with pytest.raises(UserError, match="nvml, simulated"):
        open_device("0", "amd")


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot keep simulated devices there"):
        open_device("a40", "simulated", state_dir=tmp_path / "file")


def test_when_one_cannot_be_opened_the_others_are_closed(slot_library, monkeypatch):
    gpus = [SimulatedDevice("h100-sxm", index=index, clock=VirtualClock()) for index in range(2)]
    slot_library(gpus)
    closed = []

    def opened(uuid):
        if uuid == gpus[1].info().uuid:
            raise DeviceNotFoundError("gone since it was listed")
        gpus[0].close = lambda: closed.append(uuid)
        return gpus[0]

    monkeypatch.setattr(opening, "_open_nvml", opened)
    with pytest.raises(DeviceNotFoundError, match="gone"):
        open_devices(None)
    assert closed == [gpus[0].info().uuid]


def test_a_machine_without_gpus_says_so(slot_library):
    slot_library([])
    with pytest.raises(DeviceNotFoundError, match="no GPU"):
        open_devices(None)


def test_real_devices_are_opened_without_loading_anything_heavy(standin):
    # What a privileged helper and a watchdog import: no torch, no NumPy, no pydantic.
    code = (
        "import sys; from wattgym.hw.open import open_device\nopen_device('0').read()\n"
        "print([name for name in ('torch', 'numpy', 'pydantic', 'yaml', 'gymnasium') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], env=standin.env(), capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr


def test_a_seed_in_the_address_draws_the_board(tmp_path):
    def drawn(address, **options):
        device = open_device(address, "simulated", **options)
        device.set_demand(1.0)
        return device._board.training_w

    plain, seven = drawn("h100-sxm:0"), drawn("h100-sxm:0@7")
    assert plain == 620.0
    assert seven != plain
    assert seven == drawn("SIM-h100-sxm-0@7")
    # A shared state remembers the seed, and refuses another.
    assert drawn("h100-sxm:1@7", state_dir=tmp_path) == seven
    assert drawn("h100-sxm:1", state_dir=tmp_path) == seven
    with pytest.raises(UserError, match="drawn from seed 7, not 8; take another number"):
        open_device("h100-sxm:1@8", "simulated", state_dir=tmp_path)


@pytest.mark.parametrize("address", ["h100-sxm:0@", "h100-sxm:0@-1", "h100-sxm@x", "@7"])
def test_a_seed_that_is_no_number_is_refused(address):
    with pytest.raises(DeviceNotFoundError, match="PRESET:N"):
        open_device(address, "simulated")
