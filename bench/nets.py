"""The networks the bench trains, with the input each takes. Plain PyTorch; used by both trainings alike."""

import torch
import torch.nn.functional as F
from torch import nn


class CNN(nn.Module):
    """The lab's: two 5 × 5 layers of 32 and 64 channels with pooling, a dense one of 1024. 3.3 million parameters."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 5, padding=2), nn.Conv2d(32, 64, 5, padding=2)
        self.dense, self.out = nn.Linear(7 * 7 * 64, 1024), nn.Linear(1024, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.out(F.relu(self.dense(x.flatten(1))))


class MLP400(nn.Module):
    """200 linear layers of width 24, so 400 small parameters: what is slow here is the handling, not the numbers."""

    def __init__(self, width=24):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(199))
        self.out = nn.Linear(width, 10)

    def forward(self, x):
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return self.out(x)


class Basic(nn.Module):
    """A residual block: two 3 × 3 convolutions and a way around them."""

    def __init__(self, a, b, stride):
        super().__init__()
        self.one, self.two = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.Conv2d(b, b, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(b), nn.BatchNorm2d(b)
        self.way = nn.Identity()
        if stride != 1 or a != b:
            self.way = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x):
        return F.relu(self.norm2(self.two(F.relu(self.norm1(self.one(x))))) + self.way(x))


class Bottleneck(nn.Module):
    """A residual block of the larger networks: narrow, look, widen."""

    def __init__(self, a, b, stride):
        super().__init__()
        mid = b // 4
        self.one, self.two = nn.Conv2d(a, mid, 1, bias=False), nn.Conv2d(mid, mid, 3, stride, 1, bias=False)
        self.three = nn.Conv2d(mid, b, 1, bias=False)
        self.norm1, self.norm2, self.norm3 = nn.BatchNorm2d(mid), nn.BatchNorm2d(mid), nn.BatchNorm2d(b)
        self.way = nn.Identity()
        if stride != 1 or a != b:
            self.way = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x):
        y = F.relu(self.norm1(self.one(x)))
        y = F.relu(self.norm2(self.two(y)))
        return F.relu(self.norm3(self.three(y)) + self.way(x))


def resnet(block, widths, depths, classes, stem):
    """Four stages of residual blocks, each half as wide an image as the one before."""
    layers, a = list(stem), stem[0].out_channels
    for stage, (b, depth) in enumerate(zip(widths, depths, strict=True)):
        for i in range(depth):
            layers.append(block(a, b, 2 if stage and i == 0 else 1))
            a = b
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(a, classes))


def resnet18():
    """ResNet-18 for 32 × 32 images: 11.2 million parameters."""
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return resnet(Basic, (64, 128, 256, 512), (2, 2, 2, 2), 10, stem)


def resnet50():
    """ResNet-50 for 224 × 224 images: 25.6 million parameters."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return resnet(Bottleneck, (256, 512, 1024, 2048), (3, 4, 6, 3), 1000, stem)


def inception_v3():
    """torchvision's, where torchvision can be imported: 27.2 million parameters."""
    from torchvision.models import inception_v3 as make

    return make(weights=None, aux_logits=False, init_weights=False)


# name: how to make it, the shape of one sample, how many classes
NETS = {
    "cnn": (CNN, (1, 28, 28), 10),
    "mlp400": (MLP400, (24,), 10),
    "resnet18": (resnet18, (3, 32, 32), 10),
    "resnet50": (resnet50, (3, 224, 224), 1000),
    "inception": (inception_v3, (3, 299, 299), 1000),
}


def data(net, count, seed=0):
    """count random samples with random classes, in memory."""
    _, shape, classes = NETS[net]
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, *shape, generator=g), torch.randint(classes, (count,), generator=g)
