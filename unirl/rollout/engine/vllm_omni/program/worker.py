"""The part of the server that lives in the worker of vLLM-Omni: samples with a recorder, and holds the weights.

`worker_extension_cls` of vLLM-Omni names `SamplingWorker`, which it mixes into its own worker. `collective_rpc` calls
its methods. It is written against vllm-omni 0.30.0.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from unirl.distributed.weight_sync.fingerprint import Fingerprint, fingerprints
from unirl.models.denoising.packing import packed, unpacked
from unirl.rollout.engine.vllm_omni.program.trajectory import (
    Recording,
    RecordingScheduler,
    Schedule,
    seeded_draws,
)
from unirl.rollout.engine.vllm_omni.program.weights import BucketReader, HeldWeights
from unirl.types.device import synchronize

ORDER = "unirl_order"
"""The key of a request's body in `OmniDiffusionSamplingParams.extra_args`."""
ADAPTER_PREFIX = "base_model.model."
Order = Mapping[str, Any]


class SamplingWorker:
    """Methods that vLLM-Omni adds to its worker."""

    model_runner: Any
    lora_manager: Any
    device: torch.device

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and record its samples from then on."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        pipeline = self.model_runner.pipeline
        if pipeline is None:
            return
        networks = networks_of(pipeline)
        self.recorder = Recorder(pipeline, networks.values())
        self.reader = BucketReader(self.device)
        self.weights = HeldWeights(networks)
        self.adapter = MemoryAdapter(self.weights)
        pipeline._load_diffusion_lora_adapter = self.adapter.load

    # Weights

    def unirl_begin(self, name: str, adapter: Mapping[str, Any] | None) -> None:
        """Begin a transfer of weights under a name. Samples are refused until it has ended."""
        self.recorder.weights = None
        self.next_name = name
        self.adapter.begin(adapter)

    def unirl_open(self, handle: Mapping[str, Any]) -> None:
        self.reader.open_buffer(handle)

    def unirl_bucket(self, bucket: Mapping[str, Any], body: bytes) -> None:
        """Take over the tensors of a bucket. A shared buffer is free for the next one afterwards."""
        tensors = self.reader.tensors(bucket, body)
        if self.adapter.settings is not None:
            self.adapter.take(tensors)
        else:
            self.weights.load(tensors)
        synchronize(self.device)

    def unirl_end(self) -> Mapping[str, Fingerprint]:
        """Sample from the weights of the transfer from now on. Returns the fingerprints of `unirl_held`."""
        if self.adapter.settings is not None:
            self.adapter.activate(self.lora_manager)
        self.recorder.weights = self.next_name
        return self.unirl_held()

    def unirl_held(self) -> Mapping[str, Fingerprint]:
        """The fingerprint of every tensor of the last transfer, as the network has it now."""
        return self.adapter.fingerprints() if self.adapter.settings is not None else self.weights.fingerprints()

    def unirl_weights(self) -> str | None:
        """The name of the present weights. None: a transfer is under way."""
        return self.recorder.weights

    def unirl_adapter(self) -> Any:
        """The adapter that a request must name: vLLM-Omni switches adapters off for requests without one."""
        return self.adapter.request()


def networks_of(pipeline: Any) -> dict[str, nn.Module]:
    """The networks that denoise, by their names in the pipeline. The second expert of Wan is None in other models."""
    named = {name: getattr(pipeline, name) for name in pipeline._dit_modules}
    return {name: network for name, network in named.items() if network is not None}


