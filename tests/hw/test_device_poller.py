"""One polling thread: ages, failures, a hung driver, a clean stop."""

import threading
import time

import pytest

from wattgym.errors import UserError
from wattgym.hw.clock import VirtualClock
from wattgym.hw.device import DeviceError, DeviceLostError, DeviceTimeoutError
from wattgym.hw.poller import DevicePoller
from wattgym.hw.simulated import Faults, SimulatedDevice


@pytest.fixture
def clock():
    return VirtualClock(10.0)


@pytest.fixture
def gpus(clock):
    return [SimulatedDevice("h100-sxm", index=index, clock=clock) for index in range(2)]


def test_before_the_first_reading_nothing_is_known(gpus, clock):
    polled = DevicePoller(gpus, clock=clock).latest("SIM-h100-sxm-0")
    assert polled.reading is None
    assert polled.age_s == float("inf")
    assert polled.failures == 0


def test_the_last_good_reading_ages_through_failures(gpus, clock):
    poller = DevicePoller(gpus, clock=clock)
    poller.poll_once()
    good = poller.latest("SIM-h100-sxm-0").reading
    gpus[0].inject(Faults(lost=True))
    for failures in (1, 2, 3):
        clock.sleep(1.0)
        poller.poll_once()
        polled = poller.latest("SIM-h100-sxm-0")
        assert (polled.reading, polled.failures) == (good, failures)
        assert polled.age_s == pytest.approx(failures)
        assert isinstance(polled.error, DeviceLostError)
        other = poller.latest("SIM-h100-sxm-1")
        assert (other.failures, other.error, other.age_s) == (0, None, 0.0)
    gpus[0].inject(Faults())
    poller.poll_once()
    polled = poller.latest("SIM-h100-sxm-0")
    assert (polled.failures, polled.error, polled.age_s) == (0, None, 0.0)


def test_a_thread_reads_all_devices_and_stops():
    gpus = [SimulatedDevice("h100-sxm", index=index) for index in range(3)]
    before, begin_s, seen = threading.active_count(), time.monotonic(), set()
    with DevicePoller(gpus, interval_s=0.1) as poller:
        poller.start()  # harmless
        assert threading.active_count() == before + 1  # one thread for all devices
        while len(seen) < 5:
            polled = _wait_for(poller, gpus[2], lambda polled: polled.reading and polled.reading.t_s not in seen)
            seen.add(polled.reading.t_s)
        # No more than 10 readings a second: they begin 0.1 s apart at least, however late a busy machine ends each.
        assert time.monotonic() - begin_s >= 0.1 * (len(seen) - 1) - 0.001
    assert threading.active_count() == before
    assert poller.stop()  # harmless


class _Hanging(SimulatedDevice):
    def __init__(self, clock):
        super().__init__(clock=clock)
        self.entered, self.release = threading.Event(), threading.Event()

    def read(self):
        self.entered.set()
        self.release.wait(30)
        return super().read()


def test_a_hung_driver_is_told_and_nobody_waits_for_it(clock):
    device = _Hanging(clock)
    poller = DevicePoller([device], timeout_s=0.3, clock=clock)
    poller.start()
    assert device.entered.wait(10)
    clock.sleep(0.2)
    assert poller.latest("SIM-h100-sxm-0").error is None  # slow, not yet hung
    clock.sleep(5.0)
    polled = poller.latest("SIM-h100-sxm-0")
    assert isinstance(polled.error, DeviceTimeoutError)
    assert polled.waiting_s == pytest.approx(5.2)
    assert polled.reading is None
    assert poller.stop() is False
    device.release.set()


def test_a_hung_thread_does_not_come_back_to_life(clock):
    device = _Hanging(clock)
    poller = DevicePoller([device], timeout_s=0.1, clock=clock)
    poller.start()
    assert device.entered.wait(10)
    hung = next(thread for thread in threading.enumerate() if thread.name == "wattgym-poller")
    assert poller.stop() is False
    poller.start()
    device.release.set()
    hung.join(10)
    assert not hung.is_alive()
    assert poller.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_not_mistaken_for_silence(clock):
    class Broken(SimulatedDevice):
        def read(self):
            raise RuntimeError("a bug")

    poller = DevicePoller([Broken(clock=clock)], clock=clock)
    poller.start()
    for thread in threading.enumerate():
        if thread.name == "wattgym-poller":
            thread.join(10)
    error = poller.latest("SIM-h100-sxm-0").error
    assert isinstance(error, DeviceError)
    assert "died" in str(error)
    poller.stop()


@pytest.mark.parametrize("interval_s", [0.05, 0.0, -1.0, float("nan"), float("inf")])
def test_faster_than_10_hz_is_refused(gpus, interval_s):
    with pytest.raises(UserError, match=r"at least 0\.1 s"):
        DevicePoller(gpus, interval_s=interval_s)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_time_out_must_be_positive(gpus, timeout_s):
    with pytest.raises(UserError, match="time-out"):
        DevicePoller(gpus, timeout_s=timeout_s)


def test_an_unknown_device_is_named(gpus):
    with pytest.raises(UserError, match=r"no device 'GPU-1'; it has: SIM-h100-sxm-0"):
        DevicePoller(gpus).latest("GPU-1")


def _wait_for(poller, device, condition):
    while True:
        polled = poller.latest(device.info().uuid)
        assert polled.error is None
        if condition(polled):
            return polled
