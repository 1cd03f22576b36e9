"""Learning rates against torch's own schedulers."""

from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, SequentialLR

from tests.toy import ToyBundle
from unirl.config.errors import ConfigError
from unirl.train.backend.base import LrSchedulerConfig, OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend

TOTAL, PEAK = 20, 0.5
AFTER: dict[str, Callable[[torch.optim.Optimizer, int, float], LRScheduler]] = {
    "constant": lambda optimizer, length, final: LambdaLR(optimizer, lambda t: 1.0),
    "linear": lambda optimizer, length, final: LinearLR(optimizer, 1.0, final, length),
    "cosine": lambda optimizer, length, final: CosineAnnealingLR(optimizer, length, eta_min=final * PEAK),
}


def torch_rates(kind: str, warmup: int, final: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = AFTER[kind](optimizer, TOTAL - warmup, final)
    if warmup:
        ramp = LambdaLR(optimizer, lambda t: (t + 1) / warmup)
        schedule = SequentialLR(optimizer, [ramp, schedule], [warmup])
    rates = []
    for _ in range(TOTAL + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("kind", sorted(AFTER))
@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("final", [0.0, 0.2])
def test_rates_equal_those_of_torch(kind: str, warmup: int, final: float) -> None:
    config = LrSchedulerConfig(type=kind, warmup_updates=warmup, final_fraction=final)  # type: ignore[arg-type]
    ours = [PEAK * config.factor(t, TOTAL) for t in range(TOTAL + 1)]
    assert ours == pytest.approx(torch_rates(kind, warmup, final), abs=1e-12)


def test_the_end_is_held() -> None:
    config = LrSchedulerConfig(type="cosine", total_updates=4, final_fraction=0.1)
    assert [config.factor(t, None) for t in (4, 5, 99)] == pytest.approx([0.1, 0.1, 0.1])
    assert LrSchedulerConfig(type="linear", total_updates=4).factor(2, 100) == 0.5  # the recipe's end wins


def test_the_backend_counts_updates_and_uses_each_rate_once() -> None:
    schedule = LrSchedulerConfig(type="linear", warmup_updates=2, total_updates=4)
    backend = FSDPBackend(ToyBundle(), optimizer_cfg=OptimizerConfig(learning_rate=PEAK), scheduler_cfg=schedule)
    rates = []
    for _ in range(5):
        loss = backend.module(torch.ones(2, 3, 4, 4), torch.ones(2), torch.ones(2, 4)).square().mean()
        backend.backward(loss, last=True)
        rates.append(backend.step(1.0, loss).lr)
    assert rates == pytest.approx([0.25, 0.5, 0.5, 0.25, 0.0])


def test_a_schedule_without_an_end_is_refused_when_the_backend_is_built() -> None:
    config = LrSchedulerConfig(type="cosine")
    adam = OptimizerConfig(learning_rate=PEAK)
    with pytest.raises(ConfigError, match=r"scheduler_cfg\.total_updates"):
        FSDPBackend(ToyBundle(), optimizer_cfg=adam, scheduler_cfg=config)
    assert FSDPBackend(ToyBundle(), 0, 10, optimizer_cfg=adam, scheduler_cfg=config).learning_rate() == PEAK


@pytest.mark.parametrize(
    "options", [{"warmup_updates": -1}, {"final_fraction": 1.5}, {"total_updates": 3, "warmup_updates": 3}]
)
def test_settings_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        LrSchedulerConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="learning_rate"):
        OptimizerConfig(learning_rate=0.0)
