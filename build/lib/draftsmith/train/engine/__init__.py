"""What runs a training loop: processes, sharding, order, checkpoints, watchdog, logs."""
