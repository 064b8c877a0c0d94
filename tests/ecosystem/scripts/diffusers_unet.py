"""diffusers: a small UNet learns to take noise away; then it draws."""

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from torch.utils.data import DataLoader

torch.manual_seed(0)
images = torch.rand(24, 1, 8, 8) * 2 - 1
model = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(16, 32),
                    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
                    norm_num_groups=4)
noises = DDPMScheduler(num_train_timesteps=50)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(images, batch_size=8, shuffle=True)
schedule = get_cosine_schedule_with_warmup(optimizer, 1, 2 * len(loader))
for _ in range(2):
    for clean in loader:
        noise = torch.randn_like(clean)
        steps = torch.randint(0, 50, (clean.shape[0],), dtype=torch.int64)
        loss = F.mse_loss(model(noises.add_noise(clean, noise, steps), steps, return_dict=False)[0], noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")
model.eval()
noises.set_timesteps(5)
drawn = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    for step in noises.timesteps:
        drawn = noises.step(model(drawn, step).sample, step, drawn,
                            generator=torch.Generator().manual_seed(2)).prev_sample
print(f"drawn {drawn.mean().item():.4f} {drawn.std().item():.4f}")
torch.save(model.state_dict(), "model.pt")
