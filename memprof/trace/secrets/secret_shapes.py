"""Finds secrets by their shape, whatever their name: tokens with a vendor's prefix, and random strings."""

from __future__ import annotations

import re

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
