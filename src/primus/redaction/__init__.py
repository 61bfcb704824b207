"""Redaction: no text that primus writes shows a secret.

There is one mechanism for every place where text leaves the process: files of the run folder, events, standard output
and error, logs, generated scripts, reports. A secret is known in three ways:

    by name     the variable, option or key that holds it: names.is_secret_name
    by form     tokens of known makers, passwords in URLs and connection strings, private keys: forms.find_secrets
    by value    a secret that was found in either way is also one elsewhere: known.KnownSecrets

What the user's shell happens to contain is not searched for secrets but written only if it is known to be harmless
(harmless.is_harmless_variable); of every other variable a fingerprint is written (fingerprint.FingerprintKey).

Values are known to the whole process, because any text may contain any of them. Readers of variables, options and
configuration files call `learn`, and writers of text call `redact`.
"""

from primus.redaction.fingerprint import are_comparable, fingerprint_key, is_fingerprint
from primus.redaction.forms import MASK
from primus.redaction.harmless import is_harmless_variable
from primus.redaction.known import (
    HIDDEN_VARIABLE,
    hide_inherited_value,
    holds_secret,
    learn,
    learn_args,
    learn_value,
    redact,
    redact_args,
    redact_log_text,
    redact_tree,
    redact_value,
    scope,
)
from primus.redaction.names import is_secret_name
from primus.redaction.streams import redact_file, redacting, redirected_streams

__all__ = [
    "HIDDEN_VARIABLE",
    "MASK",
    "are_comparable",
    "fingerprint_key",
    "hide_inherited_value",
    "holds_secret",
    "is_fingerprint",
    "is_harmless_variable",
    "is_secret_name",
    "learn",
    "learn_args",
    "learn_value",
    "redact",
    "redact_args",
    "redact_file",
    "redact_log_text",
    "redact_tree",
    "redact_value",
    "redacting",
    "redirected_streams",
    "scope",
]
