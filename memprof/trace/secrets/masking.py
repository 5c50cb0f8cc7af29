"""Masks likely secrets in command lines and sentences before they are written to a recording.

A value is masked because of its name (``--password``, ``HF_TOKEN=``, ``"api_key":``) or its own shape
(``ghp_…``, a JSON web token, a long random string). Everything else is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from memprof.trace.secrets.secret_names import is_secret_list, is_secret_name, names_a_digest
from memprof.trace.secrets.secret_shapes import mask_shapes

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
    """Masks a word that is the value of an option."""
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
