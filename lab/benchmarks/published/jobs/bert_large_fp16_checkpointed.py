"""Trains BERT-large under float16 autocast on four batches of 1 a step, its layers recomputed."""

from families.bert_large import train

if __name__ == "__main__":
    train(batch=1, accumulate=4, checkpointing=True, fp16=True)
