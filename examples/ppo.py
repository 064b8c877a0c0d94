"""PPO: a pole on a cart learns to stay upright. All carts move at once, in NumPy: no gymnasium is needed.

Every rank plays all the games, which is cheap, with the same random numbers; learning from them is split.
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--rounds", type=int, default=10, help="how often it plays and learns")
parser.add_argument("--carts", type=int, default=16)
parser.add_argument("--steps", type=int, default=128, help="of each cart in a round")
parser.add_argument("--epochs", type=int, default=4, help="how often it learns from a round")
parser.add_argument("--batch-size", type=int, default=512)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


class Carts:
    """The equations of Barto, Sutton and Anderson (1983), for many carts; one that falls begins again."""

    def __init__(self, count, seed):
        self.rng = np.random.default_rng(seed)
        self.state, self.age = self.rng.uniform(-0.05, 0.05, (count, 4)), np.zeros(count, int)

    def step(self, right):
        x, speed, angle, turning = self.state.T
        force, sin, cos = np.where(right, 10.0, -10.0), np.sin(angle), np.cos(angle)
        push = (force + 0.05 * turning**2 * sin) / 1.1
        falls = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        gains = push - 0.05 * falls * cos / 1.1
        self.state = self.state + 0.02 * np.stack([speed, gains, turning, falls], 1)
        self.age += 1
        done = (abs(self.state[:, 0]) > 2.4) | (abs(self.state[:, 2]) > 0.2095) | (self.age >= 500)
        ages = self.age[done]
        self.state[done] = self.rng.uniform(-0.05, 0.05, (done.sum(), 4))
        self.age[done] = 0
        return done, ages


class Player(nn.Module):
    """What to do, and how good things look."""

    def __init__(self):
        super().__init__()
        w = args.width
        self.policy = nn.Sequential(nn.Linear(4, w), nn.Tanh(), nn.Linear(w, w), nn.Tanh(), nn.Linear(w, 2))
        self.value = nn.Sequential(nn.Linear(4, w), nn.Tanh(), nn.Linear(w, w), nn.Tanh(), nn.Linear(w, 1))

    def forward(self, state):
        return self.policy(state), self.value(state).squeeze(1)


def as_tensor(array):
    return torch.as_tensor(np.asarray(array), dtype=torch.float32, device=device)


carts, player = Carts(args.carts, args.seed), Player().to(device)
optimizer = torch.optim.Adam(player.parameters(), lr=1e-3)
for number in range(args.rounds):
    states, actions, dones, ages = [], [], [], []
    with torch.no_grad():
        for _ in range(args.steps):  # play
            states.append(as_tensor(carts.state))
            actions.append(Categorical(logits=player.policy(states[-1])).sample())
            done, ended = carts.step(actions[-1].cpu().numpy() == 1)
            dones.append(as_tensor(done))
            ages += ended.tolist()
        seen, chosen = torch.cat(states), torch.cat(actions)
        logits, values = player(seen)
        before = Categorical(logits=logits).log_prob(chosen)
        values = values.reshape(args.steps, args.carts)
        after, gain, gains = player.value(as_tensor(carts.state)).squeeze(1), 0.0, []
        for t in reversed(range(args.steps)):  # how much better than expected: GAE
            alive = 1 - dones[t]
            gain = 1 + GAMMA * after * alive - values[t] + GAMMA * LAMBDA * alive * gain
            after = values[t]
            gains.insert(0, gain)
        advantage, target = torch.cat(gains), (torch.stack(gains) + values).flatten()

    for _ in range(args.epochs):  # learn
        for rows in torch.randperm(len(seen), device=device).split(args.batch_size):
            logits, value = player(seen[rows])
            choice = Categorical(logits=logits)
            ratio = (choice.log_prob(chosen[rows]) - before[rows]).exp()
            part = (advantage[rows] - advantage[rows].mean()) / (advantage[rows].std() + 1e-8)
            surrogate = torch.min(ratio * part, ratio.clamp(1 - CLIP, 1 + CLIP) * part)
            loss = -surrogate.mean() + 0.5 * (value - target[rows]).pow(2).mean() - 0.01 * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(player.parameters(), 0.5)
            optimizer.step()
    print(f"round {number} loss {loss.item():.4f}, {len(ages)} poles fell after {np.mean(ages or [0]):.1f} steps")
