"""Never slower: where steps are too short to share, every rank does all of the work, and the training is the same."""

import signal

import pytest
import torch
from running import Run, python, wait_for

SCENES = """
import os, signal, sys, time
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
images, labels = torch.randn(240, 12), torch.randint(0, 4, (240,))
held = DataLoader(TensorDataset(images[:60], labels[:60]), batch_size=20)

def loader(batch=8, collate=None):
    return DataLoader(TensorDataset(images, labels), batch, shuffle=True, collate_fn=collate)

def trained(model, batches, optimizer=None, every=1, loss_of=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for i, (x, y) in enumerate(batches, 1):
        loss = loss_of(model, x) if loss_of else F.cross_entropy(model(x), y)
        (loss / every).backward()
        if i % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        print(f"loss {loss.item():.6f}", flush=True)
    print("norm", f"{sum(p.detach().abs().sum() for p in model.parameters()):.5f}")

def by_hand(count=20, rows=8):
    for i in range(count):
        chosen = torch.randint(0, len(images), (rows,))
        yield images[chosen], labels[chosen]

class Net(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.a, self.b, self.drop, self.norm = nn.Linear(12, 16), nn.Linear(16, 4), nn.Dropout(p), nn.BatchNorm1d(16)
    def forward(self, x):
        return self.b(self.drop(F.relu(self.norm(self.a(x)))))

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.spread, self.back = nn.Linear(12, 3), nn.Linear(12, 3), nn.Linear(3, 12)
    def forward(self, x):
        mean, spread = self.mean(x), self.spread(x)
        return self.back(mean + torch.randn_like(spread) * (0.5 * spread).exp()), mean, spread

def of_noisy(model, x):
    back, mean, spread = model(x)
    return F.mse_loss(back, x) - 0.01 * (1 + spread - mean ** 2 - spread.exp()).sum() / len(x)

class Jittered(torch.utils.data.Dataset):
    def __len__(self):
        return len(images)
    def __getitem__(self, i):
        return images[i] + torch.randn(12), labels[i]

def softmax():
    trained(nn.Linear(12, 4), loader())

def mlp():
    trained(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)), by_hand())

def vae():
    trained(Noisy(), loader(), loss_of=of_noisy)

def dropout():
    trained(Net(0.4), loader(12))

def accumulation():
    trained(Net(), loader(), every=3)

def evaluation():
    model = Net()
    for epoch in range(2):
        trained(model, loader(24), torch.optim.Adam(model.parameters()))
        model.eval()
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum().item() for x, y in held)
        print("right", right, "of", len(held.dataset))
        model.train()

def collating():
    trained(nn.Linear(12, 4), loader(collate=lambda samples: (
        torch.stack([x for x, _ in samples]), torch.tensor([int(y) for _, y in samples]))))

def two():
    one, other = Net(), Net()
    opts = torch.optim.SGD(one.parameters(), 0.1), torch.optim.Adam(other.parameters())
    for x, y in loader():
        fake = one(x)
        opts[1].zero_grad()
        (F.cross_entropy(other(x), y) + F.cross_entropy(other(x * fake.detach().sum()), y)).backward()
        opts[1].step()
        opts[0].zero_grad()
        loss = (one(x) - other(x)).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        opts[0].step()
        print(f"loss {loss.item():.6f}")

def hooked():
    model = nn.Linear(12, 4)
    model.weight.register_hook(lambda grad: grad * 2)
    trained(model, loader())

def closures():
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[:50]), labels[:50])
        loss.backward()
        return loss
    for _ in range(4):
        print(f"loss {optimizer.step(closure).item():.4f}")

def grows():
    model = nn.Linear(12, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for rows in (8, 64, 50_000, 8, 60_000):
        trained(model, by_hand(2, rows), optimizer)

def slowly():
    model = nn.Linear(12, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(int(os.environ.get("EPOCHS", 4))):
        for x, y in loader():
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"loss {loss.item():.6f}", flush=True)
            time.sleep(float(os.environ.get("SLOW", 0)))
        torch.save(model.state_dict(), "last.pt")

def jittered():
    trained(nn.Linear(12, 4), DataLoader(Jittered(), 8))

for scene in sys.argv[1:]:
    print("==", scene)
    globals()[scene]()
"""
MORE = ["dropout", "accumulation", "evaluation", "collating", "two", "hooked", "closures", "vae", "mlp", "grows"]
SHORT = "are too short to share, so every rank does all of the work; from a batch of about"


def run(folder, *words, ranks=2, split="auto", **more):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(SCENES)
    return Run(folder, "-n", ranks, *words, OARS_SPLIT=split, OARS_DIGEST="1", **more)


def notices(it):
    return [event["text"] for event in it.events("notice") if "too short to share" in event["text"]]


def differ(ours, theirs):
    """The first line that differs, by more than the last digits."""
    for a, b in zip(ours, theirs, strict=False):
        (word, *x), (other, *y) = a.split(), b.split()
        if word != other or (x != y and word not in ("loss", "norm")) or (
                x != y and abs(float(x[0]) - float(y[0])) > 2e-4 * max(1, abs(float(y[0])))):
            return f"{a} | {b}"
    return "" if len(ours) == len(theirs) else f"{len(ours)} lines, {len(theirs)}"


