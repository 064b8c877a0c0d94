"""trl's SFTTrainer on a small GPT-2."""

import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, set_seed
from trl import SFTConfig, SFTTrainer
from words import make_texts, make_tokenizer

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=2,
                                   eos_token_id=2))
trainer = SFTTrainer(
    model, train_dataset=Dataset.from_dict({"text": make_texts(48)}), processing_class=make_tokenizer(),
    args=SFTConfig("out", per_device_train_batch_size=8, max_steps=8, logging_steps=2, save_strategy="no",
                   report_to="none", use_cpu=True, bf16=False, max_length=32, seed=0))
print(f"train loss {trainer.train().metrics['train_loss']:.5f}")
torch.save(model.state_dict(), "model.pt")
