"""Loops of other kinds for ranks to die in: gradients of gradients, batches changed in place, losses over pairs."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
x = torch.randn(96, 8)
y = (x[:, 0] > 0).long()


def mlp(inputs, outputs):
    """A small network."""
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def weight(*models):
    """One number that tells whether all weights are right."""
    return sum(p.double().abs().sum().item() for model in models for p in model.parameters())


def loader():
    return DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True)


def pairs():
    """Every sample against every other, a penalty on weights, accumulation, clipping."""
    model = mlp(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for number, (a, b) in enumerate(loader()):
        z = F.normalize(model((a - a.mean(0)) / a.std()), dim=1)
        loss = F.cross_entropy(z @ z.T / 0.5, torch.arange(len(a))) + F.cross_entropy(z, b)
        loss = loss + 0.001 * sum(p.square().sum() for p in model.parameters())
        (loss / 2).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    print(f"pairs {loss.item():.6f} {weight(model):.6f}")


def critics():
    """A critic with a gradient penalty against a generator: torch.autograd.grad within the loss."""
    critic, generator = mlp(8, 1), mlp(3, 8)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.05)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.05)
    for a, _ in loader():
        fake = generator(torch.randn(len(a), 3)).detach()
        mix = torch.rand(len(a), 1)
        between = (mix * a + (1 - mix) * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = critic(fake).mean() - critic(a).mean() + 10 * (slope.norm(2, 1) - 1).square().mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        loss = -critic(generator(torch.randn(len(a), 3))).mean()
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()
    print(f"critics {loss.item():.6f} {weight(critic, generator):.6f}")


def in_place():
    """Batches that are changed in place, and a metric over outputs that were kept."""
    model, kept = mlp(8, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for a, b in loader():
        a[:, 0] *= 2
        a[a > 1] = 0.5
        a.add_(0.1)
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for a, b in loader():
            kept.append((model(a).argmax(1) == b).float())
    print(f"in place {loss.item():.6f} {weight(model):.6f} {torch.cat(kept).mean().item():.4f}")


pairs()
critics()
in_place()
