"""Lightning: a module with two loaders, gradient clipping, accumulation, a scheduler, a checkpoint of the best."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1),
                                 nn.Linear(32, 3))

    def training_step(self, batch, at):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, at):
        x, y = batch
        out = self.net(x)
        self.log("val_loss", F.cross_entropy(out, y))
        self.log("val_acc", (out.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    def on_validation_epoch_end(self):
        values = self.trainer.callback_metrics
        print(f"epoch {self.current_epoch}", {name: round(float(values[name]), 5) for name in ("val_loss", "val_acc")})


L.seed_everything(1, verbose=False)
x = torch.randn(120, 10)
y = x[:, :3].argmax(1)
train = DataLoader(TensorDataset(x[:90], y[:90]), batch_size=16, shuffle=True)
test = DataLoader(TensorDataset(x[90:], y[90:]), batch_size=16)
model = Net()
best = ModelCheckpoint("best", filename="net", monitor="val_loss")
trainer = L.Trainer(max_epochs=3, accelerator="cpu", gradient_clip_val=1.0, accumulate_grad_batches=2, callbacks=[best],
                    logger=CSVLogger("logs"), log_every_n_steps=1, enable_progress_bar=False,
                    enable_model_summary=False)
trainer.fit(model, train, test)
print("best", round(float(best.best_model_score), 5))
torch.save(Net.load_from_checkpoint(best.best_model_path).state_dict(), "best.pt")
torch.save(model.state_dict(), "model.pt")
