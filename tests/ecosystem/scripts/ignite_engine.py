"""ignite: a trainer and an evaluator as engines, metrics, a checkpoint."""

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import ModelCheckpoint
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
x = torch.randn(100, 10)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x[:80], y[:80]), batch_size=16, shuffle=True)
test = DataLoader(TensorDataset(x[80:], y[80:]), batch_size=16)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
criterion = nn.CrossEntropyLoss()
trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), criterion)
evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy(), "loss": Loss(criterion)})


@trainer.on(Events.ITERATION_COMPLETED(every=5))
def say(engine):
    print(f"step {engine.state.iteration} loss {engine.state.output:.6f}")


@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    evaluator.run(test)
    print(f"epoch {engine.state.epoch} " + " ".join(f"{k} {v:.5f}" for k, v in evaluator.state.metrics.items()))


evaluator.add_event_handler(Events.COMPLETED, ModelCheckpoint(
    "best", n_saved=1, score_function=lambda engine: engine.state.metrics["accuracy"], score_name="accuracy",
    require_empty=False), {"model": model})
trainer.run(loader, max_epochs=3)
torch.save(model.state_dict(), "model.pt")
