"""An emulated device behaves as CUDA does where a CPU differs: mixed devices, waits, asynchronous copies."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from unirl.testing.emulated_streams import DeviceMismatch, Stream, StreamRace
from unirl.testing.second_device import DeviceTensor, second_devices

DEVICE = "emulated:0"


@pytest.fixture
def devices():
    with second_devices(count=2) as opened:
        yield opened


def module():
    """The counterpart of torch.cuda, which exists from the first context on."""
    return torch.get_device_module(DEVICE)


def kinds(devices) -> Counter:
    counts: Counter = Counter()
    for (kind, _), n in devices.syncs.items():
        counts[kind] += n
    return counts


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.empty(3, device=d).fill_(1),
        lambda d: torch.zeros(3, device=d),
        lambda d: torch.full((3,), 2.0, device=d),
        lambda d: torch.arange(3, device=d),
        lambda d: torch.linspace(0, 1, 3, device=d),
        lambda d: torch.tensor([1.0, 2.0, 3.0], device=d),
        lambda d: torch.as_tensor([1, 2, 3], device=d),
        lambda d: torch.ones(3).to(d),
        lambda d: torch.zeros_like(torch.ones(3), device=d),
    ],
)
def test_every_way_to_make_a_tensor_gives_the_values_of_the_cpu(devices, make):
    tensor = make(DEVICE)
    assert isinstance(tensor, DeviceTensor)
    assert tensor.device == torch.device(DEVICE)
    assert torch.equal(tensor.cpu(), make(torch.device("cpu")))


@pytest.mark.parametrize("other", ["cpu", "emulated:1"])
def test_tensors_of_two_devices_do_not_mix(devices, other):
    with pytest.raises(DeviceMismatch, match=r"add.*test_emulation\.py:\d+.*\(2,\) on emulated:0, \(2,\) on " + other):
        torch.ones(2, device=DEVICE) + torch.ones(2, device=other)


def test_a_number_on_the_cpu_mixes_with_any_device(devices):
    assert (torch.ones(2, device=DEVICE) * torch.tensor(3.0)).tolist() == [3, 3]


def test_a_tensor_on_the_cpu_is_not_indexed_by_one_of_a_device(devices):
    with pytest.raises(DeviceMismatch):
        torch.arange(3)[torch.tensor([0], device=DEVICE)]


def test_values_of_an_asynchronous_copy_arrive_with_the_next_wait(devices):
    host = torch.ones(3, device=DEVICE).to("cpu", non_blocking=True)
    too_early = host.clone()
    module().synchronize()
    assert too_early.isnan().all()
    assert torch.equal(host, torch.ones(3))


def test_a_copy_also_arrives_in_a_view_that_is_all_that_is_left_of_it(devices):
    view = torch.arange(3.0, device=DEVICE).to("cpu", non_blocking=True)[1:]
    module().synchronize()
    assert view.tolist() == [1, 2]


def test_a_wait_for_another_stream_brings_nothing(devices):
    host = torch.ones(3, device=DEVICE).to("cpu", non_blocking=True)
    module().Stream(DEVICE).synchronize()
    assert host.isnan().all()


def test_an_event_brings_what_was_queued_before_it(devices):
    first = torch.ones(1, device=DEVICE).to("cpu", non_blocking=True)
    event = module().current_stream().record_event()
    second = torch.ones(1, device=DEVICE).to("cpu", non_blocking=True)
    event.synchronize()
    assert (first.item(), second.isnan().item()) == (1, True)


def test_a_stream_that_does_not_wait_reads_nothing_of_another(devices):
    side: Stream = module().Stream(DEVICE)
    tensor = torch.ones(2, device=DEVICE)
    with module().stream(side), pytest.raises(StreamRace, match=r"test_emulation\.py"):
        tensor + 1
    side.wait_stream(module().current_stream())
    with module().stream(side):
        result = tensor + 1
    with pytest.raises(StreamRace):
        result + 1
    module().current_stream().wait_event(side.record_event())
    assert (result + 1).tolist() == [3, 3]


def test_waits_are_inherited_along_a_chain_of_streams(devices):
    first, second = module().Stream(DEVICE), module().Stream(DEVICE)
    with module().stream(first):
        tensor = torch.ones(1, device=DEVICE)
    second.wait_stream(first)
    module().current_stream().wait_stream(second)
    assert tensor.item() == 1


def test_what_the_host_has_waited_for_may_be_read_on_any_stream(devices):
    side = module().Stream(DEVICE)
    with module().stream(side):
        tensor = torch.ones(1, device=DEVICE)
    side.synchronize()
    assert tensor.item() == 1


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        ("item", lambda x: x[0].item()),
        ("item", lambda x: bool(x[0] > 0)),
        ("to the host", lambda x: x.cpu()),
        ("to the host", lambda x: x.tolist()),
        ("to the host", lambda x: torch.empty(3).copy_(x)),
        ("to the device", lambda x: x.copy_(torch.zeros(3))),
        ("to the device", lambda x: torch.ones(3).to(x.device)),
        ("equal", lambda x: torch.equal(x, x)),
        ("size of a result", lambda x: x[x > 0]),
        ("size of a result", lambda x: x.nonzero()),
        ("size of a result", lambda x: torch.ones(1, device=x.device).repeat_interleave(x.long().sum().view(1))),
        ("to the device", lambda x: x[[0, 2]]),
        ("indices to the device", lambda x: x[torch.tensor([0, 2])]),
    ],
)
def test_each_wait_of_the_host_is_counted(devices, kind, use):
    tensor = torch.full((3,), 1.0, device=DEVICE)
    devices.reset()
    use(tensor)
    assert kinds(devices) == {kind: 1}


def test_work_that_stays_on_the_device_waits_for_nothing(devices):
    x = torch.ones(4, 4, device=DEVICE, requires_grad=True)
    devices.reset()
    loss = (F.softmax(x @ x, -1)[1:, torch.arange(2, device=DEVICE)] ** 2).sum()
    loss.backward()
    torch.ones(3).to(DEVICE, non_blocking=True)
    assert not devices.syncs
    assert devices.launches[0] > 10


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Conv1d(1, 2, 3))


def trained(model: nn.Module, device: str, forward) -> list[torch.Tensor]:
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = torch.linspace(-1, 1, 32).view(4, 1, 8).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        forward(model, inputs).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    "forward",
    [
        lambda model, x: model(x),
        lambda model, x: checkpoint(model, x, use_reentrant=False),
        lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=True),
    ],
    ids=["plain", "checkpointed", "checkpointed, reentrant"],
)
def test_training_has_the_bits_of_the_cpu(devices, forward, index):
    model = network()
    expected = trained(copy.deepcopy(model), "cpu", forward)
    result = trained(model, f"emulated:{index}", forward)
    assert all(torch.equal(a, b) for a, b in zip(expected, result, strict=True))


def test_autocast_has_the_dtypes_of_the_cpu(devices):
    def dtypes(device: str) -> list[torch.dtype]:
        x = torch.ones(2, 2, device=device)
        with torch.autocast(device, torch.bfloat16):
            return [F.linear(x, x).dtype, (x @ x).dtype, F.layer_norm(x, (2,)).dtype, (x + x).dtype]

    assert dtypes("emulated") == dtypes("cpu")


@pytest.mark.parametrize("masked", [False, True])
def test_attention_agrees_with_the_cpu(devices, masked):
    torch.manual_seed(0)
    query = torch.randn(1, 2, 5, 8)
    mask = torch.rand(5, 5) > 0.2 if masked else None
    expected = F.scaled_dot_product_attention(query, query, query, mask)
    on_device = query.to(DEVICE)
    result = F.scaled_dot_product_attention(on_device, on_device, on_device, None if mask is None else mask.to(DEVICE))
    torch.testing.assert_close(result.cpu(), expected)


def test_a_module_that_moves_keeps_its_parameters_and_their_ties(devices):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    weight = model[0].weight
    model.to(DEVICE)
    assert model[0].weight is weight and model[1].weight is weight
    assert weight.device == torch.device(DEVICE)
    model.to("cpu")
    assert model[0].weight is weight and weight.device.type == "cpu"


def test_a_parameter_changes_its_dtype_in_place(devices):
    parameter = nn.Parameter(torch.ones(2, device=DEVICE))
    parameter.data = parameter.data.to(torch.bfloat16)
    assert (parameter + 1).dtype is torch.bfloat16
    assert parameter.detach().cpu().tolist() == [1, 1]


def test_bytes_in_use_are_counted_once_for_all_views(devices):
    tensor = torch.zeros(256, device=DEVICE)
    views = [tensor.view(2, 128), tensor[:8], tensor.detach()]
    assert devices.allocated[0] == 1024
    del tensor
    assert devices.allocated[0] == 1024
    views.clear()
    assert (devices.allocated[0], devices.peak[0]) == (0, 1024)
    assert devices.allocated[1] == 0


def test_bytes_of_a_result_that_was_resized_are_counted(devices):
    numbers = torch.arange(1000, device=DEVICE)
    assert devices.allocated[0] == devices.peak[0] == numbers.nbytes == 8000
    del numbers
    assert devices.allocated[0] == 0


def test_the_peak_is_counted_from_the_last_reset_on(devices):
    large = torch.zeros(1000, device=DEVICE)
    small = torch.zeros(10, device=DEVICE)
    del large
    module().reset_peak_memory_stats()
    assert module().max_memory_allocated() == module().memory_allocated() == small.nbytes


def test_each_context_begins_with_its_own_streams_on_the_first_device():
    with second_devices(count=2):
        with module().stream(module().Stream(DEVICE)):
            torch.ones(1, device=DEVICE)
        module().set_device(1)
    with second_devices():
        host = torch.ones(1, device="emulated").to("cpu", non_blocking=True)
        module().synchronize()
        assert host.item() == 1


def test_devices_exist_only_inside_the_context():
    with second_devices(count=3):
        assert torch.accelerator.is_available()
        assert torch.accelerator.device_count() == 3
    assert not torch.accelerator.is_available()
