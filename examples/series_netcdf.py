"""Tomorrow's temperature at some stations, from the last two weeks: a GRU on a time series in a NetCDF file.

Without ``--data`` the file is made: a year's wave, weather that moves from station to station, and noise.
"""

import argparse
from pathlib import Path

import netCDF4
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", type=Path, default=Path("stations.nc"), help="a NetCDF file: temperature(time, station)")
parser.add_argument("--days", type=int, default=2400, help="how many are made, if there are none")
parser.add_argument("--stations", type=int, default=8)
parser.add_argument("--look-back", type=int, default=14)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"


def make(path):
    """Daily temperatures; a station has today what its neighbour had yesterday, more or less."""
    rng = np.random.default_rng(args.seed)
    weather, values = np.zeros(args.stations), np.empty((args.days, args.stations), np.float32)
    for day in range(args.days):
        weather = 0.8 * np.roll(weather, 1) + rng.normal(0, 1.5, args.stations) * (np.arange(args.stations) < 2)
        values[day] = 10 - 12 * np.cos(2 * np.pi * day / 365.25) + weather + rng.normal(0, 0.3, args.stations)
    with netCDF4.Dataset(path, "w") as file:
        file.createDimension("time", None)
        file.createDimension("station", args.stations)
        time = file.createVariable("time", "i4", ("time",))
        time.units, time[:] = "days since 2015-01-01", np.arange(args.days)
        temperature = file.createVariable("temperature", "f4", ("time", "station"), zlib=True)
        temperature.units, temperature[:] = "degrees Celsius", values


class Windows(Dataset):
    """Some days, and the day after them."""

    def __init__(self, path):
        with netCDF4.Dataset(path) as file:
            values = np.ma.filled(file["temperature"][:], np.nan)
        self.mean, self.std = float(np.nanmean(values)), float(np.nanstd(values))
        self.values = torch.from_numpy((values - self.mean) / self.std).nan_to_num()

    def __len__(self):
        return len(self.values) - args.look_back

    def __getitem__(self, i):
        return self.values[i : i + args.look_back], self.values[i + args.look_back]


class Forecast(nn.Module):
    """What changes from the last day to the next one."""

    def __init__(self, stations):
        super().__init__()
        self.memory = nn.GRU(stations, args.width, batch_first=True)
        self.out = nn.Linear(args.width, stations)

    def forward(self, days):
        states, _ = self.memory(days)
        return days[:, -1] + self.out(states[:, -1])


if not args.data.exists():
    make(args.data)
windows = Windows(args.data)
parted = int(0.8 * len(windows))  # the past is for learning, what comes later for the test
train = DataLoader(Subset(windows, range(parted)), args.batch_size, shuffle=True)
test = DataLoader(Subset(windows, range(parted + args.look_back, len(windows))), 256)
model = Forecast(windows.values.shape[1]).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

for epoch in range(args.epochs):
    model.train()
    for days, after in train:
        loss = F.huber_loss(model(days.to(device)), after.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    schedule.step()
    model.eval()
    wrong = same = count = 0.0
    with torch.no_grad():
        for days, after in test:
            days, after = days.to(device), after.to(device)
            wrong += (model(days) - after).abs().sum().item()
            same += (days[:, -1] - after).abs().sum().item()
            count += after.numel()
    print(f"epoch {epoch} loss {loss.item():.5f}: {wrong / count * windows.std:.3f} degrees off, "
          f"{same / count * windows.std:.3f} if tomorrow is like today")
