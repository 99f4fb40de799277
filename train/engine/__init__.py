"""What the training loop runs on: processes, sharded models, sample order, the watchdog, checkpoints, logs."""
