"""Which GPU an address means, under CUDA's rules and NVML's."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattgym.hw.device import DeviceNotFoundError
from wattgym.hw.visible import GpuAddress, cuda_visible, resolve, unique


def gpu(index, name="H100", bus=None, **more):
    uuid = f"GPU-{index:08x}-aaaa-bbbb-cccc-{index:012x}"
    return GpuAddress(uuid=uuid, index=index, pci_bus_id=f"00000000:{bus or 16 + index:02X}:00.0", name=name, **more)


ALIKE = [gpu(0), gpu(1), gpu(2)]
MIXED = [gpu(0, "T400"), gpu(1), gpu(2)]
SPLIT = [gpu(0, is_mig=True, mig_uuids=("MIG-aa11", "MIG-aa22")), gpu(1)]


def indices(gpus, mask=None, order=None):
    environment = {}
    if mask is not None:
        environment["CUDA_VISIBLE_DEVICES"] = mask
    if order is not None:
        environment["CUDA_DEVICE_ORDER"] = order
    return [found.index for found in cuda_visible(gpus, environment)]


@pytest.mark.parametrize(
    ("spec", "index"),
    [
        ("0", 0),
        ("2", 2),
        (ALIKE[1].uuid, 1),
        (ALIKE[1].uuid.upper().replace("GPU", "gpu"), 1),
        ("GPU-00000002", 2),
        (f"MIG-{ALIKE[1].uuid}/7/0", 1),  # as drivers before R470 wrote it
        (" 1 ", 1),
        ("cuda:2", 2),
    ],
)
def test_addresses(spec, index):
    assert resolve(spec, ALIKE, {}).index == index


@pytest.mark.parametrize("spec", ["MIG-aa11", "MIG-aa22", "MIG-aa2"])
def test_a_mig_id_means_its_parent(spec):
    assert resolve(spec, SPLIT, {}).index == 0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("3", "NVML index 3 does not exist; valid: 0 … 2"),
        ("GPU-0000000", "means 3 GPUs, give more of it"),
        ("GPU-ffff", "does not exist; there is: GPU-00000000"),
        ("MIG-aa11", "does not exist; there is: none"),
        ("cuda:7", "CUDA index (CUDA_VISIBLE_DEVICES unset) 7 does not exist"),
        ("cuda:", "after 'cuda:' goes a CUDA index"),
        ("cuda:-1", "after 'cuda:' goes a CUDA index"),
        ("-1", "give a UUID"),
        ("", "give a UUID"),
        ("h100", "give a UUID"),
        ("1.0", "give a UUID"),
        ("²", "give a UUID"),
    ],
)
def test_bad_addresses_say_what_there_is(spec, words):
    with pytest.raises(DeviceNotFoundError, match=re.escape(words)):
        resolve(spec, ALIKE, {})


def test_an_ambiguous_mig_prefix_on_one_gpu_is_not_ambiguous():
    assert resolve("MIG-aa", SPLIT, {}).index == 0


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        (" 2 , 0 ", [2, 0]),
        ("0,-1,1", [0]),  # CUDA ends the list at the first entry that means nothing
        ("0,9,1", [0]),
        ("0,nothing,1", [0]),
        ("GPU-00000002,GPU-00000000", [2, 0]),
        ("GPU-ffff,0", []),
        ("GPU-0000000", []),  # ambiguous beginning
    ],
)
def test_cuda_visible_devices(mask, expected):
    assert indices(ALIKE, mask) == expected


def test_cuda_index_goes_through_the_mask():
    environment = {"CUDA_VISIBLE_DEVICES": "2,0"}
    assert resolve("cuda:0", ALIKE, environment).index == 2
    assert resolve("0", ALIKE, environment).index == 0  # an NVML index does not
    with pytest.raises(DeviceNotFoundError, match=re.escape("valid: 0 … 1")):
        resolve("cuda:2", ALIKE, environment)
    with pytest.raises(DeviceNotFoundError, match="no GPU is visible"):
        resolve("cuda:0", ALIKE, {"CUDA_VISIBLE_DEVICES": ""})


def test_fastest_first_is_refused_where_models_differ():
    for mask in (None, "0"):
        with pytest.raises(DeviceNotFoundError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
            indices(MIXED, mask)
    assert indices(MIXED, "0,1", "PCI_BUS_ID") == [0, 1]
    assert indices(MIXED, "GPU-00000002") == [2]  # a UUID is certain in any order


def test_pci_order_is_by_address_not_by_nvml_index():
    shuffled = [gpu(0, bus=0x90), gpu(1, bus=0x20), gpu(2, bus=0x50)]
    assert indices(shuffled, "0,1,2", "PCI_BUS_ID") == [1, 2, 0]


def test_integers_are_refused_while_a_gpu_is_split():
    with pytest.raises(DeviceNotFoundError, match="MIG"):
        indices(SPLIT, "0")
    assert indices(SPLIT, "MIG-aa11,MIG-aa22") == [0, 0]


def test_instances_of_one_gpu_are_counted_once():
    seen = cuda_visible(SPLIT, {"CUDA_VISIBLE_DEVICES": "MIG-aa22,MIG-aa11"})
    assert [found.index for found in unique(seen)] == [0]
    assert [found.index for found in unique([ALIKE[2], ALIKE[0], ALIKE[2]])] == [2, 0]


@given(st.one_of(st.text(max_size=30), st.from_regex(r"(cuda:|GPU-|MIG-)?[0-9a-f]*", fullmatch=True)))
def test_any_text_resolves_or_is_refused_in_one_line(text):
    for gpus in (ALIKE, SPLIT, []):
        try:
            found = resolve(text, gpus, {"CUDA_VISIBLE_DEVICES": text})
        except DeviceNotFoundError as error:
            refusal = str(error)
        else:
            refusal = ""
            assert found in gpus
        assert len(refusal.splitlines()) <= 1


def test_a_very_long_number_is_refused_like_any_other():
    with pytest.raises(DeviceNotFoundError, match="give a UUID"):
        resolve("9" * 5000, ALIKE, {})
