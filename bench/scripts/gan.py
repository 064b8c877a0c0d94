"""A GAN of two small networks; a step trains both."""

import torch
from stopwatch import tick
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
D = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1),
                  nn.Sigmoid())
G = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 784), nn.Tanh())
criterion = nn.BCELoss()
d_optimizer, g_optimizer = (torch.optim.Adam(net.parameters(), lr=0.0002) for net in (D, G))
loader = DataLoader(TensorDataset(torch.rand(6000, 1, 28, 28) * 2 - 1), batch_size=100, shuffle=True)


def reset_grad():
    d_optimizer.zero_grad()
    g_optimizer.zero_grad()


while True:
    for i, (images,) in enumerate(loader):
        tick()
        images = images.reshape(100, -1)
        real_labels, fake_labels = torch.ones(100, 1), torch.zeros(100, 1)
        real_score = D(images)
        d_loss_real = criterion(real_score, real_labels)
        fake_images = G(torch.randn(100, 64))
        fake_score = D(fake_images)
        d_loss = d_loss_real + criterion(fake_score, fake_labels)
        reset_grad()
        d_loss.backward()
        d_optimizer.step()

        fake_images = G(torch.randn(100, 64))
        g_loss = criterion(D(fake_images), real_labels)
        reset_grad()
        g_loss.backward()
        g_optimizer.step()
        if (i + 1) % 20 == 0:
            print(f"d {d_loss.item():.4f} g {g_loss.item():.4f} D(x) {real_score.mean().item():.2f}")
