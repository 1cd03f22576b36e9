"""The program for vLLM-Omni without its packages: a recorded pipeline, and weights read back from fused layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from unirl.distributed.weight_sync.fingerprint import fingerprint
from unirl.rollout.engine.vllm_omni.messages import entries
from unirl.rollout.engine.vllm_omni.program.trajectory import seeded_draws
from unirl.rollout.engine.vllm_omni.program.weights import BucketReader, HeldWeights
from unirl.rollout.engine.vllm_omni.program.wire import bucket_head, bucket_parts
from unirl.rollout.engine.vllm_omni.program.worker import ORDER, Recorder, read_back
from unirl.rollout.engine.vllm_omni.transports import parts

CPU = torch.device("cpu")


class Fused(nn.Module):
    """A network that joins q, k and v, and forgets one tensor if it is told to."""

    def __init__(self, forgets: str = "") -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(3, 8), nn.Linear(3, 2)  # q, k and v have 4, 2 and 2 rows
        self.forgets = forgets

    def load_weights(self, weights):
        starts = {"to_q": 0, "to_k": 4, "to_v": 6}
        for name, tensor in weights:
            layer, leaf = name.replace(".0.", ".").removeprefix("attn.").split(".")
            if name == self.forgets:
                continue
            if layer in starts:
                self.attn.to_qkv.get_parameter(leaf)[starts[layer] : starts[layer] + len(tensor)] = tensor
            else:
                self.attn.to_out.get_parameter(leaf).copy_(tensor)


def network(forgets: str = "") -> nn.Module:
    """The layers in a module `attn`, so that their names have a dot."""
    inner, outer = Fused(forgets), nn.Module()
    outer.attn = inner
    outer.load_weights = lambda weights: Fused.load_weights(SimpleNamespace(attn=inner, forgets=forgets), weights)
    return outer


def tensors() -> dict[str, torch.Tensor]:
    shapes = {"attn.to_q.weight": (4, 3), "attn.to_k.weight": (2, 3), "attn.to_v.weight": (2, 3)}
    shapes |= {"attn.to_v.bias": (2,), "attn.to_q.bias": (4,), "attn.to_k.bias": (2,), "attn.to_out.0.weight": (2, 3)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def held_by(*networks: nn.Module) -> HeldWeights:
    """The weights of a pipeline with one network, or with two experts."""
    return HeldWeights(dict(zip(("transformer", "transformer_2"), networks, strict=False)))


def test_tensors_are_read_back_from_the_rows_of_fused_layers() -> None:
    weights, sent = held_by(network()), tensors()
    weights.load(sent)
    assert weights.fingerprints() == {name: fingerprint(tensor) for name, tensor in sent.items()}


def test_a_tensor_that_the_network_drops_has_another_fingerprint() -> None:
    weights, sent = held_by(network("attn.to_k.weight")), tensors()
    weights.load(sent)
    held = weights.fingerprints()
    assert [name for name in sent if held[name] != fingerprint(sent[name])] == ["attn.to_k.weight"]


def test_each_of_two_experts_gets_its_own_tensors() -> None:
    first, second = tensors(), {name: 2.0 * tensor for name, tensor in tensors().items()}
    sent = {f"transformer.{name}": each for name, each in first.items()}
    sent |= {f"transformer_2.{name}": each for name, each in second.items()}
    experts = network(), network()
    weights = held_by(*experts)
    weights.load(sent)
    assert weights.fingerprints() == {name: fingerprint(tensor) for name, tensor in sent.items()}
    assert torch.equal(experts[1].attn.to_out.weight, second["attn.to_out.0.weight"])


def test_a_name_that_the_network_does_not_have_is_refused() -> None:
    with pytest.raises(KeyError, match=r"has no parameter for attn\.to_x\.weight"):
        held_by(network()).load({"attn.to_x.weight": torch.zeros(2, 3)})


def test_a_bucket_in_a_body_has_the_tensors_that_were_packed() -> None:
    sent = {"a": torch.arange(3.0), "b": torch.full((2, 2), 0.5, dtype=torch.bfloat16)}
    places, size = entries(sent, 16)
    body = b"".join([bucket_head({"by": "body", "entries": places}), *parts(sent)])
    header, content = bucket_parts(memoryview(body))
    assert len(content) == size and (len(body) - size) % 16 == 0
    arrived = BucketReader(CPU).tensors(header, content)
    assert {name: each.tolist() for name, each in arrived.items()} == {k: v.tolist() for k, v in sent.items()}
    with pytest.raises(ValueError, match="b ends at byte"):
        BucketReader(CPU).tensors(header, content[:20])


class Pipeline(nn.Module):
    """A pipeline as those of vLLM-Omni: it rounds x and the timestep to bfloat16, and steps with its scheduler."""

    device = CPU

    def __init__(self, scale: float = 1.0) -> None:
        """
        Args:
            scale: the timestep of the network over that of the scheduler.
        """
        super().__init__()
        self.scale = scale
        self.transformer = nn.Identity()
        self.transformer.forward = self.velocity
        self.scheduler = SimpleNamespace(config={"use_dynamic_shifting": False})
        self.given: list[float] = []

    def predict_noise_maybe_with_cfg(self, do_true_cfg, true_cfg_scale, inputs):
        return self.transformer(**inputs)

    def velocity(self, hidden_states, timestep):
        self.given.append(float(timestep[0]))
        return 0.5 * hidden_states

    def forward(self, batch):
        rows = torch.cat([params.latents for params in batch.sampling_params_list]).to(torch.bfloat16)
        self.scheduler.set_timesteps(sigmas=[1.0, 0.7], device=CPU)
        for t in self.scheduler.timesteps:
            inputs = {"hidden_states": rows, "timestep": t.expand(len(rows)).to(torch.bfloat16) * self.scale}
            rows = self.scheduler.step(self.predict_noise_maybe_with_cfg(True, 4.0, inputs), t, rows)[0]
        return [SimpleNamespace(output=row[None]) for row in rows]


def recorded(pipeline: Pipeline) -> Recorder:
    return Recorder(pipeline, [pipeline.transformer])


def batch_of(*seeds: int, **changes: object) -> SimpleNamespace:
    order = {"shape": [2, 2], "sigmas": [1.0, 0.701, 0.0], "positions": [0, 1, 2], "trajectory_dtype": "float32"}
    order |= {"steps": [[0.9, -0.3, 0.2], [1.0, -0.7, 0.0]], "token_side": None, "timestep_scale": 1000.0}
    params = [SimpleNamespace(extra_args={ORDER: order | {"seed": seed} | changes}, latents=None) for seed in seeds]
    return SimpleNamespace(sampling_params_list=params)


def test_a_pipeline_is_recorded_with_exact_latents_and_timesteps() -> None:
    """The pipeline rounds x, and the timestep 701 to 700, to bfloat16."""
    pipeline = Pipeline()
    plain, recorder = pipeline.scheduler, recorded(pipeline)
    recorder.weights = "w"
    outputs = pipeline.forward(batch_of(1, 2))
    for seed, output in zip((1, 2), outputs, strict=True):
        x0, noise = seeded_draws(seed, (2, 2), 2)
        x1 = 0.9 * x0 - 0.3 * (0.5 * x0.bfloat16()).float() + 0.2 * noise
        x2 = x1 - 0.7 * (0.5 * x1.bfloat16()).float()
        assert torch.allclose(output.trajectory_latents, torch.stack([x0, x1, x2]), atol=1e-6)
        assert output.trajectory_timesteps["weights"] == "w"
        assert output.trajectory_timesteps["guidance_scales"].tolist() == [4.0, 4.0]
    assert pipeline.given == pytest.approx([1000.0, 701.0], abs=1e-3) and pipeline.scheduler is plain


def test_tokens_are_sampled_from_the_noise_of_their_latents() -> None:
    """The pipeline reads [4, 4] tokens of latents [1, 4, 4], and its network sigma in place of 1000 sigma."""
    pipeline = Pipeline(scale=1e-3)
    recorded(pipeline).weights = "w"
    changes = {"shape": [1, 4, 4], "token_side": 2, "timestep_scale": 1.0, "steps": [[1.0, -0.5, 0.0], [1.0, 0.0, 0.1]]}
    [output] = pipeline.forward(batch_of(3, **changes))
    x0, noise = seeded_draws(3, (1, 4, 4), 2)
    x1 = x0 - 0.5 * (0.5 * x0.bfloat16()).float()
    assert torch.allclose(output.trajectory_latents, torch.stack([x0, x1, x1 + 0.1 * noise]), atol=1e-6)
    assert pipeline.given == pytest.approx([1.0, 0.701], abs=1e-6)
    assert output.trajectory_timesteps["timesteps"].tolist() == pytest.approx([1000.0, 701.0], abs=1e-3)


def test_requests_with_other_steps_may_not_share_a_batch() -> None:
    pipeline = Pipeline()
    recorded(pipeline)
    batch = batch_of(1, 2)
    batch.sampling_params_list[1].extra_args[ORDER]["steps"] = [[1.0, -0.3, 0.0], [1.0, -0.7, 0.0]]
    with pytest.raises(RuntimeError, match="requests with other steps share a batch"):
        pipeline.forward(batch)


def test_samples_are_refused_while_weights_are_on_their_way() -> None:
    pipeline = Pipeline()
    recorded(pipeline).weights = None
    with pytest.raises(RuntimeError, match="of neither the old nor the new ones"):
        pipeline.forward(batch_of(1))


def test_an_adapter_is_read_back_from_the_layers_that_compute_with_it() -> None:
    """q is a part of a fused layer that stores B times 2; k was lost, and the layer of o does not exist."""
    a, b = torch.ones(2, 3), torch.full((4, 2), 0.25)
    zeros = torch.zeros(1, 1, 8, 8)
    stored_a, stored_b = zeros.clone(), zeros.clone()
    stored_a[0, 0, :2, :3], stored_b[0, 0, :4, :2] = a, 2 * b
    layer = SimpleNamespace(lora_a_stacked=(stored_a, zeros, zeros), lora_b_stacked=(stored_b, zeros, zeros))
    manager = SimpleNamespace(_lora_modules={"transformer.attn.to_qkv": layer})
    weights = held_by(network())
    sent = {f"attn.{name}.lora_{side}.weight": each for name in ("to_q", "to_k") for side, each in (("A", a), ("B", b))}
    held = read_back(manager, weights, sent, 2.0)
    assert [name for name in sent if not torch.equal(held[name], sent[name])] == [
        "attn.to_k.lora_A.weight",
        "attn.to_k.lora_B.weight",
    ]
    with pytest.raises(RuntimeError, match=r"no layer of vLLM-Omni has taken the adapter of attn\.to_out\.0"):
        read_back(manager, weights, {"attn.to_out.0.lora_A.weight": a}, 2.0)
