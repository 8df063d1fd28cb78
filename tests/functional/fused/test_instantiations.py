"""Every kernel that the networks launch compiles for the GPUs that they run on, and fits there; no GPU is needed.

Which kernels these are is found by running each kind of module that a network has, in training and in evaluation in
bfloat16, with a launcher that only writes down what it is asked for. It takes less than two minutes on two cores, once:
compiled kernels are kept (see `gsanet.functional.fused.compiler`).
"""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from functional.fused.test_product import SHAPES

import gsanet
from gsanet.functional.fused.compiler import compile_all, unavailable
from gsanet.functional.fused.norm_ops import norm_gradient
from gsanet.functional.fused.plan import (
    Launch,
    Machine,
    channel_map,
    plan_channel_map,
    plan_pixel_products,
    plan_product,
)
from gsanet.functional.fused.plan.pixel_products import CUTS, MAPPED

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

NETWORKS = {
    "gsa_resnet26": {},
    "gsa_resnet38": {},
    "gsa_resnet50": {},
    "gsa_resnet101": {},
    "gsa_m_resnet50": {},
    "gsa_resnet26_tiny": {"img_size": 32},
    "gsa_resnet38 at 64 pixels": {"img_size": 64, "stem": "7x7/2"},
}
# An A100, an H200 and a B200.
MACHINES = {
    "sm_80": Machine(multiprocessors=108, shared_memory=163 * 1024, shared_memory_in_all=164 * 1024),
    "sm_90": Machine(multiprocessors=132, shared_memory=227 * 1024, shared_memory_in_all=228 * 1024),
    "sm_100": Machine(multiprocessors=148, shared_memory=227 * 1024, shared_memory_in_all=228 * 1024),
}
# Bytes that a thread stores to, or loads from, local memory because its registers are too few: not more than now, with
# some room for another compiler.
MOST_SPILLED = {
    "line_forward": 320, "line_backward": 1300, "line_backward_pieces": 520, "pixel_products": 48,
    "axial_forward": 180, "axial_backward": 300, "relation_neighbours": 16, "position_sensitive_backward": 1000,
    "position_sensitive_sums": 64, "position_sensitive_sums_gradient": 32,
}  # fmt: skip
REGISTERS = 65536  # of a multiprocessor
LINES_AND_CONTEXT = {
    "line_forward", "line_backward", "table_gradient", "context_partial", "context_combine", "context_gradient",
    "project_with_context", "pixel_products",
}  # fmt: skip


# Rows of Table 4; on square maps rows alone need the kernels of columns alone.
FEWER_COMPONENTS = ({"row": False}, {"column": False}, {"content": False, "row": False})


@functools.cache
def kinds_of_modules(network: str) -> list[tuple[int, int, tuple[int, int], int, int, int]]:
    model = gsanet.create_model(network.split()[0], **NETWORKS[network])
    modules = [module for module in model.modules() if isinstance(module, gsanet.GlobalSelfAttention)]
    return list(
        dict.fromkeys(
            (module.dim, module.dim_out, module.feat_size, module.stride, module.num_heads, module.dim_key)
            for module in modules
        )
    )


def launches(planned, network: str, dtype: torch.dtype = torch.bfloat16, **components: bool) -> list[Launch]:
    """What one step of training and one of evaluation launch."""
    planned.launched.clear()
    for dim, *options in kinds_of_modules(network):
        module = gsanet.GlobalSelfAttention(dim, *options, **components, dtype=dtype)
        x = torch.zeros(1, dim, *module.feat_size, dtype=dtype).to(memory_format=torch.channels_last)
        module(x.requires_grad_()).sum().backward()
        module.eval()(x)
    return list(dict.fromkeys(planned.launched))


@pytest.mark.parametrize("architecture", MACHINES)
def test_kernels_of_the_networks_compile_and_fit(planned, architecture):
    machine = MACHINES[architecture]
    plans: dict[Launch, None] = {}
    # One image on all multiprocessors is cut as one is; one image on one of them as a large batch on all.
    for multiprocessors in (machine.multiprocessors, 1):
        planned.machine = replace(machine, multiprocessors=multiprocessors)
        # All networks at once: many of their kernels are the same, and none is compiled twice.
        plans.update(dict.fromkeys(plan for name in NETWORKS for plan in launches(planned, name)))
    binaries = compile_all([plan.kernel for plan in plans], architecture, workers=2)
    assert {plan.kernel.entry for plan in plans} == LINES_AND_CONTEXT | {"norm_statistics", "norm_gradient"}
    check_that_they_fit(machine, binaries, plans)


