"""UniRL from Python, cell by cell: open it in an editor that knows `# %%`, or run it with `python`.

Everything runs on a CPU in less than a minute: a toy model of the real classes stands in for Stable Diffusion 3.
"""

# %% [markdown]
# A recipe is an object. It is checked when it is made; no model is loaded for that.

# %%
import tempfile
from pathlib import Path

import torch

import unirl

folder = Path(tempfile.mkdtemp())
run = unirl.Run(
    "diffusion/sd3_trainside",
    scale="toy",  # the same classes, tiny sizes
    num_rollouts=3,
    **{"run.dir": folder / "run", "tracking.sample_steps": 1},
)
print(run.plan())

# %% [markdown]
# A wrong setting is answered at once, with the right one.

# %%
try:
    unirl.Run("diffusion/sd3_trainside", batch_siz=8)
except ValueError as error:
    print(error)

# %% [markdown]
# Train, and look at the result.

# %%
result = run.train()
for row in result.metrics:
    print(row["step"], row["rollout/reward_mean"], row["train/ratio_mean"])
best = max(result.samples, key=lambda sample: sample["reward"])
print(best["prompt"], best["reward"], best["file"])

# %% [markdown]
# The trained adapter, written for diffusers and peft, loaded there and compared with our own sampler.

# %%
for file in run.export():
    print(file.format, file.path, file.difference)

# %% [markdown]
# The pieces work by themselves, without a recipe. A kernel is one denoising step as a Gaussian:

# %%
from unirl.sde.kernels import FlowSDEStrategy  # noqa: E402

kernel = FlowSDEStrategy(eta=0.7)
x, velocity = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8)
step = kernel.transition(x, velocity, sigma=0.8, sigma_next=0.7)
x_next = step.sample(torch.randn_like(x))
print(step.mean.shape, float(step.std), step.log_prob(x_next))  # log-prob: mean over latent elements, nats

# %% [markdown]
# A loss is a frozen dataclass; its fields are the keys of a recipe's `algorithm` block. What it needs is declared:

# %%
from unirl.algorithms.diffusion_grpo import DiffusionGRPO  # noqa: E402

loss = DiffusionGRPO(clip_range=1e-4, kl_coef=0.01)
print(loss.needs.snapshots)  # the weight snapshots that it reads: ("reference",)

# %% [markdown]
# A reward maps a request to one total per sample, and named components:

# %%
from unirl.reward.local.image_statistics import BrightnessRewardScorer  # noqa: E402
from unirl.types.reward import RewardRequest  # noqa: E402

images = torch.stack([torch.zeros(3, 8, 8), torch.ones(3, 8, 8)])
print(BrightnessRewardScorer().score(RewardRequest(sample_ids=["dark", "bright"], images=images)).total)
