"""Decide by the name of a variable, option or key whether its value is a secret."""

from __future__ import annotations

import re
from functools import lru_cache

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SPLIT = re.compile(r"[^A-Za-z0-9]+")

_ANYWHERE = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|PASSCODE|SECRET|CREDENTIAL|APIKEY|ACCESSKEY|PRIVATEKEY|SECRETKEY|WEBHOOK|ACCESSTOKEN"
    r"|AUTHTOKEN|CONNSTR|CONNECTIONSTRING"
)
"""Substrings that make a word secret."""
_WORDS = frozenset(
    "PASS PWD CREDS JWT COOKIE COOKIES DSN AUTH AUTHORIZATION PAT PIN BEARER SAS OTP TOTP SIG PASSKEY MNEMONIC"
    " SALT ASSERTION".split()
)
"""Words that are secret by themselves."""
_PAIRS = frozenset(
    tuple(pair.split("_"))
    for pair in "CONNECTION_STRING CONN_STR CONN_STRING SESSION_ID SEED_PHRASE SA_JSON ACCOUNT_JSON KUBECONFIG_DATA"
    " NETRC_DATA OTLP_HEADERS METRICS_HEADERS TRACES_HEADERS".split()
)

_SUSPICIOUS = re.compile(
    "ASSERTION|AUTH|BEARER|CONN|COOKIE|CRED|DATA|DSN|HEADERS|JSON|JWT|KEY|MNEMONIC|OTP|PASS|PAT|PIN|PWD|PW|SALT|SAS|SECRET|SEED"
    "|SESSION|SIG|TOKEN|WEBHOOK"
)
"""Every secret name has one of these, so that most names need no closer look."""

_PLACES = frozenset("FILE PATH DIR FOLDER SOCK SOCKET EXPIRY TTL TIMEOUT LIFETIME ERROR EXCEPTION".split())
"""Last words of names whose values describe a secret (its location, its lifetime, a message) and are not secret."""
_NO_PASS = frozenset(
    "FORWARD BACKWARD SINGLE ONE TWO MULTI FIRST SECOND NUM MAX MIN LAST EACH BAND BY HIGH LOW".split()
)
_NO_PASS_WORDS = frozenset("BYPASS COMPASS ENCOMPASS TRESPASS SURPASS OVERPASS UNDERPASS MULTIPASS SINGLEPASS".split())
_NO_KEY = frozenset("PUBLIC PRIMARY FOREIGN SORT PARTITION QUERY CACHE DICT HOT IDEMPOTENCY LOOKUP STATE BATCH".split())
_AFTER_KEY = frozenset(
    "ID SECRET B64 BASE64 JSON PEM DATA STRING VALUE PROD DEV TEST LIVE PRIVATE READ WRITE ADMIN".split()
)
_TEXT_TOKENS = frozenset(
    "EOS BOS PAD UNK MASK SEP CLS EOD EOT FIM PREFIX SUFFIX MIDDLE PER START END STOP NEXT SPECIAL IMAGE AUDIO VIDEO"
    " VISION FIRST LAST ADDED DROP NUM MAX MIN EVERY EACH SAMPLE BEGIN".split()
)
"""Words of names about a language model's tokens: `eos_token`, `loss_per_token`."""
_OF_TEXT_TOKENS = frozenset(
    "ID IDS TYPE TYPES COUNT LENGTH LEN NUM LIMIT BUDGET SIZE LOSS EMBEDDING EMBEDDINGS MASK LEVEL SHIFT RATE CAPACITY"
    " DISPATCHER DROP DROPPING DROPOUT POSITION POSITIONS INDEX PARALLEL PARALLELISM BUFFER FACTOR ORDER".split()
)


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a variable, option or key of this name holds a secret: `HF_TOKEN`, `--api-key`, `dbPass`, `MYSQL_PWD`."""
    if not _SUSPICIOUS.search(name.upper()):
        return False
    words = _split_words(name)
    if not words or words[-1] in _PLACES or words in (["PWD"], ["OLDPWD"]):
        return False
    return any(_is_secret_word(words, index) for index in range(len(words)))


def _split_words(name: str) -> list[str]:
    """Words of a name in capitals, without the digits at their ends: `env.wandbApiKey2` is ENV, WANDB, API, KEY."""
    spaced = _CAMEL.sub(" ", name) if not name.isupper() else name
    found = [word.upper().rstrip("0123456789") or word for word in _SPLIT.split(spaced) if word]
    if found and found[-1] in ("V", "VERSION") and len(found) > 1:
        found.pop()
    return found


def _is_secret_word(words: list[str], index: int) -> bool:
    word = words[index]
    before = words[index - 1] if index else ""
    after = words[index + 1] if index + 1 < len(words) else ""
    if _ANYWHERE.search(word) or (before, word) in _PAIRS:
        return True
    if word.endswith("TOKEN"):
        return _is_secret_token(word, before, after)
    if word.endswith("PW"):  # DBPW, BASICPW
        return not after
    if word.endswith(("PASS", "PWD")) and word not in _NO_PASS_WORDS:
        return before not in _NO_PASS and (not after or len(word) > len("PASS"))
    if word == "KEY":
        is_of_records = before in _NO_KEY or words == ["JSON", "KEY"]
        return not is_of_records and (not after or after in _AFTER_KEY or before in ("API", "ACCESS", "PRIVATE"))
    if word == "PIN":
        return not after
    return word in _WORDS


def _is_secret_token(word: str, before: str, after: str) -> bool:
    if word != "TOKEN":
        return True  # HFTOKEN, GHTOKEN
    return before not in _TEXT_TOKENS and not after.startswith(("IZ", "DROP")) and after not in _OF_TEXT_TOKENS
