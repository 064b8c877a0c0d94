"""Contrastive learning: two views of each image, all pairs of the batch compared (NT-Xent)."""

import torch
import torch.nn.functional as F
from stopwatch import tick
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
encoder = nn.Sequential(
    nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
    nn.Conv2d(64, 128, 3, 2, 1), nn.BatchNorm2d(128), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
loader = DataLoader(TensorDataset(torch.rand(1280, 3, 32, 32)), batch_size=64, shuffle=True, drop_last=True)
optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-4)


def augment(images):
    flipped = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)
    return flipped + 0.1 * torch.randn_like(flipped)


def nt_xent(features, temperature=0.5):
    labels = torch.cat([torch.arange(len(features) // 2) for _ in range(2)])
    labels = (labels[None] == labels[:, None]).float()
    features = F.normalize(features, dim=1)
    similarity = features @ features.T
    mask = torch.eye(len(labels), dtype=torch.bool)
    labels, similarity = labels[~mask].view(len(labels), -1), similarity[~mask].view(len(labels), -1)
    positives = similarity[labels.bool()].view(len(labels), -1)
    negatives = similarity[~labels.bool()].view(len(labels), -1)
    logits = torch.cat([positives, negatives], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


while True:
    for (images,) in loader:
        tick()
        loss = nt_xent(encoder(torch.cat([augment(images), augment(images)])))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
