"""What becomes of the events of a run: the MLPerf log, metrics.jsonl, the terminal, telemetry, TensorBoard, the
watcher."""
