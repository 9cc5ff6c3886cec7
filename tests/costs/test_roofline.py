"""The work of an update against counts by hand, and the time that it takes."""

from __future__ import annotations

import dataclasses

import pytest
from llamas import SIZES, llama

from meshtune.costs.collectives import Collective
from meshtune.costs.hardware import find_target, known_devices
from meshtune.costs.roofline import EFFICIENCY, Work, roofline, work_of
from meshtune.errors import UserError
from meshtune.setup.search import apply_overrides, predict_candidate, workload_of

WORK = Work(
    flops=1e15,
    recompute_flops=0.0,
    product_bytes=1e11,
    elementwise_bytes=0.0,
    update_bytes=0.0,
    host_bytes=0.0,
    tokens=4096,
)


def candidate_on(tmp_path, model, target, *overrides):
    recipe, machine = llama(tmp_path, model, *overrides), find_target(target, env={})
    if recipe.mesh == "auto":
        recipe = apply_overrides(recipe, {"mesh": {"fsdp": machine.devices}})
    return predict_candidate(recipe, machine, workload_of(recipe, machine.device.backend)).candidate


@pytest.mark.parametrize("model", ["8B", "70B", "405B"])
@pytest.mark.parametrize(("method", "factor"), [("lora", 4), ("full", 6)])
def test_model_flops_are_4n_and_6n_and_attention_at_half_its_square(tmp_path, model, method, factor):
    candidate = candidate_on(tmp_path, model, "8xH100", f"method={method}", "data.max_length=4096")
    work, spec = work_of(candidate), candidate.workload.spec
    tokens = 8 * 4096 / 8
    # N without the embedding, which multiplies nothing; half of 12 L T H h per token for attention's square.
    parameters = SIZES[model] * 1e9 - spec.vocab * spec.embed
    attention = (
        6 * spec.layers * 4096 * spec.stacks[0].pattern[0].mixer.heads * spec.stacks[0].pattern[0].mixer.head_dim
    )
    expected = tokens * (factor * parameters + attention)
    # LoRA's own products and rounded published sizes make less than 1%.
    assert work.flops == pytest.approx(expected, rel=0.01)


def test_full_rematerialisation_computes_the_layers_forward_once_more(tmp_path):
    full, selective = (
        work_of(candidate_on(tmp_path, "8B", "8xH100", f"compute.remat={remat}")) for remat in ("full", "selective")
    )
    assert full.flops == selective.flops
    layers = 2 * 6.98e9 + 2 * 32 * 4096 * 4096  # 2N of the layers, and attention forward at half the square
    assert full.recompute_flops - selective.recompute_flops == pytest.approx(4096 * layers, rel=0.01)


def test_gradients_stop_at_the_lowest_trained_layer(tmp_path):
    top = work_of(candidate_on(tmp_path, "8B", "H100", "method={kind: freeze, last_layers: 8}", "train.batch_size=1"))
    lora = work_of(candidate_on(tmp_path, "8B", "H100", "train.batch_size=1"))
    layers, head = 6.98e9, 128256 * 4096
    # Forward through all, backward through a quarter of the layers and the head, weight gradients of that quarter.
    expected = 4096 * (2 * (layers + head) + 2 * (layers / 4 + head) + 2 * layers / 4)
    attention = 4096 * 2 * 32 * 4096 * 4096 * (1 + 2 / 4)
    assert top.flops == pytest.approx(expected + attention, rel=0.01)
    assert top.flops < lora.flops


