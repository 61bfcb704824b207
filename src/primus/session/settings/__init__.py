"""Settings that several engines share, and those that are in force after the first step."""
