"""Every configuration key changes what an episode looks like; a key that nothing reads fails here."""

from pathlib import Path

import numpy as np
import pytest
from key_tree import leaves, merged

from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.power_shaping import PowerShapingEnv
from wattgym.errors import UserError

BASE = {
    "site": {"jobs": 2, "surfaces": ("a40/bert_base_squad/b72",), "control_delay_periods": (0, 0), "command_loss": 0.0},
    "episode_s": 120.0,
}
REGA = {"signal": {"families": {"rega": 1.0}}}
TRACE = {"signal": {"trace": "rega"}}
RESIDUAL = {"action": {"kind": "residual"}}
LOOP = {"action": {"kind": "residual_pi", "gains": {"proportional": 0.3, "integral": 0.1, "rate": 0.2}}}
ADVICE = {"action": {"kind": "advice", "loop": {"horizon": 3}}}
DIPS = {"site": {"phase_families": ("lora_64xh100",)}, "episode_s": 400.0}
ALL = ["power_limit", "micro_batch", "active_gpus", "duty_cycle", "local_steps"]
KNOBS = {"action": {"knobs": ALL}}
# More than any site can give, so that one of two ends refuses and the other tracks.
STEEP = {"signal": {"offers": {"synthetic_regd": {"base": 0.9, "capacity": 0.9, "of": "base"}}, "infeasible": "track"}}
OFFER = {"base": 0.5, "capacity": 0.3, "of": "band"}
OFFERED = {"signal": {"offers": {"synthetic_regd": OFFER}}}
FAST = {"period_s": 1.0, "rules": {"raise_window_s": 1.0}}

# Key: another valid value, and what else to set for both (the key needs it, or shows only with it).
ALTERNATIVES = {
    "site.jobs": (3, {}),
    "site.surfaces": ("train", {}),
    # A profile excludes surfaces of the configuration's own.
    "site.profile": (str(Path(__file__).with_name("profile.yaml")), {"site": {"surfaces": "train"}}),
    "site.gpus_per_job": ((1, 64), {"site": {"jobs": 6}}),  # shares of the site, so jobs must differ
    "site.phase_families": (("lora_64xh100",), {"site": {"phase_families": ("gpt3_512xh100",)}}),
    "site.randomise": (0.2, {}),
    "site.power_spread": (0.2, {}),
    "site.sensor": ("instant", {}),
    "site.control_delay_periods": ((2, 2), {}),
    "site.command_loss": (0.5, {}),
    "site.host_w_per_gpu": (200.0, {}),
    "signal.families": ({"rega": 1.0}, {}),
    "signal.split": ("test", REGA),
    "signal.trace": ("rega", {}),
    "signal.start_s": (3600.0, TRACE),
    "signal.offers": ({"synthetic_regd": OFFER}, {}),
    "signal.offers.*.base": (0.6, OFFERED),
    "signal.offers.*.capacity": (0.2, OFFERED),
    "signal.offers.*.of": ("base", {"signal": {"offers": {"synthetic_regd": {**OFFER, "capacity": 0.1}}}}),
    "signal.band": ("knobs", KNOBS),
    "signal.infeasible": ("refuse", STEEP),
    "site.knobs.step_s": (11.0, KNOBS),
    "site.knobs.comm_share": ((0.3, 0.3), KNOBS),
    "site.knobs.straggler_share": ((0.2, 0.2), KNOBS),
    "site.knobs.micro_batch_switch_s": (2.0, KNOBS),
    "site.knobs.active_gpus_switch_s": (2.0, KNOBS),
    "site.knobs.local_steps_switch_s": (2.0, KNOBS),
    # A knob of two settings, free to change, which actions push to three quarters of the way.
    "knob_rules.hysteresis": (0.49, {**KNOBS, "knob_rules": {"max_local_steps": 2, "local_steps_dwell_s": 0.0}}),
    "knob_rules.micro_batch_dwell_s": (60.0, KNOBS),
    "knob_rules.active_gpus_dwell_s": (5.0, KNOBS),
    "knob_rules.local_steps_dwell_s": (5.0, KNOBS),
    "knob_rules.duty_dead_band": (0.4, KNOBS),
    "knob_rules.min_duty": (0.4, KNOBS),
    "knob_rules.min_active_share": (0.5, KNOBS),
    "knob_rules.max_local_steps": (2, KNOBS),
    "action.knobs": (["power_limit", "duty_cycle"], {}),
    "action.kind": ("delta", {}),
    "action.scale": (0.1, RESIDUAL),
    "action.gains.proportional": (0.1, LOOP),
    "action.gains.integral": (0.3, LOOP),
    "action.gains.rate": (0.05, LOOP),
    "action.gains.identify": (0.1, {**LOOP, "site": {"power_spread": 0.2}}),
    "action.loop.horizon": (2, ADVICE),
    "action.loop.move": (0.3, ADVICE),
    "action.loop.throughput": (0.3, ADVICE),
    "action.loop.credit": (1.0, {**ADVICE, "site": {"power_spread": 0.2}}),
    "action.loop.fill": (1.0, {**ADVICE, **DIPS}),
    "action.loop.prior": (1.0, ADVICE),
    "action.loop.memory": (5.0, ADVICE),
    "action.loop.ridge": (3.0, ADVICE),
    "action.loop.split": ("optimal", {**ADVICE, "site": {"surfaces": "train"}}),
    "observation.preview_periods": (2, {}),
    "observation.error_history": (1, {}),
    "observation.command_history": (1, {}),
    "observation.integral_leak": (0.5, {}),
    "reward.tracking": (2.0, {}),
    "reward.huber": (0.5, {}),
    "reward.throughput": (0.0, {}),
    "reward.actuation": (0.0, {}),
    "reward.violation": (0.0, {}),
    # A period can't be shorter than the interval, so this key acts by refusing.
    "rules.interval_s": (4.0, {"rules": {"raise_window_s": 4.0}}),
    "rules.dead_band_w": (60.0, {}),
    "rules.dead_band_fraction": (0.2, {}),
    "rules.raise_fraction_per_s": (0.05, {}),
    "rules.raise_window_s": (3.0, FAST),
    "rules.floor_fraction": (0.7, {}),
    "rules.ceiling_fraction": (0.8, {}),
    "period_s": (4.0, {}),
    "episode_s": (60.0, {}),
}


