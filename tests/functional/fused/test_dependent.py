"""Kernels that are launched early wait for those before them: read from what is compiled, and seen on a GPU."""

import copy
import re
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from functional.fused.graphs import both_ways, capture, replay
from functional.fused.test_instantiations import MACHINES
from functional.fused.test_kernels import BF16, make_module, normal, same_bits
from torch import nn

import gsanet
from gsanet.functional.backends import BACKENDS
from gsanet.functional.fused import calls, compiler, pointwise
from gsanet.functional.fused.dependent import dependent_launches
from gsanet.functional.fused.plan import channel_map
from gsanet.functional.fused.plan.pixel_products import CUTS, MAPPED
from gsanet.functional.fused.position_sensitive import position_sensitive_attention, position_sensitive_sums
from gsanet.functional.local_ops import local_mix, local_scores, local_spread
from gsanet.layers.axial_attention import axial_attention
from gsanet.layers.local_relation import local_relation

KERNELS = {
    name: path.name
    for path in sorted(compiler.KERNELS.glob("*.cu"))
    for name in re.findall(r"^KERNEL\(.*?\) (\w+)\(", path.read_text(), re.MULTILINE)
}
LABEL = re.compile(r"(\$\w+):")
BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")
# Memory that other kernels see; parameters, constants and what a block or thread has for itself is not.
ACCESS = re.compile(r"\b(ldu?|st|atom|red|prefetchu?|cp|tex|suld|sust)\.(?!param|const|shared|local)|cp\.async")
READ = re.compile(r"\bld\.global\.|\bcp\.async\.cg\.shared\.global\b")
HARMLESS = re.compile(r"\bcp\.async\.bulk\.prefetch\.L2\b")  # nobody gets what was there
RETURN = re.compile(r"\b(ret|exit)\b")


def first_mistake(body: list[str], reads: bool = False) -> str | None:
    """Why not every thread of a kernel waits before all else that counts, if that is so.

    Args:
        body: The lines of its PTX.
        reads: It may read before.
    """
    waits = [number for number, line in enumerate(body) if "griddepcontrol.wait" in line]
    if len(waits) != 1:
        return f"{len(waits)} waits"
    (wait,) = waits
    labels = {found[1]: number for number, line in enumerate(body) if (found := LABEL.match(line))}
    for number, line in enumerate(body):
        if number > wait:
            # And what lets others start is behind it.
            if "griddepcontrol.launch_dependents" in line:
                return None
            continue
        touches = ACCESS.search(line) and not (reads and READ.search(line)) and not HARMLESS.search(line)
        if touches or RETURN.search(line) or "launch_dependents" in line:
            return f"before the wait: {line}"
        if (found := BRANCH.search(line)) and labels[found[1]] > wait:
            return f"around the wait: {line}"
    return "no launch_dependents behind the wait"