def test_kernels_of_networks_with_fewer_components_compile_and_fit(planned):
    """Modules with one axis, in large batches on an H200: each is one kernel of lines, and few more, each way."""
    planned.machine = replace(MACHINES["sm_90"], multiprocessors=1)
    networks = itertools.product(("gsa_resnet50", "gsa_resnet38 at 64 pixels"), FEWER_COMPONENTS)
    found = [launches(planned, name, **components) for name, components in networks]
    for one in found:
        for plan in one:
            constants = dict(plan.kernel.constants)
            assert plan.kernel.entry in LINES_AND_CONTEXT
            assert not any(constants.get(name) for name in ("NORM_VALUES", "NORM_GRADIENT", "ACCUMULATE", "STATISTICS"))
    plans = dict.fromkeys(itertools.chain(*found))
    check_that_they_fit(MACHINES["sm_90"], compile_all([plan.kernel for plan in plans], "sm_90", workers=2), plans)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_kernels_of_other_dtypes_compile(planned, dtype):
    """Of the network for images of 64 pixels, and gradients of long lines; how fast these are is not looked at."""
    planned.machine = MACHINES["sm_90"]
    plans = launches(planned, "gsa_resnet38 at 64 pixels", dtype)
    long = gsanet.GlobalSelfAttention(64, 64, (112, 112), dtype=dtype)
    long(torch.zeros(1, 64, 112, 112, dtype=dtype, requires_grad=True)).sum().backward()
    plans = dict.fromkeys([*plans, *planned.launched])
    assert {plan.kernel.entry for plan in plans} >= {"line_forward", "line_backward", "line_backward_pieces"}
    binaries = compile_all([plan.kernel for plan in plans], "sm_90", workers=2)
    for plan in plans:
        binary = binaries[plan.kernel]
        assert plan.threads * -(-binary.registers // 8) * 8 <= REGISTERS, plan
        assert plan.shared_bytes + binary.shared <= planned.machine.shared_memory, plan


@pytest.mark.parametrize(
    ("architecture", "dim", "size", "stride"),
    [*((architecture, 64, (112, 112), 1) for architecture in MACHINES), ("sm_90", 256, (50, 84), 2)],
)
def test_gradients_of_long_lines_compile_and_fit(planned, architecture, dim, size, stride):
    """As of the first groups of a detector's backbone, in large batches."""
    planned.machine = replace(MACHINES[architecture], multiprocessors=1)
    module = gsanet.GlobalSelfAttention(dim, dim, size, stride, dtype=torch.bfloat16)
    module(torch.zeros(1, dim, *size, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    plans = {plan for plan in planned.launched if plan.kernel.entry == "line_backward_pieces"}
    assert len(plans) == (2 if min(size) > 64 else 1)
    binaries = compile_all([plan.kernel for plan in plans], architecture, workers=2)
    check_that_they_fit(planned.machine, binaries, plans)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("architecture", MACHINES)
def test_kernels_of_norms_compile_and_fit(planned, architecture, dtype):
    planned.machine = MACHINES[architecture]
    stem = gsanet.create_model("gsa_resnet50", stem_width=64).stem.to(dtype)
    stem.conv1.bn.float()
    stem(torch.zeros(1, 3, 16, 16, dtype=dtype).to(memory_format=torch.channels_last)).sum().backward()
    for relu in (False, True):  # of the norms behind it, when they are compiled
        x = torch.zeros(1, 64, 4, 4, dtype=dtype).to(memory_format=torch.channels_last)
        norm_gradient(x, x, torch.zeros(5, 64), relu)
    plans = dict.fromkeys(planned.launched)
    binaries = compile_all([plan.kernel for plan in plans], architecture, workers=2)
    assert planned.entries == {
        "channel_sums", "norm_statistics", "keep_statistics", "norm_sums", "norm_gradient",
        "norm_pool", "norm_pool_sums", "norm_pool_gradient",
    }  # fmt: skip
    check_that_they_fit(planned.machine, binaries, plans)


@pytest.mark.parametrize("architecture", MACHINES)
def test_kernels_of_pixel_products_compile_and_fit(architecture):
    """All that are planned; with so many pixels, cut as for a large batch."""
    machine = MACHINES[architecture]
    found = [plan_pixel_products(machine, torch.bfloat16, 2**18, *key) for key in CUTS]
    found += [plan_pixel_products(machine, torch.bfloat16, 2**18, *key, same=False, mapped=True) for key in MAPPED]
    plans = dict.fromkeys(itertools.chain(*(plan.launches for plan in found)))
    check_that_they_fit(machine, compile_all([plan.kernel for plan in plans], architecture, workers=2), plans)


@pytest.mark.parametrize("architecture", MACHINES)
def test_maps_of_channels_compile_and_fit(architecture):
    """All that are planned, as they are used: gradients that enter a block, its end, and sums of two products."""
    machine, plans = MACHINES[architecture], {}
    for key in channel_map.CUTS:
        options = {"level": key[1] > 0, "addend": key[1] == 0, "mask": key[1] == 0}
        plans[plan_channel_map(machine, torch.bfloat16, 2**18, *key, **options)] = None
    for first, columns in channel_map.RELUS:
        options = {"level": True, "addend": True, "mask": False, "relu": True}
        plans[plan_channel_map(machine, torch.bfloat16, 2**18, first, 0, columns, **options)] = None
    check_that_they_fit(machine, compile_all([plan.kernel for plan in plans], architecture, workers=2), plans)


@pytest.mark.parametrize("architecture", MACHINES)
def test_products_of_one_image_compile_and_fit(architecture):
    """All 1x1 convolutions and projections of GSA-ResNet-50."""
    machine = MACHINES[architecture]
    options = ("bias", "residual", "relu", "strided", "early_weight")
    ways = [(True, False, True, False, False), (True, True, True, False, True), (False, False, False, True, False)]
    plans = {
        plan_product(machine, torch.bfloat16, *shape, **dict(zip(options, ways[i % 3], strict=True)))
        for i, shape in enumerate(SHAPES)
    }
    assert len(plans) == len(SHAPES)
    binaries = compile_all([plan.kernel for plan in plans], architecture, workers=2)
    check_that_they_fit(machine, binaries, plans)


def check_that_they_fit(machine, binaries, plans):
    for plan in plans:
        binary, constants = binaries[plan.kernel], dict(plan.kernel.constants)
        blocks = constants["BLOCKS"]
        assert binary.registers <= 255, plan
        # They are given out by eights.
        assert blocks * plan.threads * -(-binary.registers // 8) * 8 <= REGISTERS, plan
        assert plan.shared_bytes + binary.shared <= machine.shared_memory, plan
        if plan.kernel.entry.startswith(("line", "project", "pixel", "map")):
            # As many blocks as it was compiled for fit at once; each takes a kilobyte more than it asks for.
            assert blocks * (plan.shared_bytes + binary.shared + 1024) <= machine.shared_memory_in_all, plan
        spilled = max(binary.spill_stores, binary.spill_loads)
        assert spilled <= MOST_SPILLED.get(plan.kernel.entry, 0), f"{spilled} bytes: {plan.kernel}"


def test_modules_run_as_one_call_on_an_h200(planned):
    """No module of these networks falls back to several calls there."""
    planned.machine = MACHINES["sm_90"]
    for name in ("gsa_resnet50", "gsa_resnet38 at 64 pixels", "gsa_resnet26_tiny"):
        entries = [plan.kernel.entry for plan in launches(planned, name)]
        assert entries.count("norm_statistics") >= len({kind[1] for kind in kinds_of_modules(name)})
        for plan in planned.launched:
            constants = dict(plan.kernel.constants)
            if plan.kernel.entry == "line_backward":
                assert constants["NORM_VALUES"] or constants["NORM_GRADIENT"]