def test_a_group_across_hosts_uses_the_ports_of_its_members():
    def seconds(kind, members, target="2x8xA100-80"):
        return roofline(WORK, [Collective(kind, 16 * 10**9, tuple(members), 1)], find_target(target, env={}))

    inside = seconds("all-gather", range(8))
    assert (inside.link, inside.network) == (pytest.approx(14e9 / 300e9), 0)
    # Rings through 8, 4 and 1 ports of 25 GB/s per host; with L40S the link is slower than the ports.
    assert seconds("all-gather", range(16)).network == pytest.approx(15e9 / 200e9)
    assert seconds("reduce-scatter", range(0, 16, 2)).network == pytest.approx(14e9 / 100e9)
    assert seconds("all-reduce", (3, 11)).network == pytest.approx(16e9 / 25e9)
    assert seconds("all-gather", range(16), "2x8xL40S").network == pytest.approx(15e9 / 32e9)
    # A ring of neighbours leaves a host through one port; half of an all-to-all does, through all ports.
    assert seconds("collective-permute", range(16)).network == pytest.approx(16e9 / 25e9)
    assert seconds("all-to-all", range(16)).network == pytest.approx(8e9 / 25e9)
    assert seconds("all-reduce", range(16)).link == 0


def test_workstations_have_one_port_for_all_their_devices():
    def seconds(kind, members):
        return roofline(
            WORK, [Collective(kind, 8 * 10**9, tuple(members), 1)], find_target("2x4xRTX4090", env={})
        ).network

    assert seconds("all-gather", range(8)) == pytest.approx(7e9 / 1.25e9)
    assert seconds("all-gather", (0, 1, 4, 5)) == pytest.approx(
        6e9 / (1.25e9 / 2)
    )  # another such group uses the other half
    assert seconds("collective-permute", range(8)) == pytest.approx(8e9 / 1.25e9)
    assert seconds("all-to-all", range(8)) == pytest.approx(4 * 4e9 / 1.25e9)


def test_all_reduces_are_exposed_and_gathers_overlap_with_products():
    target = find_target("8xH100", env={})
    members = tuple(range(8))
    alone = roofline(WORK, [], target).seconds
    gather = roofline(WORK, [Collective("all-gather", 10**9, members, 10)], target)
    total = roofline(WORK, [Collective("all-reduce", 10**9, members, 10)], target)
    assert gather.seconds == alone
    assert total.seconds > alone
    long = roofline(WORK, [Collective("all-gather", 10**9, members, 10**4)], target)
    assert long.seconds == pytest.approx(long.link / EFFICIENCY["links"] + 10**4 * 10e-6)
    assert long.bound_by == "link"


def test_loops_of_unknown_trip_count_use_the_given_count():
    target = find_target("8xH100", env={})
    reduction = Collective("all-reduce", 10**8, tuple(range(8)), 1, unknown_trip_count=True)
    assert roofline(WORK, [reduction], target, trip_count=64).link == pytest.approx(
        64 * roofline(WORK, [reduction], target).link
    )


def test_the_bound_is_the_roofline_and_the_expected_time_is_longer():
    times = roofline(WORK, [], find_target("H100", env={}))
    assert times.bound == pytest.approx(1e15 / 989.4e12)
    assert times.seconds == pytest.approx(times.bound / EFFICIENCY["compute"])
    assert times.mfu_bound == pytest.approx(1.0)
    assert times.bound_by == "compute"
    few_flops = roofline(dataclasses.replace(WORK, flops=1e12), [], find_target("H100", env={}))
    assert few_flops.bound == pytest.approx(1e11 / 3.352e12)
    assert few_flops.bound_by == "memory"


def test_every_device_has_its_speeds():
    for device in known_devices({}).values():
        assert device.bandwidth is not None, device.name
        assert device.flops_bf16 is not None, device.name
        assert device.flops_f32 is not None, device.name
        assert device.flops_bf16 >= device.flops_f32, device.name
        assert device.link is not None, device.name
        assert device.network is not None, device.name
        assert device.link >= device.network, device.name
        assert device.host_link is not None, device.name


def test_a_device_without_speeds_is_named(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('[Mine]\nplatform = "rocm"\nmemory_gib = 12\n')
    with pytest.raises(UserError, match="the speed of Mine is not described: flops_bf16"):
        roofline(WORK, [], find_target("Mine", {"MESHTUNE_HARDWARE": str(file)}))
