"""Why a run failed: signatures of failures, found in the logs of its ranks."""
