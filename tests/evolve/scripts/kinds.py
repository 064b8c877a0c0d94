"""Trainings with something besides one model and one optimizer; which one is the first argument."""
import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

kind = sys.argv[1]
torch.manual_seed(5)
draw = torch.Generator().manual_seed(1)
X = torch.randn(320, 12, generator=draw)
Y = (X[:, 0] * X[:, 1] > 0).long()


def net(inside=12, out=2):
    return nn.Sequential(nn.Linear(inside, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, out))


model = net()
if kind == "frozen":
    model[0].requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
if kind == "sgd":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
called = torch.compile(model) if kind == "compiled" else model
scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaled")
average = {name: p.detach().clone() for name, p in model.named_parameters()}  # ema
shadow = [p.detach().clone() for p in model.parameters()]
follower = copy.deepcopy(model).requires_grad_(False)  # state
critic = net(12, 1)
generator = net(6, 12)
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3)
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3)
seen = []
model[0].weight.register_hook(lambda grad: seen.append(tuple(grad.shape))) if kind == "hooked" else None
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=16, shuffle=True)

step = 0
for epoch in range(2):
    for x, y in loader:
        step += 1
        if kind == "gan":
            fake = generator(torch.randn(16, 6))
            wrong = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(x)).mean()
            of_critic.zero_grad()
            wrong.backward()
            of_critic.step()
            loss = F.softplus(-critic(fake)).mean()
            of_generator.zero_grad()
            loss.backward()
            of_generator.step()
            continue
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "scaled"):
            loss = F.cross_entropy(called(x).float(), y)
        scaler.scale(loss / (2 if kind == "accumulated" else 1)).backward()
        if kind == "accumulated" and step % 2:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if kind == "ema":
            with torch.no_grad():
                for name, p in model.named_parameters():
                    average[name].lerp_(p, 0.1)
                for mine, p in zip(shadow, model.parameters(), strict=True):
                    mine.mul_(0.9).add_(p, alpha=0.1)
        if kind == "state":  # writes into what state_dict gives
            with torch.no_grad():
                new = model.state_dict()
                for name, value in follower.state_dict().items():
                    value *= 0.9
                    value += 0.1 * new[name]
    print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
trained = [generator, critic] if kind == "gan" else [model]
print(sum(p.numel() for each in trained for p in each.parameters()), len(set(seen)))
with torch.no_grad():
    if kind == "ema":
        print(f"{sum(t.sum().item() for t in average.values()):.3f} {sum(t.square().sum().item() for t in shadow):.3f}")
    if kind == "state":
        print(f"{F.cross_entropy(follower(X), Y).item():.4f}")
    fresh = [net(6, 12), net(12, 1)] if kind == "gan" else [net()]
    for mine, other in zip(trained, fresh, strict=True):
        other.load_state_dict(mine.state_dict())
        x = torch.randn(8, next(mine.parameters()).shape[1])
        print(bool(torch.allclose(mine(x), other(x), atol=1e-5)))