@pytest.mark.parametrize(("scenes", "ranks"), [
    (["softmax", *MORE], 2), (["softmax", *MORE], 3), (["mlp", "jittered"], 2), (["vae"], 3)])
def test_ranks_that_do_not_share_train_as_one_process_does(scenes, ranks, tmp_path):
    it = run(tmp_path / "ranks", "train.py", *scenes, ranks=ranks)
    assert it.code == 0, it
    notice, = notices(it)
    assert SHORT in notice
    (tmp_path / "train.py").write_text(SCENES)
    ours, one = it.lines, python(tmp_path, "train.py", *scenes)
    if "jittered" in scenes:  # each rank draws from its own stream what reading samples draws, until all read all
        ours, one = (lines[: lines.index("== jittered")] for lines in (ours, one))
    assert differ(ours, one) == ""
    assert len(set(it.digests().values())) == 1
    if ranks == 2:
        again = run(tmp_path / "again", "train.py", *scenes)
        assert again.lines == it.lines and notices(again) == [notice], again


def test_they_do_not_wait_for_each_other_and_share_if_told_to(tmp_path):
    """So many messages a step: those that come later than the sixth are few."""
    shared = run(tmp_path / "always", "--split", "always", "train.py", "softmax", *["mlp"] * 5)
    alone = run(tmp_path / "auto", "train.py", "softmax", *["mlp"] * 5)
    assert (shared.code, alone.code) == (0, 0), alone
    assert not notices(shared) and notices(alone)
    assert shared.summary["meetings"] > 3 and alone.summary["meetings"] < 1
    assert shared.summary["split_steps"] == shared.summary["steps"]
    assert alone.summary["split_steps"] <= 6 and alone.summary["split"]
    assert "was split" not in alone.err


def test_long_steps_are_shared(tmp_path):
    wide = SCENES.replace("nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)",
                          "nn.Linear(12, 3000), nn.ReLU(), nn.Linear(3000, 3000), nn.ReLU(), nn.Linear(3000, 4)")
    folder = tmp_path / "wide"
    folder.mkdir()
    (folder / "train.py").write_text(wide.replace("def by_hand(count=20, rows=8)", "def by_hand(count=8, rows=500)"))
    it = Run(folder, "-n", 2, "train.py", "mlp", OARS_SPLIT="auto")
    assert it.code == 0 and not notices(it), it
    assert it.summary["split_steps"] == it.summary["steps"] == 8


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_is_not_missed(dies, tmp_path):
    it = run(tmp_path, "train.py", "slowly", SLOW="0.005")
    it.until("too short to share")
    it.wait_for_step(10)
    it.kill(dies)
    assert it.code == 0, it
    (tmp_path / "one").mkdir()
    (tmp_path / "one/train.py").write_text(SCENES)
    assert differ(it.lines, python(tmp_path / "one", "train.py", "slowly")) == ""
    assert it.summary["losses"] == 1 and "1 death survived" in it.err
    assert torch.load(tmp_path / "last.pt").keys() == {"weight", "bias"}


def test_ctrl_c_stops_all_ranks(tmp_path):
    it = run(tmp_path, "train.py", "slowly", SLOW="0.005", EPOCHS="1000")
    it.until("too short to share")
    it.process.send_signal(signal.SIGINT)
    assert it.code == 130, it
    assert "KeyboardInterrupt" in it.err


def test_a_run_goes_on_from_a_snapshot_as_if_it_had_not_been_stopped(tmp_path):
    whole = run(tmp_path / "whole", "train.py", "slowly", EPOCHS="6")
    it = run(tmp_path / "cut", "train.py", "slowly", SLOW="0.01", EPOCHS="6")
    it.until("too short to share")
    it.wait_for_step(20)
    it.process.send_signal(signal.SIGTERM)
    assert it.code == 143 and "kept, continue with" in it.err, it
    assert whole.code == 0, whole
    rest = Run(it.cwd, command=[*it.command[:3], "resume", "it"], OARS_SPLIT="auto", EPOCHS="6")
    assert rest.code == 0, rest
    assert [*it.lines, *rest.lines] == whole.lines
    assert torch.load(it.cwd / "last.pt")["weight"].equal(torch.load(whole.cwd / "last.pt")["weight"])
    assert rest.summary["split_steps"] <= 6


def test_a_rank_that_joins_does_not_share_either(tmp_path):
    it = run(tmp_path, "train.py", "slowly", SLOW="0.01", EPOCHS="60")
    it.until("too short to share")
    grow = Run(tmp_path, command=[*it.command[:3], "grow", "it", "-n", "3"])
    assert grow.code == 0, grow
    wait_for(lambda: it.events("grown"), "a rank that joins")
    it.wait_for_step(60)
    it.process.send_signal(signal.SIGINT)
    assert it.code == 130, it
    assert not [event["text"] for event in it.events("notice") if "the same bits" in event["text"]]
