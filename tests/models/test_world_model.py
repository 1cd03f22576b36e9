"""A world model learns a video whose next latent frame is known in closed form."""

from __future__ import annotations

import torch

from unirl.models.denoising.vae import IMAGE
from unirl.models.wan22.family import Wan22Bundle, Wan22Pipeline
from unirl.models.world_model import ActionTokens, WorldModel
from unirl.sde.kernels import EulerODE
from unirl.sde.noise import NoiseSource
from unirl.types.conditions import LatentCondition
from unirl.types.sampling import DiffusionSamplingParams

STEPS, ROWS, CHUNK = 240, 32, 4


def test_a_trained_world_model_follows_actions_and_beats_the_first_frame_again() -> None:
    """The next latent frame is x_1 = x_0 + (sum of a_c) m with a fixed pattern m.

    Copying x_0 has the error E[(sum of a_c)^2] mean(m^2), and no model that reads no actions has a smaller one.
    """
    torch.manual_seed(0)
    bundle = Wan22Bundle(path="toy-world", dtype="fp32", components=("text_encoder", "vae"))
    settings = DiffusionSamplingParams(
        kernel=EulerODE(), num_inference_steps=4, height=8, width=8, max_sequence_length=6
    )
    tokens = ActionTokens.toy(1, CHUNK, 32).requires_grad_(True)
    world = WorldModel.of(Wan22Pipeline(bundle), tokens, settings)
    pattern = torch.randn(4, 1, 2, 2)
    text = world.pipeline.encode([""] * ROWS, world.sampling)

    def videos() -> tuple[torch.Tensor, torch.Tensor]:
        first, actions = torch.randn(ROWS, 4, 1, 2, 2), torch.rand(ROWS, CHUNK, 1) * 2 - 1
        return torch.cat([first, first + actions.sum(1)[:, :, None, None, None] * pattern], 2), actions

    def conditions(x0: torch.Tensor, actions: torch.Tensor) -> dict:
        return world.with_actions({**text, IMAGE: LatentCondition(latents=x0[:, :, :1])}, actions)

    network = bundle.trainable()
    optimizer = torch.optim.Adam([*network.parameters(), *tokens.parameters()], lr=5e-3)
    for _ in range(STEPS):
        x0, actions = videos()
        noise, sigma = torch.randn(x0.shape), torch.rand(ROWS)
        x = torch.lerp(x0, noise, sigma.view(-1, 1, 1, 1, 1))
        v = world.pipeline.stage.denoiser.velocity(x, sigma, conditions(x0, actions))
        loss = (v - (noise - x0))[:, :, 1:].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    x0, actions = videos()
    copied = (x0[:, :, 1] - x0[:, :, 0]).square().mean()
    errors = []
    for given in (actions, -actions):
        with torch.no_grad():
            final = world.pipeline.stage.sample(
                conditions(x0, given), torch.randn(x0.shape), world.sampling, NoiseSource(0, "eval", 0), ["x"] * ROWS
            ).final
        torch.testing.assert_close(final[:, :, 0], x0[:, :, 0], atol=1e-4, rtol=0)  # the first frame is given
        errors.append((final[:, :, 1] - x0[:, :, 1]).square().mean())
    assert errors[0] < 0.5 * copied < errors[1]