class Recorder:
    """Wraps `pipeline.forward`: every batch is sampled by the steps of its requests, and recorded."""

    def __init__(self, pipeline: Any, networks: Iterable[nn.Module]) -> None:
        self.pipeline = pipeline
        self.plain = pipeline.forward
        self.plain_guidance = pipeline.predict_noise_maybe_with_cfg
        self.weights: str | None = ""
        """The name of the present weights; empty for those of the checkpoint. None: a transfer is under way."""
        self.scheduler: RecordingScheduler | None = None
        takes_output_type = "output_type" in inspect.signature(self.plain).parameters
        self.settings = {"output_type": "latent"} if takes_output_type else {}
        pipeline.forward = self.forward
        pipeline.predict_noise_maybe_with_cfg = self._guided
        for network in networks:
            network.register_forward_pre_hook(self._give_exact_timestep, with_kwargs=True)

    def forward(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the pipeline, with the trajectories of its requests. A warm-up has none."""
        orders = [params.extra_args.get(ORDER) for params in batch.sampling_params_list]
        if all(order is None for order in orders):
            return self.plain(batch, *args, **kwargs)
        if self.weights is None:
            raise RuntimeError("new weights are on their way: samples would be of neither the old nor the new ones")
        schedule = Schedule.of(orders[0])
        if any(Schedule.of(order) != schedule for order in orders[1:]):
            raise RuntimeError("requests with other steps share a batch: set rollout.max_num_seqs=1")
        shape, side = orders[0]["shape"], orders[0]["token_side"]
        draws = self._draws(orders)
        draws = draws if side is None else packed(draws, side)
        for params, row in zip(batch.sampling_params_list, draws, strict=True):
            params.latents = row[:1].to(self.pipeline.device)
        plain = self.pipeline.scheduler
        self.scheduler = RecordingScheduler(plain.config, schedule, draws, self.pipeline.device)
        self.pipeline.scheduler = self.scheduler
        try:
            outputs = self.plain(batch, *args, **self.settings, **kwargs)
            recording = self.scheduler.recording()
        finally:
            self.pipeline.scheduler, self.scheduler = plain, None
        rows = outputs if isinstance(outputs, list) else [outputs]
        if side is not None:
            recording = replace(recording, latents=unpacked(recording.latents, shape, side).contiguous())
        for row, output in enumerate(rows):
            self._attach(output, recording, row)
        return outputs

    def _draws(self, orders: Sequence[Order]) -> Tensor:
        count = 1 + len(Schedule.of(orders[0]).stochastic)
        return torch.stack([seeded_draws(order["seed"], order["shape"], count) for order in orders])

    def _attach(self, output: Any, recording: Recording, row: int) -> None:
        output.output = output.output[:0]  # the final latents are in the trajectory
        output.trajectory_latents = recording.latents[row]
        output.trajectory_log_probs = recording.logp[row]
        output.trajectory_timesteps = {
            "timesteps": recording.timesteps,
            "guidance_scales": recording.guidance_scales,
            "sigmas": recording.sigmas,
            "weights": self.weights,
        }

    def _guided(self, do_true_cfg: bool, true_cfg_scale: float, *args: Any, **kwargs: Any) -> Any:
        """The velocity with guidance, whose scale is recorded."""
        if self.scheduler is not None:
            self.scheduler.note_guidance(float(true_cfg_scale) if do_true_cfg else 1.0)
        return self.plain_guidance(do_true_cfg, true_cfg_scale, *args, **kwargs)

    def _give_exact_timestep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the timestep, which the pipeline rounds to the dtype of the network."""
        if self.scheduler is None:
            return None
        return args, kwargs | {"timestep": self.scheduler.exact_timestep(kwargs["timestep"])}


class MemoryAdapter:
    """An adapter whose tensors arrived in memory. vLLM-Omni reads adapters from files, and asks the pipeline first."""

    def __init__(self, weights: HeldWeights) -> None:
        self.weights = weights
        """It has the layers of the networks by the names of diffusers."""
        self.settings: Mapping[str, Any] | None = None
        """`r` and `lora_alpha`. None: the last transfer was of whole weights."""
        self.tensors: dict[str, Tensor] = {}
        self.number = 0
        self.held: dict[str, Tensor] = {}

    def begin(self, settings: Mapping[str, Any] | None) -> None:
        self.settings, self.tensors = settings, {}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def request(self) -> Any:
        """The adapter of a request. None: the network has no adapter."""
        if self.settings is None:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(lora_name=f"unirl-{self.number}", lora_int_id=self.number, lora_path="/in-memory")

    def activate(self, manager: Any) -> None:
        """Put the adapter in the place of the former one, and read it back. Raises RuntimeError for a lost layer."""
        former = self.number
        self.number += 1
        if former:
            manager.remove_adapter(former)
        manager.set_active_adapter(self.request(), 1.0)
        self.held = read_back(manager, self.weights, self.tensors, self.scale)

    @property
    def scale(self) -> float:
        assert self.settings is not None, "begin comes first"
        return float(self.settings["lora_alpha"]) / int(self.settings["r"])

    def load(self, lora_request: Any, lora_path: str, dtype: torch.dtype) -> Any:
        """What vLLM-Omni asks the pipeline for: the adapter and its settings. None leaves another one to files."""
        if self.settings is None or lora_request.lora_int_id != self.number:
            return None
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        named: dict[str, Tensor] = {}
        ends: set[str] = set()  # of the names of layers, by which vLLM-Omni finds them
        for name, tensor in self.tensors.items():
            layer, _, side = name.rpartition(".lora_")
            own = self.weights.unfused(layer)
            ends.add(".".join(own.split(".")[-2:]))
            named[f"{ADAPTER_PREFIX}{own}.lora_{side}"] = tensor.clone()
        helper = PEFTHelper.from_dict({**self.settings, "target_modules": sorted(ends)})
        model = LoRAModel.from_lora_tensors(self.number, named, helper, device="cpu", dtype=dtype)
        return model, helper

    def fingerprints(self) -> Mapping[str, Fingerprint]:
        return fingerprints(self.held.items())


def read_back(manager: Any, weights: HeldWeights, tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The tensors of the active adapter, by their names in the transfer, from the layers that compute with them.

    A layer stores A, and B times the scale, in the dtype of the network. If these are those of `tensors`, the tensors
    themselves are returned, else what is stored. Raises RuntimeError for a layer without an adapter.
    """
    held: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, side = name.removesuffix(".weight").rpartition(".")
        module, part = weights.layer(layer)
        if module not in manager._lora_modules:
            raise RuntimeError(f"no layer of vLLM-Omni has taken the adapter of {layer}")
        adapted = manager._lora_modules[module]
        stacked = adapted.lora_a_stacked if side == "lora_A" else adapted.lora_b_stacked
        stored = stacked[part][0, 0, : tensor.shape[0], : tensor.shape[1]].cpu()
        wanted = (tensor * scale if side == "lora_B" else tensor).to(stored.dtype)
        held[name] = tensor if torch.equal(stored, wanted) else stored
    return held
