"""Trains BERT-large in float32 on four batches of 1 a step."""

from families.bert_large import train

if __name__ == "__main__":
    train(batch=1, accumulate=4)
