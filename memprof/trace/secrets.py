"""Detects and masks secrets in command lines and sentences.

A value is masked because of its name (``--password``, ``HF_TOKEN=``, ``"api_key":``) or its own shape
(``ghp_…``, a JSON web token, a long random string). Everything else is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

#: Replacement for a secret.
MASK = "***"
#: Values that reveal nothing: a switch, an empty value, a variable that the shell expands.
_HARMLESS = re.compile(r"(?:true|false|none|null|yes|no|on|off|\*\*\*|\$\w+|\$\{\w+\})?", re.IGNORECASE)
#: Possessive: a long word that is not a name is scanned only once.
_NAME = r"(?<![\w.+~@/-])[\w.+~@/-]++"
#: ``password=``, ``"token": ``, ``Authorization: ``, ``--api-key `` inside a text, in front of the value.
_HEAD = re.compile(rf"({_NAME})(\\*[\"']?\]?\s*[=:]\s*|\s+)")
_QUOTE = re.compile(r"\\*[\"']")
_PLAIN = re.compile(r"((?:(?:Bearer|Basic|Token)\s+)?)(\$\{\w+\}|[^\s\"'\\,;&|)}\]]+)", re.IGNORECASE)
_BEARER = re.compile(r"\b(Bearer|Basic)(\s+)([\w.~+/-]{6,}=*)", re.IGNORECASE)
#: The password in ``https://user:password@host``, and in ``user:password@host``.
_ADDRESS = re.compile(
    r"(?P<before>://[^\s:/@\"']*+:|(?<![\w.:/@+-])[\w.+-]++:)(?!//|\d{1,5}[/?#])[^\s\"']{1,500}@(?=[\w\[])"
)
_WHOLE_WORD = re.compile(rf"({_NAME})[=:]")
#: Words after these are sentences or addresses, and a value may end before the word does.
_NO_NAME = re.compile(r"\s|[?&]|://")
#: Programs whose option ``-c`` takes a whole program as its value.
_SHELL = re.compile(r"(?:.*/)?(?:\w*sh|su|python[\d.]*)")


def mask_words(words: Sequence[str]) -> tuple[str, ...]:
    """Returns a command line of the same number of words, with likely secrets masked."""
    shown: list[str] = []
    owner, is_list = "", False
    for place, word in enumerate(words):
        is_option = word.startswith("-") and word != "-"
        # A short option cannot be distinguished from a secret that begins with a dash.
        if owner and (not is_option or (is_secret_name(owner) and len(word) > 3 and word[1] != "-")):
            shown.append(_masked_value(owner, word))
            owner = owner if is_list else ""
            continue
        shown.append(mask_text(word) if _is_program(words, place) else _masked_word(word))
        owner = word.lstrip("-") if is_option and "=" not in word else ""
        is_list = is_secret_list(owner)
    return tuple(shown)


def mask_text(text: str) -> str:
    """Returns a text of several words with likely secrets masked."""
    text = _ADDRESS.sub(lambda match: f"{match['before']}{MASK}@", text)
    text = _mask_values(text)
    text = _BEARER.sub(lambda match: f"{match[1]}{match[2]}{MASK}", text)
    return mask_shapes(text, MASK)


def is_masked(words: Sequence[str]) -> bool:
    """Whether a secret was masked in a command line."""
    return any(MASK in word for word in words)


def _is_program(words: Sequence[str], place: int) -> bool:
    """Returns whether a word is code for a shell or Python: ``bash -lc 'PASSWORD=x python train.py'``."""
    is_option = place > 1 and re.fullmatch(r"-[a-z]*c", words[place - 1]) is not None
    return is_option and any(_SHELL.fullmatch(word) for word in words[: place - 1])


def _masked_value(owner: str, word: str) -> str:
    if names_a_digest(owner):
        return word
    return MASK if is_secret_name(owner) and not _HARMLESS.fullmatch(word) else _masked_word(word)


def _masked_word(word: str) -> str:
    """Masks one word of a command line: ``--password=a phrase`` is masked to its end."""
    stop = _NO_NAME.search(word)
    names = () if word[:1] in ("{", "[") else _WHOLE_WORD.finditer(word, 0, stop.start() if stop else len(word))
    for match in names:
        if names_a_digest(match[1]):
            return word
        at = match.end()
        if is_secret_name(match[1]):
            return word if _HARMLESS.fullmatch(word, at) else f"{word[:at]}{MASK}"
        if word[at : at + 1] in ("{", "["):
            return word[:at] + _masked_json(word[at:])
    return _masked_json(word)


def _mask_values(text: str) -> str:
    """Masks the values that follow names of secrets in a text."""
    parts: list[str] = []
    written = at = 0
    while (head := _HEAD.search(text, at)) is not None:
        at = head.end()
        is_pair = not head[2].isspace()
        if not is_secret_name(head[1]) or (not is_pair and (head[1][0] != "-" or text[at : at + 1] == "-")):
            continue
        begin, end = _value_at(text, at)
        if not _HARMLESS.fullmatch(text[begin:end]):
            parts += [text[written:begin], MASK]
            written = at = end
    return "".join([*parts, text[written:]])


def _value_at(text: str, at: int) -> tuple[int, int]:
    """Returns the start and end of a value: within its quotes, or up to the separator before the next word."""
    quote = _QUOTE.match(text, at)
    if quote is not None:
        end = text.find(quote[0], quote.end())
        return quote.end(), end if end >= 0 else len(text)
    plain = _PLAIN.match(text, at)
    return plain.span(2) if plain is not None else (at, at)


def _masked_json(word: str) -> str:
    """Masks a word that may be JSON, by its keys if it is."""
    if word[:1] not in ("{", "["):
        return mask_text(word)
    try:
        value = json.loads(word)
        masked = _inside(value)
    except (ValueError, RecursionError):
        return mask_text(word)
    return word if masked == value else json.dumps(masked, ensure_ascii=False)


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            mask_text(name): _blank(content) if is_secret_name(name) else _inside(content)
            for name, content in value.items()
        }
    if isinstance(value, list):
        return [_inside(item) for item in value]
    return mask_text(value) if isinstance(value, str) else value


def _blank(value: Any) -> Any:
    """Masks everything inside the value of a secret key."""
    if isinstance(value, dict):
        return {name: _blank(content) for name, content in value.items()}
    if isinstance(value, list):
        return [_blank(item) for item in value]
    return value if value is None or isinstance(value, bool) or value == "" else MASK


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


#: Tokens by vendor prefix.
_TOKENS = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_(?=\w*[A-Z0-9]|\w{16})[A-Za-z0-9]{10,}"  # Hugging Face
    r"|gh[pousr]_\w{10,}|github_pat_\w{10,}|glpat-[\w-]{10,}|glc_[\w=]{20,}"
    r"|sk-(?=[\w-]*\d|[\w-]{20})[\w-]{16,}|[sr]k_(?:live|test)_\w{8,}|gsk_\w{16,}|xai-\w{16,}|nvapi-[\w-]{10,}|r8_\w{20,}"
    r"|A(?:KIA|SIA|ROA|IDA|GPA)[0-9A-Z]{10,}"  # Amazon
    r"|xox[a-z]-[\w-]{8,}|xapp-[\w-]{10,}"  # Slack
    r"|AIza[\w-]{20,}|ya29\.[\w-]{10,}|GOCSPX-[\w-]{10,}"  # Google
    r"|eyJ[\w-]{8,}\.[\w.=-]+"  # JSON web tokens
    r"|npm_\w{20,}|pypi-[\w-]{16,}|dckr_pat_[\w-]{10,}|dop_v1_\w{20,}|shp(?:at|ca|pa|ss)_\w{10,}|SG\.[\w-]{10,}\.[\w-]{10,}"
    r"|wandb_v\d_\w{10,}|lin_api_\w{10,}|AGE-SECRET-KEY-\w{10,}"
    r")"
)
_HOOKS = re.compile(r"(hooks\.slack\.com/services/|/api/webhooks/)[\w/-]{8,}", re.IGNORECASE)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL)
#: Prefixes of a random string that is a digest, not a secret.
_DIGEST = r"(?:sha\d*|md5|commit|rev|revision|hash|digest|checksum)[:=@ -]"
_RUN = re.compile(r"(?<![A-Za-z0-9+/=_-])[A-Za-z0-9+/_-]{20,}={0,2}(?![A-Za-z0-9+/_-])")
_HEX = re.compile(r"[0-9a-f]{32,}|[0-9A-F]{32,}")


def mask_shapes(text: str, mask: str) -> str:
    """Returns a text with everything masked that has the shape of a secret."""
    text = _PRIVATE_KEY.sub(mask, text)
    text = _HOOKS.sub(lambda match: match[1] + mask, text)
    text = _TOKENS.sub(mask, text)
    return _RUN.sub(lambda match: mask if _is_random(match) else match[0], text)


def _is_random(match: re.Match[str]) -> bool:
    """Returns whether a run of letters and digits is random, and not made by people or git."""
    run = match[0].rstrip("=")
    before = match.string[max(0, match.start() - 12) : match.start()]
    if re.search(_DIGEST + "$", before, re.IGNORECASE):
        return False
    if _HEX.fullmatch(run):
        return any(letter.isdigit() for letter in run) and any(letter.isalpha() for letter in run)
    has_upper, has_lower, digits = any(map(str.isupper, run)), any(map(str.islower, run)), sum(map(str.isdigit, run))
    separators = sum(not letter.isalnum() for letter in run)
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+|.", run)
    longest, mean = max(map(len, parts)), len(run) / len(parts)
    if has_upper and has_lower and len(run) == 40 and digits and set("/+") & set(run):
        return mean <= 3 and longest <= 12  # as in Amazon's secret keys
    if has_upper and has_lower and digits >= 2:
        # Compound words made by people have longer words than random strings do.
        return mean <= 2.7 and longest <= 7 and separators <= len(run) / 8
    return not separators and len(run) >= 32 and digits >= 5 and mean <= 4 and longest <= 10
