"""Two networks against each other: one draws digits out of noise, the other tells them from the real ones."""

import argparse

import digits
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=2e-4)
parser.add_argument("--noise", type=int, default=32, help="how many random numbers an image is drawn from")
parser.add_argument("--data", help="folder with MNIST's IDX files; without it digits are drawn")
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(args.seed)

real_x = torch.from_numpy(digits.load(args.data, 3000, 1, args.seed)[0])
loader = DataLoader(TensorDataset(real_x), batch_size=args.batch_size, shuffle=True)

generator = nn.Sequential(
    nn.Linear(args.noise, 128),
    nn.LeakyReLU(0.2),
    nn.Linear(128, 256),
    nn.LeakyReLU(0.2),
    nn.Linear(256, 28 * 28),
    nn.Sigmoid(),
)
critic = nn.Sequential(
    nn.Linear(28 * 28, 256), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(256, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
optimizer_c = torch.optim.Adam(critic.parameters(), lr=args.lr, betas=(0.5, 0.999))

step = 0
for _ in range(args.epochs):
    for (real,) in loader:
        n = len(real)
        fake = generator(torch.randn(n, args.noise))

        # The critic learns to say 1 to real images and 0 to drawn ones. No gradient goes back into the generator.
        optimizer_c.zero_grad()
        loss_c = F.binary_cross_entropy_with_logits(critic(real.flatten(1)), torch.ones(n, 1))
        loss_c = loss_c + F.binary_cross_entropy_with_logits(critic(fake.detach()), torch.zeros(n, 1))
        loss_c.backward()
        optimizer_c.step()

        # The generator learns to be told 1.
        optimizer_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(critic(fake), torch.ones(n, 1))
        loss_g.backward()
        optimizer_g.step()

        step += 1
        if step % 20 == 0:
            print(f"step {step} critic {loss_c.item():.6f} generator {loss_g.item():.6f}")

critic.eval()
with torch.no_grad():
    fake = generator(torch.randn(500, args.noise))
    told = (critic(real_x[:500].flatten(1)) > 0).float().mean() + (critic(fake) < 0).float().mean()
print(f"accuracy of the critic {50 * told.item():.1f} %")
