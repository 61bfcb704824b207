"""Facts about the machine; reading them changes nothing."""
