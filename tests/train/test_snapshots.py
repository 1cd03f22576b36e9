"""Named snapshots: exact swaps, and averages that follow their published schedules."""

from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.toy import ToyBundle
from unirl.config.errors import ConfigError, DataError, NotFoundError, UniRLError
from unirl.models.loading.saved_weights import SavedWeights
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import EmaFullConfig, EmaLoraConfig, LoraConfig, SnapshotConfig

ADAM = OptimizerConfig(learning_rate=1e-2)
X = (torch.ones(2, 3, 4, 4), torch.ones(2), torch.ones(2, 4))


def output(backend: FSDPBackend) -> Tensor:
    return backend.module(*X).detach()


def update(backend: FSDPBackend) -> None:
    loss = backend.module(*X).square().mean()
    backend.backward(loss, last=True)
    backend.step(1.0, loss)


def bits(weights: Mapping[str, Tensor]) -> bytes:
    return b"".join(tensor.detach().numpy().tobytes() for tensor in weights.values())


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
def test_weights_run_the_snapshot_inside_and_are_bit_equal_afterwards(lora: LoraConfig | None) -> None:
    backend = FSDPBackend(ToyBundle(), optimizer_cfg=ADAM, lora_cfg=lora)
    backend.snapshot("reference")
    initial = output(backend)
    update(backend)
    live, moved = bits(backend.gather()), output(backend)
    assert not torch.equal(initial, moved)
    with torch.no_grad(), backend.weights("reference"):
        assert torch.equal(output(backend), initial)
    assert bits(backend.gather()) == live and torch.equal(output(backend), moved)


def test_weights_come_back_after_an_error_inside() -> None:
    backend = FSDPBackend(ToyBundle(), optimizer_cfg=ADAM)
    backend.snapshot("reference")
    update(backend)
    live = bits(backend.gather())
    with pytest.raises(KeyError), torch.no_grad(), backend.weights("reference"):
        raise KeyError
    assert bits(backend.gather()) == live
    with torch.no_grad(), backend.weights("reference"):
        pass


def test_the_parameters_keep_their_storage() -> None:
    # Sharding, compiled graphs and CUDA IPC hold the address; a swap by pointer would leave them the live weights.
    backend = FSDPBackend(ToyBundle(), optimizer_cfg=ADAM)
    backend.snapshot("reference")
    addresses = [p.data_ptr() for p in backend.trainable.values()]
    with torch.no_grad(), backend.weights("reference"):
        assert [p.data_ptr() for p in backend.trainable.values()] == addresses
    assert [p.data_ptr() for p in backend.trainable.values()] == addresses


def test_misuse_is_refused() -> None:
    backend = FSDPBackend(ToyBundle(), optimizer_cfg=ADAM)
    backend.snapshot("reference")
    with pytest.raises(RuntimeError, match="no_grad"), backend.weights("reference"):
        pass
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="nest"), backend.weights("reference"), backend.weights("reference"):
            pass
        with pytest.raises(ConfigError, match=r"no weight snapshot 'ema'.*reference"), backend.weights("ema"):
            pass
        with backend.weights("live"):
            pass
    with pytest.raises(ConfigError, match="'live'"):
        backend.snapshot("live")


def test_a_snapshot_does_not_follow_the_weights_and_gather_reads_either() -> None:
    backend = FSDPBackend(ToyBundle(), optimizer_cfg=ADAM)
    backend.snapshot("reference")
    before = bits(backend.gather())
    update(backend)
    assert bits(backend.gather("reference")) == before != bits(backend.gather())
    assert backend.has_snapshot("reference") and not backend.has_snapshot("ema")


def test_the_evaluation_average_has_flow_grpos_decays() -> None:
    ema = EmaFullConfig(target_decay=0.9)
    decays = [ema.decay_at(t) for t in (0, 1, 8, 79, 80, 81, 1000)]
    assert decays == pytest.approx([0.1, 2 / 11, 0.5, 80 / 89, 0.9, 0.9, 0.9])
    assert [t for t in range(24) if ema.due(t)] == [7, 15, 23]


def test_nfts_old_policy_has_the_papers_three_schedules() -> None:
    assert [EmaLoraConfig(ceiling=0.0).decay_at(n) for n in (0, 1, 500)] == [0.0, 0.0, 0.0]
    type1 = EmaLoraConfig()
    assert [type1.decay_at(n) for n in (0, 76, 500, 900)] == pytest.approx([0.0, 0.076, 0.5, 0.5])
    type2 = EmaLoraConfig(flat_updates=75, rate=0.0075, ceiling=0.999)
    assert [type2.decay_at(n) for n in (0, 75, 100, 209)] == pytest.approx([0.0, 0.0, 0.1875, 0.999])


def test_the_ema_snapshot_is_the_recursion_over_the_live_weights() -> None:
    backend = FSDPBackend(ToyBundle(), optimizer_cfg=ADAM, ema_cfg=EmaFullConfig(target_decay=0.15, every=2))
    expected = {name: tensor.double() for name, tensor in backend.gather().items()}
    for t in range(6):
        update(backend)
        if t % 2 == 1:
            decay = min((1 + t) / (10 + t), 0.15)
            expected = {n: decay * expected[n] + (1 - decay) * w.double() for n, w in backend.gather().items()}
    for name, tensor in backend.gather("ema").items():
        assert torch.allclose(tensor.double(), expected[name], atol=1e-6)


