"""Serves a diffusion model with vLLM-Omni: python -m unirl.rollout.engine.vllm_omni.program.serve --help.

It runs in the environment of vLLM-Omni, whose own HTTP server returns neither latents nor log-probs and takes no
weights. It is written against vllm-omni 0.30.0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from unirl.distributed.weight_sync.fingerprint import Fingerprint
from unirl.rollout.engine.vllm_omni.program.listener import wire_server
from unirl.rollout.engine.vllm_omni.program.wire import Body, Wire
from unirl.rollout.engine.vllm_omni.program.worker import ORDER

EXTENSION = "unirl.rollout.engine.vllm_omni.program.worker.SamplingWorker"
ResultT = TypeVar("ResultT")


class OmniBackend:
    """A `DiffusionEngine` of vLLM-Omni with one worker."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """
        Args:
            settings: fields of `OmniDiffusionConfig`.
        """
        from vllm_omni.diffusion.data import OmniDiffusionConfig
        from vllm_omni.diffusion.diffusion_engine import DiffusionEngine

        self.config = OmniDiffusionConfig.from_kwargs(worker_extension_cls=EXTENSION, num_gpus=1, **settings)
        self.config.enrich_config()
        self.engine = DiffusionEngine.make_engine(self.config)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="requests", daemon=True).start()

    def _wait(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The result of a coroutine of the engine, which runs in the thread of its event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def _call(self, method: str, *args: object) -> Any:
        return self._wait(self.engine.async_collective_rpc(method, args=args, unique_reply_rank=0))

    def info(self) -> Body:
        from vllm_omni import __version__

        config = self.config
        return {
            "engine": "vllm-omni",
            "version": __version__,
            "pipeline": config.model_class_name,
            "model": str(config.model),
            "dtype": str(config.dtype).removeprefix("torch."),
            "can_sleep": bool(config.enable_sleep_mode),
        }

    # Samples

    def sample(self, order: Body) -> tuple[dict[str, Tensor], dict[str, str]]:
        output = self._wait(self._last_output(request_of(order, self._call("unirl_adapter"))))
        if output.error or output.aborted:
            raise RuntimeError(output.error or output.abort_message or "the request was aborted")
        facts = output.trajectory_timesteps
        tensors = {
            "latents": output.trajectory_latents,
            "logp": output.trajectory_log_probs,
            **{name: facts[name] for name in ("timesteps", "guidance_scales", "sigmas")},
        }
        return tensors, {"id": order["id"], "prompt": order["prompt"], "weights": facts["weights"]}

    async def _last_output(self, request: Any) -> Any:
        """The output of a request. The first call of `_call` has started the engine's own loop."""
        outputs = [output async for output in self.engine.async_add_req_and_stream_response(request)]
        return outputs[-1]

    # Weights

    def begin(self, name: str, adapter: Mapping[str, Any] | None) -> None:
        self._call("unirl_begin", name, adapter)

    def open_buffer(self, handle: Mapping[str, Any]) -> None:
        self._call("unirl_open", handle)

    def bucket(self, bucket: Mapping[str, Any], body: memoryview) -> None:
        self._call("unirl_bucket", bucket, bytes(body))

    def end(self) -> Mapping[str, Fingerprint]:
        return self._call("unirl_end")

    def held(self) -> Mapping[str, Fingerprint]:
        return self._call("unirl_held")

    def weights(self) -> str | None:
        return self._call("unirl_weights")

    # Sleep

    def sleep(self) -> None:
        self._acknowledged("handle_sleep_task", {"task_id": "sleep", "level": 1})

    def wake_up(self) -> None:
        self._acknowledged("handle_wake_task", {"task_id": "wake", "tags": None})

    def _acknowledged(self, method: str, task: Mapping[str, object]) -> None:
        ack = self._call(method, task)
        if ack is None or ack.status != "SUCCESS":
            raise RuntimeError(f"{method} failed: {ack and ack.error_msg}")


def request_of(order: Body, adapter: Any) -> Any:
    """The request of vLLM-Omni for the body of /sample.

    Args:
        adapter: its LoRARequest. vLLM-Omni switches adapters off for a request without one.
    """
    from vllm_omni.diffusion.request import OmniDiffusionRequest
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    params = OmniDiffusionSamplingParams(
        height=order["height"],
        width=order["width"],
        num_frames=order["num_frames"],
        num_inference_steps=len(order["steps"]),
        sigmas=list(order["sigmas"][:-1]),
        guidance_scale=order["guidance_scale"],
        guidance_scale_2=order["guidance_scale_2"],
        true_cfg_scale=order["guidance_scale"],  # the name of the scale for Qwen-Image
        max_sequence_length=order["max_sequence_length"],
        seed=order["seed"],
        output_type="latent",
        extra_args={ORDER: order},
        lora_request=adapter,
    )
    # Only requests with the same steps may share a batch.
    key = json.dumps([order["steps"], order["positions"], order["trajectory_dtype"]])
    return OmniDiffusionRequest(
        prompt={"prompt": order["prompt"], "negative_prompt": order["negative_prompt"]},
        sampling_params=params,
        request_id=f"{order['id']}-{uuid.uuid4().hex}",  # it may be repeated while the first one still runs
        batch_compatibility_key=(key,),
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="vLLM-Omni for UniRL", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="the port of 127.0.0.1")
    parser.add_argument("--settings", type=json.loads, required=True, help="fields of OmniDiffusionConfig, as JSON")
    options = parser.parse_args(words)
    server = wire_server(options.port, Wire(OmniBackend(options.settings)).routes())
    print(server.url, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
