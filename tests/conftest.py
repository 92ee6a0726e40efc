"""Session set-up: eight CPU devices, so that every test of sharding runs on any machine."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
