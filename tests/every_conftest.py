"""Imports the `conftest` of each folder by its full name, so that mypy checks all of them.

No test imports this module.
"""

# ruff: noqa: F401
import tests.adapters.conftest
import tests.attacks.conftest
import tests.call_paths.conftest
import tests.e2e.conftest
import tests.events.conftest
import tests.events.nats.conftest
import tests.frontend.conftest
import tests.planner.conftest
import tests.profiler.conftest
import tests.read_model.conftest
import tests.replay.conftest
import tests.workers.conftest
import tests.workers.devices.conftest
import tests.workers.openai.conftest
import tests.workers.openai.probes.conftest
import tests.workers.transformers_engine.conftest
