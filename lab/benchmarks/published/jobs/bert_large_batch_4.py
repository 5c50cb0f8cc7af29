"""Trains BERT-large in float32 on batches of 4, the guide's vanilla training."""

from families.bert_large import train

if __name__ == "__main__":
    train(batch=4)
