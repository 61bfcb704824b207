"""Find secrets by their form in any text: tokens of known vendors, URLs, connection strings, assignments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from primus.redaction.names import is_secret_name

MASK = "<secret>"
Span = tuple[int, int]
Naming = Literal["none", "assigned", "any"]
"""Names before a value that are checked: none, those of `NAME=VALUE`, or also those of `NAME: VALUE` and `--name
VALUE`."""


# `re` compiles each pattern on its first use, and keeps it: all of them take 10 ms, and most commands need none.
_SHAPES = (
    r"\bhf_[A-Za-z0-9]{8,}"  # Hugging Face
    r"|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}"  # GitHub
    r"|\bgl(?:pat|ptt|dt|rt)-[\w-]{16,}"  # GitLab
    r"|\bxox[abeprs]-[\w-]{8,}|https://hooks\.slack\.com/[^\s\"'<>]+"  # Slack
    r"|\bsk-[\w-]{16,}|\b[rs]k_(?:live|test)_\w{12,}|\bwhsec_\w{12,}"  # OpenAI, Anthropic, Stripe
    r"|\bA(?:KIA|SIA)[A-Z0-9]{12,}"  # AWS
    r"|\bAIza[\w-]{30,}|\bya29\.[\w-]{16,}"  # Google
    r"|\bnpm_[A-Za-z0-9]{16,}|\bpypi-[\w-]{16,}|\bdckr_pat_[\w-]{16,}|\bnvapi-[\w-]{16,}|\bhvs\.[\w-]{16,}|\bdapi[0-9a-f]{32}\b"
    r"|\beyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)*"  # JSON web tokens (RFC 7519)
)
"""Tokens by the prefixes of their vendors."""
_PEM = r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----(?P<secret>.+?)(?:-----END|\Z)"
_HEADER = (
    r"(?i)Authorization[\"']?\s*[:=]\s*[\"']?(?:(?:Bearer|Basic|Token|Digest|Negotiate)\s+)?(?P<secret>[^\s\"',;]{4,})"
)
_BEARER = r"(?i)\bBearer\s+(?=\S*\d)(?P<secret>[\w.~+/=-]{8,})"
_CURL_USER = r"\b(?:curl|wget)\b[^\n]{0,300}?\s(?:-u|--user|--proxy-user)[ =][^\s:]+:(?P<secret>\S+)"
_LOGIN = r"\blogin\s+(?P<secret>[0-9a-f]{32,})\b"
_NETRC = r"\b(?:machine\s+\S+|default)\s+login\s+\S+\s+password\s+(?P<secret>\S+)"
"""An entry of .netrc (curl and GNU inetutils)."""
_SIGNED = (
    r"(?i)\b(?:X-Amz-Signature|X-Amz-Security-Token|X-Amz-Credential|X-Goog-Signature|sig|AccountKey|SharedAccessKey"
    r"|SharedAccessSignature)(?:=|%3D)(?P<secret>[^\s&;\"'<>]{8,})"
)
_COOKIE = r"(?i)\b(?:Set-)?Cookie:\s*(?P<secret>[^\r\n\"']+)"
_CONNECTION_STRING = (
    r"(?i)(?:^|[;\s\"'])(?:Password|Pwd|User Password|Access Key|Secret)\s*=\s*"
    r"(?P<secret>\"[^\"]*\"|'[^']*'|[^;\s\"']+)"
)
"""The password in `Server=h;Uid=u;Pwd=p;`."""
_SHAPE_BEGINNINGS = tuple(
    "hf_ ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- glptt- gldt- glrt- xox hooks.slack.com sk- k_live_ k_test_"
    " whsec_ akia asia aiza ya29. npm_ pypi- dckr_pat_ nvapi- hvs. dapi eyj".split()
)
_FORMS = (
    (_SHAPES, 0, _SHAPE_BEGINNINGS),
    (_PEM, "secret", ("private key",)),
    (_HEADER, "secret", ("authorization",)),
    (_BEARER, "secret", ("bearer",)),
    (_CURL_USER, "secret", ("curl", "wget")),
    (_LOGIN, "secret", ("login",)),
    (_NETRC, "secret", ("login",)),
    (_SIGNED, "secret", ("sig=", "sig%3d", "x-amz-", "x-goog-", "accountkey", "sharedaccess")),
    (_COOKIE, "secret", ("cookie:",)),
    (_CONNECTION_STRING, "secret", ("password", "pwd", "access key", "secret")),
)
"""Each pattern with words, one of which every match contains: a search for words is 100 times faster."""
_NUMERIC = b"0123456789,+ \n"
"""Most of a long list of numbers. Words are searched in texts without it, and are without it themselves."""


def _condense(text: str) -> str:
    rest = text.encode("utf-8", "surrogatepass").translate(None, _NUMERIC)
    return rest.decode("utf-8", "surrogatepass").lower()


_FORM_WORDS = tuple((_condense(word), number) for number, (_, _, words) in enumerate(_FORMS) for word in words)

# Prefixes and lengths are bounded: otherwise a long line of letters takes quadratic time.
_AUTHORITY = r"(?<![A-Za-z0-9+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,30})://(?P<rest>[^\s\"'<>|]*)"
_PORT = r"[^:/?#]*:\d{1,5}(?:[/?#]|$)"
_ANY_AUTHORITY = r"(?<![A-Za-z0-9+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,30})://(?P<rest>\S*)"
"""If the whole value is a URL, quotes are part of it."""
_TOKEN_SCHEMES = frozenset(("http", "https", "ws", "wss", "ftp", "ftps"))
"""Schemes in which a single word before `@` may be a token; in others, as in `ssh://ann@host`, it is a user name."""

_NAMED = r"""(?<![\w.])(?P<option>--)?(?P<name>[A-Za-z_][\w.-]{0,100})(?P<is>["']?\s{0,2}[=:]\s{0,2}|\s+)"""
_VALUE = r"""(?:"(?:[^"\\]|\\.)*"?|'[^']*'?|[^\s"',;&)]+)"""
_PLAIN = frozenset(("none", "null", "true", "false", "yes", "no", "on", "off", "nan", "error"))


def find_secrets(text: str, naming: Naming = "none", *, is_value: bool = False) -> Iterator[Span]:
    """Spans of secrets in `text` by their form, unordered; they may overlap.

    Args:
        text: Any text.
        naming: Names before a value that are checked.
        is_value: Whether the text is a single value of a variable or a setting.
    """
    condensed = _condense(text)
    for number in {number for word, number in _FORM_WORDS if word in condensed}:
        form, group, _ = _FORMS[number]
        yield from (found.span(group) for found in re.finditer(form, text))
    if "://" in text:
        yield from _find_in_urls(text, _ANY_AUTHORITY if is_value else _AUTHORITY)
    if naming != "none":
        yield from _find_named(text, naming)


def has_shape(text: str) -> bool:
    """Whether `text` contains a token of a known vendor."""
    lowered = text.lower()
    return any(word in lowered for word in _SHAPE_BEGINNINGS) and re.search(_SHAPES, text) is not None


def cover(text: str, spans: Iterator[Span] | list[Span]) -> str:
    """Replace each of `spans` in `text` by the mask; spans that are the mask already stay."""
    parts: list[str] = []
    end = 0
    for begin, finish in sorted(span for span in spans if text[span[0] : span[1]].strip("\"'") != MASK):
        if finish <= end or finish == begin:
            continue
        if begin >= end:
            parts += [text[end:begin], MASK]
        end = finish
    return "".join([*parts, text[end:]]) if end else text


def _find_in_urls(text: str, pattern: str) -> Iterator[Span]:
    """Find passwords and tokens before the host of a URL, and secret values of its query.

    A password ends at the last `@`, because users do not always escape one in it. Without a password, an `@` after
    HOST:PORT is part of the path.
    """
    for url in re.finditer(pattern, text):
        begin, rest = url.start("rest"), url["rest"]
        authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
        is_host = "@" in authority or ":" not in authority or rest.startswith("[") or re.match(_PORT, rest)
        userinfo, at, _ = (authority if is_host else rest).rpartition("@")
        user, colon, _ = userinfo.partition(":")
        if colon and at:
            yield begin + len(user) + 1, begin + len(userinfo)
            yield begin + len(user) + 1, begin + rest.rindex("@")  # a slash may belong to the password, too
            if _is_token(user):
                yield begin, begin + len(user)
        elif at and user not in ("", "git", MASK) and (_is_token(user) or _takes_tokens(url["scheme"])):
            yield begin, begin + len(user)
        for part in re.finditer(r"[?&#;](?P<name>[^=&#;?]{1,80})=(?P<value>[^&#;]+)", rest):
            if is_secret_name(part["name"]) or part["name"].lower() in ("key", "code"):
                yield begin + part.start("value"), begin + part.end("value")


def _takes_tokens(scheme: str) -> bool:
    return scheme.lower().rpartition("+")[2] in _TOKEN_SCHEMES


def _is_token(word: str) -> bool:
    """Whether a word looks like a token rather than a name."""
    return len(word) >= 20 and any(c.isdigit() for c in word) and any(c.isalpha() for c in word)


def _find_named(text: str, naming: Naming) -> Iterator[Span]:
    """Find values after names and options that are secret."""
    end = 0
    if naming == "assigned" and not any(sign in text for sign in ("=", "':", '":')):
        return
    for found in re.finditer(_NAMED, text):
        sign = found["is"].strip()
        if found.end() <= end or (naming == "assigned" and sign not in ("=", '"=', "'=", '":', "':")):
            continue
        if (not sign and not found["option"]) or not is_secret_name(found["name"]):
            continue
        value = re.compile(_VALUE).match(text, found.end())
        if value is None or _is_harmless(value[0].strip("\"'"), naming):
            continue
        end = value.end()
        quoted = value[0][0] in "\"'" and naming == "assigned"
        yield value.start() + quoted, end - (quoted and value[0][-1] == value[0][0] and len(value[0]) > 1)


def _is_harmless(value: str, naming: Naming) -> bool:
    if naming == "assigned" and value.startswith(("$", "<", "`")):
        return True  # of a script: the value of another variable
    return value.lower() in _PLAIN or (naming == "any" and value.isdigit()) or value in ("", MASK)
