"""The module by which Python asks macOS for its proxies."""


def _get_proxy_settings() -> dict[str, str]:
    return {}


def _get_proxies() -> dict[str, str]:
    return {}
