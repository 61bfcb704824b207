"""Secrets are known by name and never shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus.secret import MASK, is_secret, mask_words, masked

SECRET = "HF_TOKEN WANDB_API_KEY MLFLOW_TRACKING_PASSWORD AWS_SECRET_ACCESS_KEY GITHUB_PAT hf_token --api-key".split()
SECRET += "KEY A_KEY GOOGLE_JSON_KEY SENTRY_DSN MY_CREDENTIALS env.HF_TOKEN NPM_AUTH DB_PASSWD --hf-token TOKEN".split()
SECRET += ["TOKENIZER_TOKEN"]
HARMLESS = "TOKENIZER_MODEL tokenizer_model TOKENIZERS_PARALLELISM TOKENIZED_DATA_PATH MAX_TOKENS sample_tokens".split()
HARMLESS += "KEYBOARD PATH PATTERN AUTHOR MONKEY NCCL_DEBUG --lr TOKENS_PER_S NUM_TOKENS --token-file".split()
HARMLESS += ["--json-key", "--fim_prefix_token", "data.fim_suffix_token"]


@pytest.mark.parametrize("name", SECRET)
def test_a_secret_is_known_by_its_name(name: str) -> None:
    assert is_secret(name)
    assert masked(name, "canary") == MASK


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_sounds_like_a_secret_is_shown(name: str) -> None:
    assert not is_secret(name)
    assert masked(name, "value") == "value"


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "MLFLOW_TRACKING_URI"])
def test_a_password_inside_an_address_is_masked_under_any_name(name: str) -> None:
    assert masked(name, "http://ann:canary@host:1/x") == f"http://ann:{MASK}@host:1/x"
    assert masked(name, "http://host:8080/a@b") == "http://host:8080/a@b"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--env", "HF_TOKEN=canary"], ["--env", f"HF_TOKEN={MASK}"]),
        (["--env=HF_TOKEN=canary"], [f"--env=HF_TOKEN={MASK}"]),
        (["env.HF_TOKEN=canary"], [f"env.HF_TOKEN={MASK}"]),
        (["--env.HF_TOKEN=canary"], [f"--env.HF_TOKEN={MASK}"]),
        (["--env.HF_TOKEN", "canary", "x"], ["--env.HF_TOKEN", MASK, "x"]),
        (["--hf_token", "canary"], ["--hf_token", MASK]),
        (["--hf_token", "--lr", "1"], ["--hf_token", "--lr", "1"]),
        (["HF_TOKEN=a\ncanary"], [f"HF_TOKEN={MASK}"]),
        (["--env", "P=http://a:canary@h"], ["--env", f"P=http://a:{MASK}@h"]),
        (["git+https://a:canary@h/r"], [f"git+https://a:{MASK}@h/r"]),
        (["--lr=1", "tokenizer_model=x", "a b"], ["--lr=1", "tokenizer_model=x", "a b"]),
    ],
)
def test_a_command_line_is_shown_without_its_secrets(words: list[str], shown: list[str]) -> None:
    assert mask_words(words) == shown


@given(st.text(min_size=8).filter(lambda text: not text.startswith("--") and "canary" not in text))
def test_no_value_of_a_token_survives(value: str) -> None:
    canary = f"canary{value}"
    ways = [
        [f"HF_TOKEN={canary}"],
        ["--env", f"HF_TOKEN={canary}"],
        [f"--env=HF_TOKEN={canary}"],
        ["--env.A_KEY", canary],
    ]
    assert all("canary" not in word for way in ways for word in mask_words(way))
