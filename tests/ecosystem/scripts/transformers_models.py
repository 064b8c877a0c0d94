"""Four models of transformers, from their configs, on padded batches: a loop by hand, attention of both kinds."""

import torch
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    get_linear_schedule_with_warmup,
)
from words import make_texts, make_tokenizer

SMALL = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 64}
tokenizer = make_tokenizer()
data = [dict(tokenizer(text), labels=len(text.split()) % 3) for text in make_texts(32)]


def make_model(kind, attention):
    torch.manual_seed(0)
    if kind == "bert":
        return BertForSequenceClassification(BertConfig(**SMALL, num_labels=3, attn_implementation=attention))
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=32,
                                          attn_implementation=attention))
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation=attention))
    return T5ForConditionalGeneration(T5Config(vocab_size=100, d_model=32, num_layers=2, num_heads=2, d_ff=64, d_kv=16,
                                               decoder_start_token_id=0))


for kind, attention in [("bert", "sdpa"), ("bert", "eager"), ("gpt2", "sdpa"), ("gpt2", "eager"), ("llama", "sdpa"),
                        ("llama", "eager"), ("t5", "eager")]:
    model = make_model(kind, attention)
    loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=DataCollatorWithPadding(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 8)
    model.train()
    for epoch in range(2):
        for batch in loader:
            if kind != "bert":
                batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        print(f"{kind} {attention} epoch {epoch} loss {loss.item():.6f}")
    torch.save(model.state_dict(), f"{kind}-{attention}.pt")
