"""Tells by a name whether its value is a secret: that of ``--hf_token`` is, those of ``--max_tokens`` are not."""

from __future__ import annotations

import re

#: Names that hold one of these anywhere, written together, are of secrets.
_ANYWHERE = re.compile(
    r"passw|passphrase|passcode|secret|credential|apikey|accesskey|authkey|privatekey|signingkey|encryptionkey"
    r"|authtoken|accesstoken|refreshtoken|bearer|authorization|connectionstring|webhook"
)
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
#: Last parts of names of secrets.
_ENDS = {"token", "key", "pass", "pwd", "pw", "pat", "auth", "creds", "cookie", "dsn", "sig", "signature", "passwd"}
#: What stands before such an end where the value is none.
_BEFORE = {
    "token": "pad eos bos unk sep cls mask image video audio special prompt stop start end next last first per max min "
    "num by one new text current prefix suffix separator begin cut drop each type",
    "key": "sort label image text img data target input output caption audio video prompt answer question foreign "
    "primary group index order dict column field metric monitor state ckpt checkpoint hash score reward response "
    "message messages content cache partition batch feature id loss seed rng layer module name query q k v",
    "pass": "forward backward first second third one two single multi num by per max min low high band each fwd bwd",
    "auth": "use no enable with require disable",
    "pat": "file name glob include exclude filter path ignore match",
    "sig": "func function method type",
    "signature": "func function method type model",
    "pw": "max min",
}
_BEFORE_SETS = {end: frozenset(words.split()) for end, words in _BEFORE.items()}
#: Plural names of several secrets; ``--max_tokens`` counts, and ``--sort-keys`` names fields.
_PLURAL_AFTER = frozenset(
    ("api", "auth", "access", "secret", "hf", "refresh", "bearer", "private", "signing", "wandb", "github", "openai")
)
_DIGESTS = frozenset(
    ("commit", "sha", "sha1", "sha256", "rev", "revision", "hash", "digest", "checksum", "md5", "uuid", "fingerprint")
)


def is_secret_name(name: str) -> bool:
    """Returns whether the value of an option, a variable or a key of this name is a secret.

    Args:
        name: Such as ``--hf_token``, ``AWS_SECRET_ACCESS_KEY`` or ``logger.wandb.api_key``.
    """
    parts = _parts_of(name)
    if not parts:
        return False
    if _ANYWHERE.search("".join(parts)):
        return True
    end, before = parts[-1], parts[-2] if len(parts) > 1 else ""
    if end in ("tokens", "keys", "passes"):
        return before in _PLURAL_AFTER
    return end in _ENDS and before not in _BEFORE_SETS.get(end, ())


def is_secret_list(name: str) -> bool:
    """Returns whether an option of this name takes several secrets, such as ``--api-keys``."""
    parts = _parts_of(name)
    return bool(parts) and parts[-1].endswith("s") and parts[-1] not in ("pass", "credentials") and is_secret_name(name)


def names_a_digest(name: str) -> bool:
    """Returns whether a long random value under this name is none: a commit, a checksum."""
    parts = _parts_of(name)
    return bool(parts) and parts[-1] in _DIGESTS and not is_secret_name(name)


def _parts_of(name: str) -> list[str]:
    """Splits the last part of a dotted name at dashes, underscores and capitals; numbers at its end are left out."""
    parts = [part.lower() for part in _PARTS.findall(re.split(r"[./@]", name.strip("./@"))[-1])]
    while len(parts) > 1 and parts[-1].isdigit():
        parts.pop()
    return parts
