"""Power responses: the V100's measured cap steps, and closed forms against brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattgym.hw.physics import PowerResponse, TickKernel
from wattgym.hw.presets import gpu_preset

ACTUATOR = gpu_preset("v100-sxm2").actuator
SHARE = ACTUATOR.drawn_share.value
T_S = np.arange(0.0, 1.0, 1e-4)


def v100():
    taus = [[ACTUATOR.down_tau_s.value], [ACTUATOR.up_tau_s.value], [ACTUATOR.recovery_tau_s.value]]
    return PowerResponse(tau_s=np.array(taus), undershoot=np.array([ACTUATOR.undershoot.value]))


def cap_step(old_cap_w, new_cap_w):
    """Power over `T_S` seconds after the call that sets the new cap returns."""
    response, drop = v100(), np.array([SHARE * (old_cap_w - new_cap_w)])
    after = response.retarget(np.zeros((3, 1)), drop, commanded=True)
    since = T_S - ACTUATOR.dead_time_s.value
    moved = [response.power_w(np.array([SHARE * new_cap_w]), after, max(t, 0.0))[0] for t in since]
    return np.where(since < 0.0, SHARE * old_cap_w, moved)


def first_time(condition):
    return T_S[np.argmax(condition)]


@pytest.mark.parametrize(("old_w", "new_w"), [(280.0, 200.0), (250.0, 150.0), (300.0, 200.0)])
def test_v100_cut_is_within_two_percent_after_35_to_50_ms(old_w, new_w):
    power = cap_step(old_w, new_w)
    assert 0.035 <= first_time(power <= 1.02 * new_w) <= 0.050
    undershoot = (SHARE * new_w - power.min()) / new_w
    assert 0.02 <= undershoot <= 0.04
    recovered = T_S[np.flatnonzero(power < SHARE * new_w - 3.0)[-1]]  # back within the measured ripple of ±3 W
    assert 0.150 <= recovered <= 0.350


@pytest.mark.parametrize(("old_w", "new_w"), [(200.0, 280.0), (150.0, 250.0)])
def test_v100_raise_reaches_97_percent_after_157_to_224_ms(old_w, new_w):
    power = cap_step(old_w, new_w)
    assert 0.157 <= first_time(power >= 0.97 * new_w) <= 0.224
    assert power.max() <= SHARE * new_w + 1e-9


@pytest.mark.parametrize("cap_w", [150.0, 200.0])
def test_v100_settles_at_the_measured_share_of_its_cap(cap_w):
    assert cap_step(280.0, cap_w)[-1] == pytest.approx(0.978 * cap_w, abs=0.05)  # measured: 146.7 and 196.1 W


def test_power_is_continuous_at_a_step_and_a_change_of_load_does_not_undershoot():
    response, drop = v100(), np.array([80.0])
    for commanded in (True, False):
        after = response.retarget(np.zeros((3, 1)), drop, commanded=commanded)
        assert response.power_w(np.array([100.0]), after, 0.0)[0] == pytest.approx(180.0)
    course = [response.power_w(np.array([100.0]), after, t)[0] for t in T_S]
    assert min(course) >= 100.0
    assert (np.diff(course) <= 0.0).all()


tau = st.floats(0.005, 0.5)
watts = st.floats(0.0, 700.0)
boards = st.builds(
    lambda taus, k: PowerResponse(tau_s=np.array(taus)[:, None], undershoot=np.array([k])),
    st.tuples(tau, tau, tau),
    st.floats(0.0, 0.3),
)


@given(boards, watts, st.tuples(*[st.floats(-500.0, 500.0)] * 3), st.floats(1e-3, 60.0))
def test_energy_is_the_integral_of_power(response, target_w, amplitudes, dt_s):
    a = np.array(amplitudes)[:, None]
    # A grid that is dense where the modes live, so that the reference is exact to well below the tolerance.
    t = np.concatenate([[0.0], np.geomspace(1e-6, dt_s, 4_000)])
    power = target_w + (a[:, :, None] * np.exp(-t / response.tau_s[:, :, None])).sum(axis=0)[0]
    for k in (0, 100, 3_000):
        assert response.power_w(np.array([target_w]), a, t[k])[0] == pytest.approx(power[k], abs=1e-9)
    energy = response.energy_j(np.array([target_w]), a, dt_s)[0]
    assert energy == pytest.approx(np.trapezoid(power, t), abs=1e-3, rel=1e-4)


@given(boards, st.tuples(*[st.floats(-300.0, 300.0)] * 3), st.floats(0.0, 2.0), st.floats(0.0, 2.0))
def test_amplitudes_carried_in_two_steps_equal_one(response, amplitudes, first_s, second_s):
    a = np.array(amplitudes)[:, None]
    once = response.amplitudes_after(a, first_s + second_s)
    twice = response.amplitudes_after(response.amplitudes_after(a, first_s), second_s)
    np.testing.assert_allclose(once, twice, rtol=1e-9, atol=1e-12)


@given(
    boards,
    st.floats(0.2, 10.0),
    st.floats(0.0, 1.0),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4),
    st.tuples(watts, watts, watts),
    st.tuples(*[st.floats(-200.0, 200.0)] * 3),
)
def test_tick_kernel_is_the_response_piece_by_piece(response, period_s, latency, offsets, targets, amplitudes):
    """Within a tick the load's target changes at the start and the command's at the latency."""
    heading, p1, p2 = (np.array([w]) for w in targets)
    latency_s, offsets_s = latency * period_s, np.array(offsets) * period_s
    start = response.retarget(np.array(amplitudes)[:, None], heading - p1, commanded=False)
    at_command = response.amplitudes_after(start, latency_s)
    commanded = response.retarget(at_command, p1 - p2, commanded=True)

    kernel = TickKernel(response, period_s, np.array([latency_s]), offsets_s[:, None])
    rows = np.concatenate([[p1], [p2], start, [np.maximum(p1 - p2, 0.0)], [np.minimum(p1 - p2, 0.0)]])
    energies = (kernel.energy_coefficients * rows).sum(axis=1)[:, 0]
    for offset, energy in zip(offsets_s, energies, strict=True):
        expected = response.energy_j(p1, start, min(offset, latency_s))[0]
        if offset > latency_s:
            expected += response.energy_j(p2, commanded, offset - latency_s)[0]
        assert energy == pytest.approx(expected, rel=1e-9, abs=1e-7)

    kernel.decay_amplitudes(rows)
    end = response.amplitudes_after(commanded, period_s - latency_s)
    np.testing.assert_allclose(rows[TickKernel.A_DOWN : TickKernel.A_RECOVERY + 1], end, rtol=1e-9, atol=1e-9)


def test_a_command_later_than_the_period_counts_as_at_its_end():
    kernel = TickKernel(v100(), 0.2, np.array([0.9]), np.array([[0.2]]))
    at_end = TickKernel(v100(), 0.2, np.array([0.2]), np.array([[0.2]]))
    np.testing.assert_array_equal(kernel.energy_coefficients, at_end.energy_coefficients)
