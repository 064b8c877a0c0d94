"""sentence-transformers: pairs of texts, with every other text of the batch as a negative."""

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel, set_seed
from words import make_texts, make_tokenizer

set_seed(0)
BertModel(BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                     max_position_embeddings=64)).save_pretrained("bert")
make_tokenizer().save_pretrained("bert")
words = Transformer("bert", max_seq_length=32)
model = SentenceTransformer(modules=[words, Pooling(32, "mean")], device="cpu")
anchors = make_texts(48)
pairs = Dataset.from_dict({"anchor": anchors, "positive": [" ".join(reversed(text.split())) for text in anchors]})
trainer = SentenceTransformerTrainer(
    model, SentenceTransformerTrainingArguments("out", per_device_train_batch_size=12, max_steps=6, logging_steps=2,
                                                save_strategy="no", report_to="none", use_cpu=True, seed=0),
    train_dataset=pairs, loss=MultipleNegativesRankingLoss(model))
print(f"train loss {trainer.train().metrics['train_loss']:.5f}")
print(model.encode(["w1 w2 w3", "w4 w5"])[:, :4])
torch.save(model.state_dict(), "model.pt")
