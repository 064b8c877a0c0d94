"""A U-Net that finds the foreground of images of 64 x 64."""

import torch
import torch.nn.functional as F
from stopwatch import tick
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def double_conv(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.down3 = double_conv(3, 16), double_conv(16, 32), double_conv(32, 64)
        self.up1, self.conv1 = nn.ConvTranspose2d(64, 32, 2, stride=2), double_conv(64, 32)
        self.up2, self.conv2 = nn.ConvTranspose2d(32, 16, 2, stride=2), double_conv(32, 16)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        x1 = self.down1(x)
        x2 = self.down2(F.max_pool2d(x1, 2))
        x3 = self.down3(F.max_pool2d(x2, 2))
        x = self.conv1(torch.cat([x2, self.up1(x3)], dim=1))
        return self.out(self.conv2(torch.cat([x1, self.up2(x)], dim=1)))


def dice_loss(input, target, epsilon=1e-6):
    input, target = input.sigmoid().flatten(1), target.flatten(1)
    inter = 2 * (input * target).sum(1)
    return 1 - ((inter + epsilon) / (input.sum(1) + target.sum(1) + epsilon)).mean()


torch.manual_seed(0)
images = torch.rand(160, 3, 64, 64)
loader = DataLoader(TensorDataset(images, (images.mean(1) > 0.5).float()), batch_size=8, shuffle=True)
model = UNet()
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.9)

while True:
    for images, true_masks in loader:
        tick()
        masks_pred = model(images).squeeze(1)
        loss = criterion(masks_pred, true_masks) + dice_loss(masks_pred, true_masks)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
