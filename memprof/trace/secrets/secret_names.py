"""Decides by name whether a value is a secret: ``--hf_token`` is one, ``--max_tokens`` is not."""

from __future__ import annotations

import re

#: A name that contains one of these anywhere, ignoring separators, denotes a secret.
_ANYWHERE = re.compile(
    r"passw|passphrase|passcode|secret|credential|apikey|accesskey|authkey|privatekey|signingkey|encryptionkey"
    r"|authtoken|accesstoken|refreshtoken|bearer|authorization|connectionstring|webhook|mnemonic"
    r"|(seed|recovery|backup)phrase|clientassertion"
)
#: A name that ends in one of these, ignoring separators: what one logs in with once, and what stands for a login.
_AT_END = re.compile(
    r"(sess(ion)?|csrf|xsrf)id$|pincode$|connstr(ing)?$|(2|two)fa$"
    r"|(access|auth|login|verif\w*|recovery|backup|security|otp|mfa|2fa|twofactor|onetime|sms|activation|pairing)codes?$"
)
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
#: Last parts of names of secrets.
_ENDS = {"token", "key", "pass", "pwd", "pw", "pat", "auth", "creds", "cookie", "dsn", "sig", "signature", "passwd"}
_ENDS |= {"oauth", "cred", "cookies", "psk", "sid", "pin", "otp", "totp", "hotp", "mfa", "jwt", "jws", "jwe", "sas"}
#: Parts before such an ending whose value is not a secret.
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
#: Plural names of several secrets; but ``--max_tokens`` is a count, and ``--sort-keys`` names fields.
_PLURAL_AFTER = frozenset(
    ("api", "auth", "access", "secret", "hf", "refresh", "bearer", "private", "signing", "wandb", "github", "openai")
)
#: Endings in s of a single secret.
_SINGULAR = ("pass", "credentials", "sas", "jws", "cookies")
_DIGESTS = frozenset(
    ("commit", "sha", "sha1", "sha256", "rev", "revision", "hash", "digest", "checksum", "md5", "uuid", "fingerprint")
)


def is_secret_name(name: str) -> bool:
    """Returns whether an option, variable or key of this name holds a secret.

    Args:
        name: For example ``--hf_token``, ``AWS_SECRET_ACCESS_KEY`` or ``logger.wandb.api_key``.
    """
    parts = _parts_of(name)
    if not parts:
        return False
    if _ANYWHERE.search("".join(parts)) or _AT_END.search("".join(parts)):
        return True
    end, before = parts[-1], parts[-2] if len(parts) > 1 else ""
    if end in ("tokens", "keys", "passes"):
        return before in _PLURAL_AFTER
    return end in _ENDS and before not in _BEFORE_SETS.get(end, ())


def is_secret_list(name: str) -> bool:
    """Returns whether an option of this name takes several secrets, such as ``--api-keys``."""
    parts = _parts_of(name)
    return bool(parts) and parts[-1].endswith("s") and parts[-1] not in _SINGULAR and is_secret_name(name)


def names_a_digest(name: str) -> bool:
    """Returns whether a long random value under this name is not a secret: a commit, a checksum."""
    parts = _parts_of(name)
    return bool(parts) and parts[-1] in _DIGESTS and not is_secret_name(name)


def _parts_of(name: str) -> list[str]:
    """Splits the last part of a dotted name at dashes, underscores and capitals; trailing numbers are dropped."""
    parts = [part.lower() for part in _PARTS.findall(re.split(r"[./@]", name.strip("./@"))[-1])]
    while len(parts) > 1 and parts[-1].isdigit():
        parts.pop()
    return parts
