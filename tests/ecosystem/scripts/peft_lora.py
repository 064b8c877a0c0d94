"""LoRA by peft on a small Llama, a loop by hand; the adapter's weights are kept."""

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM
from words import make_texts, make_tokenizer

torch.manual_seed(0)
tokenizer = make_tokenizer()
base = LlamaForCausalLM(LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                    intermediate_size=64))
model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj"],
                                        task_type="CAUSAL_LM"))
model.print_trainable_parameters()
loader = DataLoader([tokenizer(text) for text in make_texts(32)], batch_size=8, shuffle=True,
                    collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
model.train()
for epoch in range(3):
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch} loss {loss.item():.6f}")
torch.save(get_peft_model_state_dict(model), "adapter.pt")
