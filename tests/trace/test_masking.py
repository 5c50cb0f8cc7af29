"""Masking of secrets in command lines and sentences."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.trace.secrets import MASK, is_masked, mask_text, mask_words

SECRET = "Zc4nary7"

#: Each is a command line around the secret, which stands in one of its words.
WITH_SECRET = [
    ["--password", "{}"],
    ["--password={}"],
    ["--db-password={} and more"],
    ["--passwd", "{}"],
    ["--api-key", "{}"],
    ["--api_key", "{}"],
    ["--apikey={}"],
    ["--token", "{}"],
    ["--hf_token", "{}"],
    ["--hf-token={}"],
    ["--wandb-key={}"],
    ["--wandbApiKey", "{}"],
    ["--pat", "{}"],
    ["--auth", "alice:{}"],
    ["--secret", "-{}"],
    ["--credentials", "{}"],
    ["--api-keys", "first", "{}"],
    *([f"--{name}", "{}"] for name in ("session_id", "session-id", "sessionId", "sid", "PHPSESSID", "csrf-id")),
    *([f"--{name}={{}}"] for name in ("otp", "totp", "mfa", "mfa-code", "2fa", "2fa-code", "otp_code", "pin")),
    *([f"--{name}", "{}"] for name in ("passcode", "one-time-code", "verification_code", "recovery-codes", "sms-code")),
    *([f"--{name}={{}}"] for name in ("cookie", "cookies", "session-cookie", "jwt", "bearer", "sas", "sas-token")),
    *([f"--{name}", "{}"] for name in ("signature", "private-key", "ssh-key", "psk", "conn-str", "connection_string")),
    *([f"--{name}", "{}"] for name in ("seed-phrase", "mnemonic", "oauth", "client_assertion", "db.conn_string")),
    ["Endpoint=sb://x/;SharedAccessKeyName=n;SharedAccessKey={}"],
    ["AccountName=n;AccountKey={};EndpointSuffix=x"],
    ["https://host/login?sid={}&page=2"],
    ["-H", "Cookie: {}"],
    ["AWS_SECRET_ACCESS_KEY={}"],
    ["env", "HF_TOKEN={}", "python", "t.py"],
    ["-e", "WANDB_API_KEY={}"],
    ["--env=PASSWORD=a {} phrase"],
    ["--export=ALL,WANDB_API_KEY={}"],
    ["logger.wandb.api_key={}"],
    ["++trainer.hub_token='{}'"],
    ["https://alice:{}@host/x"],
    ["postgresql://u:p@{}/x@db:5432/jobs"],
    ["redis://:{}@cache"],
    ["alice:{}@db.internal"],
    ["https://host/x?token={}&page=2"],
    ["https://host/x?page=2&X-Amz-Signature={}"],
    ["-H", "Authorization: Bearer {}aaaa"],
    ["-H", "X-Api-Key: {}"],
    ["Bearer {}aaaa"],
    ['{{"token": "{}", "lr": 1}}'],
    ['--cfg={{"hub": {{"api_key": ["{}"]}}}}'],
    ["{{'password': '{}', 'lr': 1}}"],
    ["bash", "-c", "export TOKEN={}; python train.py"],
    ["bash", "-c", "PASSWORD='a {} phrase' python train.py --lr 1"],
    ["bash", "-lc", 'python train.py --password "a {} phrase" --lr 1'],
    ["bash", "-c", "bash -c 'python t.py --api-key \\\"{}\\\"'"],
    ["bash", "-c", 'python t.py --cfg \'{{"token": "{}"}}\''],
    ["ssh", "host", "cd /job && HF_TOKEN={} python train.py"],
    ["python", "-c", "import os; os.environ['HF_TOKEN'] = '{}'"],
    ["--password", '"unclosed {}'],
    ["hf_{}AbCdEfGh"],
    ["ghp_{}0123456789"],
    ["glpat-{}0123456789"],
    ["sk-proj-{}0123456789ab"],
    ["xoxb-1234567890-{}"],
    ["eyJhbGciOiJIUzI1NiJ9.eyJ{}.c2lnbmF0dXJl"],
    ["https://hooks.slack.com/services/T0/B0/{}"],
    ["-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----"],
]


@pytest.mark.parametrize("words", WITH_SECRET, ids=lambda words: " ".join(words)[:50])
def test_a_secret_is_masked_in_a_command_line(words: list[str]) -> None:
    """A value that is a secret by its name or its shape is gone, and the mask is in its place."""
    given_words = ["train.py", *(word.format(SECRET) for word in words), "--lr", "1e-3"]
    shown = mask_words(given_words)
    assert SECRET not in " ".join(shown)
    assert len(shown) == len(given_words)
    assert (shown[0], shown[-2:]) == ("train.py", ("--lr", "1e-3"))
    assert is_masked(shown)


@pytest.mark.parametrize("words", WITH_SECRET, ids=lambda words: " ".join(words)[:50])
def test_masking_twice_is_masking_once(words: list[str]) -> None:
    """What was masked is not read as a secret again."""
    once = mask_words([word.format(SECRET) for word in words])
    assert mask_words(once) == once


@pytest.mark.parametrize(
    "shape",
    [
        "AKIAIOSFODNN7EXAMPLE",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "0123456789abcdef0123456789abcdef01234567",
        "github_pat_11ABCDEFG0abcdefghijkl",
        "AIzaSyA1234567890abcdefghijklmnopqrstuv",
        "npm_abcdefghijklmnopqrstuvwxyz0123456789",
        "X9fK2mQ7vB4nL8pR1tY6wZ3c",
        # Made of one letter: only what stands before it tells.
        *(prefix + 20 * "a" for prefix in ("gho_", "glc_", "sk_live_", "rk_test_", "gsk_", "xai-", "nvapi-", "r8_")),
        *(prefix + 20 * "a" for prefix in ("xapp-", "ya29.", "GOCSPX-", "pypi-", "dckr_pat_", "dop_v1_", "shpat_")),
        *(prefix + 10 * "a" for prefix in ("wandb_v1_", "lin_api_", "AGE-SECRET-KEY-")),
        "SG." + 10 * "a" + "." + 10 * "a",
    ],
)
def test_tokens_are_known_by_their_shape(shape: str) -> None:
    """A token without a name, or inside a sentence, is masked too."""
    assert mask_words(["t.py", shape]) == ("t.py", MASK)
    assert mask_text(f"cannot log in with {shape}.") == f"cannot log in with {MASK}."


@pytest.mark.parametrize(
    "words",
    [
        ["--max_tokens", "512", "--num-tokens=7", "--tokenizer", "gpt2", "--eos-token", "</s>", "--pad_token=<pad>"],
        ["--sort-key", "length", "--image_key", "jpg", "--num_keys", "8", "--key-dim", "64", "--forward-pass", "2"],
        [
            "--pin-memory",
            "true",
            "--pin_memory_device=cuda",
            "--spin",
            "2",
            "--session-length",
            "8",
            "--num-sessions=3",
        ],
        [
            "--exit-code",
            "3",
            "--language_code=en",
            "--error-codes",
            "1",
            "--otp-length=6",
            "--code-dim",
            "7",
            "--codec",
            "x",
        ],
        [
            "--conn-stride=2",
            "--n-session-ids",
            "4",
            "--sas-rec",
            "x",
            "--cookie-cutter=a",
            "--jwt-leeway",
            "5",
            "--ids",
            "a",
        ],
        ["--use-auth", "--path", "/data/Experiments2024/RunA_lr3e-4_bs128/checkpoints", "model.layers=12"],
        ["meta-llama/Llama-3.1-70B-Instruct", "ResNet50Baseline2024FinalRunA", "gpt2-medium-bf16-lr3e-4-wd0.1-seed42"],
        ["--commit", "0123456789abcdef0123456789abcdef01234567", "sha256:" + "0123456789abcdef" * 4],
        ["torchrun", "--nproc-per-node", "2", "--rdzv-endpoint=host:29500", "http://localhost:8080/a@b"],
        ["git@github.com:org/repo.git", "s3://bucket/data", "C:\\data\\x", '{"lr": 1, "name": "run"}', "--token", ""],
        ["bash", "-c", "python train.py --hf_token $HF_TOKEN --token=${TOKEN}"],
        ["--use-token", "true", "--token=None", "--password", "--lr", "1"],
    ],
)
def test_what_is_no_secret_stays(words: list[str]) -> None:
    """Names that only look like those of secrets, paths, models and commits are shown as they were typed."""
    assert mask_words(words) == tuple(words)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 3.19 MiB is",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4503599627370496 bytes. Error code 12 (x)",
    ],
)
def test_errors_of_torch_stay(message: str) -> None:
    """What torch says of memory is read later, and holds no secret."""
    assert mask_text(message) == message


@given(st.lists(st.text(st.sampled_from("ab=:'\"\\ -{}[]@/.?&,;$K7\n")), max_size=6))
def test_any_command_line_is_masked_without_a_fault(words: list[str]) -> None:
    """As many words come out as go in, whatever they are."""
    assert len(mask_words(words)) == len(words)


@given(st.recursive(st.text() | st.integers() | st.booleans(), lambda inner: st.dictionaries(st.text(), inner)))
def test_json_stays_json(value: object) -> None:
    """A word that is JSON is JSON afterwards, with the same keys, unless a key is a secret by its shape."""
    word = json.dumps({"password": SECRET, "rest": value})
    (shown,) = mask_words([word])
    assert json.loads(shown).keys() == {"password", "rest"}
    assert SECRET not in json.dumps(json.loads(shown)["password"])


@pytest.mark.parametrize("part", ["a", "a=", "a:", '"', 'a="b ', "--a ", "-", "a@:", "{", "\\", 'password="', "a={"])
def test_long_words_are_masked(part: str) -> None:
    """A word of the greatest length that Linux lets a program have is masked; none takes time in its square."""
    word = part * (131_000 // len(part))
    assert len(mask_words(["t.py", word])) == 2
