"""Trains BERT-large under float16 autocast on batches of 4."""

from families.bert_large import train

if __name__ == "__main__":
    train(batch=4, fp16=True)