# Keys that act by refusing, and what the message says.
REFUSED = {"rules.interval_s": "shorter than rules.interval_s", "signal.infeasible": "leaves the feasible band"}


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {"synthetic_regd" if name == "*" else name: value}
    return value


def trajectory(data):
    """Everything an agent meets in one episode, or the message that refuses it."""
    try:
        env = PowerShapingEnv(data)
        observation, _ = env.reset(seed=7)
    except UserError as error:
        return str(error)
    rng, met, over, action = np.random.default_rng(1), [observation], False, None
    tick = 0
    while not over:
        if tick % 4 == 0:  # held for some periods, so that allowances that build up show
            action = rng.choice([-1.0, -0.5, 0.4, 1.0], env.action_space.shape).astype(np.float32)
        observation, reward, terminated, over, _ = env.step(action)
        assert not terminated
        met += [observation, np.array([reward])]
        tick += 1
    return np.concatenate(met)


@pytest.mark.parametrize("key", sorted(set(leaves(PowerShapingConfig)) | set(ALTERNATIVES)))
def test_every_key_has_an_effect(key):
    assert key in ALTERNATIVES, f"{key} is new: say here which other value shows its effect"
    assert key in set(leaves(PowerShapingConfig)), f"{key} is no key any more"
    value, context = ALTERNATIVES[key]
    base = merged(BASE, context)
    # A mapping's other value replaces the default rather than joining it; nothing in BASE gives mappings.
    before, after = trajectory(base), trajectory(merged(base, nested(key, value)))
    assert not isinstance(before, str), before
    if isinstance(after, str):
        assert REFUSED[key] in after
    else:
        assert not np.array_equal(before, after), f"{key} changes nothing"


def test_the_same_configuration_gives_the_same_trajectory():
    np.testing.assert_array_equal(trajectory(BASE), trajectory(BASE))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sight": {}}, "unknown key 'sight', did you mean 'site'"),
        ({"site": {"job": 3}}, "unknown key 'site.job', did you mean 'jobs'"),
        ({"rules": {"floor_fractoin": 0.4}}, "unknown key 'rules.floor_fractoin', did you mean 'floor_fraction'"),
        ({"signal": {"offers": {"regd": {"base": 0.5, "capcity": 0.3}}}}, "did you mean 'capacity'"),
        ({"signal": {"start_s": 60.0}}, "start_s needs trace"),
        ({"signal": {"trace": "rega", "families": {"regd": 1.0}}}, "trace and families exclude each other"),
        ({"signal": {"families": {"recorded": 1.0}}}, "unknown signal family 'recorded'"),
        ({"action": {"scale": 0.1}}, "scale has no meaning for kind 'absolute'"),
        ({"action": {"gains": {}}}, "gains go with kind 'residual_pi'"),
        ({"action": {"kind": "residual_pi"}}, "which needs them"),
        ({"action": {"loop": {}}}, "loop goes with kind 'advice'"),
        ({"action": {"kind": "advice"}}, "which needs it"),
    ],
)
def test_misspelt_and_unread_keys_are_refused(data, message):
    with pytest.raises(UserError, match=message):
        PowerShapingEnv(data)