def test_the_old_policy_moves_at_the_end_of_a_step_only_and_copies_at_decay_zero() -> None:
    rule = EmaLoraConfig(rate=0.25)
    backend = FSDPBackend(ToyBundle(), optimizer_cfg=ADAM, lora_cfg=LoraConfig(rank=2), ema_lora_cfg=rule)
    start = backend.gather()
    backend.finish_step()
    update(backend)
    assert bits(backend.gather("old")) == bits(start)
    backend.finish_step()
    live = backend.gather()
    for name, tensor in backend.gather("old").items():
        assert torch.allclose(tensor, 0.25 * start[name] + 0.75 * live[name], atol=1e-7)
    always = FSDPBackend(ToyBundle(), optimizer_cfg=ADAM, ema_lora_cfg=EmaLoraConfig(ceiling=0.0))
    update(always)
    always.finish_step()
    assert bits(always.gather("old")) == bits(always.gather())


@pytest.mark.parametrize(
    ("config", "options"),
    [(EmaFullConfig, {"target_decay": 1.0}), (EmaFullConfig, {"every": 0}), (EmaLoraConfig, {"rate": -1.0})],
)
def test_rules_out_of_range_are_refused(config: type, options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        config(**options)


class LinkedBundle(ToyBundle):
    """A toy whose other checkpoints are named by the seed of their weights."""

    def saved_at(self, path: str, revision: str | None = None) -> SavedWeights:
        if not path.isdigit():
            raise NotFoundError(f"{path!r} is no checkpoint")
        return ToyBundle(init_seed=int(path)).saved()


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
def test_a_loaded_snapshot_computes_what_its_checkpoint_does_and_leaves_no_trace(lora: LoraConfig | None) -> None:
    sources = {"teacher": SnapshotConfig(path="7")}
    backend = FSDPBackend(LinkedBundle(), optimizer_cfg=ADAM, lora_cfg=lora, snapshots=sources)
    update(backend)
    teacher = ToyBundle(init_seed=7).trainable()(*X)
    live = bits(dict(backend.module.named_parameters()))
    for _ in range(2):
        with torch.no_grad(), backend.weights("teacher"):
            assert torch.equal(output(backend), teacher)
        assert bits(dict(backend.module.named_parameters())) == live
    backend.offload(("policy",))
    backend.onload(("policy",))
    with pytest.raises(ZeroDivisionError), torch.no_grad(), backend.weights("teacher"):
        raise ZeroDivisionError
    assert bits(dict(backend.module.named_parameters())) == live


def test_a_loaded_snapshot_is_not_part_of_checkpoints(tmp_path) -> None:
    def backend(path: str) -> FSDPBackend:
        keep = EmaFullConfig(every=1)
        return FSDPBackend(
            LinkedBundle(), optimizer_cfg=ADAM, ema_cfg=keep, snapshots={"teacher": SnapshotConfig(path=path)}
        )

    first, second = backend("7"), backend("8")
    update(first)
    first.save(str(tmp_path))
    held = load_file(tmp_path / "snapshots.safetensors")
    assert held and all(name.startswith("ema:") for name in held)
    second.load(str(tmp_path))
    assert bits(second.gather()) == bits(first.gather()) and bits(second.gather("ema")) == bits(first.gather("ema"))
    assert bits(second.gather("teacher")) == bits(dict(ToyBundle(init_seed=8).trainable().named_parameters()))


def test_adapters_cannot_export_a_snapshot_with_another_base() -> None:
    sources = {"teacher": SnapshotConfig(path="7")}
    backend = FSDPBackend(LinkedBundle(), optimizer_cfg=ADAM, lora_cfg=LoraConfig(rank=2), snapshots=sources)
    with pytest.raises(ConfigError, match="'teacher' was loaded from another checkpoint"):
        backend.gather("teacher")


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("ema", "7", "backend.snapshots.ema: the backend makes this snapshot"),
        ("live", "7", "backend.snapshots.live: the backend makes this snapshot"),
        ("teacher", "nowhere", "backend.snapshots.teacher: 'nowhere' is no checkpoint"),
    ],
)
def test_a_snapshot_that_cannot_be_loaded_is_refused_by_its_key(name: str, path: str, message: str) -> None:
    sources = {name: SnapshotConfig(path=path)}
    with pytest.raises(UniRLError, match=message):
        FSDPBackend(LinkedBundle(), optimizer_cfg=ADAM, ema_cfg=EmaFullConfig(), snapshots=sources)


def test_a_checkpoint_of_another_architecture_is_refused() -> None:
    class Wider(LinkedBundle):
        def saved_at(self, path: str, revision: str | None = None) -> SavedWeights:
            return ToyBundle(width=32).saved()

    with pytest.raises(DataError, match=r"backend.snapshots.teacher: .* have another shape"):
        FSDPBackend(Wider(), optimizer_cfg=ADAM, snapshots={"teacher": SnapshotConfig(path="7")})
