"""trl's DPOTrainer: a small Llama learns which of two answers is liked better."""

import copy

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import DPOConfig, DPOTrainer
from words import make_texts, make_tokenizer

set_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                     intermediate_size=64, bos_token_id=2, eos_token_id=2, pad_token_id=0))
answers = {name: make_texts(32, seed) for seed, name in enumerate(["prompt", "chosen", "rejected"])}
trainer = DPOTrainer(
    model, copy.deepcopy(model), train_dataset=Dataset.from_dict(answers), processing_class=make_tokenizer(),
    args=DPOConfig("out", per_device_train_batch_size=8, max_steps=6, logging_steps=2, save_strategy="no",
                   report_to="none", use_cpu=True, bf16=False, max_length=48, seed=0))
print(f"train loss {trainer.train().metrics['train_loss']:.5f}")
torch.save(model.state_dict(), "model.pt")
