"""Secrets are found by their form in any text, and ordinary text is left as it is."""

from __future__ import annotations

import pytest

from primus.redaction import MASK, redact, redact_log_text, redact_value

SECRET = "k9XcanaryQ7"


@pytest.mark.parametrize(
    "text",
    [
        f"1.5,\n2.5,\n ya29.{SECRET}canarycanary, 3",
        f"PRIVATE  KEY 12 of -----BEGIN EC PRIVATE KEY-----\n{SECRET}\n-----END EC PRIVATE KEY-----",
        f"Server=h;Access Key={SECRET}",
        f"\u0130stanbul 1, 2, 3: gh\u2019s token is hf_{SECRET}canarycanarycanary",
        f"https://{SECRET}@host/path",
        f"git+https://{SECRET}@github.com/o/r.git",
        f"https://user:{SECRET}@host",
        f"https://user:p@{SECRET}@host/x",
        f"postgres://user:p/{SECRET}@host:5432/db",
        f"redis://:{SECRET}@host",
        f"https://a.blob.core.windows.net/c?sv=1&sig={SECRET}%3D&se=2",
        f"https://host/hook?token={SECRET}&x=1",
        f"s3://bucket/key?X-Amz-Signature={SECRET}",
        f"Server=h;Uid=u;Password={SECRET};Encrypt=yes",
        f"Server=h;Uid=u;Pwd='{SECRET};x'",
        f"Endpoint=sb://h/;SharedAccessKeyName=n;SharedAccessKey={SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"Authorization: Basic {SECRET}==",
        f"{{'Authorization': 'Basic {SECRET}=='}}",
        f"Set-Cookie: session={SECRET}; Path=/",
        f"curl -u user:{SECRET} https://x",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\nabc\n-----END RSA PRIVATE KEY-----",
        f"eyJhbGciOiJIUzI1NiJ9.{SECRET}canary.x",
        f"sk-proj-{SECRET}canarycanary",
        f"AIza{SECRET}canarycanarycanarycanary",
        *(
            f"{vendor}{SECRET}canarycanary"
            for vendor in ("nvapi-", "xoxb-", "sk_live_", "rk_test_", "whsec_", "ya29.", "npm_", "pypi-", "dckr_pat_")
        ),
        f"hvs.{SECRET}canarycanary",
        f"github_pat_{SECRET}canarycanary",
        f"glpat-{SECRET}canarycanary",
        f"https://hooks.slack.com/services/{SECRET}",
    ],
)
def test_a_secret_is_found_by_its_form(text: str) -> None:
    shown = redact(text)
    assert MASK in shown
    assert SECRET not in shown
    assert redact(shown) == shown, "redacting twice changes nothing"


@pytest.mark.parametrize(
    "text",
    [
        "http://host:8080/a@b?c=d@e",
        "http://[::1]:8080/a@b",
        "ssh://git@github.com/o/r",
        "ssh://ann@node7",
        "postgresql://reader@host/db",
        "docker run --user 1000:1000 -u 0:0 image@sha256:0123",
        "the token sequences of basic training; a bearer of tokens, digest of it",
        "https://medium.com/@user/post",
        "signature=gpu-out-of-memory token: 5 PIN_MEMORY=1",
        '{"eos_token": "</s>", "task": "train pretrain", "tokens_per_s": 12}',
        "sig=short",
        "rank 0 of 1 on node7: step 12 loss 9.81",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text) == text


def test_a_value_is_redacted_below_a_name_inside_of_it() -> None:
    assert redact_value("OPTIONS", f"--x DB_PASS={SECRET} y") == f"--x DB_PASS={MASK} y"
    assert SECRET not in redact_value("SERVICE", f'{{"client_id": "a", "private_key": "{SECRET}"}}')
    assert redact_log_text(f"wandb api_key: {SECRET}") == f"wandb api_key: {MASK}"
    assert redact_log_text("export HF_TOKEN=$OTHER; PIN_MEMORY=1", assigned_only=True) == (
        "export HF_TOKEN=$OTHER; PIN_MEMORY=1"
    )


@pytest.mark.parametrize("place", ["machine hub.example", "default"])
def test_the_password_of_a_netrc_entry_is_masked_and_its_login_shown(place: str) -> None:
    shown = redact(f"NOTES: {place} login ann\n  password hunter2x")
    assert shown == f"NOTES: {place} login ann\n  password <secret>"
