"""Hypothesis profiles: ``HYPOTHESIS_PROFILE=nightly`` takes new examples, and many; the default repeats itself."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.register_profile("nightly", max_examples=5_000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
