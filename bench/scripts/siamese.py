"""A Siamese network: two images go through one ResNet-18, and a small head tells whether they show the same digit.
The batch is 16."""

import torch
from stopwatch import tick
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside))
        self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)) if (
            stride > 1) else nn.Identity()

    def forward(self, x):
        return torch.relu(self.main(x) + self.short(x))


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(1, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
                  nn.MaxPool2d(3, 2, 1)]
        for inside, outside in ((64, 64), (64, 128), (128, 256), (256, 512)):
            layers += [Block(inside, outside, 1 + (inside != outside)), Block(outside, outside, 1)]
        self.resnet = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        self.fc = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(inplace=True), nn.Linear(256, 1))

    def forward_once(self, x):
        output = self.resnet(x)
        return output.view(output.size()[0], -1)

    def forward(self, input1, input2):
        return torch.sigmoid(self.fc(torch.cat((self.forward_once(input1), self.forward_once(input2)), 1)))


torch.manual_seed(1)
data = TensorDataset(torch.rand(640, 1, 28, 28), torch.rand(640, 1, 28, 28), torch.randint(0, 2, (640,)).float())
loader = DataLoader(data, batch_size=16, shuffle=True)
model = SiameseNetwork()
criterion = nn.BCELoss()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)

while True:
    for images_1, images_2, targets in loader:
        tick()
        optimizer.zero_grad()
        outputs = model(images_1, images_2).squeeze()
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