@pytest.mark.parametrize(
    ("lines", "mistake"),
    [
        ("ld.param.u64 %rd1, [p]; $A:; st.shared.u32 [%r1], 0; @%p1 bra $A; WAIT; LAUNCH; ld.global.u32 %r2, [%rd1]",
         None),
        ("ld.global.u32 %r2, [%rd1]; WAIT; LAUNCH", "before the wait: ld.global"),
        ("ld.u32 %r2, [%rd1]; WAIT; LAUNCH", "before the wait: ld.u32"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16; WAIT; LAUNCH", "before the wait: cp.async"),
        ("cp.async.bulk.shared.global [%r1], [%rd1], 16, [%r2]; WAIT; LAUNCH", "before the wait: cp.async"),
        ("cp.async.bulk.prefetch.L2.global [%rd1], 16; WAIT; LAUNCH", None),
        ("@%p1 ret; WAIT; LAUNCH", "before the wait: @%p1 ret"),
        ("@%p1 bra $A; WAIT; LAUNCH; $A:; ret", "around the wait: @%p1 bra"),
        ("LAUNCH; WAIT", "before the wait: griddepcontrol"),
        ("WAIT; ret", "no launch_dependents"),
        ("ret", "0 waits"),
    ],
)  # fmt: skip
def test_mistakes_are_found(lines, mistake):
    text = lines.replace("WAIT", "griddepcontrol.wait").replace("LAUNCH", "griddepcontrol.launch_dependents")
    found = first_mistake([line.strip() for line in text.split(";")])
    assert found is None if mistake is None else found.startswith(mistake)


def bodies(specialisation: compiler.Specialisation) -> dict[str, list[str]]:
    """The lines of each kernel of a source in PTX, for compute capability 9.0."""
    nvrtc = compiler._nvrtc()
    texts = compiler._read_sources(specialisation.source)
    text, names = texts.pop(specialisation.source), tuple(name.encode() for name in texts)
    _, program = nvrtc.nvrtcCreateProgram(text, b"kernel.cu", len(texts), tuple(texts.values()), names)
    defines = (f"-D{name}={value}" for name, value in specialisation.constants)
    options = [option.encode() for option in ("--gpu-architecture=compute_90", *compiler._OPTIONS[:2], *defines)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert not status
    ptx = bytes(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    found = re.findall(r"\.entry (\w+)\(.*?\n\{\n(.*?)\n\}\n", ptx.decode(), re.DOTALL)
    return {name: [line.strip() for line in body.splitlines()] for name, body in found}


def infer(module: nn.Module, x: torch.Tensor) -> None:
    """A module from `fuse_for_inference`, without asking whether its kernels take what is on a CPU."""
    takes_all = replace(BACKENDS["fused"], refuses=lambda *arguments, **settings: None)
    with torch.no_grad(), mock.patch.dict(BACKENDS, {"fused": takes_all}):
        gsanet.fuse_for_inference(module)(x)


def use_every_kernel() -> None:
    """Each kernel at least once, of few images."""
    for size in ((14, 12), (72, 7)):
        module = gsanet.GlobalSelfAttention(64, feat_size=size, dtype=BF16)
        x = torch.zeros(1, 64, *size, dtype=BF16, requires_grad=True)
        module(x).sum().backward()
        infer(module, x)
    assert calls.project_with_context(torch.zeros(22, 56, 56, 64, dtype=BF16), torch.zeros(192, 64, dtype=BF16), 8)
    for columns, rows, same in CUTS:
        x = torch.zeros(8, columns, dtype=BF16)
        assert calls.pixel_products(x, x if same else torch.zeros(8, rows, dtype=BF16))
    for columns, rows in MAPPED:
        x, weight, d_out = (torch.zeros(size, dtype=BF16) for size in ((8, columns), (rows, columns), (8, rows)))
        assert calls.pointwise_gradients(d_out, x, weight) is not None
    for first, second, columns in channel_map.CUTS:
        x, weight, out = (torch.zeros(8, first), torch.zeros(first, columns), torch.zeros(8, columns, dtype=BF16))
        more = (torch.zeros(8, second, dtype=BF16), torch.zeros(second, columns, dtype=BF16)) if second else ()
        level, maps = (out[0], {}) if second else (None, {"addend": out, "mask": out})
        assert calls.map_channels(x.to(BF16), weight.to(BF16), *more, level=level, **maps) is not None
    x, weight, out = (torch.zeros(shape, dtype=BF16) for shape in ((8, 64), (64, 256), (8, 256)))
    assert calls.map_channels(x, weight, level=out[0], addend=out, relu=True) is not None
    stem = gsanet.create_model("gsa_resnet50", stem_width=64).stem.to(BF16)
    stem(torch.zeros(1, 3, 16, 16, dtype=BF16).to(memory_format=torch.channels_last)).sum().backward()
    calls.norm_pool(torch.zeros(1, 8, 8, 8, dtype=BF16), None)
    x = torch.zeros(1, 8, 8, 8, dtype=BF16)
    applied = torch.zeros(5, 8)
    calls.keep_statistics(applied[2], applied[4], torch.tensor(0), applied, 64, 0.1)
    for relu in (False, True):
        calls.norm_sums(x, x, applied, relu)
    for early, stride in ((False, (1, 1)), (True, (1, 1)), (True, (2, 2))):
        x, weight, bias = torch.zeros(1, 7, 7, 64, dtype=BF16), torch.zeros(128, 64, dtype=BF16), torch.zeros(128)
        calls.product(x, weight, bias.to(BF16), relu=True, stride=stride, early_weight=early)
    q, weights = torch.zeros(1, 4, 4, 2, 8, dtype=BF16), torch.zeros(1, 4, 4, 2, 9, dtype=BF16)
    local_scores(q, q, 3, 1, 1)
    local_mix(weights, q, 3, 1, 1)
    local_spread(weights, q, 4, 4, 3, 1, 1)
    lines = q.detach().requires_grad_()
    axial_attention(lines, lines, lines, torch.zeros(7, 8, dtype=BF16)).sum().backward()
    tables = torch.zeros(2, 7, 8 * 2, dtype=BF16)
    position_sensitive_attention(lines.repeat(1, 1, 1, 1, 2), tables, torch.zeros(2)).sum().backward()
    position_sensitive_sums(lines.repeat(1, 1, 1, 1, 2), tables[0]).sum().backward()
    numbers = torch.zeros(1, 4, 4, 2)
    local_relation(numbers, numbers, torch.zeros(2, 9), lines, 3, 1).sum().backward()


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
def test_every_kernel_waits_before_all_else(planned):
    planned.machine = MACHINES["sm_90"]
    with planned.running(poison=False):
        use_every_kernel()
    assert planned.entries == KERNELS.keys()
    for kernel in dict.fromkeys(plan.kernel for plan in planned.launched):
        body = bodies(kernel)[kernel.entry]  # a source may have other kernels too
        constants = dict(kernel.constants)
        early = constants.get("EARLY_TABLE") == 1 or constants.get("EARLY_WEIGHT") == 1
        mistake = first_mistake(body, reads=early)
        assert mistake is None, f"{kernel}: {mistake}"
        assert not early or READ.search(first_mistake(body))


def test_every_kernel_runs(gpu):
    """For compute-sanitizer, which would take very long for all tests.

    compute-sanitizer --tool racecheck python -m pytest -k every_kernel_runs tests/functional/fused/test_dependent.py
    """
    with torch.device(gpu.device), gpu.running(poison=False):
        use_every_kernel()
        torch.cuda.synchronize()
    assert len(gpu.entries) >= len(KERNELS) - 2  # with few multiprocessors images are not cut into pieces


@pytest.mark.parametrize("few", [False, True])
def test_which_tables_are_read_early(planned, monkeypatch, few):
    """Those of rows, in inference: the kernel before them is that of the columns, which has waited.

    And those of columns, where the projection is by a kernel of ours.
    """
    monkeypatch.setattr(pointwise, "wanted", few)
    for options in ({}, {"content": False}, {"row": False}, {"column": False}):
        planned.launched.clear()
        module = gsanet.GlobalSelfAttention(64, feat_size=(14, 12), dtype=BF16, **options)
        x = torch.zeros(1, 64, 14, 12, dtype=BF16, requires_grad=True)
        with planned.running(poison=False):
            module(x).sum().backward()
            module.eval()(x)
            assert not any(constants["EARLY_TABLE"] for constants in planned.constants("line_forward"))
            planned.launched.clear()
            infer(module, x.detach().to(memory_format=torch.channels_last))
        both = len(options) == 0 or "content" in options
        early = [constants["EARLY_TABLE"] for constants in planned.constants("line_forward")]
        assert early == ([int(few), 1] if both else [0])
        assert planned.launched[-1].kernel.entry == "line_forward"
        if both:
            assert planned.launched[-2].kernel.entry == "line_forward"
        if both and few:
            (product,) = planned.constants("product")
            assert planned.launched[0].kernel.entry == "product"
            assert not product["EARLY_WEIGHT"]  # what was before the module is not known
            planned.launched.clear()
            with planned.running(poison=False):
                infer(module, x.detach())  # not channels-last: by cuBLAS
            assert [one["EARLY_TABLE"] for one in planned.constants("line_forward")] == [0, 1]


@pytest.mark.parametrize("entry", KERNELS)
def test_every_kernel_takes_its_turn_once(entry):
    """The same of the text alone, where there is no compiler."""
    text = (compiler.KERNELS / KERNELS[entry]).read_text()
    (body,) = re.findall(rf"^KERNEL\(.*?\) {entry}\(.*?\{{\n(.*?)^\}}", text, re.MULTILINE | re.DOTALL)
    before, turn, behind = body.partition("\n  take_turn();\n")
    assert turn
    assert "take_turn" not in behind
    assert "return" not in before


# --- On a GPU: the same bits with early launches and without.


def trained(module, x, d_out):
    """The output and all gradients, of a copy."""
    module, x = copy.deepcopy(module), x.clone().requires_grad_()
    out = module(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *module.parameters()], d_out), *module.buffers()]


# Bundles, whole lines, pieces; many blocks and few; with pooling, with one axis.
SHAPES = [
    ((1, 64, 56, 56), {}),
    ((64, 64, 56, 56), {}),
    ((3, 128, 14, 7), {}),
    ((2, 64, 28, 28), {"stride": 2}),
    ((2, 64, 72, 10), {}),
    ((2, 64, 14, 14), {"row": False}),
]


@pytest.mark.parametrize(("shape", "options"), SHAPES, ids=str)
def test_training_on_gpu(gpu, shape, options):
    module = make_module(BF16, shape[1], shape[2:], **options).cuda().train()
    with gpu.running(poison=False):
        x = normal(*shape, dtype=BF16).cuda().to(memory_format=torch.channels_last)
        with torch.no_grad():
            d_out = normal(*module(x).shape, dtype=BF16, seed=1).cuda().to(memory_format=torch.channels_last)
        for _ in range(5):
            early, usual = both_ways(lambda: trained(module, x, d_out))
            assert same_bits(early, usual)


def replayed(pairs, x, seed):
    """What each of some graphs gives for another x, which they read."""
    x.copy_(normal(*x.shape, dtype=BF16, seed=seed).cuda())
    return replay(pairs)


@pytest.mark.parametrize("images", [1, 12])
def test_cuda_graphs_of_inference_on_gpu(gpu, images):
    """One image forks in a graph: its context vectors are computed beside the columns."""
    sizes = {(56, 56): 64, (28, 28): 128, (14, 14): 256, (7, 7): 512}
    for size, channels in sizes.items():
        modules = (make_module(BF16, channels, size, seed=seed) for seed in range(3))
        network = gsanet.fuse_for_inference(nn.Sequential(*modules).cuda())
        x = torch.zeros(images, channels, *size, dtype=BF16, device="cuda").to(memory_format=torch.channels_last)
        with gpu.running(poison=False), torch.inference_mode():
            network(x)  # compiles, and loads
            pairs = both_ways(partial(capture, partial(network, x)))
            for seed in range(5):
                early, usual = replayed(pairs, x, seed)
                assert same_bits([early, early], [usual, network(x)])


def test_cuda_graphs_of_training_on_gpu(gpu):
    module = make_module(BF16, 64, (28, 28)).cuda().train()
    x = torch.zeros(2, 64, 28, 28, dtype=BF16, device="cuda").to(memory_format=torch.channels_last)
    d_out = normal(2, 64, 28, 28, dtype=BF16, seed=1).cuda().to(memory_format=torch.channels_last)
    with gpu.running(poison=False):
        trained(module, x, d_out)  # compiles, and loads
        kept = []  # a graph does not hold on to what it reads

        def step(own, leaf):
            out = own(leaf)
            return [out, *torch.autograd.grad(out, [leaf, *own.parameters()], d_out)]

        def capture_copy():
            kept.append(copy.deepcopy(module))
            return capture(partial(step, kept[-1], x.detach().requires_grad_()))

        pairs = both_ways(capture_copy)
        for seed in range(3):
            early, usual = replayed(pairs, x, seed)
            assert same_bits(early, usual)


def test_memory_that_is_used_again_on_gpu(gpu):
    """What is let go is written by the next kernels at once: none of them may begin before the last reader is done."""
    modules = [make_module(BF16, 64, (56, 56), seed=seed).cuda().eval() for seed in range(4)]
    network = nn.Sequential(*modules)
    x = normal(16, 64, 56, 56, dtype=BF16).cuda().to(memory_format=torch.channels_last)
    with gpu.running(poison=False), torch.no_grad():
        for _ in range(10):
            early, usual = both_ways(lambda: network(x))
            assert torch.equal(early, usual)


def test_tables_that_were_just_written_on_gpu(gpu):
    """Embeddings that change right before a call, as other dtypes do under autocast: none is read too early."""
    network = gsanet.fuse_for_inference(nn.Sequential(make_module(BF16, 64, (14, 14)).cuda()))
    tables = [parameter for name, parameter in network.named_parameters() if "rel_" in name]
    assert len(tables) == 2
    x = normal(1, 64, 14, 14, dtype=BF16).cuda().to(memory_format=torch.channels_last)
    values = normal(20, *tables[0].shape, dtype=BF16).cuda()

    def run():
        results = []
        for one in values:
            for table in tables:
                table.copy_(one)
            results.append(network(x))
        return results

    with gpu.running(poison=False), torch.no_grad():
        for _ in range(5):
            early, usual = both_ways(run)
            assert same_bits(early, usual)
        assert not torch.equal(usual[0], usual[1])


def test_early_launches_are_made_on_gpu(gpu, monkeypatch):
    """Neither of the two ways is taken for the other."""
    module = make_module(BF16, 64, (14, 14)).cuda().eval()
    x = normal(1, 64, 14, 14, dtype=BF16).cuda()
    seen = []
    really = compiler.Kernel.launch

    def launch(kernel, *arguments):
        seen.append(kernel)
        really(kernel, *arguments)

    monkeypatch.setattr(compiler.Kernel, "launch", launch)
    with gpu.running(poison=False), torch.no_grad(), dependent_launches(True):
        module(x)
        early = torch.cuda.get_device_capability() >= (9, 0)
        for kernel in seen:
            assert bool(kernel._configurations) == early
