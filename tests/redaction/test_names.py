"""Secrets are known by name and never shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus.config.schema import OWNERS
from primus.machine.assumed_machine import build_assumed_machine
from primus.machine.cluster import ClusterLayout
from primus.machine.environment.precedence import GivenVariables, JobNode, build_environment
from primus.machine.network import selection as network
from primus.redaction import MASK, is_secret_name, redact_args, redact_value

SECRET = "HF_TOKEN WANDB_API_KEY MLFLOW_TRACKING_PASSWORD AWS_SECRET_ACCESS_KEY GITHUB_PAT hf_token --api-key".split()
SECRET += "KEY A_KEY GOOGLE_JSON_KEY SENTRY_DSN MY_CREDENTIALS env.HF_TOKEN NPM_AUTH DB_PASSWD --hf-token TOKEN".split()
SECRET += ["TOKENIZER_TOKEN"]
SECRET += (
    "DB_PASS MYSQL_PWD PGPASS PGPASSWORD PASSPHRASE PIN ACCESSKEY WANDB_API_KEY2 JWT COOKIE WEBHOOK APIKEY".split()
)
SECRET += "dbPassword wandbApiKey2 AZURE_STORAGE_CONNECTION_STRING SLACK_WEBHOOK_URL SESSION_ID GITHUB_TOKEN_2".split()
SECRET += "HF_TOKEN_READ AWS_ACCESS_KEY_ID SSH_PRIVATE_KEY OPENAI_KEY_V2 CARD_PIN SLURM_JWT X-Api-Key HFTOKEN".split()
SECRET += "BEARER SAS OTP TOTP SIG PASSKEY MNEMONIC COOKIES CREDS AUTHORIZATION SEED_PHRASE CONN_STR CONNSTR".split()
SECRET += "MY_PW HTTP_BASICPW PASSWORD_SALT OAUTH_ASSERTION GCP_SA_JSON KUBECONFIG_DATA NETRC_DATA".split()
SECRET += "OTEL_EXPORTER_OTLP_HEADERS OTEL_EXPORTER_OTLP_METRICS_HEADERS PRIMUS_NOTIFY_WEBHOOK".split()
HARMLESS = "HTTP_HEADERS NUM_HEADERS PW_LENGTH KUBECONFIG NETRC CONFIG_JSON TOKENIZER_MODEL".split()
HARMLESS += "tokenizer_model TOKENIZERS_PARALLELISM TOKENIZED_DATA_PATH MAX_TOKENS sample_tokens".split()
HARMLESS += "KEYBOARD PATH PATTERN AUTHOR MONKEY NCCL_DEBUG --lr TOKENS_PER_S NUM_TOKENS --token-file".split()
HARMLESS += "PWD OLDPWD PINNED PIN_MEMORY BYPASS COMPASS num_passes forward_pass eos_token bos_token_id".split()
HARMLESS += "moe_token_dispatcher_type calculate_per_token_loss token_drop_policy PUBLIC_KEY KEYS key_padding".split()
HARMLESS += "GOOGLE_APPLICATION_CREDENTIALS_FILE SSH_AUTH_SOCK TOKEN_LENGTH QUERY_KEY_NORM COOKIECUTTER AUTHORS".split()
HARMLESS += ["AssertionError", "jwt.exceptions.InvalidTokenError", "TokenException"]
HARMLESS += ["--json-key", "--fim_prefix_token", "data.fim_suffix_token"]

PROFILES = ("mi300x:8", "mi355x:8", "h100:8", "cpu")


@pytest.mark.parametrize("name", SECRET)
def test_a_secret_is_known_by_its_name(name: str) -> None:
    assert is_secret_name(name)
    assert redact_value(name, "canary") == MASK


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_sounds_like_a_secret_is_shown(name: str) -> None:
    assert not is_secret_name(name)
    assert redact_value(name, "value") == "value"


def test_no_setting_and_no_variable_of_a_profile_has_the_name_of_a_secret() -> None:
    variables = {name for facts in PROFILES for name in _variables_of(facts)}
    assert len(variables) > 10
    assert [name for name in (*OWNERS, *variables) if is_secret_name(name)] == []


def _variables_of(machine: str) -> list[str]:
    facts = build_assumed_machine(machine)
    return list(
        build_environment(
            JobNode(facts=facts, network=network.choose_network(facts, 2, {}), layout=ClusterLayout(nproc=8, nnodes=2)),
            GivenVariables(),
        ).variables
    )


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "MLFLOW_TRACKING_URI"])
def test_a_password_inside_an_address_is_masked_under_any_name(name: str) -> None:
    assert redact_value(name, "http://ann:canary@host:1/x") == f"http://ann:{MASK}@host:1/x"
    assert redact_value(name, "http://host:8080/a@b") == "http://host:8080/a@b"


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
    assert redact_args(words) == shown


@given(st.text(min_size=8).filter(lambda text: not text.startswith("--") and "canary" not in text))
def test_no_value_of_a_token_survives(value: str) -> None:
    canary = f"canary{value}"
    ways = [
        [f"HF_TOKEN={canary}"],
        ["--env", f"HF_TOKEN={canary}"],
        [f"--env=HF_TOKEN={canary}"],
        ["--env.A_KEY", canary],
    ]
    assert all("canary" not in word for way in ways for word in redact_args(way))
